"""Exponential back-off: how long to wait after a failure before the next try. Pure; time and chance are
parameters.
"""

from __future__ import annotations

from typing import Protocol

_EXPONENT_MAX = 64  # something that fails for years overflows nothing


class Uniform(Protocol):
    """The part of `random.Random` that jitter needs."""

    def uniform(self, a: float, b: float) -> float:
        """Return a number between `a` and `b`."""
        ...


def backoff_s(failures: int, first_s: float, max_s: float, growth: float = 2.0) -> float:
    """Return the pause in seconds after the `failures`th failure in a row: `first_s` after the first,
    `growth` times as long after each further one, at most `max_s`; 0.0 after none.
    """
    if failures <= 0:
        return 0.0
    return min(first_s * growth ** min(failures - 1, _EXPONENT_MAX), max_s)


class Backoff:
    """Counts failures in a row and says how long to pause after each.

    `rng`: spreads each pause by 20 % to either side, so that peers that failed together do not try again
    together; None: no jitter.
    """

    def __init__(self, first_s: float, max_s: float, rng: Uniform | None = None) -> None:
        self._first_s, self._max_s, self._rng = first_s, max_s, rng
        self.failures = 0

    def next_s(self) -> float:
        """Count one more failure, and return how many seconds to wait before the next try."""
        self.failures += 1
        pause_s = backoff_s(self.failures, self._first_s, self._max_s)
        return pause_s if self._rng is None else pause_s * self._rng.uniform(0.8, 1.2)

    def reset(self) -> None:
        """Forget the failures: a try succeeded."""
        self.failures = 0
