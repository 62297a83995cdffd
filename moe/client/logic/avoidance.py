"""Who fails is left alone for a while, twice as long after each further failure, until it answers again.

A pure machine over keys of any kind (a peer, a peer's expert). When the while is over, the next who wants to
may try it: failing again costs one call, and doubles the while. Failures that come in while a key is avoided
are those of calls that were on their way already, and count as one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from swarm.core.backoff import backoff_s
from swarm.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class AvoidanceConfig:
    """For how long."""

    # after the first failure; too small: steps wait for the dead again and again, too large: a hiccup costs
    # experts
    first_s: float = 1.0
    growth: float = 2.0  # each further failure without an answer between makes it so many times as long
    longest_s: float = 60.0  # never longer: who comes back is used again within this
    keys_max: int = 10_000  # who failed longest ago is forgotten beyond this

    def __post_init__(self) -> None:
        if not (
            0.0 < self.first_s <= self.longest_s < float("inf") and self.growth >= 1.0 and self.keys_max >= 1
        ):
            raise UsageError(
                "avoidance needs 0 < first_s <= longest_s, a growth of at least 1, and keys_max of at least 1"
            )


@dataclass(slots=True)
class _Record:
    failures: int
    until_s: float
    why: str
    last_s: float  # when it failed last, avoided or not


class Avoidance:
    """`now_s` is any clock that never jumps."""

    def __init__(self, config: AvoidanceConfig | None = None) -> None:
        self._config = config or AvoidanceConfig()
        self._records: OrderedDict[Hashable, _Record] = OrderedDict()

    def failed(self, key: Hashable, now_s: float, why: str = "") -> None:
        """It did not do what it was asked."""
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = _Record(0, now_s, why, now_s)
            if len(self._records) > self._config.keys_max:
                self._records.popitem(last=False)
        record.last_s = now_s
        if now_s < record.until_s:
            return
        record.failures += 1
        record.why = why
        config = self._config
        record.until_s = now_s + backoff_s(record.failures, config.first_s, config.longest_s, config.growth)
        self._records.move_to_end(key)

    def succeeded(self, key: Hashable) -> None:
        """It did: what was held against it is forgotten."""
        self._records.pop(key, None)

    def avoided(self, key: Hashable, now_s: float) -> bool:
        record = self._records.get(key)
        return record is not None and now_s < record.until_s

    def failed_since(self, key: Hashable, since_s: float) -> bool:
        """And has not answered after that."""
        record = self._records.get(key)
        return record is not None and record.last_s >= since_s

    def failures(self, key: Hashable) -> int:
        """In a row, so far."""
        record = self._records.get(key)
        return record.failures if record is not None else 0

    def why(self, key: Hashable) -> str:
        """What it did last; empty when nothing is held against it."""
        record = self._records.get(key)
        return record.why if record is not None else ""

    def until_s(self, key: Hashable) -> float | None:
        record = self._records.get(key)
        return record.until_s if record is not None else None
