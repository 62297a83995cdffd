"""Two of four trainers killed at once: the pause of the other two, depending on which are left.

Half of the electors continue at once if the most senior one is among them. The other half cannot know whether
that elector is alive elsewhere. It waits for the grace, which is short because the hosts of the killed peers
refuse connections, and continues with a break (docs/concepts/history.md).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.environments import OWN_PYTHON
from benchmarks.launch import Launch, LaunchFailed, Worker
from benchmarks.results import Aim, Failures, Row

PEERS = 4
TARGET = 40  # samples of an epoch: about half a second for all four
TIMES = 3
USUAL_EPOCHS = 2  # of all four, before the two are killed
AFTER_EPOCHS = 3  # of the two that are left
START_S_MAX = 180.0  # imports included
TIMEOUT_S = 60.0
CASES = (
    ("with-senior", (2, 3), "the most senior of them is left", 5.0),
    ("without-senior", (0, 1), "the most senior of them is killed", 10.0),
)


@dataclass(slots=True)
class Pauses(Failures):
    """The pauses of the survivors of several launches."""

    pauses_s: list[float] = field(default_factory=list)  # beyond a usual epoch


def rows(say: Callable[[str], None]) -> list[Row]:
    """Measure both cases and return a row for each."""
    found = []
    for identifier, victims, words, aim_s in CASES:
        pauses = measure(victims, say)
        found.append(
            Row(
                identifier=f"killed-two-{identifier}",
                workload=f"two of {PEERS} trainers killed at once by kill -9: {words}",
                quantity="how much longer than an epoch of these two it took until both had the next one",
                ours=pauses.series_of("swarm: pause", pauses.pauses_s),
                peer=None,
                aim=Aim(of="ours", sense="at most", value=aim_s),
                limit="the notice that two peers are gone, and without the most senior one the grace",
            )
        )
    return found


def measure(victims: tuple[int, ...], say: Callable[[str], None]) -> Pauses:
    """Kill the trainers with these ranks, `TIMES` times, each in a launch of its own."""
    pauses = Pauses()
    for _ in range(TIMES):
        try:
            pause_s = _kill_once(victims)
        except LaunchFailed as failure:
            pauses.failed += 1
            pauses.fail(str(failure))
            continue
        say(f"  ranks {victims} killed: a pause of {pause_s:.2f} s")
        pauses.pauses_s.append(pause_s)
    return pauses


def _kill_once(victims: tuple[int, ...]) -> float:
    configurations = [{"target": TARGET} for _ in range(PEERS)]
    module = "benchmarks.workers.swarm_survivor"
    with Launch("swarm", python=OWN_PYTHON, module=module, configurations=configurations) as launch:
        survivors = [worker for rank, worker in enumerate(launch.workers) if rank not in victims]
        deadline_s = time.monotonic() + START_S_MAX
        for worker in survivors:
            for _ in range(USUAL_EPOCHS):
                _next_epoch(worker, deadline_s, members=PEERS)
        killed_s = time.monotonic()
        for rank in victims:
            os.killpg(launch.workers[rank].process.pid, signal.SIGKILL)
        deadline_s = killed_s + TIMEOUT_S
        ends = [
            [_next_epoch(worker, deadline_s, members=2) for _ in range(AFTER_EPOCHS)] for worker in survivors
        ]
        if len({one[-1]["digest"] for one in ends if one[-1]["epoch"] == ends[0][-1]["epoch"]}) != 1:
            raise LaunchFailed("the survivors hold different states")
        first_s = max(one[0]["at_s"] for one in ends) - killed_s
        usual_s = min((one[-1]["at_s"] - one[0]["at_s"]) / (AFTER_EPOCHS - 1) for one in ends)
        return max(0.0, first_s - usual_s)


def _next_epoch(worker: Worker, deadline_s: float, members: int) -> dict[str, float]:
    """Return the worker's next epoch whose round had this number of members."""
    while True:
        report = worker.receive("epoch", deadline_s)
        if report["members"] == members:
            return report
