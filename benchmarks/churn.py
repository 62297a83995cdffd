"""Four volunteers of one run, each killed and restarted at random: goodput and final loss.

The volunteers are the real commands, `swarm start` and `swarm join`, with a `swarm bootstrap` that is never
killed. A training step takes the same time on each of them (`benchmarks.paced_task`). The baseline is the
same five minutes without kills.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import paced_task
from benchmarks.launch import LaunchFailed
from benchmarks.lifetimes import PHASES, STATE, ChurnSummary, Kill, ProcessLifetime, draw_kills, summarize
from benchmarks.results import Row, Series
from swarm.cli.children import Children

READY_S = 120.0
LOOK_S = 0.2
_PATH = "PYTHONPATH"
_BOOTSTRAP = "bootstrap"
_LISTEN = ("--listen", "127.0.0.1:0")
_RUN = """
name = "churn"
members = "open"
target_batch_size = {target}
batch_size = {batch}
[task]
name = "{task}"
[task.settings]
width = 64
layers = 1
heads = 4
context = 32
data_bytes = 4000000
step_s = {step_s}
[optimizer]
learning_rate = 3e-3
clip_norm = 1.0
"""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Churn:
    peers: int = 4
    mean_s: float = 60.0  # mean time between two kills of a peer
    seconds: float = 300.0
    seed: int = 1
    step_s: float = 0.1  # minimum of one peer; its computation takes a tenth of that
    batch: int = 16  # samples per step
    epoch_s: float = 1.0  # the target batch is the work of all peers in this time

    @property
    def samples_per_s_max(self) -> float:
        return self.peers * self.batch / self.step_s

    def kills(self) -> list[Kill]:
        return draw_kills(
            random.Random(self.seed), peers=self.peers, mean_s=self.mean_s, seconds=self.seconds
        )


QUICK = Churn(peers=3, mean_s=15.0, seconds=20.0)


@contextlib.contextmanager
def _task_installed(folder: Path) -> Iterator[None]:
    """Install the paced task for child processes, which inherit Python's search path, then undo it."""
    paced_task.install(folder)
    before = os.environ.get(_PATH)
    os.environ[_PATH] = os.pathsep.join(filter(None, (str(folder), before)))
    try:
        yield
    finally:
        del os.environ[_PATH]
        if before is not None:
            os.environ[_PATH] = before


class _Swarm:
    """The processes and the events that each reported. Every restart of a peer is a process with its own
    name.
    """

    def __init__(self, children: Children, folder: Path, churn: Churn) -> None:
        self._children, self._folder = children, folder
        self._address = ""
        self._run_file = folder / "run.toml"
        target = round(churn.samples_per_s_max * churn.epoch_s)
        self._run_file.write_text(
            _RUN.format(target=target, batch=churn.batch, step_s=churn.step_s, task=paced_task.NAME),
            encoding="utf-8",
        )
        self._names: dict[int, str] = {}
        self.lifetimes: dict[str, ProcessLifetime] = {}

    def open(self, peers: int) -> None:
        """Start all peers and wait until each trains. Raises LaunchFailed when one does not in time."""
        deadline_s = time.monotonic() + READY_S
        self._children.start(_BOOTSTRAP, "bootstrap", "--identity", "new", *_LISTEN)
        while not self._address:
            self._look(deadline_s)
        self.begin(0)
        while "run" not in self.lifetimes[self._names[0]].moments_s:
            self._look(deadline_s)
        for peer in range(1, peers):
            self.begin(peer)
        while not all("contributing" in lifetime.moments_s for lifetime in self.lifetimes.values()):
            self._look(deadline_s)

    def begin(self, peer: int) -> None:
        """Start or restart a peer.

        The creator restarts with the command that created the run: with the same identity it joins the
        existing run.
        """
        lived = sum(lifetime.peer == peer for lifetime in self.lifetimes.values())
        name = self._names[peer] = f"peer {peer}, lifetime {lived}"
        role = (
            ("start", str(self._run_file), "--bootstrap", self._address)
            if peer == 0
            else ("join", self._address, "--yes")
        )
        self.lifetimes[name] = ProcessLifetime(peer, time.monotonic(), restarted=lived > 0)
        identity = str(self._folder / f"{peer}.identity")
        self._children.start(
            name, *role, "--device", "cpu", "--identity", identity, "--name", f"peer {peer}", *_LISTEN
        )

    def kill(self, peer: int) -> None:
        name = self._names[peer]
        self._children[name].kill()
        self.lifetimes[name].ended_s = time.monotonic()
        self._children[name].process.wait()

    def listen(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            self._receive(min(LOOK_S, until_s - time.monotonic()))

    def _look(self, deadline_s: float) -> None:
        self._receive(LOOK_S)
        if time.monotonic() > deadline_s:
            raise LaunchFailed(
                f"not everybody trained within {READY_S:g} s: "
                f"{ {n: [*lifetime.moments_s] for n, lifetime in self.lifetimes.items()} }"
            )

    def _receive(self, timeout_s: float) -> None:
        line = self._children.next_line(timeout_s)
        if line is None:
            return
        name, event = line
        if name == _BOOTSTRAP:
            if event is not None and event["event"] == "listening":
                self._address = event["addresses"][0]
            return
        lifetime = self.lifetimes[name]
        if event is not None:
            lifetime.take(event, time.monotonic())
        elif lifetime.ended_s is None:
            raise LaunchFailed(f"{name} ended by itself: {self._children[name].error_text()}")


def train(churn: Churn, say: Say, *, killed: bool) -> tuple[list[ProcessLifetime], ChurnSummary]:
    """Train for `seconds`, counted from the moment at which every peer has contributed.

    Raises LaunchFailed when the peers do not all start to train, or when a process ends by itself.
    """
    with (
        tempfile.TemporaryDirectory(prefix="swarm-churn-") as name,
        _task_installed(Path(name)),
        Children() as children,
    ):
        swarm = _Swarm(children, Path(name), churn)
        swarm.open(churn.peers)
        since_s = time.monotonic()
        for kill in churn.kills() if killed else ():
            swarm.listen(since_s + kill.at_s)
            say(f"  {kill.at_s:.0f} s: peer {kill.peer} is killed and started again")
            swarm.kill(kill.peer)
            swarm.begin(kill.peer)
        until_s = since_s + churn.seconds
        swarm.listen(until_s)
    lifetimes = list(swarm.lifetimes.values())
    return lifetimes, summarize(lifetimes, peers=churn.peers, since_s=since_s, until_s=until_s)


def rows(say: Say, churn: Churn | None = None) -> list[Row]:
    """Measure the section and return its rows."""
    churn = churn or Churn()
    say(f"{churn.peers} volunteers, {churn.seconds:g} s without a kill")
    _, calm = train(churn, say, killed=False)
    say(_summary_line(calm))
    say(f"{churn.peers} volunteers, {churn.seconds:g} s, each killed every {churn.mean_s:g} s on average")
    lifetimes, stormy = train(churn, say, killed=True)
    say(_summary_line(stormy))
    return rows_of(churn, calm, stormy, lifetimes)


def _summary_line(found: ChurnSummary) -> str:
    loss = "no loss" if found.loss is None else f"loss {found.loss:.3f}"
    restarts = f", back after {statistics.median(found.restarts_s):.1f} s" if found.restarts_s else ""
    return f"  {found.samples_per_s:.0f} samples/s, {loss}, {found.trained:.1%} of the time trained{restarts}"


def rows_of(
    churn: Churn, calm: ChurnSummary, stormy: ChurnSummary, lifetimes: list[ProcessLifetime]
) -> list[Row]:
    deaths = sum(lifetime.restarted for lifetime in lifetimes)
    workload = (
        f"{churn.peers} volunteers, {churn.seconds:g} s, each killed (SIGKILL) and started again after "
        f"{churn.mean_s:g} s on average"
    )
    note = (
        f"{deaths} kills, seed {churn.seed}; the peers trained {stormy.trained:.1%} of the time; failed "
        "rounds that peers reported: "
        f"{stormy.failed_rounds} (without kills {calm.failed_rounds}); states downloaded again by peers that "
        "were not killed: "
        f"{stormy.resynchronised} ({calm.resynchronised})"
    )

    def row(
        kind: str,
        quantity: str,
        unit: str,
        of: Callable[[ChurnSummary], float | None],
        limit: str,
        *notes: str,
    ) -> Row:
        def series(name: str, sums: ChurnSummary) -> Series:
            value = of(sums)
            return Series(name=f"{name}: {kind}", unit=unit, samples=() if value is None else (value,))

        return Row(
            identifier=f"churn-{kind}",
            workload=workload,
            quantity=quantity,
            ours=series("swarm", stormy),
            peer=series("the same without kills", calm),
            aim=None,
            shown="ours / peer",
            limit=limit,
            notes=notes,
        )

    most = (
        f"{churn.samples_per_s_max:.0f} samples/s: a step of {churn.batch} samples takes {churn.step_s:g} s"
    )
    return [
        row(
            "goodput",
            "samples that count in the swarm's steps",
            "samples/s",
            lambda found: found.samples_per_s,
            most,
            note,
        ),
        row(
            "goodput-alive",
            "the same for each second of a peer that trains: without the time in which it is dead or starts",
            "samples/s",
            lambda found: found.samples_per_peer_s,
            f"{churn.batch / churn.step_s:.0f} samples/s",
        ),
        row(
            "loss",
            "held-out loss at the end, at equal time",
            "nats/byte",
            lambda found: found.loss,
            "fewer samples in the same time",
        ),
        *_restarts(workload, stormy, lifetimes),
    ]


def _restarts(workload: str, stormy: ChurnSummary, lifetimes: list[ProcessLifetime]) -> list[Row]:
    starts = [
        phases for lifetime in lifetimes if lifetime.restarted and (phases := lifetime.phases_s) is not None
    ]

    def series(name: str, samples: list[float]) -> Series:
        return Series(name=f"swarm: {name}", unit="s", samples=tuple(samples))

    whole = Row(
        identifier="churn-restart",
        workload=workload,
        quantity="from a kill to the first sample of the new process that counts in the swarm",
        ours=series("restart", list(stormy.restarts_s)),
        peer=None,
        aim=None,
        limit="torch's import",
        notes=(
            f"{stormy.unfinished} restarts were cut short by a further kill or the end, and are in no median",
        ),
    )
    parts = [
        Row(
            identifier=f"churn-restart-{number}",
            workload=workload,
            quantity=f"of the restart: {words}",
            ours=series(words, [phases[words] for phases in starts if words in phases]),
            peer=None,
            aim=None,
            limit="",
        )
        for number, words in enumerate((*PHASES.values(), STATE), 1)
    ]
    return [whole, *parts]
