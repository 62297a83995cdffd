"""Simulated trainings under faults, checked throughout: `make sim SCENARIO=training SEED=7`.

After the start, periods with and without faults alternate until the time is over. Within a minute after the
faults all peers must share one history again and continue to train. Everything follows from the seed.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

import torch

from averaging.optim.modes import ModeSettings
from averaging.optim.modes.settings import Diloco, Gradients, Local
from swarm.testing.chance import Chance
from swarm.testing.checkers import Deadlines, Violations
from swarm.testing.identities import remembered_signatures
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.time_limits import watched_time_limits
from swarm.testing.training_checkers import TrainingChecks
from swarm.testing.training_faults import FAULTS, TrainingFaultConfig, TrainingFaults
from swarm.testing.training_swarm import TrainingConfig, TrainingPeer, TrainingSwarm
from swarm.testing.virtual_loop import collector_off, run_virtual

TRAINING = "training"
MODES: dict[str, ModeSettings] = {
    "gradients": Gradients(),
    "gradients-delayed": Gradients(delayed=True),
    "local": Local(),
    "diloco": Diloco(),
    "diloco-delayed": Diloco(delayed=True),
    "diloco-streaming": Diloco(streaming=2),
}
# names of the scenario: in the mode that the seed decides, and in each mode
TRAININGS: dict[str, str | None] = {TRAINING: None, **{f"{TRAINING}-{mode}": mode for mode in MODES}}
MODES_BY_SEED = ("gradients", "local", "gradients", "diloco")
_LIARS_SHARE = 5  # every fifth peer of every third run lies
_LIARS_EVERY = 3
_SMALL_MAX, _SMALL_CROWD_MAX = 8, 4  # peers of a small swarm, and newcomers that come to it at once
SEEDS_PER_PROCESS = 20
_EPOCH_STEPS = 4  # steps of each peer in an epoch, when all take part
_CALM_S = 40.0  # at the beginning
_WATCH_S = 2.0
_COLLECT_WATCHES = 15
_HEAL_S = 60.0  # from the end of the last fault to one history
_GOES_ON_S = 40.0  # within which a healed swarm completes an epoch
_LOAD_S = 120.0
# the longest step: three attempts at a round, three at the state's, and a download, each to its deadline
_STEP_S_MAX = 3 * 60.0 + 3 * 120.0 + _LOAD_S


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingScenario:
    """Settings of one simulated training; equal settings give equal runs."""

    seed: int = 1
    peers: int = 8
    hours: float = 0.1
    faults_s: float = 150.0  # duration of the faults of each round
    kinds: tuple[str, ...] = FAULTS
    chosen_mode: str | None = None  # of `MODES`; None: the seed decides

    @property
    def mode(self) -> ModeSettings:
        """Return the mode of the optimizer."""
        return MODES[self.chosen_mode or MODES_BY_SEED[self.seed % len(MODES_BY_SEED)]]

    @property
    def liars(self) -> int:
        """Return how many of the peers lie about their progress and their state."""
        return self.peers // _LIARS_SHARE if self.seed % _LIARS_EVERY == 0 else 0

    @property
    def crowd_max(self) -> int:
        """Return how many newcomers come at once, at most: in a small swarm a few, in a larger one as many as
        it has peers.
        """
        return self.peers if self.peers > _SMALL_MAX else _SMALL_CROWD_MAX

    @property
    def replay(self) -> str:
        """Return the command that runs the same scenario again."""
        name = f"{TRAINING}-{self.chosen_mode}" if self.chosen_mode else TRAINING
        return f"make sim SEED={self.seed} PEERS={self.peers} HOURS={self.hours:g} SCENARIO={name}"


@dataclass(slots=True, kw_only=True)
class ScenarioFigures:
    """Results of a simulated training."""

    digest: str = ""
    virtual_s: float = 0.0
    wall_s: float = 0.0
    messages: int = 0
    epochs: int = 0  # certificates
    breaks: int = 0
    foundings: int = 0  # second first certificates: newcomers that found no other peer
    steps: int = 0
    rounds_failed: int = 0
    resynchronised: int = 0
    given_up: int = 0
    misled: int = 0  # states that a liar gave
    longest_step_s: float = 0.0
    longest_pause_s: float = 0.0  # of a connected quorum, beyond the time of an epoch
    faults: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """Return the results as text."""
        return [
            f"{self.virtual_s / 60:.0f} virtual minutes in {self.wall_s:.0f} s, {self.messages} messages, "
            f"digest {self.digest}",
            "faults: "
            + (", ".join(f"{count} × {kind}" for kind, count in sorted(self.faults.items())) or "none"),
            f"certificates {self.epochs} ({self.breaks} breaks, {self.foundings} second foundings), "
            f"steps {self.steps} (the longest {self.longest_step_s:.1f} s)",
            f"failed rounds {self.rounds_failed}, downloads {self.resynchronised}, "
            f"epochs given up {self.given_up}, states of liars taken {self.misled}",
            f"longest pause with a quorum {self.longest_pause_s:.1f} s and an epoch",
        ]


class TrainingFailed(AssertionError):
    """Promises were broken; the last line of the text is the command that replays the run."""


def run_training(
    scenario: TrainingScenario, print_line: Callable[[str], None] = lambda text: None
) -> ScenarioFigures:
    """Run one scenario in virtual time. Raise TrainingFailed with the broken promises and the command that
    replays them.
    """
    try:
        run = _TrainingRun(scenario, print_line)
        with collector_off(), remembered_signatures(), watched_time_limits(run.deadlines):
            return run_virtual(run.main())
    except TrainingFailed:
        raise
    except BaseException as error:
        error.add_note(f"replay: {scenario.replay}")
        raise


def _processes(count: int) -> Executor:
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


def run_trainings(
    scenarios: Sequence[TrainingScenario],
    run: Callable[[TrainingScenario], str] | None = None,
    pool_of: Callable[[int], Executor] = _processes,
) -> Iterator[tuple[TrainingScenario, str]]:
    """Run scenarios side by side, on all cores. Return each, as it ends, with the text of its failure, or ""
    when it has broken no promise.

    `run` returns that text of one scenario; None: it runs the training. `pool_of` makes a pool of that
    number of workers. Each pool runs a limited number of scenarios, because processes do not return memory.
    """
    workers = os.cpu_count() or 1
    # not `max_tasks_per_child`: Python 3.11 then hangs when a process has ended
    count = workers * SEEDS_PER_PROCESS
    for first in range(0, len(scenarios), count):
        with pool_of(workers) as pool:
            running = {
                pool.submit(run or _failure_of, scenario): scenario
                for scenario in scenarios[first : first + count]
            }
            for ended in as_completed(running):
                error = ended.exception()  # it has a note that replays it, unless the process was killed
                yield running[ended], "".join(traceback.format_exception(error)) if error else ended.result()


def _failure_of(scenario: TrainingScenario) -> str:
    logging.disable(logging.CRITICAL)  # each fault is a warning of many peers
    torch.set_num_threads(1)
    try:
        run_training(scenario)
    except TrainingFailed as failure:
        return str(failure)
    return ""


class _TrainingRun:
    """State of one scenario in progress."""

    def __init__(self, scenario: TrainingScenario, print_line: Callable[[str], None]) -> None:
        self._scenario, self._print = scenario, print_line
        self._started_s = time.monotonic()
        self._link = LinkConfig(delay_s=0.03, jitter=0.5)
        self._network = SimulatedNetwork(scenario.seed, self._link)
        self._violations = Violations()
        self._checks = TrainingChecks(self._violations, _STEP_S_MAX)
        self.deadlines = Deadlines(self._violations)

    async def main(self) -> ScenarioFigures:
        async with asyncio.TaskGroup() as group:
            self._found(group)
            watching = group.create_task(self._watch())
            await self._train()
            await self._faults.calm()
            watching.cancel()
            await self._swarm.close()
        return self._finish()

    def _found(self, group: asyncio.TaskGroup) -> None:
        """Make the swarm and its faults, whose tasks belong to `group`."""
        scenario = self._scenario
        faults = TrainingFaultConfig(
            kinds=scenario.kinds, peers_max=2 * scenario.peers, crowd_max=scenario.crowd_max
        )
        config = TrainingConfig(
            target_batch_size=faults.batch * _EPOCH_STEPS * scenario.peers,
            mode=scenario.mode,
            load_timeout_s=_LOAD_S,
        )
        self._swarm = TrainingSwarm(self._network, config, self._checks.on_step, group)
        self._faults = TrainingFaults(
            self._swarm, self._checks, Chance(scenario.seed, "faults"), faults, self._say, group
        )

    async def _train(self) -> None:
        scenario, loop = self._scenario, asyncio.get_running_loop()
        await self._fill()
        await self._until(_CALM_S, self._has_begun)
        end_s = loop.time() + scenario.hours * 3600.0
        while loop.time() < end_s and not self._violations.count:
            await self._fill()
            await self._faults.run(min(loop.time() + scenario.faults_s, end_s))
            await self._faults.calm()
            self._checks.faults_s = loop.time()
            self._say("all faults have ended")
            healed_by_s = loop.time() + _HEAL_S
            await self._until(_HEAL_S, self._is_one)
            await self._continues()
            # it may have looked like one swarm while a peer that was behind continued with another history
            await self._until(healed_by_s - loop.time(), self._is_one)
            for apart in self._checks.apart(self._live):
                self._violations.add(loop.time(), apart)
            self._checks.check_sizes(self._live, loop.time())

    async def _fill(self) -> None:
        """Start peers until there are as many as in the beginning, and as many liars. More processes end by
        faults than newcomers come: without this, most of a long run has the two peers that faults spare.
        """
        liars = self._scenario.liars - sum(one.lies for one in self._live)
        missing = self._scenario.peers - len(self._live)
        for number in range(missing):
            await self._faults.add(lies=number >= missing - liars)

    async def _continues(self) -> None:
        """Check that a healed swarm completes an epoch."""
        loop, certificates = asyncio.get_running_loop(), self._checks.ledger.certificates
        before = len(certificates)
        await self._until(_GOES_ON_S, lambda: len(certificates) > before)
        if len(certificates) == before:
            self._violations.add(
                loop.time(), f"no epoch was completed within {_GOES_ON_S:g} s without faults"
            )

    @property
    def _live(self) -> list[TrainingPeer]:
        return list(self._swarm.live.values())

    def _is_one(self) -> bool:
        return not self._checks.apart(self._live)

    def _has_begun(self) -> bool:
        return all(one.optimizer is not None and one.optimizer.epoch > 0 for one in self._live)

    async def _until(self, limit_s: float, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds in two consecutive checks, at most `limit_s`."""
        end_s, held = asyncio.get_running_loop().time() + limit_s, False
        while asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(min(_WATCH_S, max(end_s - asyncio.get_running_loop().time(), 0.0)))
            if (now := holds()) and held:
                return
            held = now

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        for number in itertools.count(1):
            await asyncio.sleep(_WATCH_S)
            if number % _COLLECT_WATCHES == 0:
                gc.collect()
            self._checks.watch(self._live, loop.time())
            self.deadlines.check(loop.time())
            for error in self._network.errors:
                self._violations.add(loop.time(), f"a handler failed: {error!r}")
            self._network.errors.clear()

    def _say(self, text: str) -> None:
        self._print(f"{asyncio.get_running_loop().time():.1f} s: {text}")

    def _finish(self) -> ScenarioFigures:
        checks = self._checks
        figures = ScenarioFigures(
            digest=self._network.digest,
            virtual_s=asyncio.get_running_loop().time(),
            wall_s=time.monotonic() - self._started_s,
            messages=sum(peer.messages_sent for peer in self._network.peers.values()),
            epochs=len(checks.ledger.certificates),
            breaks=sum(one.proposal.is_break for one in checks.ledger.certificates.values()),
            foundings=checks.ledger.foundings,
            steps=checks.steps,
            rounds_failed=checks.rounds_failed,
            resynchronised=checks.resynchronised,
            given_up=checks.given_up,
            misled=checks.misled,
            longest_step_s=checks.longest_step_s,
            longest_pause_s=checks.quorums.longest_pause_s,
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
