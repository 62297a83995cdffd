"""Caches of what searches found: records, for readers that state how old an answer may be and for replicas,
which receive every write anyway; and replicas, for the next write under the same key.

An answer is kept as records, tombstones included, so that it can be merged with later arrivals and expires
like any other copy. Entries have no fixed lifetime: the reader decides whether an answer is fresh enough.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm.core.ids import Contact, Key
from swarm.dht.logic.records import Owner, Record

_KEYS_MAX = 256  # beyond this the replicas that were found longest ago are forgotten


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """The records known under a key when a search ended at `taken_s`."""

    taken_s: float
    # The same moment in swarm time: the monotonic clock of a suspended machine stands still.
    taken_us: int
    neighbourhood_version: int  # value of `Overlay.neighbourhood` at that moment
    latest: Mapping[Owner, Record]


class ReadCache:
    """A cache bounded by keys and bytes; the oldest answer is evicted first. Time is a parameter."""

    def __init__(self, keys_max: int, bytes_max: int) -> None:
        self._keys_max, self._bytes_max = keys_max, bytes_max
        self._answers: OrderedDict[Key, CachedAnswer] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def put(self, key: Key, answer: CachedAnswer) -> None:
        """Store an answer, replacing the previous one for this key."""
        self.drop(key)
        size_bytes = _size_bytes(answer)
        if size_bytes > self._bytes_max:
            return
        self._answers[key] = answer
        self.size_bytes += size_bytes
        while len(self._answers) > self._keys_max or self.size_bytes > self._bytes_max:
            self.drop(next(iter(self._answers)))

    def get(self, key: Key, now_s: float, now_us: int, age_s: float) -> CachedAnswer | None:
        """Return the answer if it is at most `age_s` old by both clocks, else None."""
        answer = self._answers.get(key)
        if answer is None or answer.taken_s < now_s - age_s or answer.taken_us < now_us - age_s * 1e6:
            return None
        return answer

    def drop(self, key: Key) -> None:
        """Remove a key's answer, because something was written under the key."""
        answer = self._answers.pop(key, None)
        if answer is not None:
            self.size_bytes -= _size_bytes(answer)

    def clear(self) -> None:
        """Remove all answers."""
        self._answers.clear()
        self.size_bytes = 0


def _size_bytes(answer: CachedAnswer) -> int:
    return 256 + sum(record.size_bytes for record in answer.latest.values())


class FoundReplicas:
    """The replicas of the keys that this peer has read or written under lately."""

    def __init__(self) -> None:
        self._found: OrderedDict[Key, Sequence[Contact]] = OrderedDict()

    def of(self, key: Key) -> Sequence[Contact]:
        """Return the replicas that the last search for a key found; none when they are no longer cached."""
        return self._found.get(key, ())

    def note(self, key: Key, replicas: Sequence[Contact]) -> None:
        """Record the replicas of a key."""
        self._found[key] = replicas
        self._found.move_to_end(key)
        if len(self._found) > _KEYS_MAX:
            self._found.popitem(last=False)
