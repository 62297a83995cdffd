"""How peers that host experts have answered lately: who is avoided, and how long an answer usually takes. Pure; time is a parameter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """How long failures are held against somebody."""

    avoid_first_s: float = 1.0  # after one failure; twice as long after each further one in a row
    avoid_max_s: float = 60.0
    hedge_share: float = 3.0  # a second replica is asked after so many usual answer times of the first
    hedge_least_s: float = 0.05
    hedge_unknown_s: float = 1.0  # when nothing is known of the first
    known_max: int = 8192
    fresh_s: float = 30.0  # who was slow so long ago may be fast now, and is given another chance
    newest_share: float = 0.2  # of the newest answer in the usual time


@dataclass(slots=True)
class _Known:
    failures: int = 0  # in a row
    avoided_until_s: float = 0.0
    usual_s: float | None = None
    answered_s: float = 0.0


class Health:
    """By whatever names who is asked: an expert, a replica, a peer."""

    def __init__(self, config: HealthConfig | None = None) -> None:
        self.config = config or HealthConfig()
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()

    def answered(self, who: Hashable, seconds: float, now_s: float) -> None:
        """It gave what it was asked for."""
        known = self._entry(who)
        known.failures, known.avoided_until_s, known.answered_s = 0, 0.0, now_s
        known.usual_s = seconds if known.usual_s is None else known.usual_s + self.config.newest_share * (seconds - known.usual_s)

    def failed(self, who: Hashable, now_s: float) -> None:
        """It did not."""
        known = self._entry(who)
        if now_s < known.avoided_until_s:
            return  # one outage that several calls met
        known.failures += 1
        known.avoided_until_s = now_s + min(self.config.avoid_first_s * 2.0 ** min(known.failures - 1, 30), self.config.avoid_max_s)

    def avoided(self, who: Hashable, now_s: float) -> bool:
        """Should others be asked first?"""
        known = self._known.get(who)
        return known is not None and now_s < known.avoided_until_s

    def avoided_until_s(self, who: Hashable) -> float:
        """0 for one that is not avoided."""
        known = self._known.get(who)
        return known.avoided_until_s if known is not None else 0.0

    def usual_s(self, who: Hashable) -> float | None:
        """How long an answer takes; None: nothing is known."""
        known = self._known.get(who)
        return known.usual_s if known is not None else None

    def expected_s(self, who: Hashable, now_s: float) -> float:
        """The usual time of one that answered lately; 0 for one of which nothing is known, or no longer, so that it is tried."""
        known = self._known.get(who)
        if known is None or known.usual_s is None or now_s - known.answered_s > self.config.fresh_s:
            return 0.0
        return known.usual_s

    def hedge_s(self, who: Hashable) -> float:
        """After how long without an answer somebody else should be asked as well."""
        usual_s = self.usual_s(who)
        if usual_s is None:
            return self.config.hedge_unknown_s
        return max(self.config.hedge_share * usual_s, self.config.hedge_least_s)

    def _entry(self, who: Hashable) -> _Known:
        known = self._known.setdefault(who, _Known())
        self._known.move_to_end(who)
        if len(self._known) > self.config.known_max:
            self._known.popitem(last=False)
        return known
