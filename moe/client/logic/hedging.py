"""One forward call of an expert that several peers hold: whom to ask, when to ask a second one as well, whom
next after a failure.

After Dean and Barroso, "The Tail at Scale" (2013): a second request goes out only when the first takes longer
than most do, and only for a small share of all calls, so that a slow swarm is not made slower. Forward passes
only: they change nothing, so that asking twice is harmless. Pure machines.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from swarm.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgingConfig:
    """When a second replica is asked."""

    # never sooner after the first; too small: hiccups of a busy machine are answered with more work
    least_s: float = 0.05
    first_s: float = 1.0  # while nothing is known of how long it takes
    deviations: float = 4.0  # sooner only after the mean plus so many mean deviations of its calls of late
    share_max: float = 0.1  # of all calls, over time; 0: never
    saved_max: float = 8.0  # second requests that may have been saved up, for the moment when a peer freezes
    attempts_max: int = 3  # peers that one call may ask in all

    def __post_init__(self) -> None:
        if not (0.0 < self.least_s <= self.first_s and self.deviations >= 0.0 and self.attempts_max >= 1):
            raise UsageError(
                "hedging needs 0 < least_s <= first_s, deviations of at least 0, attempts_max of at least 1"
            )
        if not (0.0 <= self.share_max <= 1.0 and self.saved_max >= 0.0):
            raise UsageError("hedging needs a share_max from 0 to 1 and a saved_max of at least 0")


class HedgeBudget:
    """Second requests that may still be made: each call saves up `share_max` of one."""

    def __init__(self, config: HedgingConfig) -> None:
        self._config = config
        self._saved = config.saved_max if config.share_max else 0.0

    def call(self) -> None:
        self._saved = min(self._saved + self._config.share_max, self._config.saved_max)

    def affords(self, requests: int) -> bool:
        """Whether so many second requests could be made now. Always where none is ever made: there they save
        nobody from waiting.
        """
        return self._saved >= requests or not self._config.share_max

    def spend(self) -> bool:
        """Whether a second request may be made now."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True


class HedgedCall:
    """Replicas are hashable names, best first. `poll` says whom to ask now; it is over when `winner` is set
    or nobody is left.
    """

    def __init__(
        self, order: Sequence[Hashable], hedge_after_s: float, budget: HedgeBudget, config: HedgingConfig
    ) -> None:
        self._left = list(order[: config.attempts_max])
        self._hedge_after_s = hedge_after_s
        self._budget = budget
        self._asked: list[Hashable] = []  # and not heard of since
        self._hedge_at_s: float | None = None
        self.winner: Hashable | None = None
        self.hedged = False
        budget.call()

    def poll(self, now_s: float) -> list[Hashable]:
        if self.over or not self._left:
            return []
        if not self._asked:
            self._hedge_at_s = None if self.hedged else now_s + self._hedge_after_s
            return [self._ask()]
        if self._hedge_at_s is not None and now_s >= self._hedge_at_s:
            self._hedge_at_s = None
            if self._budget.spend():
                self.hedged = True
                return [self._ask()]
        return []

    def deadline_s(self) -> float | None:
        """When to poll again, if nothing happens before."""
        return None if self.over or not self._left else self._hedge_at_s

    def answered(self, replica: Hashable) -> None:
        if self.winner is None and replica in self._asked:
            self.winner = replica

    def failed(self, replica: Hashable) -> None:
        if replica in self._asked:
            self._asked.remove(replica)

    @property
    def over(self) -> bool:
        return self.winner is not None or not (self._asked or self._left)

    def _ask(self) -> Hashable:
        replica = self._left.pop(0)
        self._asked.append(replica)
        return replica
