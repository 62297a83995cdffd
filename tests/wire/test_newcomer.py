"""The page for volunteers who know nothing: what they type and read, on a terminal, is what the page shows.

Each console block of the page is typed on a pseudo-terminal of a machine without any state, while an owner
trains the run. Lines that the page shows come in this order; numbers may differ, and `…` stands for anything.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarm.core.identity import Identity
from swarm.membership.invite import RunIdentity, Terms, make_invite
from tests.docs.pages import DOCS, ROOT, Block, blocks

PAGE = DOCS / "tutorials" / "volunteer.md"
TYPED = "a person types it"
_WAIT_S = 40.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_UNIT = r"(?: (?:bytes|kB|MB|GB|ms|s|min|h)\b)?"
_VARIABLE = re.compile(rf"12D3KooW\w*…?|\d[\d,.]*{_UNIT}|…")
_COLUMNS = "160"


class Terminal:
    """A command on a terminal."""

    def __init__(self, command: str, home: Path, term: str) -> None:
        self._command, self._text, self._at = command, "", 0
        own, other = os.openpty()
        words = shlex.split(command)
        assert words[0] == "swarm", command
        environment = {
            **os.environ,
            "HOME": str(home),
            "SWARM_HOME": str(home / "swarm"),
            "PYTHONPATH": str(ROOT),
            # where the installed command is, which a service starts
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "TERM": term,
            "COLUMNS": _COLUMNS,
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "swarm.cli", *words[1:]],
            cwd=home,
            env=environment,
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
        )
        os.close(other)
        self._terminal = own

    def read(self, line: str) -> None:
        """Wait for a line as the page shows it, below those before."""
        pattern = re.compile(expected(line))
        deadline_s = time.monotonic() + _WAIT_S
        while (found := pattern.search(self._text, self._at)) is None:
            assert self._more(deadline_s), f"`{self._command}` did not say {line!r}, but:\n{self._text}"
        self._at = found.end()

    def found(self, pattern: str) -> str:
        """Return what fits in the text so far."""
        match = re.search(pattern, self._text)
        assert match is not None, self._text
        return match[0]

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Read the rest, and return the exit status."""
        deadline_s = time.monotonic() + _WAIT_S
        while self._more(deadline_s):
            pass
        return self.process.wait(_WAIT_S)

    def close(self) -> str:
        """End the command if it still runs, and return what it printed."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._terminal)
        return self._text

    def _more(self, deadline_s: float) -> bool:
        """Read on. Return False at the end of the output, or when the time is over."""
        ready, _, _ = select.select([self._terminal], [], [], max(deadline_s - time.monotonic(), 0.0))
        if not ready:
            return False
        try:
            raw = os.read(self._terminal, 1 << 16)
        except OSError:  # Linux: the command has closed it
            return False
        self._text += _ESCAPES.sub("", raw.decode(errors="replace")).replace("\r", "")
        return bool(raw)


def expected(line: str) -> str:
    """Return the pattern of a line of the page: numbers are any, and `…` is anything."""
    pattern, at = "", 0
    for found in _VARIABLE.finditer(line):
        pattern += re.escape(line[at : found.start()])
        pattern += rf"\d[\d,.]*{_UNIT}" if found[0][0].isdigit() and "D3" not in found[0] else r"[^\n]*?"
        at = found.end()
    return (pattern + re.escape(line[at:])).replace(r"\ ", r"\s+")


@contextmanager
def owner(folder: Path) -> Iterator[Terminal]:
    """Train a run as its owner."""
    folder.mkdir()
    run = (ROOT / "examples" / "bytelm.toml").read_text(encoding="utf-8")
    (folder / "run.toml").write_text(run.replace("target_batch_size = 960", "target_batch_size = 96"))
    terminal = Terminal("swarm start run.toml --listen 127.0.0.1:0 --no-lan --cpu 25", folder, "dumb")
    try:
        terminal.read("others join with: swarm join …")
        terminal.read("epoch 1: loss …")
        yield terminal
        terminal.interrupt()
        assert terminal.end() == 0
    finally:
        terminal.close()


def expired_invite() -> str:
    someone = Identity.generate()
    terms = Terms(roles=("train",), uses=1, lifetime_s=3600.0)
    run = RunIdentity(someone.peer_id, "bytelm", None)
    return make_invite(run, someone, (), terms, now_s=time.time() - 7200.0).text()


def play(block: Block, home: Path, invite: str, term: str) -> str:
    """Type a block and compare what is read. Return everything that was printed."""
    typed, *shown = block.text.splitlines()
    command = typed.removeprefix("$ ").replace("swarm1CFW…", invite)
    terminal = Terminal(command.replace("swarm1Old…", expired_invite()), home, term)
    try:
        for line in shown:
            if line == "^C":
                terminal.interrupt()
                continue
            question, asks, answer = line.partition("[y/n] (y): ")
            terminal.read(question if asks else line)
            if asks:
                terminal.type(f"{answer}\n")
        code = terminal.end()
        fails = any(line.startswith("swarm: ") for line in shown)
        assert (code != 0) == fails, f"{block.name}: exit status {code}"
    finally:
        text = terminal.close()
    return text


def test_what_a_newcomer_types_and_reads_is_what_the_page_shows(tmp_path: Path) -> None:
    home, script = tmp_path / "volunteer", [one for one in blocks(PAGE) if TYPED in one.comment]
    home.mkdir()
    assert len(script) > 4
    with owner(tmp_path / "owner") as terminal:
        invite = terminal.found(r"swarm1\w{100,}")
        for number, block in enumerate(script):
            text = play(block, home, invite, "xterm" if number % 2 == 0 else "dumb")
            assert "Traceback" not in text
            assert "Exception" not in text
