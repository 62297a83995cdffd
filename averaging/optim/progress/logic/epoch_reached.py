"""The epoch that a swarm has reached, by the reports of its peers. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable


def _enough_of(peers: int) -> int:
    """Return how many peers must report an epoch for it to count as reached: a third of them, and at least
    two where there are more than two.
    """
    return 1 if peers <= 2 else max(2, math.ceil(peers / 3))


def epoch_of(reported: Iterable[tuple[int, int]]) -> int:
    """Return the highest epoch that enough peers report to have reached; 0 when nobody reports any.
    `reported` yields (epoch, number of peers in it).
    """
    ordered = sorted(reported, reverse=True)
    wanted, count_so_far = _enough_of(sum(count for _, count in ordered)), 0
    for epoch, count in ordered:
        count_so_far += count
        if count_so_far >= wanted:
            return epoch
    return 0
