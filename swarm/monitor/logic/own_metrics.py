"""Metrics that users report under names of their own, over all peers. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from swarm.metrics.record import Metrics
from swarm.monitor.logic.robust import median
from swarm.monitor.logic.view import OwnView

NAMES_MAX: Final = 24  # names of users' metrics over all peers


def own_views(published: Iterable[Metrics]) -> dict[str, OwnView]:
    """Return the metrics of users by name, with the median over the peers that report each."""
    values: dict[str, list[float]] = {}
    for one in published:
        for name, value in one.own.items():
            values.setdefault(name, []).append(value)
    # a liar can invent names, so names that most peers report come first
    names = sorted(values, key=lambda name: (-len(values[name]), name))[:NAMES_MAX]
    return {
        name: OwnView(
            median=median(values[name]) or 0.0,
            minimum=min(values[name]),
            maximum=max(values[name]),
            peers=len(values[name]),
        )
        for name in sorted(names)
    }
