"""The records that a replica keeps: for each (key, writer, subkey) the record that was issued last, under
quotas.

Storing replaces or refuses; a refused store changes nothing. The slot of an expired record is reserved until
every earlier record of the same owner would have expired, too. Otherwise an old record could be replayed
after its shorter-lived successor (or tombstone) has expired. Records given to `store` must have been
validated (`RecordValidator`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from swarm.core.ids import Key, PeerId
from swarm.dht.logic.records import Owner, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Quotas of one replica. Records beyond them are refused; stored records are never evicted for others."""

    entries_per_key_max: int = 4096  # this many peers can announce themselves under one key
    bytes_per_key_max: int = 2 << 20  # a whole key must fit into one reply
    entries_per_writer_and_key_max: int = 1024  # unless a rule of the namespace says otherwise
    entries_per_writer_max: int = 4096  # over all keys
    bytes_per_writer_max: int = 8 << 20
    bytes_max: int = 128 << 20  # all records, as `Record.size_bytes` counts
    # Part of it for records of keys that this peer is no replica of: the most that a flood from anywhere can
    # take.
    bytes_far_max: int = 32 << 20


PRODUCTION_QUOTAS = Quotas()


@dataclass(slots=True, eq=False)
class _Slot:
    version: tuple[int, bytes]
    reserved_until_us: int  # latest expiration of any record that this owner has stored here
    record: Record | None  # None: expired, the slot is only reserved
    far: bool = False  # stored while this peer was no replica of the key

    @property
    def size_bytes(self) -> int:
        return self.record.size_bytes if self.record else 128

    @property
    def due_us(self) -> int:
        """Return when this slot changes next without a store."""
        return self.record.expiration_us if self.record else self.reserved_until_us


@dataclass(slots=True)
class _Usage:
    entries: int = 0
    size_bytes: int = 0


_NONE = _Usage()
_Name = TypeVar("_Name")


class Storage:
    """Records by key and owner. Time is a parameter: microseconds of swarm time."""

    def __init__(
        self, quotas: Quotas = PRODUCTION_QUOTAS, quota: Callable[[Key], int | None] = lambda key: None
    ) -> None:
        """Create an empty storage. `quota` returns how many entries one writer may have under a key, or None
        where no rule says so.
        """
        self.quotas = quotas
        self._quota = quota
        self.size_bytes = 0
        self.far_bytes = 0
        self.entry_count = 0
        self._slots: dict[Key, dict[Owner, _Slot]] = {}
        self._by_key: dict[Key, _Usage] = {}
        self._by_writer: dict[PeerId, _Usage] = {}
        self._by_key_and_writer: dict[tuple[Key, PeerId], _Usage] = {}
        # A heap; entries of slots that have changed since are skipped.
        self._due: list[tuple[int, int, Key, Owner]] = []
        self._counter = itertools.count()

    def store(self, record: Record, now_us: int, *, far: bool = False) -> str | None:
        """Store a record. Returns why it was refused, or None when it is held (or was already). `far`: this
        peer is no replica of its key.
        """
        self.expire(now_us)
        if record.expiration_us <= now_us:
            return "it has expired"
        old = self._slots.get(record.key, {}).get(record.owner)
        if (
            old is not None
            and record.version <= old.version
            and not (record.is_blob and record.version == old.version)
        ):
            same = old.record is not None and record.version == old.version
            return None if same else "its writer has issued a later one"
        if (
            old is not None
            and old.record is not None
            and record.version == old.version
            and record.expiration_us <= old.record.expiration_us
        ):
            return None  # this blob is already stored with a later expiration
        far = far and (old is None or old.far)
        slot = _Slot(
            record.version, max(record.expiration_us, old.reserved_until_us if old else 0), record, far
        )
        refusal = self._quota_refusal(slot, old)
        if refusal is None:
            self._put(record.key, record.owner, old, slot)
        return refusal

    def records(self, key: Key, now_us: int) -> list[Record]:
        """Return all unexpired records of a key, tombstones included: readers need them to recognise older
        copies elsewhere.
        """
        slots = self._slots.get(key, {})
        return [
            slot.record
            for slot in slots.values()
            if slot.record is not None and slot.record.expiration_us > now_us
        ]

    def record_of(self, key: Key, owner: Owner) -> Record | None:
        """Return the record of an entry, perhaps one that has just expired; None when there is none."""
        slot = self._slots.get(key, {}).get(owner)
        return slot.record if slot is not None else None

    def keys(self) -> list[Key]:
        return list(self._slots)

    def __contains__(self, key: Key) -> bool:
        return key in self._slots

    def versions(self, key: Key) -> dict[Owner, int]:
        """Return the issue time of the latest record of every owner that has a slot, reserved slots
        included.
        """
        return {owner: slot.version[0] for owner, slot in self._slots.get(key, {}).items()}

    def expire(self, now_us: int) -> None:
        """Drop expired records."""
        while self._due and self._due[0][0] <= now_us:
            due_us, _, key, owner = heapq.heappop(self._due)
            slot = self._slots.get(key, {}).get(owner)
            if slot is None or slot.due_us != due_us:
                continue
            held = slot.record is not None and slot.reserved_until_us > now_us
            self._put(
                key,
                owner,
                slot,
                _Slot(slot.version, slot.reserved_until_us, None, slot.far) if held else None,
            )

    def discard(self, is_refused: Callable[[Record], bool]) -> None:
        """Drop records that new rules refuse."""
        for key, owned in list(self._slots.items()):
            for owner, slot in list(owned.items()):
                if slot.record is not None and is_refused(slot.record):
                    self._put(key, owner, slot, None)

    def _quota_refusal(self, slot: _Slot, old: _Slot | None) -> str | None:
        quotas, record = self.quotas, slot.record
        assert record is not None
        by_key = self._by_key.get(record.key, _NONE)
        by_writer = self._by_writer.get(record.writer, _NONE)
        if old is None:
            per_writer_and_key = self._quota(record.key) or quotas.entries_per_writer_and_key_max
            if by_key.entries >= quotas.entries_per_key_max:
                return f"the key holds {quotas.entries_per_key_max} entries already"
            if by_writer.entries >= quotas.entries_per_writer_max:
                return f"its writer has {quotas.entries_per_writer_max} entries here already"
            if self._by_key_and_writer.get((record.key, record.writer), _NONE).entries >= per_writer_and_key:
                return f"its writer has {per_writer_and_key} entries under this key already"
        growth_bytes = slot.size_bytes - (old.size_bytes if old else 0)
        if growth_bytes <= 0:
            return None
        if by_key.size_bytes + growth_bytes > quotas.bytes_per_key_max:
            return f"the key's entries would take more than {quotas.bytes_per_key_max} bytes"
        if by_writer.size_bytes + growth_bytes > quotas.bytes_per_writer_max:
            return f"its writer's entries would take more than {quotas.bytes_per_writer_max} bytes here"
        if self.size_bytes + growth_bytes > quotas.bytes_max:
            return f"this peer's storage of {quotas.bytes_max} bytes is full"
        if slot.far and self.far_bytes + growth_bytes > quotas.bytes_far_max:
            return (
                f"this peer is far from the key, and its {quotas.bytes_far_max} bytes for such keys are taken"
            )
        return None

    def _put(self, key: Key, owner: Owner, old: _Slot | None, new: _Slot | None) -> None:
        """Replace a slot, and update every count that depends on it."""
        size_bytes = (new.size_bytes if new else 0) - (old.size_bytes if old else 0)
        entries = (new is not None) - (old is not None)
        self.size_bytes += size_bytes
        self.far_bytes += (new.size_bytes if new and new.far else 0) - (
            old.size_bytes if old and old.far else 0
        )
        self.entry_count += entries
        _count(self._by_key, key, entries, size_bytes)
        _count(self._by_writer, owner[0], entries, size_bytes)
        _count(self._by_key_and_writer, (key, owner[0]), entries, size_bytes)
        if new is None:
            del self._slots[key][owner]
            if not self._slots[key]:
                del self._slots[key]
            return
        self._slots.setdefault(key, {})[owner] = new
        heapq.heappush(self._due, (new.due_us, next(self._counter), key, owner))
        # owners that renew often leave dead entries in the heap
        if len(self._due) > 64 + 4 * self.entry_count:
            slots = (
                (key, owner, slot) for key, owned in self._slots.items() for owner, slot in owned.items()
            )
            self._due = [(slot.due_us, next(self._counter), key, owner) for key, owner, slot in slots]
            heapq.heapify(self._due)


def _count(usages: dict[_Name, _Usage], name: _Name, entries: int, size_bytes: int) -> None:
    usage = usages.setdefault(name, _Usage())
    usage.entries += entries
    usage.size_bytes += size_bytes
    if not usage.entries:
        del usages[name]


def latest_by_owner(records: Iterable[Record]) -> dict[Owner, Record]:
    """Return the latest record of each owner. This merges the answers of several replicas."""
    latest: dict[Owner, Record] = {}
    for record in records:
        held = latest.get(record.owner)
        longer = (
            held is not None
            and record.is_blob
            and record.version == held.version
            and record.expiration_us > held.expiration_us
        )
        if held is None or record.version > held.version or longer:
            latest[record.owner] = record
    return latest
