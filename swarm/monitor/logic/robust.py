"""Robust sums over claims of untrusted peers: the other claims bound the influence of each claim."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

K = TypeVar("K")

_MAJORITY_FROM = 3  # with two peers there is no majority


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the known values; None when there is none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def capped(values: Mapping[K, float], ratio_max: float) -> dict[K, float]:
    """Return the values, each limited to `ratio_max` times the median of those above zero. With fewer than
    three positive values, nothing is limited.
    """
    positive = [value for value in values.values() if value > 0]
    if len(positive) < _MAJORITY_FROM:
        return dict(values)
    limit = ratio_max * statistics.median_low(positive)
    return {key: min(value, limit) for key, value in values.items()}


def swarm_epoch(epochs: Collection[int]) -> int:
    """Return the epoch of a swarm: the highest one that enough peers claim, so that a single liar cannot
    change it. Trainers use the same rule.
    """
    ordered = sorted(epochs, reverse=True)
    if not ordered:
        return 0
    enough = 1 if len(ordered) <= 2 else max(2, -(-len(ordered) // 3))
    return ordered[enough - 1]
