"""Avoidance of peers that fail: a key that fails is avoided for a while, twice as long after each further
failure, until it answers again.

Pure logic over keys of any kind (a peer, a peer's expert). When the time is over, the next caller may try the
key: another failure costs one call and doubles the time. Failures that arrive while a key is avoided belong
to calls that were sent before, and count as one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from swarm.core.backoff import backoff_s
from swarm.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class AvoidanceConfig:
    """The times for which failing keys are avoided."""

    # after the first failure. Too small: steps keep waiting for dead peers; too large: a hiccup costs experts
    pause_first_s: float = 1.0
    growth: float = 2.0  # factor for each further failure without an answer in between
    pause_s_max: float = 60.0  # upper limit: a peer that comes back is used again within this time
    keys_max: int = 10_000  # beyond this the key that failed longest ago is forgotten

    def __post_init__(self) -> None:
        if not (
            0.0 < self.pause_first_s <= self.pause_s_max < float("inf")
            and self.growth >= 1.0
            and self.keys_max >= 1
        ):
            raise UsageError(
                "avoidance needs 0 < pause_first_s <= pause_s_max, a growth of at least 1, "
                "and keys_max of at least 1"
            )


@dataclass(slots=True)
class _Record:
    failures: int
    until_s: float
    reason: str
    last_s: float  # time of the last failure, also while it was avoided


class Avoidance:
    """Counts failures by key. `now_s` is a time of any clock that never jumps."""

    def __init__(self, config: AvoidanceConfig | None = None) -> None:
        self._config = config or AvoidanceConfig()
        self._records: OrderedDict[Hashable, _Record] = OrderedDict()

    def failed(self, key: Hashable, now_s: float, reason: str = "") -> None:
        """Record a failure."""
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = _Record(0, now_s, reason, now_s)
            if len(self._records) > self._config.keys_max:
                self._records.popitem(last=False)
        record.last_s = now_s
        if now_s < record.until_s:
            return
        record.failures += 1
        record.reason = reason
        config = self._config
        record.until_s = now_s + backoff_s(
            record.failures, config.pause_first_s, config.pause_s_max, config.growth
        )
        self._records.move_to_end(key)

    def succeeded(self, key: Hashable) -> None:
        """Record a success: earlier failures are forgotten."""
        self._records.pop(key, None)

    def avoided(self, key: Hashable, now_s: float) -> bool:
        """Return whether the key is avoided now."""
        record = self._records.get(key)
        return record is not None and now_s < record.until_s

    def failed_since(self, key: Hashable, since_s: float) -> bool:
        """Return whether the key has failed since `since_s`, and not succeeded after that."""
        record = self._records.get(key)
        return record is not None and record.last_s >= since_s

    def failures(self, key: Hashable) -> int:
        """Return the number of failures in a row."""
        record = self._records.get(key)
        return record.failures if record is not None else 0

    def reason(self, key: Hashable) -> str:
        """Return the reason of the failure that counted last; empty when there is none."""
        record = self._records.get(key)
        return record.reason if record is not None else ""

    def until_s(self, key: Hashable) -> float | None:
        """Return the time until which the key is avoided; None when it has not failed."""
        record = self._records.get(key)
        return record.until_s if record is not None else None
