"""What searches found, kept for a while: for readers who say how old an answer may be, and for replicas,
which writes reach anyway.

An answer is kept as records, tombstones among them, so that it is merged with what arrives later and expires
like any other copy. Nothing is kept for longer than it is asked for: whether an answer is fresh enough is
decided when it is read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from swarm.core.ids import Key
from swarm.dht.logic.records import Owner, Record


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """What was known of a key, from a search that ended at `taken_s`."""

    taken_s: float
    # the same moment in swarm time: a machine that was suspended has a monotonic clock that stood still
    taken_us: int
    neighbourhood: int  # what `Overlay.neighbourhood` was then
    latest: Mapping[Owner, Record]


class ReadCache:
    """Bounded by keys and bytes; what was taken longest ago goes first. Time is a parameter."""

    def __init__(self, keys_max: int, bytes_max: int) -> None:
        self._keys_max, self._bytes_max = keys_max, bytes_max
        self._answers: OrderedDict[Key, CachedAnswer] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def put(self, key: Key, answer: CachedAnswer) -> None:
        """Keep an answer instead of the one before."""
        self.drop(key)
        size_bytes = _size_bytes(answer)
        if size_bytes > self._bytes_max:
            return
        self._answers[key] = answer
        self.size_bytes += size_bytes
        while len(self._answers) > self._keys_max or self.size_bytes > self._bytes_max:
            self.drop(next(iter(self._answers)))

    def get(self, key: Key, now_s: float, now_us: int, age_s: float) -> CachedAnswer | None:
        """The answer, if it is not older than `age_s` by either clock."""
        answer = self._answers.get(key)
        if answer is None or answer.taken_s < now_s - age_s or answer.taken_us < now_us - age_s * 1e6:
            return None
        return answer

    def drop(self, key: Key) -> None:
        """Forget what was known: something was written."""
        answer = self._answers.pop(key, None)
        if answer is not None:
            self.size_bytes -= _size_bytes(answer)

    def clear(self) -> None:
        """Forget everything."""
        self._answers.clear()
        self.size_bytes = 0


def _size_bytes(answer: CachedAnswer) -> int:
    return 256 + sum(record.size_bytes for record in answer.latest.values())
