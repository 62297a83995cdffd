"""The sections of the pages, in their order: what each needs, and how its rows are measured.

A new section is one more entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import (
    allreduce,
    attacks,
    churn,
    codecs,
    convergence,
    cuda,
    cuts,
    dht,
    expert_grids,
    experts,
    group_formation,
    half_killed,
    hostile,
    joining,
    links,
    low_rank,
    membership_costs,
    mixtures,
    peer_failures,
    placements,
    reach,
    round_costs,
    simulated_attacks,
    simulated_dht,
    simulated_groups,
    simulated_growth,
    simulated_monitoring,
    simulated_progress,
    simulated_rounds,
    simulated_training,
    slow_peers,
    slowdown,
    small_runs,
    trainer_costs,
    transports,
    unequal_speeds,
    untrained,
)
from benchmarks import state as states
from benchmarks.allreduce import Setting
from benchmarks.environments import memory_copy_bytes_per_s
from benchmarks.results import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The figures to measure, and the settings to measure them with."""

    setting: Setting
    sizes_mib: tuple[int, ...]  # vectors of all-reduce
    figures: frozenset[str] = frozenset()  # of the section that is measured; empty: all
    # where an interruptible section stores its progress; None: nowhere
    folder: Path | None = None


Rows = Iterator[list[Row]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """How a section is measured."""

    rows: Callable[[Request], Rows]
    compared: bool = False  # with hivemind, whose environment it then needs
    check: Callable[[], None] = lambda: None  # raises NoEnvironment on a machine that cannot measure it
    figures: Collection[str] = ()  # names of its parts, of which some may be measured without the others


def _allreduce(request: Request) -> Rows:
    for size_mib in request.sizes_mib:
        yield allreduce.rows(request.setting, vector_mib=size_mib)
    yield transports.rows(request.setting.say)


def _dht(request: Request) -> Rows:
    for peers in dht.SIZES:
        yield dht.rows(request.setting, peers=peers)


def _experts(request: Request) -> Rows:
    for name, rows in _EXPERTS.items():
        if not request.figures or name in request.figures:
            yield rows(request.setting)


def _simulated(request: Request) -> Rows:
    say = request.setting.say
    if not request.figures:
        yield from simulated_rounds.rows(say)
        yield from simulated_groups.rows(say)
    yield from simulated_dht.rows(say, simulated_dht.Plan(figures=request.figures))


def _attacks(request: Request) -> Rows:
    for members in simulated_attacks.MEMBERS:
        if not request.figures or f"bad-{members}" in request.figures:
            yield simulated_attacks.rows(request.setting.say, members)
    yield attacks.rows(request.setting.say, attacks.Plan(figures=request.figures))


def _small_runs(request: Request) -> Rows:
    runs = [run for run in small_runs.RUNS if not request.figures or run.name in request.figures]
    yield from small_runs.rows(request.setting.say, runs)


def _once(rows: Callable[[Request], list[Row]]) -> Callable[[Request], Rows]:
    def measured(request: Request) -> Rows:
        yield rows(request)

    return measured


# parts that may be measured without the others
_EXPERTS: dict[str, Callable[[Setting], list[Row]]] = {
    "calls": experts.rows,
    "mixture": mixtures.rows,
    "many-experts": lambda setting: [
        *expert_grids.mixtures(setting, "nop"),
        *expert_grids.mixtures(setting, "ffn"),
    ],
    "pipeline": lambda setting: [expert_grids.pipeline(setting)],
    "memory": lambda setting: [expert_grids.memory(setting)],
    "placement": placements.rows,
    "low-rank": low_rank.rows,
}

SECTIONS = {
    "allreduce": Section(rows=_allreduce, compared=True),
    "links": Section(
        rows=lambda request: links.rows(request.setting, request.figures),
        compared=True,
        figures=[scenario.identifier for scenario in links.SCENARIOS],
    ),
    "groups": Section(
        rows=_once(lambda request: group_formation.rows(request.setting, rounds=5)), compared=True
    ),
    "losses": Section(rows=_once(lambda request: peer_failures.rows(request.setting)), compared=True),
    "half-killed": Section(rows=_once(lambda request: half_killed.rows(request.setting.say))),
    "trainers": Section(rows=_once(lambda request: trainer_costs.rows(request.setting)), compared=True),
    "state": Section(rows=_once(lambda request: states.rows(request.setting)), compared=True),
    "cuts": Section(rows=lambda request: cuts.rows(request.setting.say)),
    "joining": Section(rows=lambda request: joining.rows(request.setting.say)),
    "reach": Section(
        rows=lambda request: reach.rows(request.setting.say, reach.Plan(figures=request.figures)),
        check=reach.check,
        figures=reach.FIGURES,
    ),
    "dht": Section(rows=_dht, compared=True),
    "experts": Section(rows=_experts, compared=True, figures=list(_EXPERTS)),
    "simulated": Section(rows=_simulated, figures=simulated_dht.figures(simulated_dht.Plan())),
    "grid": Section(rows=lambda request: simulated_training.rows(request.setting.say)),
    "electors": Section(rows=lambda request: simulated_growth.rows(request.setting.say)),
    "progress": Section(rows=lambda request: simulated_progress.rows(request.setting.say)),
    "monitor": Section(rows=lambda request: simulated_monitoring.rows(request.setting.say)),
    "hostile": Section(rows=_once(lambda request: hostile.rows(request.setting.say))),
    "attacks": Section(
        rows=_attacks,
        figures=[
            *(f"bad-{members}" for members in simulated_attacks.MEMBERS),
            *attacks.figures(attacks.Plan()),
        ],
    ),
    "membership": Section(rows=lambda request: membership_costs.rows(request.setting.say)),
    "round-costs": Section(
        rows=lambda request: round_costs.rows(request.setting.say), check=small_runs.check
    ),
    "small-runs": Section(
        rows=_small_runs, check=small_runs.check, figures=[run.name for run in small_runs.RUNS]
    ),
    "codecs": Section(
        rows=_once(lambda request: codecs.rows(request.setting.say, request.setting.hivemind)), compared=True
    ),
    "slowdown": Section(
        rows=_once(
            lambda request: [*slowdown.rows(request.setting.say), *unequal_speeds.rows(request.setting.say)]
        )
    ),
    "slow-peers": Section(rows=_once(lambda request: slow_peers.rows(request.setting.say))),
    "convergence": Section(rows=lambda request: convergence.rows(request.setting.say, request.folder)),
    "untrained": Section(rows=lambda request: untrained.rows(request.setting.say, request.folder)),
    "churn": Section(rows=_once(lambda request: churn.rows(request.setting.say))),
    "cuda": Section(rows=lambda request: cuda.rows(request.setting.say), check=cuda.check),
}


def measure(names: tuple[str, ...], request: Request) -> Rows:
    """Measure these sections and yield rows as they come."""
    if any(SECTIONS[name].compared for name in names):
        request = replace(
            request, setting=replace(request.setting, copy_bytes_per_s=memory_copy_bytes_per_s())
        )
    for name in SECTIONS:
        if name in names:
            yield from SECTIONS[name].rows(request)
