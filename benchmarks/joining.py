"""Newcomers that join a run at once: until all have the state, and until all contribute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from benchmarks.environments import OWN_PYTHON
from benchmarks.launch import Launch, LaunchFailed
from benchmarks.results import Aim, Failures, Row, Series

CASES = ((8, 1), (16, 1), (32, 1), (32, 2))  # newcomers, and trainers that are there already
TARGET = 330  # samples of an epoch: about half a second for all peers together
IMPORT_TIMEOUT_S = 300.0
TIMEOUT_S = 120.0
CONTRIBUTING_S_MAX = 10.0  # as the project promises it
COUNTED = {
    "connections": "TLS connections that a newcomer opens until it has contributed; it accepts as many",
    "calls": "calls that a newcomer makes until it has contributed",
    "failed rounds": "rounds of a newcomer that fail until it has contributed",
}


@dataclass(slots=True)
class Arrivals(Failures):
    """Times of the newcomers of one launch, in seconds from the end of their imports."""

    loaded_s: list[float] = field(default_factory=list)
    contributed_s: list[float] = field(default_factory=list)
    # of each newcomer, until it contributed
    processor_s: list[float] = field(default_factory=list)
    counted: list[dict[str, int]] = field(default_factory=list)

    def series(self, name: str, seconds: list[float], newcomers: int) -> Series:
        """Return the time until the last newcomer was there; no sample unless all were."""
        last = (max(seconds),) if len(seconds) == newcomers else ()
        return replace(self.series_of(f"swarm: {name}", last), failed=newcomers - len(seconds))


def rows(say: Callable[[str], None], cases: tuple[tuple[int, int], ...] = CASES) -> Iterator[list[Row]]:
    """Measure the section, and yield the rows of each case."""
    for newcomers, trainers in cases:
        yield _rows(join_at_once(say, newcomers, trainers), newcomers, trainers)


def _rows(arrivals: Arrivals, newcomers: int, trainers: int) -> list[Row]:
    beside = "a founder" if trainers == 1 else f"{trainers} trainers"

    def row(kind: str, quantity: str, seconds: list[float], aim: Aim | None) -> Row:
        middle = f"half of them within {statistics.median(seconds):.1f} s" if seconds else ""
        return Row(
            identifier=f"joining-{newcomers}-{trainers}-{kind}",
            workload=f"{newcomers} newcomers at once beside {beside}, in epoch 8 or later",
            quantity=f"{quantity}, from the end of their imports",
            ours=arrivals.series(kind, seconds, newcomers),
            peer=None,
            aim=aim,
            limit="processor time: all peers share the cores",
            notes=(middle,) if middle else (),
        )

    def each(kind: str, quantity: str, name: str, values: list[float], unit: str) -> Row:
        missing = newcomers - len(values)
        return Row(
            identifier=f"joining-{newcomers}-{trainers}-{kind}",
            workload=f"{newcomers} newcomers at once beside {beside}, in epoch 8 or later",
            quantity=quantity,
            ours=replace(arrivals.series_of(f"swarm: {name}", values, unit), failed=missing),
            peer=None,
            aim=None,
        )

    aim = Aim(of="ours", sense="at most", value=CONTRIBUTING_S_MAX)
    took = "processor time of one newcomer, from the end of its imports until it has contributed"
    return [
        row("loaded", "until all newcomers have the state", arrivals.loaded_s, None),
        row("contributing", "until all newcomers have contributed to an epoch", arrivals.contributed_s, aim),
        each("processor", took, "processor time", arrivals.processor_s, "s"),
        *(
            each(
                name.replace(" ", "-"),
                quantity,
                name,
                [float(one.get(name, 0)) for one in arrivals.counted],
                "",
            )
            for name, quantity in COUNTED.items()
        ),
    ]


def join_at_once(say: Callable[[str], None], newcomers: int, trainers: int) -> Arrivals:
    """Let `newcomers` processes join a run of `trainers` processes at the same moment."""
    say(f"{newcomers} newcomers at once beside {trainers}")
    arrivals = Arrivals()
    configurations = [
        {"target": TARGET, "trains": number < trainers} for number in range(trainers + newcomers)
    ]
    try:
        with Launch(
            "swarm",
            python=OWN_PYTHON,
            module="benchmarks.workers.swarm_newcomer",
            configurations=configurations,
        ) as launch:
            launch.receive("imported", IMPORT_TIMEOUT_S)
            present, coming = launch.workers[:trainers], launch.workers[trainers:]
            for worker in present:
                worker.send({"do": "join"})
            for worker in present:
                worker.receive("founded", time.monotonic() + TIMEOUT_S)
            for worker in coming:
                worker.send({"do": "join"})
            deadline_s = time.monotonic() + TIMEOUT_S
            for worker in coming:
                loaded = worker.receive("loaded", deadline_s)
                if loaded["ok"]:
                    arrivals.loaded_s.append(loaded["seconds"])
                else:
                    arrivals.fail(loaded["reason"])
            for worker in coming:
                contributed = worker.receive("contributed", deadline_s)
                arrivals.contributed_s.append(contributed["seconds"])
                arrivals.processor_s.append(contributed["processor_s"])
                arrivals.counted.append(contributed["counted"])
    except LaunchFailed as failure:
        arrivals.launches_failed += 1
        arrivals.fail(str(failure).partition("; its log ends")[0])  # the log names paths
    for kind, seconds in (("loaded", arrivals.loaded_s), ("contributed", arrivals.contributed_s)):
        if seconds:
            middle = statistics.median(seconds)
            say(f"  {len(seconds)} {kind}: half within {middle:.1f} s, the last {max(seconds):.1f} s")
    return arrivals
