"""A round without faults compared with the code before histories and membership: processor time and calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.environments import OWN_PYTHON
from benchmarks.launch import ROOT, Launch, LaunchFailed
from benchmarks.results import Aim, Failures, Row
from benchmarks.small_runs import EARLIER_COMMIT, earlier_code

PEERS = 4
SIZES_MIB = (1, 16, 64)
TURNS = 4
WARM_ROUNDS, ROUNDS = 3, 20
PROCESSOR_SHARE_MAX = 0.9
_MODULE = "benchmarks.workers.round_costs_peer"
_READY_S, _ROUNDS_S = 180.0, 300.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    peers: int = PEERS
    sizes_mib: tuple[int, ...] = SIZES_MIB
    turns: int = TURNS
    rounds: int = ROUNDS


@dataclass(slots=True)
class Costs(Failures):
    """The costs of a round to a member of one code, one sample for each launch."""

    processor_s: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)

    def measure(self, say: Say, plan: Plan, size_mib: int, folder: Path) -> None:
        """Launch the code in `folder` once."""
        try:
            with Launch(
                "round costs",
                python=OWN_PYTHON,
                module=_MODULE,
                configurations=[{"peers": plan.peers, "elements": size_mib << 18}] * plan.peers,
                within=lambda number, command: ["env", "-C", str(folder), *command],
            ) as peers:
                peers.receive("ready", _READY_S)
                peers.send("average", rounds=WARM_ROUNDS)
                peers.receive("averaged", _ROUNDS_S)
                time.sleep(0.5)  # calls in the background end
                peers.send("average", rounds=plan.rounds)
                found = peers.receive("averaged", _ROUNDS_S)
        except LaunchFailed as failure:
            self.launches_failed += 1
            self.fail(str(failure).partition("; its log ends")[0])
            return
        self.failed += sum(int(one["failed"]) for one in found)
        rounds = plan.rounds * plan.peers
        self.processor_s.append(sum(one["processor_s"] for one in found) / rounds)
        self.calls.append(sum(one["calls"] for one in found) / rounds)
        code = "now" if folder == ROOT else "before"
        milliseconds = 1000 * self.processor_s[-1]
        say(f"{size_mib} MiB, {code}: {milliseconds:.1f} ms of processor time, {self.calls[-1]:.1f} calls")


def rows(say: Say, plan: Plan | None = None) -> Iterator[list[Row]]:
    """Measure rounds of each size, the earlier code and the present one in turns, and yield their rows."""
    plan = plan or Plan()
    with earlier_code() as folder:
        for size_mib in plan.sizes_mib:
            earlier, now = Costs(), Costs()
            for turn in range(plan.turns):
                pair = [(earlier, folder), (now, ROOT)]
                for costs, code in pair if turn % 2 else reversed(pair):
                    costs.measure(say, plan, size_mib, code)
            yield _rows(earlier, now, plan.peers, size_mib)


def _rows(earlier: Costs, now: Costs, peers: int, size_mib: int) -> list[Row]:
    workload = f"{peers} peers average {size_mib} MiB of float32, without faults"
    before = f"swarm at {EARLIER_COMMIT}"
    return [
        Row(
            identifier=f"small-round-{size_mib}-processor",
            workload=workload,
            quantity="processor time of a member for a round",
            ours=now.series_of(f"swarm: round of {size_mib} MiB", now.processor_s),
            peer=earlier.series_of(before, earlier.processor_s),
            aim=Aim(of="ours / peer", sense="at most", value=PROCESSOR_SHARE_MAX),
        ),
        Row(
            identifier=f"small-round-{size_mib}-calls",
            workload=workload,
            quantity="calls and streams that a member begins for a round",
            ours=now.series_of(f"swarm: calls of a round of {size_mib} MiB", now.calls, "calls"),
            peer=earlier.series_of(before, earlier.calls, "calls"),
            aim=Aim(of="ours / peer", sense="at most", value=1.0),
        ),
    ]
