"""Avoidance of peers that fail: a key that fails is avoided for a while, longer after each further failure,
until it answers again.

Pure logic over keys of any kind (a peer, a peer's expert). When the time is over, the next caller may try the
key: another failure costs one call and lengthens the time. Failures that arrive while a key is avoided belong
to calls that were sent before, and count as one. Peers that are avoided because they lied or were banned are
in `averaging.blocklist`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from swarm.core.backoff import backoff_s
from swarm.core.errors import UsageError


@dataclass(slots=True)
class _Record:
    failures: int
    until_s: float
    reason: str
    last_s: float  # time of the last failure, also while it was avoided


class Avoidance:
    """Counts failures by key. `now_s` is a time of any clock that never jumps.

    `pause_first_s`: how long a key is avoided after its first failure; too small: callers keep waiting for
    dead peers, too large: a hiccup costs a good one. `pause_s_max`: upper limit of that time; a peer
    that comes back is used again within it. `growth`: factor of the time after each further failure.
    `keys_max`: beyond this many the key that failed longest ago is forgotten.
    """

    def __init__(
        self,
        *,
        pause_first_s: float = 1.0,
        pause_s_max: float = 60.0,
        growth: float = 2.0,
        keys_max: int = 10_000,
    ) -> None:
        if not (0.0 < pause_first_s <= pause_s_max < float("inf") and keys_max >= 1):
            raise UsageError("avoidance needs 0 < pause_first_s <= pause_s_max, and keys_max of at least 1")
        self._pause_first_s, self._pause_s_max, self._growth = pause_first_s, pause_s_max, growth
        self._keys_max = keys_max
        self._records: OrderedDict[Hashable, _Record] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of keys that failed and have not succeeded since."""
        return len(self._records)

    def failed(self, key: Hashable, now_s: float, reason: str = "", *, failures_min: int = 1) -> None:
        """Record a failure, which counts as at least `failures_min` in a row."""
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = _Record(0, now_s, reason, now_s)
            if len(self._records) > self._keys_max:
                self._records.popitem(last=False)
        record.last_s = now_s
        if now_s < record.until_s and record.failures >= failures_min:
            return
        record.failures = max(record.failures + 1, failures_min)
        record.reason = reason
        record.until_s = now_s + backoff_s(
            record.failures, self._pause_first_s, self._pause_s_max, self._growth
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
