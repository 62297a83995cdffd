"""Rounds of an optimizer that run while training continues; the trainer's thread polls them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from averaging.averager import Averager
from averaging.history.certificate import RoundKind
from averaging.history.round_lineage import RoundLineage
from averaging.result import PendingRound, RoundResult
from swarm.core.clock import Clock

CANCEL_S_MAX = 2.0
_CHECK_S, _CHECK_S_PER_PEER, _CHECK_S_MAX = 0.04, 0.005, 0.3


def check_interval_s(peers: int) -> float:
    """Return how often a waiting round checks whether it is obsolete, in a swarm of this size. Each check
    reads the reports of all peers: at 25 checks a second, they took a quarter of the processor time of each
    of 33 peers.
    """
    return min(max(_CHECK_S, _CHECK_S_PER_PEER * peers), _CHECK_S_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """The values of one epoch and the way in which they are averaged."""

    averager: Averager
    kind: RoundKind
    epoch: int  # in which the round is held
    weight: float
    gather: Any
    timeout_s: float  # limit for one round
    # an earlier attempt failed here after it had sent these values, and others may have committed it
    may_have_counted: bool
    # returns the value to gather in the next round, computed from the gathered values of the last one
    merge: Callable[[Sequence[Any]], Any]
    # receives the result of one round and writes the averages into the tensors
    take: Callable[[PendingRound], RoundResult] = PendingRound.result

    @property
    def epoch_after(self) -> int:
        """Return the epoch of the state after the rounds."""
        return self.epoch + 1 if self.kind is RoundKind.EPOCH else self.epoch

    def step(self, key: int | str | RoundLineage, weight: float, gather: Any) -> PendingRound:
        """Begin one round under this key."""
        return self.averager.step(
            weight=weight, timeout_s=self.timeout_s, gather=gather, round_key=key, wait=False, lend=True
        )


class RunningRound(Protocol):
    """A round that runs in the background: one of a group, or one through the cells of the grid."""

    def done(self) -> bool:
        """Return whether `result` would not wait. Call it regularly: it moves the round on."""
        ...

    def result(self) -> RoundResult:
        """Wait for the end of the round and return its result. The average is written into the tensors in
        this thread.
        """
        ...

    def cancel(self) -> None:
        """Cancel the round; the tensors are free afterwards."""
        ...


class BackgroundRound:
    """A round that runs while training continues. It is cancelled `grace_s` after `is_obsolete()` became
    true.
    """

    def __init__(
        self,
        pending: PendingRound,
        is_obsolete: Callable[[], bool],
        grace_s: float,
        clock: Clock,
        take: Callable[[PendingRound], RoundResult],
        interval_s: float,
    ) -> None:
        """`take` takes the result, which writes the averages into the tensors. `interval_s`: between two
        checks of `is_obsolete`.
        """
        self._pending, self._is_obsolete, self._grace_s = pending, is_obsolete, grace_s
        self._clock, self._take, self._interval_s = clock, take, interval_s
        self._obsolete_s, self._checked_s = math.inf, -math.inf

    def done(self) -> bool:
        """Return whether `result` would not wait. Call it regularly: an obsolete round is cancelled here."""
        now_s = self._clock.monotonic_s()
        if self._pending.done:
            return True
        if now_s - self._checked_s >= self._interval_s:
            self._checked_s = now_s
            self._obsolete_s = min(self._obsolete_s, now_s) if self._is_obsolete() else math.inf
        if now_s - self._obsolete_s < self._grace_s:
            return False
        self._pending.cancel()
        return True

    def result(self) -> RoundResult:
        """Wait for the end of the round and return its result. The average is written into the tensors in
        this thread.
        """
        try:
            while not self.done():
                self._pending.wait(self._interval_s)
            return self._take(self._pending)
        except BaseException:  # Ctrl-C: no work may continue in the background
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancel the round; the tensors are free afterwards."""
        self._pending.cancel()
        self._pending.wait_given_up(CANCEL_S_MAX)
