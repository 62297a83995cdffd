"""Matchmaking: the time to form a group of fewer peers than the target size, and of exactly as many."""

from __future__ import annotations

from functools import partial

from benchmarks.allreduce import HIVEMIND, Setting, ours
from benchmarks.interleaving import Plan, interleave
from benchmarks.measured_systems import MeasuredSystem, Round, Workers, Workload
from benchmarks.results import Aim, Row

ELEMENTS = 10_000  # small, so that forming the group dominates
OWN_ROUNDS = 11
LIMIT = "four round trips; on loopback only the processor's time for them"


def forming(outcome: Round) -> float | None:
    return outcome.group_s


def rows(setting: Setting, *, rounds: int) -> list[Row]:
    full = Workload(elements=ELEMENTS, tensors=1, peers=4, target_group_size=4, codec="float32")
    aim = Aim(of="ours", sense="at most", value=0.1)
    return [
        short(setting, rounds=rounds),
        _row(
            setting,
            full,
            rounds,
            "group-full",
            "4 peers form a group of target size 4, aligned arrivals",
            aim,
        ),
    ]


def short(setting: Setting, *, rounds: int) -> Row:
    """Measure fewer peers than the target size, for which hivemind waits its whole window."""
    workload = Workload(elements=ELEMENTS, tensors=1, peers=3, target_group_size=8, codec="float32")
    aim = Aim(of="ours", sense="at most", value=0.5)
    return _row(
        setting,
        workload,
        rounds,
        "group-short",
        "3 peers form a group of target size 8, aligned arrivals",
        aim,
    )


def _row(setting: Setting, workload: Workload, rounds: int, identifier: str, title: str, aim: Aim) -> Row:
    name = f"{HIVEMIND} (default min_matchmaking_time, 5 s)"
    setting.say(f"{title}: swarm" + (f", {name}" if setting.hivemind else ""))
    own = interleave(
        [partial(ours, workload)],
        ["swarm"],
        Plan(passes=1, rounds=max(rounds, OWN_ROUNDS) if setting.hivemind else rounds),
        setting.say,
    )[0]
    peer = None
    if setting.hivemind is not None:

        def theirs() -> MeasuredSystem:
            assert setting.hivemind is not None
            return Workers(name, python=setting.hivemind, module="hivemind_averager", workload=workload)

        peer = interleave([theirs], [name], Plan(passes=1, rounds=rounds), setting.say)[0]
    return Row(
        identifier=identifier,
        workload=title,
        quantity="from the aligned start until the last peer has its group",
        ours=own.series("group formed", forming),
        peer=None if peer is None else peer.series("group formed", forming),
        aim=aim,
        limit=LIMIT,
    )
