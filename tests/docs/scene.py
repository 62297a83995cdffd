"""Run the blocks of one page in order: Python in one namespace, commands as processes on loopback."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import swarm
from tests.docs.pages import ROOT, Block

# timeout of the first output of a background command, including imports of torch on a busy machine
_START_S_MAX = 60.0
_COMMAND_S_MAX = 90.0  # of a command that ends by itself
_STOP_S_MAX = 15.0
_ADDRESS = re.compile(r"/ip4/127\.0\.0\.1/tcp/\d+/tls/http/p2p/\w{52}")
_INVITE = re.compile(r"\bswarm1[1-9A-HJ-NP-Za-km-z]{100,}")
_INVITE_PLACEHOLDER = re.compile(r"\bINVITE\b|\bswarm1\w*…")
_PLACEHOLDER = re.compile(r"\bADDRESS\b|/ip4/203\.0\.113\.\d+/tcp/\d+/tls/http/p2p/12D3KooW…")
_LISTEN = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}:\d+\b")
_ALL_INTERFACES = re.compile(r"\b0\.0\.0\.0:\d+\b")


class Scene:
    """The processes that one page has started so far. Its commands run in `folder`. A context manager that
    stops all of them at its end.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # the first that the page's own commands printed: what ADDRESS in the page stands for
        self.address = ""
        self.invite = ""  # likewise, for INVITE
        self.namespace: dict[str, Any] = {"__name__": "__page__"}
        self._processes: list[_Process] = []
        (folder / "examples").symlink_to(ROOT / "examples")

    def run(self, block: Block) -> None:
        """Run one block. An AssertionError names the block and shows what it printed."""
        if block.language == "python":
            self._python(block)
        else:
            for command in block.commands:
                self._command(block, command)

    def _python(self, block: Block) -> None:
        if not self.address and _PLACEHOLDER.search(block.text):
            self._start_a_peer()
        text = self._placed(block.text, _ALL_INTERFACES)
        code = compile("\n" * (block.line - 1) + text, str(block.page), "exec")
        with contextlib.chdir(self.folder):
            exec(code, self.namespace)  # the page's own code, from this repository

    def _start_a_peer(self) -> None:
        """Start the peer whose address a page takes for granted."""
        self.namespace["_somebody"] = swarm.Node(listen="127.0.0.1:0")
        self.address = self.namespace["_somebody"].addresses[0]

    def _command(self, block: Block, command: str) -> None:
        process = _Process(self.folder, self._placed(command), block.name)
        if block.until:
            self._processes.append(process)
            process.wait_for(block.until)
        else:
            code = process.wait(_COMMAND_S_MAX)
            assert code == 0, f"{block.name}: `{command}` ended with {code}:\n{process.output()}"
        if not self.address and (found := _ADDRESS.search(process.output())):
            self.address = found[0]
        if not self.invite and (found := _INVITE.search(process.output())):
            self.invite = found[0]

    def _placed(self, text: str, listening: re.Pattern[str] = _LISTEN) -> str:
        """Return the text with the page's placeholders filled in for this machine: a free port on loopback,
        and the address of the page's first peer.
        """
        text = listening.sub("127.0.0.1:0", text)
        if _INVITE_PLACEHOLDER.search(text):
            assert self.invite, "the page uses an INVITE that no command before has printed"
            text = _INVITE_PLACEHOLDER.sub(self.invite, text)
        if _PLACEHOLDER.search(text):
            assert self.address, "the page uses an ADDRESS that no command before has printed"
            text = _PLACEHOLDER.sub(self.address, text)
        return text

    def __enter__(self) -> Scene:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for value in reversed(list(self.namespace.values())):
            if isinstance(value, swarm.Node):
                value.close()
        problems = [problem for process in reversed(self._processes) if (problem := process.stop())]
        if error is None:
            assert not problems, "\n".join(problems)


class _Process:
    """A command of a page. Its output is read as it comes, so that no test waits for a fixed time."""

    def __init__(self, folder: Path, command: str, name: str) -> None:
        words = shlex.split(command)
        self._name, self._command = name, command
        self._ours = words[0] == "swarm"
        start = {"swarm": [sys.executable, "-m", "swarm.cli"], "python": [sys.executable]}.get(words[0])
        assert start, (
            f"{name}: the command {words[0]!r} is not run by tests; write why with <!-- not run: … -->"
        )
        environment = {
            **os.environ,
            "SWARM_HOME": str(folder / "home"),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",  # for `stop`
            "COLUMNS": "120",
        }
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # A shell lets what it runs in the background ignore Ctrl-C, and children inherit that.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._process = subprocess.Popen(
            [*start, *words[1:]],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._seen: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, pattern: str) -> None:
        deadline_s = time.monotonic() + _START_S_MAX
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                self.stop()
                raise AssertionError(
                    f"{self._name}: `{self._command}` did not say {pattern!r} in time:\n{self.output()}"
                ) from None
            assert line is not None, f"{self._name}: `{self._command}` ended early:\n{self.output()}"
            if re.search(pattern, line):
                return

    def wait(self, timeout_s: float) -> int:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.stop()
            raise AssertionError(
                f"{self._name}: `{self._command}` did not end within {timeout_s:.0f} s:\n{self.output()}"
            ) from None
        self._finish_reading()
        return code

    def stop(self) -> str:
        """Send Ctrl-C, as a user does. Return the problem with its exit, or ""."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            code = self._wait_after_interrupt()
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGABRT)  # its threads say where they are
            self._process.wait()
            self._finish_reading()
            return f"{self._name}: `{self._command}` did not leave after Ctrl-C:\n{self.output()}"
        self._finish_reading()
        return (
            f"{self._name}: `{self._command}` left with {code}:\n{self.output()}"
            if code and self._ours
            else ""
        )

    def _wait_after_interrupt(self) -> int:
        """Return the exit code. Python prints an interrupt that arrives inside a weak reference's callback or
        a `__del__` as ignored, and continues: a person presses Ctrl-C again. Raise `TimeoutExpired` after
        `_STOP_S_MAX`.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_STOP_S_MAX / 3)
        output = self.output()
        if "Exception ignored" in output and "KeyboardInterrupt" in output:
            self._process.send_signal(signal.SIGINT)
        return self._process.wait(_STOP_S_MAX * 2 / 3)

    def output(self) -> str:
        return "".join(self._seen)

    def _finish_reading(self) -> None:
        assert self._process.stdout is not None
        self._reader.join(_STOP_S_MAX)
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._seen.append(line)
            self._lines.put(line)
        self._lines.put(None)
