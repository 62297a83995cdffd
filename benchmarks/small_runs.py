"""Small honest runs compared with the code before histories and membership: samples a second of the whole
run.

The earlier code is taken from this repository by its commit. Peers are processes that train on one machine;
a training step sleeps, so that the protocol and not the processor decides.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.environments import OWN_PYTHON, NoEnvironment
from benchmarks.launch import ROOT, Launch, LaunchFailed, Worker
from benchmarks.results import Aim, Failures, Row

EARLIER_COMMIT = "3a3e756"
SHARE_MIN = 0.95
_PACKAGES = ("swarm", "averaging", "moe")
_MODULE = "benchmarks.workers.small_run_peer"
_READY_S, _ANSWER_S = 180.0, 60.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Change:
    """An end or a start of a peer during the window; `begin` starts a new peer in its place."""

    at_s: float
    peer: int
    do: Literal["kill", "leave", "begin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallRun:
    """One run: its number of peers, and the changes during it."""

    name: str
    title: str
    peers: int
    changes: tuple[Change, ...] = ()
    window_s: float = 30.0


def _restarted(
    at_s: float, peers: Sequence[int], do: Literal["kill", "leave"] = "kill"
) -> tuple[Change, ...]:
    return (
        *(Change(at_s, peer, do) for peer in peers),
        *(Change(at_s, peer, "begin") for peer in peers),
    )


RUNS = (
    SmallRun(name="two", title="a founder and one more", peers=2),
    SmallRun(name="ten", title="a founder and nine more", peers=10),
    SmallRun(
        name="left",
        title="four peers whose founder leaves early",
        peers=4,
        changes=(Change(2.0, 0, "leave"),),
    ),
    SmallRun(
        name="flapping",
        title="four peers, one of them killed and started again every 30 s",
        peers=4,
        changes=(*_restarted(1.0, [3]), *_restarted(31.0, [3])),
        window_s=60.0,
    ),
    SmallRun(
        name="volunteers",
        title="a founder and three volunteers that stay for ten minutes each, twenty times as fast",
        peers=4,
        changes=tuple(
            change for at in range(6) for change in _restarted(5.0 + 10.0 * at, [1 + at % 3], "leave")
        ),
        window_s=60.0,
    ),
    SmallRun(
        name="restarted",
        title="four peers that all are killed and started again at once",
        peers=4,
        changes=_restarted(5.0, range(4)),
        window_s=60.0,
    ),
)


def check() -> None:
    """Raise NoEnvironment where the earlier code cannot be had."""
    with earlier_code():
        pass


@contextlib.contextmanager
def earlier_code() -> Iterator[Path]:
    """Unpack the packages of the earlier commit next to the benchmarks of this one, into a folder."""
    found = subprocess.run(
        ["git", "-C", str(ROOT), "archive", EARLIER_COMMIT, *_PACKAGES], capture_output=True, check=False
    )
    if found.returncode:
        raise NoEnvironment(
            f"commit {EARLIER_COMMIT}, with which small runs are compared, is not in this repository "
            "(`git fetch --unshallow` brings it)"
        )
    with tempfile.TemporaryDirectory(prefix="swarm-earlier-") as name:
        with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
            archive.extractall(name, filter="data")
        shutil.copytree(ROOT / "benchmarks", Path(name) / "benchmarks")
        yield Path(name)


def rows(say: Say, runs: Sequence[SmallRun] = RUNS) -> Iterator[list[Row]]:
    """Measure each run with both, the earlier code first, and yield its row."""
    with earlier_code() as folder:
        for run in runs:
            earlier, now = Paces(), Paces()
            earlier.measure(say, run, folder)
            now.measure(say, run, ROOT)
            yield [
                Row(
                    identifier=f"small-{run.name}-pace",
                    workload=run.title,
                    quantity="samples per second of all peers together",
                    ours=now.series_of(f"swarm: {run.name}", now.samples, "samples/s"),
                    peer=earlier.series_of(f"swarm at {EARLIER_COMMIT}", earlier.samples, "samples/s"),
                    aim=Aim(of="ours / peer", sense="at least", value=SHARE_MIN),
                )
            ]


@dataclass(slots=True)
class Paces(Failures):
    """Samples a second of one code."""

    samples: list[float] = field(default_factory=list)

    def measure(self, say: Say, run: SmallRun, folder: Path) -> None:
        """Measure a run of the code in `folder`."""
        try:
            with _Peers(run, folder) as peers:
                self.samples.append(peers.samples_per_s())
        except LaunchFailed as failure:
            self.launches_failed += 1
            self.fail(str(failure).partition("; its log ends")[0])
            return
        code = "now" if folder == ROOT else "before"
        say(f"{run.title}, {code}: {self.samples[-1]:.1f} samples/s")


def configuration(*, founds: bool, peers: int, generation: int = 0) -> dict[str, Any]:
    """Return the configuration of a `benchmarks.workers.small_run_peer` in an open run of `peers`."""
    target = 16 * peers
    return {"founds": founds, "generation": generation, "target": target, "run": "small", "invites": []}


class _Peers(Launch):
    """The peers of one run. Those that begin together find one another by their generation's founder."""

    def __init__(self, run: SmallRun, folder: Path) -> None:
        self._run = run
        self._generation = 0
        self._gone = 0  # samples of peers that have ended
        super().__init__(
            f"small run {run.name}",
            python=OWN_PYTHON,
            module=_MODULE,
            configurations=[self._configuration(founds=peer == 0) for peer in range(run.peers)],
            within=lambda number, command: ["env", "-C", str(folder), *command],
        )

    def _configuration(self, *, founds: bool) -> dict[str, Any]:
        return configuration(founds=founds, generation=self._generation, peers=self._run.peers)

    def samples_per_s(self) -> float:
        """Return the samples a second of all peers from the moment at which all contribute."""
        self.receive("contributed", _READY_S)
        peers: list[Worker | None] = list(self.workers)
        before, began_s = self._count(peers), time.monotonic()
        for change in self._run.changes:
            time.sleep(max(began_s + change.at_s - time.monotonic(), 0.0))
            self._change(peers, change)
        time.sleep(max(began_s + self._run.window_s - time.monotonic(), 0.0))
        took_s = time.monotonic() - began_s
        return (self._gone + self._count(peers) - before) / took_s

    def _change(self, peers: list[Worker | None], change: Change) -> None:
        one = peers[change.peer]
        if one is None:
            if not any(peers):
                self._generation += 1  # no peer is left to be found
            founds = not any(peers)
            peers[change.peer] = self.add(self._configuration(founds=founds))
            return
        self._gone += self._count([one])
        if change.do == "leave":
            one.send({"do": "leave"})
            one.receive("left", time.monotonic() + _ANSWER_S)
        self.end(one)
        peers[change.peer] = None

    def _count(self, peers: Sequence[Worker | None]) -> int:
        asked = [one for one in peers if one is not None]
        for one in asked:
            one.send({"do": "count"})
        deadline_s = time.monotonic() + _ANSWER_S
        return sum(int(one.receive("counted", deadline_s)["samples"]) for one in asked)
