"""The memory of a trainer beyond torch and its model, and the time until a new one contributes, compared with
hivemind.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.allreduce import HIVEMIND, Setting
from benchmarks.environments import OWN_PYTHON
from benchmarks.launch import Launch, LaunchFailed, Worker, proportional_bytes
from benchmarks.results import Aim, Failures, Row, Series

TRAINERS = 2
JOINT_ROUNDS = 3  # of each trainer before readings begin
READINGS = 5
READING_EVERY_S = 0.4
STEADY_TIMEOUT_S = 90.0
JOIN_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
LAUNCHES_MAX = 3
PASSES = 2
JOINERS_PER_PASS = 3
TORCH_PHASE = "model and AdamW"


@dataclass(slots=True)
class Costs(Failures):
    """All readings of one system."""

    name: str
    python: Path
    module: str
    idle_bytes: list[float] = field(default_factory=list)
    trainer_bytes: list[float] = field(default_factory=list)
    processes: list[float] = field(default_factory=list)
    # from torch's import to the first committed joint round
    joined_s: list[float] = field(default_factory=list)
    loaded_s: list[float] = field(default_factory=list)  # from torch's import to the state in place
    from_exec_s: list[float] = field(default_factory=list)
    starts: list[dict[str, float]] = field(default_factory=list)  # seconds of each joiner's start by phase

    def series(self, quantity: str, samples: list[float], unit: str) -> Series:
        series = self.series_of(f"{self.name}: {quantity}", samples, unit)
        return series if unit == "s" else replace(series, failed=0)  # only joins can fail

    def joined_s_less_torch(self) -> list[float]:
        return [
            joined_s - start[TORCH_PHASE] for joined_s, start in zip(self.joined_s, self.starts, strict=True)
        ]

    def start_phases(self) -> str:
        """Return in words where the time from torch's import to contributing goes, as medians."""
        if not self.starts:
            return f"{self.name}: nobody joined"
        medians = {name: statistics.median(start[name] for start in self.starts) for name in self.starts[0]}
        return f"{self.name}: " + ", ".join(
            f"{name} {seconds * 1e3:.0f} ms" for name, seconds in medians.items()
        )

    def over_idle(self) -> Series:
        idle = statistics.median(self.idle_bytes) if self.idle_bytes else 0.0
        return self.series(
            "proportional set size over idle torch", [value - idle for value in self.trainer_bytes], "bytes"
        )


def rows(setting: Setting) -> list[Row]:
    own = Costs("swarm.Optimizer", OWN_PYTHON, "benchmarks.workers.swarm_trainer")
    systems = [own]
    peer = None
    if setting.hivemind is not None:
        peer = Costs(f"{HIVEMIND} Optimizer", setting.hivemind, "benchmarks.workers.hivemind_trainer")
        systems.append(peer)
    for costs in systems:
        setting.say(f"memory of idle torch beside {costs.name}")
        _read_idle(costs)
    for number in range(PASSES):
        for costs in systems:
            setting.say(f"trainers and joiners, pass {number + 1} of {PASSES}: {costs.name}")
            _measure(costs, setting.say)
    return _rows(own, peer)


def _read_idle(costs: Costs) -> None:
    with Launch(
        "idle torch",
        python=costs.python,
        module="benchmarks.workers.idle_trainer",
        configurations=[{}] * TRAINERS,
    ) as launch:
        launch.receive("steady", 60.0)
        costs.idle_bytes += _readings(launch)[0]


def _readings(launch: Launch) -> tuple[list[float], list[float]]:
    """Return (bytes, processes) of every worker's process tree, read several times."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(READINGS):
        for worker in launch.workers:
            processes = launch.processes(of=worker)
            found[0].append(float(proportional_bytes(processes)))
            found[1].append(float(len(processes)))
        time.sleep(READING_EVERY_S)
    return found


def _measure(costs: Costs, say: Callable[[str], None]) -> None:
    for _ in range(LAUNCHES_MAX):
        try:
            with Launch(
                costs.name,
                python=costs.python,
                module=costs.module,
                configurations=[{"joins": False}] * TRAINERS,
            ) as launch:
                launch.receive("started", STEADY_TIMEOUT_S)
                for _ in range(JOINT_ROUNDS):
                    launch.receive("joint", STEADY_TIMEOUT_S)
                taken, processes = _readings(launch)
                costs.trainer_bytes += taken
                costs.processes += processes
                for _ in range(JOINERS_PER_PASS):
                    _join(launch, costs)
            joined = ", ".join(f"{value:.2f}" for value in costs.joined_s[-JOINERS_PER_PASS:])
            say(
                f"  {statistics.median(taken) / 1e6:.0f} MB in all; contributed {joined} s after torch's "
                "import"
            )
            return
        except LaunchFailed as failure:
            costs.launches_failed += 1
            costs.fail(str(failure))


def _join(launch: Launch, costs: Costs) -> None:
    """Start one more trainer and measure from exec to its first joint round; it leaves afterwards."""
    worker = launch.add({"joins": True})
    deadline_s = time.monotonic() + JOIN_TIMEOUT_S
    try:
        started = worker.receive("started", deadline_s)
        joint = worker.receive("joint", deadline_s)
        costs.starts.append({**started["phases"], "first joint round": joint["at_s"] - started["loaded_s"]})
        costs.loaded_s.append(started["loaded_s"] - started["imported_s"])
        costs.joined_s.append(joint["at_s"] - started["imported_s"])
        costs.from_exec_s.append(joint["at_s"] - worker.started_s)
        _leave(worker)
    except LaunchFailed as failure:
        costs.failed += 1
        costs.fail(str(failure))
    finally:
        launch.end(worker)


def _leave(worker: Worker) -> None:
    worker.send({"do": "stop"})
    worker.receive("stopped", time.monotonic() + STOP_TIMEOUT_S)


def _rows(own: Costs, peer: Costs | None) -> list[Row]:
    def row(
        identifier: str,
        workload: str,
        quantity: str,
        of: Callable[[Costs], Series],
        aim: Aim | None,
        limit: str,
    ) -> Row:
        theirs = None if peer is None else of(peer)
        notes = (
            tuple(costs.start_phases() for costs in (own, peer) if costs is not None)
            if identifier == "start-after-import"
            else ()
        )
        return Row(
            identifier=identifier,
            workload=workload,
            quantity=quantity,
            ours=of(own),
            peer=theirs,
            aim=aim,
            limit=limit,
            notes=notes,
        )

    at_most = {value: Aim(of="ours", sense="at most", value=value) for value in (1.0, 2.0, 150e6)}
    model = "model of 4 MiB"
    return [
        row(
            "trainer-processes",
            f"a trainer, {model}",
            "processes",
            lambda costs: costs.series("processes", costs.processes, ""),
            at_most[1.0],
            "one",
        ),
        row(
            "trainer-memory",
            f"a trainer, {model}",
            "proportional set size of its process tree over idle torch with the same model",
            Costs.over_idle,
            at_most[150e6],
            "about 13 MB: accumulated, staged and averaged gradients in float32",
        ),
        row(
            "start-after-import",
            f"a third trainer joins two, {model}",
            "from torch's import to the first committed joint round",
            lambda costs: costs.series("after torch's import", costs.joined_s, "s"),
            at_most[2.0],
            "one epoch of the running swarm (0.35–0.5 s here)",
        ),
        row(
            "start-own",
            f"a third trainer joins two, {model}",
            "the same, less the time in which torch makes its first optimizer (it imports its compiler then)",
            lambda costs: costs.series("after torch is whole", costs.joined_s_less_torch(), "s"),
            None,
            "one epoch of the running swarm (0.35–0.5 s here)",
        ),
        row(
            "start-loaded",
            f"a third trainer joins two, {model}",
            "from torch's import to the swarm's state in place",
            lambda costs: costs.series("state loaded", costs.loaded_s, "s"),
            None,
            "12.6 MB of parameters and moments over loopback",
        ),
        row(
            "start-whole",
            f"a third trainer joins two, {model}",
            "from exec to the first committed joint round",
            lambda costs: costs.series("from exec", costs.from_exec_s, "s"),
            None,
            "torch's import",
        ),
    ]
