"""A cache of the inputs of forward passes whose backward passes are likely to follow, so that they need not
be sent again.

It is bounded in total and per caller; the oldest entries are dropped first. A caller whose inputs are gone is
asked to send them again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


BYTES_MAX = 256 << 20  # the inputs between a forward pass and its backward pass; missing ones are sent again
BYTES_PER_CALLER_MAX = 64 << 20
ENTRY_OVERHEAD_BYTES = 1024  # counted for each, which bounds the number of small entries


class InputCache(Generic[T]):
    """Values by caller and name."""

    def __init__(
        self,
        *,
        bytes_max: int = BYTES_MAX,
        bytes_per_caller_max: int = BYTES_PER_CALLER_MAX,
        entry_overhead_bytes: int = ENTRY_OVERHEAD_BYTES,
    ) -> None:
        self._bytes_max, self._bytes_per_caller_max = bytes_max, bytes_per_caller_max
        self._entry_overhead_bytes = entry_overhead_bytes
        self._entries: OrderedDict[tuple[Hashable, Hashable], tuple[T, int]] = OrderedDict()
        self._names_by_caller: dict[Hashable, OrderedDict[Hashable, None]] = {}
        self._caller_bytes: dict[Hashable, int] = {}
        self.size_bytes = 0

    def put(self, caller: Hashable, name: Hashable, value: T, size_bytes: int) -> bool:
        """Store a value. Return False when it is too large."""
        size_bytes += self._entry_overhead_bytes
        if size_bytes > min(self._bytes_max, self._bytes_per_caller_max):
            return False
        self.drop(caller, name)
        self._entries[caller, name] = (value, size_bytes)
        self._names_by_caller.setdefault(caller, OrderedDict())[name] = None
        self._caller_bytes[caller] = self._caller_bytes.get(caller, 0) + size_bytes
        self.size_bytes += size_bytes
        while self._caller_bytes[caller] > self._bytes_per_caller_max:
            self.drop(caller, next(iter(self._names_by_caller[caller])))
        while self.size_bytes > self._bytes_max:
            self.drop(*next(iter(self._entries)))
        return True

    def get(self, caller: Hashable, name: Hashable) -> T | None:
        """Return a value; None when it is gone."""
        found = self._entries.get((caller, name))
        return found[0] if found is not None else None

    def drop(self, caller: Hashable, name: Hashable) -> None:
        """Remove a value, if it is there."""
        found = self._entries.pop((caller, name), None)
        if found is None:
            return
        self.size_bytes -= found[1]
        self._caller_bytes[caller] -= found[1]
        del self._names_by_caller[caller][name]
        if not self._names_by_caller[caller]:
            del self._names_by_caller[caller], self._caller_bytes[caller]
