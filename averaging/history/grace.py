"""How long a peer without a quorum waits before it continues by itself with a break, and whether others may
have waited for it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

# longer than most network interruptions, and than the detection of failed peers takes
GRACE_S_MIN: Final = 15.0
GRACE_S_MAX: Final = 60.0
# grace if the hosts of all missing electors refuse connections, because their processes have ended, or if
# this process knows of no other peer
_REFUSED_S: Final = 1.0
# Part of the grace that may pass between two calls: a suspended machine does not wait.
_AWAKE_S_MAX: Final = 2.0


class Grace:
    """The waiting of one peer on one head. Times are a monotonic clock's, in seconds."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._seen_s: float | None = None  # last time without a quorum; None: there is one

    @property
    def is_running(self) -> bool:
        """Return whether no quorum was found when one was looked for last."""
        return self._seen_s is not None

    def is_over(self, now_s: float, epoch_s: float, *, refused: bool) -> bool:
        """Record that there is no quorum, and return whether the peer has waited for long enough. `epoch_s`:
        how long an epoch takes. `refused`: the grace is the short one: the hosts of all missing electors
        refuse connections, or this process knows of no other peer.
        """
        if self._seen_s is not None:
            self.waited_s += min(max(now_s - self._seen_s, 0.0), _AWAKE_S_MAX)
        self._seen_s = now_s
        return self.waited_s >= grace_s(epoch_s, refused=refused)


def grace_s(epoch_s: float, *, refused: bool = False) -> float:
    """Return how long a peer without a quorum waits, in seconds; the parameters are those of `is_over`."""
    return _REFUSED_S if refused else min(max(GRACE_S_MIN, epoch_s), GRACE_S_MAX)


class SleepWatch:
    """Notices that this process stood still: its machine was suspended, or it was stopped. Ask it every
    `TICK_S`; more rarely, and it takes the time in between for sleep.
    """

    TICK_S: Final = 5.0

    def __init__(self, now_s: Callable[[], float]) -> None:
        """`now_s`: a clock that continues while the machine is suspended, as a monotonic one does not. A
        correction of it by more than the shortest grace looks like sleep.
        """
        self._now_s, self._awake_s = now_s, now_s()

    def has_slept(self) -> bool:
        """Return whether the process stood still, since the last call, for longer than the shortest grace."""
        before_s, self._awake_s = self._awake_s, self._now_s()
        return self._awake_s - before_s > GRACE_S_MIN
