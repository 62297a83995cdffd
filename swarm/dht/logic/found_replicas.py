"""The replicas that searches for keys have found, for the next write under the same key."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from swarm.core.ids import Contact, Key

_KEYS_MAX = 256  # beyond this the replicas that were found longest ago are forgotten


class FoundReplicas:
    """The replicas of the keys that this peer has read or written under lately."""

    def __init__(self) -> None:
        self._found: OrderedDict[Key, Sequence[Contact]] = OrderedDict()

    def of(self, key: Key) -> Sequence[Contact]:
        """Return the replicas that the last search for a key found; none when that is forgotten."""
        return self._found.get(key, ())

    def note(self, key: Key, replicas: Sequence[Contact]) -> None:
        """Record the replicas of a key."""
        self._found[key] = replicas
        self._found.move_to_end(key)
        if len(self._found) > _KEYS_MAX:
            self._found.popitem(last=False)
