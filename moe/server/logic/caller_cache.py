"""A cache that a server keeps for its callers: the inputs of forward passes whose backward passes are likely
to follow, so that they need not be sent again, and the answers of backward passes. It is bounded in total,
per caller, and for all strangers together; the oldest entries are dropped first, those of strangers before
those of members. Identities are free, so a bound per caller alone would not limit strangers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

ENTRY_OVERHEAD_BYTES = 1024  # counted for each, which bounds the number of small entries


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """Limits of a cache, in bytes. An entry that is larger than one of them is not kept."""

    bytes_max: int
    bytes_per_caller_max: int
    strangers_bytes_max: int  # limit for all strangers together
    entry_overhead_bytes: int = ENTRY_OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    value: T
    size_bytes: int
    is_stranger: bool  # whether its caller was a stranger when it was put


class CallerCache(Generic[T]):
    """Values by caller and name."""

    def __init__(self, limits: CacheLimits, is_stranger: Callable[[Hashable], bool]) -> None:
        self._limits, self._is_stranger = limits, is_stranger
        self._entries: dict[tuple[Hashable, Hashable], _Entry[T]] = {}
        # the same by whether a stranger put it, oldest first
        self._order: dict[bool, OrderedDict[tuple[Hashable, Hashable], None]] = {
            True: OrderedDict(),
            False: OrderedDict(),
        }
        self._names_by_caller: dict[Hashable, OrderedDict[Hashable, None]] = {}
        self._caller_bytes: dict[Hashable, int] = {}
        self.size_bytes = self.strangers_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, caller: Hashable, name: Hashable, value: T, size_bytes: int) -> bool:
        """Store a value. Return False when it is too large."""
        limits, is_stranger = self._limits, self._is_stranger(caller)
        size_bytes += limits.entry_overhead_bytes
        if size_bytes > min(limits.bytes_max, limits.bytes_per_caller_max):
            return False
        if is_stranger and size_bytes > limits.strangers_bytes_max:
            return False
        self.drop(caller, name)
        self._entries[caller, name] = _Entry(value, size_bytes, is_stranger)
        self._order[is_stranger][caller, name] = None
        self._names_by_caller.setdefault(caller, OrderedDict())[name] = None
        self._caller_bytes[caller] = self._caller_bytes.get(caller, 0) + size_bytes
        self.size_bytes += size_bytes
        self.strangers_bytes += size_bytes if is_stranger else 0
        while self._caller_bytes[caller] > limits.bytes_per_caller_max:
            self.drop(caller, next(iter(self._names_by_caller[caller])))
        while self.strangers_bytes > limits.strangers_bytes_max:
            self.drop(*next(iter(self._order[True])))
        while self.size_bytes > limits.bytes_max:
            self.drop(*next(iter(self._order[True] or self._order[False])))
        return True

    def get(self, caller: Hashable, name: Hashable) -> T | None:
        """Return a value; None when it is gone."""
        found = self._entries.get((caller, name))
        return found.value if found is not None else None

    def has(self, caller: Hashable, name: Hashable) -> bool:
        """Return whether a value is there."""
        return (caller, name) in self._entries

    def drop(self, caller: Hashable, name: Hashable) -> None:
        """Remove a value, if it is there."""
        found = self._entries.pop((caller, name), None)
        if found is None:
            return
        del self._order[found.is_stranger][caller, name]
        self.size_bytes -= found.size_bytes
        self.strangers_bytes -= found.size_bytes if found.is_stranger else 0
        self._caller_bytes[caller] -= found.size_bytes
        del self._names_by_caller[caller][name]
        if not self._names_by_caller[caller]:
            del self._names_by_caller[caller], self._caller_bytes[caller]
