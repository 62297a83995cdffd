"""Hedging of one forward call of an expert that several peers host: it decides which replica to ask, when to
ask a second one as well, and which one next after a failure.

After Dean and Barroso, "The Tail at Scale" (2013): a second request is sent only when the first takes longer
than most do, and only for a small share of all calls, so that a slow swarm is not slowed down further. Only
forward passes are hedged: they change nothing, so asking twice is harmless. Pure logic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

Replica = TypeVar("Replica")  # the name of a replica: hashable

# least delay before a second request. Too small: a busy machine's hiccups cause more work
DELAY_S_MIN = 0.05
DELAY_S_INITIAL = 1.0  # while the replica's answer times are unknown


SHARE_MAX = 0.1  # second requests as a share of all calls, over time: more would load the peers noticeably
BUDGET_MAX = 8.0  # unused second requests that may accumulate for when a peer freezes
ATTEMPTS_MAX = 3  # peers that one call may ask in total


class HedgeBudget:
    """The second requests that may still be sent. Each call adds `share_max` of one (0: never any), up to
    `budget_max`.
    """

    def __init__(self, share_max: float = SHARE_MAX, budget_max: float = BUDGET_MAX) -> None:
        self._share_max, self._budget_max = share_max, budget_max
        self._budget = budget_max if share_max else 0.0

    def add_call(self) -> None:
        """Add one call's share to the budget."""
        self._budget = min(self._budget + self._share_max, self._budget_max)

    def can_afford(self, requests: int) -> bool:
        """Return whether `requests` second requests could be sent now. Always true when hedging is switched
        off: second requests rescue no call then.
        """
        return self._budget >= requests or not self._share_max

    def try_spend(self) -> bool:
        """Take one second request from the budget. Return False when there is none."""
        if self._budget < 1.0:
            return False
        self._budget -= 1.0
        return True


class HedgedCall(Generic[Replica]):
    """One call. Replicas are hashable names, best first. `poll` says which to ask now. The call is over when
    `winner` is set, or no replica is left.
    """

    def __init__(
        self,
        order: Sequence[Replica],
        hedge_after_s: float,
        budget: HedgeBudget,
        attempts_max: int = ATTEMPTS_MAX,
    ) -> None:
        self._left = list(order[:attempts_max])
        self._hedge_after_s = hedge_after_s
        self._budget = budget
        self._asked: list[Replica] = []  # and neither answered nor failed
        self._hedge_at_s: float | None = None
        self.winner: Replica | None = None
        self.hedged = False
        budget.add_call()

    def poll(self, now_s: float) -> list[Replica]:
        """Return the replicas to ask now."""
        if self.over or not self._left:
            return []
        if not self._asked:
            self._hedge_at_s = None if self.hedged else now_s + self._hedge_after_s
            return [self._ask()]
        if self._hedge_at_s is not None and now_s >= self._hedge_at_s:
            self._hedge_at_s = None
            if self._budget.try_spend():
                self.hedged = True
                return [self._ask()]
        return []

    def deadline_s(self) -> float | None:
        """Return the time at which to poll again if nothing happens before; None when there is none."""
        return None if self.over or not self._left else self._hedge_at_s

    def answered(self, replica: Replica) -> None:
        """Record a replica's answer; the first one wins."""
        if self.winner is None and replica in self._asked:
            self.winner = replica

    def failed(self, replica: Replica) -> None:
        """Record a replica's failure."""
        if replica in self._asked:
            self._asked.remove(replica)

    @property
    def has_more(self) -> bool:
        """Return whether there is a replica that was not asked yet."""
        return bool(self._left)

    @property
    def over(self) -> bool:
        """Return whether a replica has answered, or none is left."""
        return self.winner is not None or not (self._asked or self._left)

    def _ask(self) -> Replica:
        replica = self._left.pop(0)
        self._asked.append(replica)
        return replica
