"""Simulated trainings under faults, checked throughout: `make sim SCENARIO=training SEED=7`.

Peers begin, a time of faults follows, then one without; within a minute of it all peers must have one history
again, and train on. This repeats until the time is over. Everything follows from the seed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from swarm.testing.chance import Chance
from swarm.testing.checkers import Violations
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.training_checkers import TrainingChecks
from swarm.testing.training_swarm import TrainingConfig, TrainingPeer, TrainingSwarm
from swarm.testing.virtual_loop import run_virtual

TRAINING = "training"
_EPOCH_STEPS = 4  # of each peer, when all are there
_BATCH = 4
_CALM_S = 40.0  # at the beginning
_WATCH_S = 2.0
_HEAL_S = 60.0  # from the end of the last fault to one history
_GOES_ON_S = 40.0  # within which a healed swarm completes an epoch
# longest pause of the side of a cut that has a quorum: the epoch that was running, of which the samples of the
# other side are lost, and one failed round
_EPOCHS_MAX = 2.0
_FAILED_ROUND_S = 30.0
_PEERS_MIN = 3  # that faults leave alive
# the longest step: three attempts at a round, three at the state's, and a download, each to its deadline
_STEP_S_MAX = 3 * 60.0 + 3 * 120.0 + 120.0

FAULTS = (
    "kill", "restart", "checkpoint", "leave", "join", "crowd", "freeze", "hang", "split", "one-way", "slow",
    "loss", "mass",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingScenario:
    """Settings of one simulated training; equal settings give equal runs."""

    seed: int = 1
    peers: int = 8
    hours: float = 0.1
    every_s: float = 15.0  # mean time between two faults
    faults_s: float = 150.0  # duration of the faults of each round
    lasting_s: float = 30.0  # cuts, freezes and bursts last up to twice this
    faults: tuple[str, ...] = FAULTS

    @property
    def replay(self) -> str:
        """Return the command that runs the same scenario again."""
        return f"make sim SEED={self.seed} PEERS={self.peers} HOURS={self.hours:g} SCENARIO={TRAINING}"


@dataclass(slots=True, kw_only=True)
class TrainingFigures:
    """Results of a simulated training."""

    digest: str = ""
    virtual_s: float = 0.0
    wall_s: float = 0.0
    messages: int = 0
    epochs: int = 0  # certificates
    breaks: int = 0
    steps: int = 0
    rounds_failed: int = 0
    resynchronised: int = 0
    given_up: int = 0
    longest_step_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """Return the results as text."""
        return [
            f"{self.virtual_s / 60:.0f} virtual minutes in {self.wall_s:.0f} s, {self.messages} messages, "
            f"digest {self.digest}",
            "faults: "
            + (", ".join(f"{count} × {kind}" for kind, count in sorted(self.faults.items())) or "none"),
            f"certificates {self.epochs} ({self.breaks} breaks), steps {self.steps} "
            f"(the longest {self.longest_step_s:.1f} s), failed rounds {self.rounds_failed}, "
            f"downloads {self.resynchronised}, epochs given up {self.given_up}",
        ]


class TrainingFailed(AssertionError):
    """Promises were broken; the last line of the text is the command that replays the run."""


def run_training(
    scenario: TrainingScenario, print_line: Callable[[str], None] = lambda text: None
) -> TrainingFigures:
    """Run one scenario in virtual time. Raise TrainingFailed with the broken promises and the command that
    replays them.
    """
    try:
        return run_virtual(_TrainingRun(scenario, print_line).main())
    except TrainingFailed:
        raise
    except BaseException as error:
        error.add_note(f"replay: {scenario.replay}")
        raise


class _TrainingRun:
    """State of one scenario in progress."""

    def __init__(self, scenario: TrainingScenario, print_line: Callable[[str], None]) -> None:
        self._scenario, self._print = scenario, print_line
        self._started_s = time.monotonic()
        self._link = LinkConfig(delay_s=0.03, jitter=0.5)
        self._network = SimulatedNetwork(scenario.seed, self._link)
        self._violations = Violations()
        self._checks = TrainingChecks(self._violations, _STEP_S_MAX)
        config = TrainingConfig(
            target_batch_size=_BATCH * _EPOCH_STEPS * scenario.peers, load_timeout_s=120.0
        )
        self._swarm = TrainingSwarm(self._network, config, self._checks.on_step)
        self._faults = _TrainingFaults(
            self._swarm, self._checks, Chance(scenario.seed, "faults"), scenario, self._say
        )

    async def main(self) -> TrainingFigures:
        scenario, loop = self._scenario, asyncio.get_running_loop()
        watching = asyncio.ensure_future(self._watch())
        for _ in range(scenario.peers):
            await self._faults.add()
        await asyncio.sleep(_CALM_S)
        end_s = loop.time() + scenario.hours * 3600.0
        while loop.time() < end_s and not self._violations.count:
            await self._faults.run(min(loop.time() + scenario.faults_s, end_s))
            await self._faults.calm()
            self._say("all faults have ended")
            await asyncio.sleep(_HEAL_S)
            live = list(self._swarm.live.values())
            self._checks.check_one_history(live, loop.time())
            certificates = len(self._checks.ledger.certificates)
            await asyncio.sleep(_GOES_ON_S)
            if len(self._checks.ledger.certificates) == certificates:
                self._violations.add(
                    loop.time(), f"no epoch was completed within {_GOES_ON_S:g} s without faults"
                )
            self._checks.check_sizes(live, loop.time())
        watching.cancel()
        await self._swarm.close()
        return self._finish()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_WATCH_S)
            self._checks.watch(list(self._swarm.live.values()), loop.time())
            self._faults.check_pauses()
            for error in self._network.errors:
                self._violations.add(loop.time(), f"a handler failed: {error!r}")
            for index, failure in self._swarm.errors:
                self._violations.add(loop.time(), f"the trainer of peer {index} failed: {failure!r}")
            self._network.errors.clear()
            self._swarm.errors.clear()

    def _say(self, text: str) -> None:
        self._print(f"{asyncio.get_running_loop().time():.1f} s: {text}")

    def _finish(self) -> TrainingFigures:
        checks = self._checks
        figures = TrainingFigures(
            digest=self._network.digest,
            virtual_s=asyncio.get_running_loop().time(),
            wall_s=time.monotonic() - self._started_s,
            messages=sum(peer.messages_sent for peer in self._network.peers.values()),
            epochs=len(checks.ledger.certificates),
            breaks=sum(one.proposal.is_break for one in checks.ledger.certificates.values()),
            steps=checks.steps,
            rounds_failed=checks.rounds_failed,
            resynchronised=checks.resynchronised,
            given_up=checks.given_up,
            longest_step_s=checks.longest_step_s,
            faults=self._faults.counts,
        )
        if self._violations.count:
            lines = [
                f"{self._violations.count} promises broken:",
                *self._violations.lines,
                *figures.lines(),
                f"replay: {self._scenario.replay}",
            ]
            raise TrainingFailed("\n".join(lines))
        return figures


class _TrainingFaults:
    """Faults of one training, drawn from the seed; `calm` ends all of them."""

    def __init__(
        self,
        swarm: TrainingSwarm,
        checks: TrainingChecks,
        chance: Chance,
        scenario: TrainingScenario,
        say: Callable[[str], None],
    ) -> None:
        self._swarm, self._network, self._checks = swarm, swarm.network, checks
        self._chance, self._scenario, self._say = chance, scenario, say
        self._link = swarm.network.config
        self._endings: dict[asyncio.Task[None], Callable[[], None]] = {}
        self._watched: _QuorumSide | None = None
        self.counts: Counter[str] = Counter()

    async def add(self, **how: object) -> TrainingPeer:
        """Add a peer of a random speed."""
        return await self._swarm.add(batch=_BATCH, compute_s=self._chance.uniform(0.7, 1.4), **how)  # type: ignore[arg-type]

    async def run(self, until_s: float) -> None:
        """Draw faults until `until_s`."""
        loop = asyncio.get_running_loop()
        while True:
            wait_s = self._chance.expovariate(1.0 / self._scenario.every_s)
            if loop.time() + wait_s >= until_s:
                await asyncio.sleep(max(until_s - loop.time(), 0.0))
                return
            await asyncio.sleep(wait_s)
            await self.begin(self._chance.choice(self._scenario.faults))

    async def begin(self, kind: str) -> None:
        """Begin one fault of a kind of `FAULTS`."""
        live, chance = list(self._swarm.live.values()), self._chance
        lasting_s = self._scenario.lasting_s * (0.1 + 1.9 * chance.random())
        self.counts[kind] += 1
        self._watched = None  # the pauses of a side are judged while one cut is the only fault
        alone = not self._endings
        if kind in ("kill", "restart", "checkpoint", "leave", "mass"):
            count = len(live) // 2 + 1 if kind == "mass" else 1
            chosen = chance.sample(live, min(count, max(len(live) - _PEERS_MIN, 0)))
            self._say(f"{kind}: {[one.index for one in chosen]}")
            for one in chosen:
                await self._end(one, kind, lasting_s)
        elif kind in ("join", "crowd"):
            count = 1 if kind == "join" else 2 + chance.below(3)
            count = min(count, 2 * self._scenario.peers - len(live))
            self._say(f"{kind}: {count} more")
            for _ in range(count):
                await self.add()
        elif kind == "freeze":
            one = chance.choice(live)
            self._say(f"freeze: {one.index} for {lasting_s:.0f} s")
            one.peer.frozen = True
            self._later(lasting_s, lambda: setattr(one.peer, "frozen", False))
        elif kind == "hang":
            one = chance.choice(live)
            self._say(f"hang: {one.index} for {lasting_s:.0f} s")
            one.hangs = True
            self._later(lasting_s, lambda: setattr(one, "hangs", False))
        elif kind == "slow":
            one = chance.choice(live)
            self._say(f"slow: {one.index} for {lasting_s:.0f} s")
            one.peer.slowness = 2.0 + 18.0 * chance.random()
            self._later(lasting_s, lambda: setattr(one.peer, "slowness", 1.0))
        elif kind == "split":
            chance.shuffle(live)
            side = live[: 1 + chance.below(max(len(live) - 1, 1))]
            self._say(f"split: {sorted(one.index for one in side)} apart for {lasting_s:.0f} s")
            self._network.partition([one.peer for one in side])
            if alone:
                self._watched = _QuorumSide(side, live[len(side) :], self._swarm, self._checks)
            self._later(lasting_s, self._rejoin)
        elif kind == "one-way":
            third = max(len(live) // 3, 1)
            sources, targets = chance.sample(live, third), chance.sample(live, third)
            self._say(
                f"one-way: {[one.index for one in sources]} -> {[one.index for one in targets]} "
                f"for {lasting_s:.0f} s"
            )
            cut = self._network.cut([one.peer for one in sources], [one.peer for one in targets])
            self._later(lasting_s, lambda: self._network.heal(cut))
        elif kind == "loss":
            self._say(f"loss for {lasting_s:.0f} s")
            self._network.config = replace(
                self._link, loss=0.2 * chance.random(), duplication=0.1, reorder=0.2
            )
            self._later(lasting_s, lambda: setattr(self._network, "config", self._link))
        else:
            raise ValueError(f"no such fault: {kind}")

    async def _end(self, one: TrainingPeer, kind: str, lasting_s: float) -> None:
        """End a process; one that restarts does so later, with nothing or with a checkpoint."""
        checkpoint = one.save() if kind == "checkpoint" and one.stepping_since_s is None else None
        self._checks.ledger.read(one, asyncio.get_running_loop().time())
        if kind == "leave":
            one.leaving = True
            return
        await self._swarm.kill(one)
        if kind in ("restart", "checkpoint"):
            await asyncio.sleep(min(lasting_s, 10.0))
            await self.add(peer=one.peer, checkpoint=checkpoint)

    def _rejoin(self) -> None:
        self._watched = None
        self._network.partition()

    def check_pauses(self) -> None:
        """Check that the side of a cut with a quorum goes on."""
        if self._watched is not None:
            self._watched.check(asyncio.get_running_loop().time())

    async def calm(self) -> None:
        """End all faults."""
        for task in list(self._endings):
            task.cancel()
        self._endings.clear()
        self._network.heal()
        self._rejoin()
        self._network.config = self._link
        for one in self._swarm.live.values():
            one.peer.frozen, one.hangs, one.peer.slowness = False, False, 1.0

    def _later(self, wait_s: float, end: Callable[[], object]) -> None:
        async def wait() -> None:
            await asyncio.sleep(wait_s)
            end()

        task = asyncio.ensure_future(wait())
        self._endings[task] = lambda: None
        task.add_done_callback(lambda done: self._endings.pop(done, None))


class _QuorumSide:
    """The two sides of a cut: one with a quorum must not pause longer than one failed round."""

    def __init__(
        self,
        one: Sequence[TrainingPeer],
        other: Sequence[TrainingPeer],
        swarm: TrainingSwarm,
        checks: TrainingChecks,
    ) -> None:
        self._sides, self._swarm, self._checks = (list(one), list(other)), swarm, checks
        self._since_s = [asyncio.get_running_loop().time()] * 2  # when each side began to wait
        self._heads: list[bytes | None] = [None, None]

    def check(self, now_s: float) -> None:
        """Check one moment."""
        checks, target = self._checks, self._swarm.config.target_batch_size
        for number, side in enumerate(self._sides):
            live = [one for one in side if self._swarm.live.get(one.peer.peer_id) is one and not one.leaving]
            head = checks.newest(live)
            voters = [one.peer.peer_id for one in live if one.optimizer is not None]
            if head is None or head != self._heads[number] or not checks.has_quorum(head, voters):
                self._heads[number], self._since_s[number] = head, now_s
                continue
            epoch_s = target / sum(one.batch / one.compute_s for one in live)
            if now_s - self._since_s[number] > _EPOCHS_MAX * epoch_s + _FAILED_ROUND_S:
                checks.violations.add(
                    now_s,
                    f"peers {sorted(one.index for one in live)} are a quorum of head {head.hex()[:8]}, and have "
                    f"committed nothing for {now_s - self._since_s[number]:.0f} s; an epoch takes {epoch_s:.0f} s",
                )
                self._since_s[number] = now_s
