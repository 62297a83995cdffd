"""Simulated swarms under faults, checked throughout: `make sim SEED=7`.

    python -m swarm.testing.scenarios --seed 7 --peers 60 --hours 1 --scenario storm

The scenario `training` is a whole swarm that trains (`swarm.testing.training_scenarios`), in the mode that
the seed decides, and `training-MODE` one in that mode. Any other one is a
swarm of production DHT peers, a workload of many writers, a schedule of faults, and the checkers; all of it
follows from the seed. It proceeds in rounds: ten minutes of faults, then a time without faults, in which the
swarm must heal within `settle_s`; then every stored entry that has not expired must be found. A failure is
`ScenarioFailed`, whose text ends with the command that replays it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import click

from swarm.testing.chance import Chance
from swarm.testing.checkers import CheckLimits, ConnectedSwarm, Deadlines, Ledger, Survival, Violations
from swarm.testing.dht_swarm import DhtSwarm
from swarm.testing.faults import FaultConfig, Faults
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.time_limits import watched_time_limits
from swarm.testing.training_scenarios import (
    TRAININGS,
    ScenarioFigures,
    TrainingFailed,
    TrainingScenario,
    run_training,
    run_trainings,
)
from swarm.testing.virtual_loop import run_virtual
from swarm.testing.workload import OperationCounts, WorkConfig, Workload

Print = Callable[[str], None]
_WATCH_S = 20.0  # interval of the checks of every storage and table
_HEAL_POLL_S = 5.0
_TABLES_MAX = 10_000
_SEEDS_SHOWN = 20  # between two lines about the progress of many seeds

# kinds of faults in each scenario
SCENARIOS: dict[str, tuple[str, ...]] = {
    "calm": (),
    "churn": (),
    "crash": ("crash",),
    "split": ("split", "one-way"),
    "loss": ("loss", "freeze"),
    "clock": ("clock",),
    "storm": ("crash", "freeze", "split", "one-way", "loss", "clock"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioConfig:
    """Settings of one scenario; equal settings give equal runs."""

    seed: int = 1
    peers: int = 40
    hours: float = 0.5
    name: str = "storm"
    faults_s: float = 600.0  # duration of the faults of each round
    settle_s: float = 300.0  # time for a healed swarm to become one again
    repair_s: float = 300.0  # a record may be lost if all of its holders go within this time
    operations_per_s: float = 1.0
    every_s: float = 30.0  # mean time between two faults

    @property
    def replay(self) -> str:
        """Return the command that runs the same scenario again."""
        return f"make sim SEED={self.seed} PEERS={self.peers} HOURS={self.hours:g} SCENARIO={self.name}"


@dataclass(slots=True, kw_only=True)
class Report:
    """Results of a scenario."""

    digest: str = ""
    messages: int = 0
    bytes_sent: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0
    # of each round: from the end of the faults until the tables form one swarm
    heal_s: list[float] = field(default_factory=list)
    audited: int = 0
    lost_with_holders: int = 0
    counts: OperationCounts = field(default_factory=OperationCounts)
    faults: dict[str, int] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return the results as text."""
        counts, speed = (
            self.counts,
            f"{self.messages} messages ({self.messages / max(self.wall_s, 1e-9):.0f}/s)",
        )
        largest = sorted(self.largest.items(), key=lambda item: -item[1])[:8]
        return [
            f"{self.virtual_s / 3600:.2f} virtual hours in {self.wall_s:.0f} s, {speed}, "
            f"digest {self.digest}",
            "faults: "
            + (", ".join(f"{count} × {kind}" for kind, count in sorted(self.faults.items())) or "none"),
            f"stores {counts.stores} ({counts.stores_failed} with fewer than two replicas), "
            f"deletions {counts.deletions}, reads of living entries {counts.reads} "
            f"({counts.reads_complete} complete, {counts.reads_failed} unanswered)",
            f"keys audited after healing {self.audited}; "
            f"records lost with all of their holders {self.lost_with_holders}",
            "healed after " + (", ".join(f"{seconds:.0f} s" for seconds in self.heal_s) or "–"),
            "largest: " + ", ".join(f"{name} {size}" for name, size in largest),
        ]


class ScenarioFailed(AssertionError):
    """Promises were broken; the text ends with the command that replays the run."""


def run_scenario(config: ScenarioConfig, print_line: Print = lambda text: None) -> Report:
    """Run one scenario in virtual time. Raise ScenarioFailed with the broken promises and the command that
    replays them.
    """
    if config.name not in SCENARIOS:
        raise ValueError(f"no scenario {config.name!r}: there are {', '.join(SCENARIOS)}")
    with tempfile.TemporaryDirectory(prefix="swarm-sim-") as folder:
        try:
            run = _Run(config, print_line, Path(folder))
            with watched_time_limits(run.deadlines):
                return run_virtual(run.main())
        except ScenarioFailed:
            raise
        except BaseException as error:
            error.add_note(f"replay: {config.replay}")
            raise


class _Run:
    """State of one scenario in progress."""

    def __init__(self, config: ScenarioConfig, print_line: Print, disk: Path) -> None:
        self._config = config
        self._print = print_line
        self._started_s = time.monotonic()
        self._network = SimulatedNetwork(
            config.seed, LinkConfig(delay_s=0.04, jitter=0.5, loss=0.001), disk=disk
        )
        self._swarm = DhtSwarm(self._network)
        self._violations = Violations()
        self._ledger = Ledger()
        work = WorkConfig(operations_per_s=config.operations_per_s, ttl_s=(120.0, 1800.0))
        self._work = Workload(self._swarm, self._ledger, self._violations, Chance(config.seed, "work"), work)
        self.deadlines = Deadlines(self._violations)
        self._survival = Survival(self._ledger, self._work.authorship, self._violations, config.repair_s)
        self._limits = CheckLimits(self._violations, default_max=_TABLES_MAX)
        self._connected = ConnectedSwarm(self._violations)
        self._report = Report(counts=self._work.counts)

    async def main(self) -> Report:
        config, loop = self._config, asyncio.get_running_loop()
        self._print(f"{config.name}: {config.peers} peers join")
        await self._swarm.grow(config.peers)
        gc.collect()
        gc.freeze()  # present objects stay: the collector need not visit them again
        try:
            end_s = loop.time() + config.hours * 3600.0
            number = 0
            while loop.time() < end_s and self._violations.count == 0:
                await self._round(number, min(loop.time() + config.faults_s, end_s))
                number += 1
            await self._network.close()
        finally:
            gc.unfreeze()
        return self._finish()

    async def _round(self, number: int, until_s: float) -> None:
        config = self._config
        async with asyncio.TaskGroup() as group:
            fault_config = FaultConfig(
                every_s=config.every_s, churn_share=0.2 if config.name == "churn" else 0.0
            )
            faults = Faults(self._swarm, Chance(config.seed, "faults", number), fault_config, group)
            watching = group.create_task(self._watch())
            group.create_task(self._work.run(until_s, group))
            if fault_config.churn_share:
                await faults.churn(until_s)
            if SCENARIOS[config.name]:
                await faults.run(until_s, SCENARIOS[config.name])
            await asyncio.sleep(max(until_s - asyncio.get_running_loop().time(), 0.0))
            await faults.calm()
            await self._heal()
            self._report.audited += await self._work.audit(self._swarm.live)
            watching.cancel()
        for kind, count in faults.counts.items():
            self._report.faults[kind] = self._report.faults.get(kind, 0) + count
        self._progress()

    async def _heal(self) -> None:
        """Wait until the tables form one swarm, at most `settle_s`. The rest of that time is for records to
        reach their places.
        """
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        healed_s: float | None = None
        while loop.time() < begun_s + self._config.settle_s:
            if healed_s is None and self._connected.parts(self._swarm.live) == 1:
                healed_s = loop.time()
                self._report.heal_s.append(healed_s - begun_s)
            await asyncio.sleep(_HEAL_POLL_S)
        self._connected.check(self._swarm.live, loop.time())

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_WATCH_S)
            live = self._swarm.live
            self._survival.check(live, loop.time())
            self._limits.check(live, loop.time())
            self.deadlines.check(loop.time())
            for error in self._network.errors:
                self._violations.add(loop.time(), f"a handler failed: {error!r}")
            self._network.errors.clear()

    def _progress(self) -> None:
        report = self._report
        report.virtual_s = asyncio.get_running_loop().time()
        report.messages = sum(peer.messages_sent for peer in self._network.peers.values())
        report.bytes_sent = sum(peer.bytes_sent for peer in self._network.peers.values())
        report.wall_s = time.monotonic() - self._started_s
        report.digest, report.largest, report.lost_with_holders = (
            self._network.digest,
            self._limits.largest,
            self._survival.lost_with_holders,
        )
        self._print(
            f"{report.virtual_s / 3600:.2f} h: {report.messages} messages, "
            f"{self._violations.count} violations, {report.wall_s:.0f} s"
        )

    def _finish(self) -> Report:
        self._progress()
        if self._violations.count:
            lines = [
                f"{self._violations.count} promises broken:",
                *self._violations.lines,
                *self._report.lines(),
            ]
            raise ScenarioFailed("\n".join([*lines, f"replay: {self._config.replay}"]))
        return replace(self._report)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seed", default=1, show_default=True, help="Seed of all randomness.")
@click.option("--peers", default=200, show_default=True)
@click.option("--hours", default=2.0, show_default=True, help="Virtual hours to simulate.")
@click.option(
    "--scenario", default="storm", show_default=True, type=click.Choice(sorted((*SCENARIOS, *TRAININGS)))
)
@click.option(
    "--rate", "operations_per_s", default=1.0, show_default=True, help="Operations a virtual second."
)
@click.option("--seeds", default=1, show_default=True, help="Trainings: this many seeds, on all cores.")
def main(seed: int, peers: int, hours: float, scenario: str, operations_per_s: float, seeds: int) -> None:
    """Run a simulated swarm under faults. When a promise is broken, print the command that replays the run
    and exit with code 1.
    """
    if scenario in TRAININGS:
        first = TrainingScenario(seed=seed, peers=peers, hours=hours, chosen_mode=TRAININGS[scenario])
        if seeds > 1:
            _train_all([replace(first, seed=seed + number) for number in range(seeds)])
        else:
            _train(first)
        return
    config = ScenarioConfig(
        seed=seed, peers=peers, hours=hours, name=scenario, operations_per_s=operations_per_s
    )
    # peers warn about clocks that the scenario itself has set wrong
    logging.getLogger("swarm.dht").setLevel(logging.ERROR)
    _print_report(config.replay, lambda print_line: run_scenario(config, print_line=print_line))


def _train(scenario: TrainingScenario) -> None:
    """Run the scenario `training` for the command line."""
    logging.getLogger("averaging").setLevel(logging.ERROR)  # each fault is a warning of many peers
    logging.getLogger("swarm").setLevel(logging.ERROR)
    _print_report(scenario.replay, lambda print_line: run_training(scenario, print_line=print_line))


def _print_report(replay: str, run: Callable[[Print], Report | ScenarioFigures]) -> None:
    """Run a scenario and print its report, or why it failed and end with status 1."""
    click.echo(f"replay: {replay}")
    try:
        report = run(lambda text: click.echo(text, err=True))
    except (ScenarioFailed, TrainingFailed) as failure:
        click.echo(str(failure))
        raise SystemExit(1) from None
    for line in report.lines():
        click.echo(line)


def _train_all(scenarios: Sequence[TrainingScenario]) -> None:
    """Run trainings of several seeds, and print the failures."""
    failed = 0
    for number, (scenario, failure) in enumerate(run_trainings(scenarios), 1):
        if failure:
            failed += 1
            click.echo(f"seed {scenario.seed}: {failure}")
        if number % _SEEDS_SHOWN == 0:
            click.echo(f"{number} of {len(scenarios)} seeds, {failed} failed", err=True)
    click.echo(f"{len(scenarios)} trainings of {scenarios[0].peers} peers: {failed} failed")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
