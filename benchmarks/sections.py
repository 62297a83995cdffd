"""The sections of the page, in its order: what each needs, and how its rows are measured. Another section is
one entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import (
    allreduce,
    churn,
    codecs,
    convergence,
    cuda,
    dht,
    experts,
    grid,
    groups,
    hostile,
    links,
    losses,
    mixtures,
    monitoring,
    simulated,
    simulated_progress,
    simulated_rounds,
    slowdown,
    speeds,
    trainers,
)
from benchmarks import state as states
from benchmarks.allreduce import Setting
from benchmarks.environments import memory_copy_bytes_per_s
from benchmarks.results import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be measured, and with what."""

    setting: Setting
    sizes_mib: tuple[int, ...]  # of all-reduce
    figures: frozenset[str] = frozenset()  # of the simulated DHT; none: all
    # where a section that can be interrupted keeps what it needs to go on; None: nowhere
    folder: Path | None = None


Rows = Iterator[list[Row]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    rows: Callable[[Asked], Rows]
    compared: bool = False  # with hivemind, whose environment it needs
    check: Callable[[], None] = lambda: None  # raises NoEnvironment where it cannot be measured


def _allreduce(asked: Asked) -> Rows:
    for size_mib in asked.sizes_mib:
        yield allreduce.rows(asked.setting, vector_mib=size_mib)


def _dht(asked: Asked) -> Rows:
    for peers in dht.SIZES:
        yield dht.rows(asked.setting, peers=peers)


def _simulated(asked: Asked) -> Rows:
    say = asked.setting.say
    if not asked.figures:
        yield from simulated_rounds.rows(say)
        yield from grid.rows(say)
    yield from simulated.rows(say, simulated.Plan(figures=asked.figures))


def _once(rows: Callable[[Asked], list[Row]]) -> Callable[[Asked], Rows]:
    def measured(asked: Asked) -> Rows:
        yield rows(asked)

    return measured


SECTIONS = {
    "allreduce": Section(rows=_allreduce, compared=True),
    "links": Section(rows=lambda asked: links.rows(asked.setting), compared=True),
    "groups": Section(rows=_once(lambda asked: groups.rows(asked.setting, rounds=5)), compared=True),
    "losses": Section(rows=_once(lambda asked: losses.rows(asked.setting)), compared=True),
    "trainers": Section(rows=_once(lambda asked: trainers.rows(asked.setting)), compared=True),
    "state": Section(rows=_once(lambda asked: states.rows(asked.setting)), compared=True),
    "dht": Section(rows=_dht, compared=True),
    "experts": Section(
        rows=_once(lambda asked: [*experts.rows(asked.setting), *mixtures.rows(asked.setting)]), compared=True
    ),
    "simulated": Section(rows=_simulated),
    "progress": Section(rows=lambda asked: simulated_progress.rows(asked.setting.say)),
    "monitor": Section(rows=lambda asked: monitoring.rows(asked.setting.say)),
    "hostile": Section(rows=_once(lambda asked: hostile.rows(asked.setting.say))),
    "codecs": Section(
        rows=_once(lambda asked: codecs.rows(asked.setting.say, asked.setting.hivemind)), compared=True
    ),
    "slowdown": Section(
        rows=_once(lambda asked: [*slowdown.rows(asked.setting.say), *speeds.rows(asked.setting.say)])
    ),
    "convergence": Section(rows=lambda asked: convergence.rows(asked.setting.say, asked.folder)),
    "churn": Section(rows=_once(lambda asked: churn.rows(asked.setting.say))),
    "cuda": Section(rows=lambda asked: cuda.rows(asked.setting.say), check=cuda.check),
}


def measure(names: tuple[str, ...], asked: Asked) -> Rows:
    """The rows of these sections, as they are measured."""
    if any(SECTIONS[name].compared for name in names):
        asked = replace(asked, setting=replace(asked.setting, copy_bytes_per_s=memory_copy_bytes_per_s()))
    for name in SECTIONS:
        if name in names:
            yield from SECTIONS[name].rows(asked)
