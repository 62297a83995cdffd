"""A round of four peers in which one fails: the delay of the others, and the share of the vector that they
still average.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from benchmarks.allreduce import HIVEMIND, PEERS, TENSORS, Setting
from benchmarks.environments import OWN_PYTHON
from benchmarks.launch import LaunchFailed
from benchmarks.measured_systems import READY_TIMEOUT_S, ROUND_TIMEOUT_S, START_AHEAD_S, Workers, Workload
from benchmarks.results import Aim, Failures, Row, Series

VECTOR_MIB = 64
CODEC = "float16"
VICTIM = 2
USUAL_ROUNDS = 3  # undisturbed rounds before the failure, as the baseline of its duration
LAUNCHES_MAX = 3  # failed launches of one system


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of failure of one peer, and its aims."""

    identifier: str
    words: str
    signal: signal.Signals
    aim_s: float
    own_times: int
    their_times: int


FAULTS = (
    Fault("killed", "kill -9 of one in the middle", signal.SIGKILL, 0.5, 5, 3),
    Fault("frozen", "SIGSTOP of one in the middle", signal.SIGSTOP, 1.0, 5, 2),
)


@dataclass(slots=True)
class FailureResults(Failures):
    """The reports of the survivors over all rounds of one system."""

    # beyond a usual round, until the last survivor had its result
    stalls_s: list[float] = field(default_factory=list)
    # per cent of the vector, on the survivor that received least
    averaged: list[float] = field(default_factory=list)

    def stalls(self, name: str) -> Series:
        """Return the delays of the rounds as a series."""
        return self.series_of(f"{name}: stall", self.stalls_s)

    def fractions(self, name: str) -> Series:
        """Return the averaged percentages as a series."""
        return self.series_of(f"{name}: averaged", self.averaged, "%")


class FailingWorkers(Workers):
    """Workers of which one fails in the middle of a round. The launch cannot be used afterwards."""

    def fail_one(self, usual_s: float, grouped_s: float, fault: signal.Signals) -> tuple[float, float, str]:
        """Run one round in which a peer fails.

        Returns (seconds to the last survivor's end, fraction averaged, what is wrong with the result or "").
        """
        launch = self._launch
        launch.send("prepare")
        launch.receive("prepared", READY_TIMEOUT_S)
        at_s = time.monotonic() + START_AHEAD_S
        launch.send("round", at_s=at_s, timeout_s=ROUND_TIMEOUT_S)
        # in the middle between forming the group and the end
        time.sleep(max(at_s + (usual_s + grouped_s) / 2 - time.monotonic(), 0.0))
        victim = launch.workers[VICTIM]
        os.killpg(victim.process.pid, fault)
        survivors = [worker for worker in launch.workers if worker is not victim]
        deadline_s = time.monotonic() + ROUND_TIMEOUT_S + 10.0
        done = [worker.receive("done", deadline_s) for worker in survivors]
        for worker in survivors:
            worker.send({"do": "check", "lost": VICTIM})
        checked = [worker.receive("checked", time.monotonic() + READY_TIMEOUT_S) for worker in survivors]
        digests = {report["digest"] for report in done if "digest" in report}
        wrong = "the survivors hold different results" if len(digests) > 1 else ""
        return (
            max(report["end_s"] for report in done) - at_s,
            min(report["delivered"] for report in checked),
            wrong,
        )


def rows(setting: Setting) -> list[Row]:
    workload = Workload(
        elements=VECTOR_MIB * (1 << 20) // 4,
        tensors=TENSORS,
        peers=PEERS,
        target_group_size=PEERS,
        codec=CODEC,
    )
    found = []
    for fault in FAULTS:
        own = partial(FailingWorkers, "swarm", python=OWN_PYTHON, module="swarm_averager", workload=workload)
        setting.say(
            f"{PEERS} × {VECTOR_MIB} MiB, {fault.words}: swarm"
            + (f", {HIVEMIND}" if setting.hivemind else "")
        )
        our_results = measure_failures(own, fault, fault.own_times, setting.say)
        their_results = None
        if setting.hivemind is not None:
            theirs = partial(
                FailingWorkers,
                HIVEMIND,
                python=setting.hivemind,
                module="hivemind_averager",
                workload=workload,
            )
            their_results = measure_failures(theirs, fault, fault.their_times, setting.say)
        found += _rows(fault, our_results, their_results)
    return found


def measure_failures(
    make: Callable[[], FailingWorkers], fault: Fault, times: int, say: Callable[[str], None]
) -> FailureResults:
    """Run `times` rounds with a failure, each in a launch of its own."""
    results = FailureResults()
    while len(results.stalls_s) < times and results.failed < LAUNCHES_MAX:
        try:
            with make() as system:
                system.round()  # opens connections and allocates memory
                usual = [system.round() for _ in range(USUAL_ROUNDS)]
                usual_s = statistics.median(outcome.whole_s for outcome in usual)
                grouped_s = statistics.median(outcome.group_s or 0.0 for outcome in usual)
                duration_s, averaged, wrong = system.fail_one(usual_s, grouped_s, fault.signal)
        except LaunchFailed as failure:
            results.failed += 1
            results.fail(str(failure))
            continue
        say(f"  {system.name}: {duration_s:.2f} s instead of {usual_s:.2f} s, {averaged:.0%} averaged")
        if wrong:
            results.failed += 1
            results.fail(wrong)
        else:
            results.stalls_s.append(duration_s - usual_s)
            results.averaged.append(100.0 * averaged)
    return results


def _rows(fault: Fault, own: FailureResults, peer: FailureResults | None) -> list[Row]:
    workload = f"all-reduce, {PEERS} peers × {VECTOR_MIB} MiB, {CODEC}: {fault.words}"
    return [
        Row(
            identifier=f"{fault.identifier}-stall",
            workload=workload,
            quantity="how much longer than its usual round it took until the last survivor had its result",
            ours=own.stalls("swarm"),
            peer=None if peer is None else peer.stalls(HIVEMIND),
            aim=Aim(of="ours", sense="at most", value=fault.aim_s),
            limit=(
                "what the survivors must send and reduce again of the lost peer's quarter, and the notice "
                "of its loss"
            ),
        ),
        Row(
            identifier=f"{fault.identifier}-averaged",
            workload=workload,
            quantity=(
                "elements that hold an average, of all four or of the three, on the survivor that has fewest"
            ),
            ours=own.fractions("swarm"),
            peer=None if peer is None else peer.fractions(HIVEMIND),
            aim=Aim(of="ours", sense="at least", value=100.0),
            shown="ours / peer",
        ),
    ]
