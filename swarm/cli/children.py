"""Run peers as child processes: start them, read their events line by line, and make sure that they end.

Each child has its own process group, so that Ctrl-C in a terminal reaches only this command, which then ends
its children in order. The standard input of a child is a pipe from this process: if this process dies for any
reason, the child reads the end of its input and leaves.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_LINE_BYTES_MAX = 1 << 20
_ERROR_BYTES_MAX = 4000  # the last part of standard error that is read
_TERMINATE_S = 1.5  # time for all children to end after SIGTERM
_KILL_S = 0.5


class Child:
    """One `swarm` command running with `--json --exit-with-parent`."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        lines: queue.Queue[tuple[str, dict[str, Any] | None]],
        home: str,
    ) -> None:
        self.name = name
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        package_folder = str(Path(__file__).resolve().parents[2])
        environment = {
            **os.environ,
            "SWARM_HOME": home,
            # Several trainers share the cores of this machine; more threads would only wait for each other.
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (package_folder, os.environ.get("PYTHONPATH")))),
            "PYTHONUNBUFFERED": "1",
        }
        # CREATE_NEW_PROCESS_GROUP
        group: dict[str, Any] = {"process_group": 0} if os.name == "posix" else {"creationflags": 0x200}
        # -P: do not import from the current folder, which may contain a file such as `torch.py`.
        command = [sys.executable, "-P", "-m", "swarm.cli", *arguments, "--json", "--exit-with-parent"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            **group,
        )
        self._lines = lines
        self._reader = threading.Thread(target=self._read, name=f"reads {name}", daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def error_text(self) -> str:
        """Return the last line that the child wrote to standard error."""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - _ERROR_BYTES_MAX))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with exit code {self.process.poll()} and printed no error"

    def kill(self) -> None:
        """End the child at once, as a power cut would."""
        self.process.kill()

    def terminate(self) -> None:
        if self.alive:
            self.process.terminate()

    def close(self, deadline_s: float) -> None:
        """Wait until `deadline_s` (monotonic time) for the child to leave, then kill it."""
        try:
            self.process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_KILL_S)
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._reader.join(_KILL_S)
        if self.process.stdout is not None and not self._reader.is_alive():
            self.process.stdout.close()
        self._errors.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline(_LINE_BYTES_MAX):
            try:
                value = json.loads(line)
            except ValueError:
                continue  # a library printed something
            if isinstance(value, dict):
                self._lines.put((self.name, value))
        self._lines.put((self.name, None))


class Children:
    """A context manager that ends all children and deletes their files when it is left."""

    def __init__(self) -> None:
        # (child, its event; None: its output ended)
        self.lines: queue.Queue[tuple[str, dict[str, Any] | None]] = queue.Queue()
        self._children: dict[str, Child] = {}
        self._home = tempfile.TemporaryDirectory(prefix="swarm-", ignore_cleanup_errors=True)

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, name: str, *arguments: str) -> Child:
        child = self._children[name] = Child(name, arguments, self.lines, self._home.name)
        return child

    def __contains__(self, name: str) -> bool:
        return name in self._children

    def __getitem__(self, name: str) -> Child:
        return self._children[name]

    def named(self, names: Collection[str]) -> list[Child]:
        """Return the children with these names that are alive."""
        return [child for name, child in self._children.items() if name in names and child.alive]

    def next_line(self, timeout_s: float) -> tuple[str, Mapping[str, Any] | None] | None:
        """Return the name and next event of any child, or None if there is none in time.

        The event is None when the output of the child has ended.
        """
        try:
            return self.lines.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    def close(self) -> None:
        """Ask all children to leave, then kill the rest. Takes about two seconds at most."""
        for child in self._children.values():
            child.terminate()
        deadline_s = time.monotonic() + _TERMINATE_S
        for child in self._children.values():
            child.close(deadline_s)
        self._children.clear()
        self._home.cleanup()
