"""Time as a parameter: the one place where production code reads a clock.

Two clocks are needed. `monotonic_s` measures durations and deadlines inside one process. `swarm_s` is the
time that peers agree on (Unix seconds plus the estimated offset to the swarm); expirations and issue times of
DHT records are in it.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The clocks that services read; `swarm.testing` has a virtual one."""

    def monotonic_s(self) -> float:
        """Return seconds on a clock that never jumps; only differences are meaningful."""
        ...

    def swarm_s(self) -> float:
        """Return Unix seconds in the swarm's time."""
        ...


class SystemClock:
    """The machine's clock, corrected by `offset_s`, the estimated distance to the swarm's time."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def monotonic_s(self) -> float:
        return time.monotonic()

    def swarm_s(self) -> float:
        return time.time() + self.offset_s
