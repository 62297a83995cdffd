"""Sums over what strangers claim: none of them moves the result further than the others allow."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

K = TypeVar("K")

_MAJORITY_FROM = 3  # of two peers nobody is the majority


def median(values: Iterable[float | None]) -> float | None:
    """Of those that are known; None when none is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def capped(values: Mapping[K, float], ratio_max: float) -> dict[K, float]:
    """Each counts up to `ratio_max` times the median of those above zero; from three such on."""
    moving = [value for value in values.values() if value > 0]
    if len(moving) < _MAJORITY_FROM:
        return dict(values)
    most = ratio_max * statistics.median_low(moving)
    return {key: min(value, most) for key, value in values.items()}


def reached(epochs: Collection[int]) -> int:
    """The epoch of a swarm: one claimed by enough peers that a single liar does not move it; trainers use the
    same rule.
    """
    ordered = sorted(epochs, reverse=True)
    if not ordered:
        return 0
    enough = 1 if len(ordered) <= 2 else max(2, -(-len(ordered) // 3))
    return ordered[enough - 1]
