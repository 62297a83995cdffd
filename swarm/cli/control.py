"""How one command of this user speaks to another that is running on the same machine: files in a folder,
which work on every system.

A command that trains writes `<process id>.json` there while it runs: what run it is in, and where its node
listens. `swarm pause` puts `<process id>.pause` beside it, which the trainer looks for twice a second, and
`swarm resume` takes it away.
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
_AGE_SLACK_S = 2.0  # start times of processes are read from clocks that are corrected


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A command that trains on this machine."""

    pid: int
    started_s: float  # Unix time; tells it from a later process of the same number
    name: str  # of the run
    run_id: str
    peer_id: str
    addresses: Sequence[str]

    def matches(self, wanted: str | None) -> bool:
        """`wanted`: a run's name, `name@id` or id, a PeerID, a process id, or None for all."""
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
    """The folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def announced(self, name: str, run_id: str, peer_id: str, addresses: Sequence[str]) -> Iterator[None]:
        """While this process trains. Without a folder that can be written to it trains all the same, and
        cannot be paused.
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

    def asked_to_pause(self) -> bool:
        """Has somebody asked this process to pause?"""
        return self._flag(os.getpid()).exists()

    def running(self) -> list[Running]:
        """Every command that trains; what dead ones have left is removed."""
        found = []
        for file in sorted(self._folder.glob("*.json")):
            one = _read(file)
            if one is not None and _alive(one):
                found.append(one)
            elif file.stem.isdecimal():
                self._remove(int(file.stem))
        return found

    def is_paused(self, one: Running) -> bool:
        return self._flag(one.pid).exists()

    def set_paused(self, one: Running, paused: bool) -> None:
        """SwarmError when the folder cannot be written to."""
        try:
            if paused:
                self._flag(one.pid).touch()
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
            return Running(**json.loads(stream.read(_BYTES_MAX)))
    except (OSError, ValueError, TypeError):
        return None


def _alive(one: Running) -> bool:
    import psutil

    try:
        return abs(psutil.Process(one.pid).create_time() - one.started_s) < _AGE_SLACK_S
    except (psutil.Error, ValueError):
        return False
