"""Let commands of one user on one machine find each other and ask each other to pause.

They use files in a folder, which works on every system.

A command that trains a run, or hosts experts of a grid, writes `<process id>.json` while it runs, with the
run or grid and the addresses of its node.
`swarm pause` creates `<process id>.pause` beside it, which the trainer checks twice a second, and
`swarm resume` deletes it. The file contains "free" if the memory shall be freed at once.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from swarm.core.errors import SwarmError

_BYTES_MAX = 16 << 10
_AGE_SLACK_S = 2.0  # tolerance of start times, because the clock may be adjusted


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A command that takes part in a run, or hosts experts, on this machine."""

    pid: int
    started_s: float  # Unix time; distinguishes the process from a later one with the same id
    name: str  # name of the run
    run_id: str
    peer_id: str
    addresses: Sequence[str]
    trains: bool = True  # False: it hosts experts, and cannot be paused

    def matches(self, wanted: str | None) -> bool:
        """Return whether `wanted` means this command.

        `wanted` is a run's name, `name@id` or id, a PeerID, a process id, or None for all commands.
        """
        return wanted in (
            None,
            self.name,
            f"{self.name}@{self.run_id}",
            self.run_id,
            self.peer_id,
            str(self.pid),
        )

    @property
    def full_name(self) -> str:
        return f"{self.name}@{self.run_id}"


class Control:
    """The folder in which running commands announce themselves."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def announced(
        self, name: str, run_id: str, peer_id: str, addresses: Sequence[str], *, trains: bool = True
    ) -> Iterator[None]:
        """Announce this process while the context lasts. If the folder cannot be written to, the process
        cannot be paused or found by other commands, but it works.
        """
        import psutil

        started_s = psutil.Process().create_time()
        one = Running(
            pid=os.getpid(),
            started_s=started_s,
            name=name,
            run_id=run_id,
            peer_id=peer_id,
            addresses=list(addresses),
            trains=trains,
        )
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._flag(one.pid).unlink(missing_ok=True)
            temporary = self._file(one.pid).with_suffix(".tmp")
            temporary.write_text(json.dumps(asdict(one)), encoding="utf-8")
            temporary.replace(self._file(one.pid))
        try:
            yield
        finally:
            self._remove(one.pid)

    def asked_to_pause(self) -> str:
        """Return "pause" if this process was asked to pause, "free" if it shall free its memory at once,
        too, and "" if neither.
        """
        try:
            return "free" if self._flag(os.getpid()).read_text(encoding="utf-8") == "free" else "pause"
        except (OSError, ValueError):
            return ""

    def running(self) -> list[Running]:
        """Return the commands that run now, and delete the files of dead ones."""
        found = []
        for file in sorted(self._folder.glob("*.json")):
            one = _read(file)
            if one is not None and _alive(one):
                found.append(one)
            elif file.stem.isdecimal():
                self._remove(int(file.stem))
        return found

    def processes(self) -> list[int]:
        """Return the ids of the processes that train now."""
        return [one.pid for one in self.running() if one.trains]

    def set_paused(self, one: Running, paused: bool, *, free: bool = False) -> None:
        """Ask a command to pause, and to free its memory at once, or to continue. Raise SwarmError if the
        folder cannot be written to.
        """
        try:
            if paused:
                self._flag(one.pid).write_text("free" if free else "", encoding="utf-8")
            else:
                self._flag(one.pid).unlink(missing_ok=True)
        except OSError as error:
            raise SwarmError(f"{self._flag(one.pid)} cannot be changed: {error.strerror or error}") from error

    def _file(self, pid: int) -> Path:
        return self._folder / f"{pid}.json"

    def _flag(self, pid: int) -> Path:
        return self._folder / f"{pid}.pause"

    def _remove(self, pid: int) -> None:
        for file in (self._file(pid), self._flag(pid)):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)


def _read(file: Path) -> Running | None:
    try:
        with file.open("rb") as stream:
            one = Running(**json.loads(stream.read(_BYTES_MAX)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    texts = [one.name, one.run_id, one.peer_id]
    if not isinstance(one.addresses, list) or not all(
        isinstance(text, str) for text in [*texts, *one.addresses]
    ):
        return None
    is_valid = (
        type(one.pid) is int and isinstance(one.started_s, int | float) and isinstance(one.trains, bool)
    )
    return one if is_valid else None


def _alive(one: Running) -> bool:
    import psutil

    try:
        return abs(psutil.Process(one.pid).create_time() - one.started_s) < _AGE_SLACK_S
    except (psutil.Error, ValueError, OverflowError):
        return False
