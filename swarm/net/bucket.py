"""A bandwidth cap as arithmetic: when may so many bytes pass? Pure; times are seconds, passed in.

Bytes pass one after the other at the cap, whoever they belong to: a message has passed when all that was
asked for before it has, and the time for its own bytes is over. What was not used is lost, but for a short
while, so that the gap between two messages costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarm.core.errors import UsageError

BURST_S = 0.05  # of unused time that still counts: in any t seconds at most (t + BURST_S) times the rate pass


@dataclass(slots=True)
class Bucket:
    """One direction of one peer."""

    bytes_per_s: float
    _free_s: float = -math.inf  # when all that was asked for has passed

    def __post_init__(self) -> None:
        if not 0.0 < self.bytes_per_s < math.inf:
            raise UsageError(
                f"a bandwidth cap is a positive number of bytes per second, not {self.bytes_per_s!r}"
            )

    def pass_s(self, size_bytes: float, now_s: float) -> float:
        """How long until so many bytes, asked for now, have passed; 0.0: at once."""
        self._free_s = max(self._free_s, now_s - BURST_S) + size_bytes / self.bytes_per_s
        return max(self._free_s - now_s, 0.0)
