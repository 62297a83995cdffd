"""A bandwidth cap: compute when a number of bytes may pass. Pure; times are seconds, passed in.

All bytes pass in order at the capped rate: a message has passed when all earlier ones have, and the time for
its own bytes is over. Unused capacity is lost, except for that of the last `burst_s`: by default just enough
that the gap between two messages costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarm.core.errors import UsageError

BURST_S = 0.05


@dataclass(slots=True)
class Bucket:
    """A cap in bytes per second. `burst_s`: the unused time that still counts; in any t seconds at most
    (t + burst_s) times the rate passes.
    """

    bytes_per_s: float
    burst_s: float = BURST_S
    _free_s: float = -math.inf  # time at which everything requested so far has passed

    def __post_init__(self) -> None:
        if not 0.0 < self.bytes_per_s < math.inf:
            raise UsageError(
                f"a bandwidth cap is a positive number of bytes per second, not {self.bytes_per_s!r}"
            )

    def pass_s(self, size_bytes: float, now_s: float) -> float:
        """Return how many seconds it takes until `size_bytes`, requested now, have passed; 0.0: at once."""
        self._free_s = max(self._free_s, now_s - self.burst_s) + size_bytes / self.bytes_per_s
        return max(self._free_s - now_s, 0.0)
