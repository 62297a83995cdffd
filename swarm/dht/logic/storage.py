"""The records that a replica keeps: for each (key, writer, subkey) the record that was issued last, under
quotas.

Storing replaces, evicts or refuses; a refused store changes nothing. When a key or the whole storage is
full, records of strangers (`swarm.core.standing`) are evicted: any of them for a member's record, heavier
ones (bytes times lifetime) for another stranger's record. A flood of large, long-lived records therefore
cannot keep out small, short-lived ones such as those of runs. Members' records are never evicted.

The slot of an expired record is reserved until every earlier record of the same owner would have expired,
too. Otherwise an old record could be replayed after its shorter-lived successor (or tombstone) has expired.
Records given to `store` must have been validated (`RecordValidator`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from swarm.core.ids import Key, PeerId
from swarm.core.standing import PeerStanding
from swarm.dht.logic.blobs import VERSION_STEP_MAX, is_within_step
from swarm.dht.logic.records import Owner, Record
from swarm.dht.logic.run_rules import CATALOGUE


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Quotas of one replica. Where members are known, all strangers together get half of each key and half of
    the storage.
    """

    entries_per_key_max: int = 4096  # this many peers can announce themselves under one key
    bytes_per_key_max: int = 1 << 20  # a whole key must fit into one reply
    entries_per_writer_and_key_max: int = 1024  # unless a rule of the namespace says otherwise
    entries_per_writer_max: int = 4096  # over all keys
    bytes_per_writer_max: int = 8 << 20
    # all records, as `Record.size_bytes` counts; in memory they take almost twice as much
    bytes_max: int = 40 << 20
    # Part of it for records of keys that this peer is no replica of: the most that a flood from anywhere can
    # take.
    bytes_far_max: int = 16 << 20


PRODUCTION_QUOTAS = Quotas()


@dataclass(slots=True, eq=False)
class _Slot:
    version: tuple[int, bytes]
    reserved_until_us: int  # latest expiration of any record that this owner has stored here
    record: Record | None  # None: expired, the slot is only reserved
    far: bool = False  # stored while this peer was no replica of the key
    is_stranger: bool = False  # the writer, when it was stored
    weight: int = 0  # bytes times lifetime at the time of the store

    @property
    def size_bytes(self) -> int:
        return self.record.size_bytes if self.record else 128

    @property
    def due_us(self) -> int:
        """Return when this slot changes next without a store."""
        return self.record.expiration_us if self.record else self.reserved_until_us


@dataclass(slots=True)
class Usage:
    """Entries, and the bytes that they take."""

    entries: int = 0
    size_bytes: int = 0
    strangers_entries: int = 0  # part of them
    strangers_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The reason for a refusal, and which records are in the way: those of a key, all, or the writer's."""

    text: str
    key: Key | None = None
    of_all: bool = False


_NONE = Usage()
_Name = TypeVar("_Name")


class Storage:
    """Records by key and owner. Time is a parameter: microseconds of swarm time."""

    def __init__(
        self,
        quotas: Quotas = PRODUCTION_QUOTAS,
        quota: Callable[[Key], int | None] = lambda key: None,
        standing: PeerStanding | None = None,
        key_quota: Callable[[Key], int | None] = lambda key: None,
    ) -> None:
        """Create an empty storage. `quota` returns how many entries one writer may have under a key, and
        `key_quota` how many all together, or None where no rule says so. `standing` says which writers are
        members of runs.
        """
        self._standing = standing or PeerStanding()
        self._strangers = _Heaviest()
        self._strangers_by_key: dict[Key, _Heaviest] = {}
        self.quotas = quotas
        self._quota, self._key_quota = quota, key_quota
        self.size_bytes = 0
        self.far_bytes = self.strangers_bytes = 0
        self.entry_count = 0
        self._slots: dict[Key, dict[Owner, _Slot]] = {}
        self._by_key: dict[Key, Usage] = {}
        self._by_writer: dict[PeerId, Usage] = {}
        self._by_key_and_writer: dict[tuple[Key, PeerId], Usage] = {}
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
        if old is not None and record.is_blob and not is_within_step(old.version[0], record.version[0]):
            return f"it is more than {VERSION_STEP_MAX} versions above the one that is held"
        if (
            old is not None
            and old.record is not None
            and record.version == old.version
            and record.expiration_us <= old.record.expiration_us
        ):
            return None  # this blob is already stored with a later expiration
        far = far and (old is None or old.far)
        slot = _Slot(
            record.version,
            max(record.expiration_us, old.reserved_until_us if old else 0),
            record,
            far,
            not self._standing.is_member(record.writer, record.run),
            # what is in the catalogue stays there: entries are small, and a flood must not push out others
            0 if record.key.namespace == CATALOGUE else record.size_bytes * (record.expiration_us - now_us),
        )
        evicted: list[tuple[Key, Owner, _Slot]] = []
        while (refusal := self._quota_refusal(slot, old)) is not None:
            found = self._displaced_by(slot, refusal)
            if found is None:
                for key, owner, one in reversed(evicted):
                    self._put(key, owner, None, one)
                return refusal.text
            evicted.append(found)
            self._put(*found, None)
        self._put(record.key, record.owner, old, slot)
        return None

    def _displaced_by(self, new: _Slot, refusal: _Refusal) -> tuple[Key, Owner, _Slot] | None:
        """Return the slot of a stranger that is evicted for a new one, or None."""
        heaviest = self._strangers if refusal.of_all else None
        if refusal.key is not None:
            heaviest = self._strangers_by_key.get(refusal.key)
        found = heaviest.top(self._slots) if heaviest is not None else None
        if found is None or new.record is None or found[:2] == (new.record.key, new.record.owner):
            return None
        if new.is_stranger and (found[2].far, found[2].weight) <= (new.far, new.weight):
            return None
        return found

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

    def usage(self, key: Key) -> Usage:
        """Return how many entries a key has and how many bytes they take, reserved slots included."""
        return self._by_key.get(key, _NONE)

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
                replace(slot, record=None) if held else None,
            )

    def discard(self, is_refused: Callable[[Record], bool]) -> None:
        """Drop records that new rules refuse."""
        for key, owned in list(self._slots.items()):
            for owner, slot in list(owned.items()):
                if slot.record is not None and is_refused(slot.record):
                    self._put(key, owner, slot, None)

    def _quota_refusal(self, slot: _Slot, old: _Slot | None) -> _Refusal | None:
        quotas, record = self.quotas, slot.record
        assert record is not None
        key = record.key
        by_key = self._by_key.get(key, _NONE)
        by_writer = self._by_writer.get(record.writer, _NONE)
        # where members are known, strangers share half
        halved = slot.is_stranger and self._standing.has_members(record.run)
        entries_max = (None if old else self._key_quota(key)) or quotas.entries_per_key_max
        if old is None and by_key.entries >= entries_max:
            return _Refusal(f"the key holds {entries_max} entries already", key)
        if halved and (old is None or not old.is_stranger) and by_key.strangers_entries >= entries_max // 2:
            return _Refusal(f"the key holds {entries_max // 2} entries of strangers already", key)
        if old is None:
            per_writer_and_key = self._quota(key) or quotas.entries_per_writer_and_key_max
            if by_writer.entries >= quotas.entries_per_writer_max:
                return _Refusal(f"its writer has {quotas.entries_per_writer_max} entries here already")
            if self._by_key_and_writer.get((key, record.writer), _NONE).entries >= per_writer_and_key:
                return _Refusal(f"its writer has {per_writer_and_key} entries under this key already")
        growth_bytes = slot.size_bytes - (old.size_bytes if old else 0)
        if growth_bytes <= 0:
            return None
        bytes_max = quotas.bytes_per_key_max
        if by_key.size_bytes + growth_bytes > bytes_max:
            return _Refusal(f"the key's entries would take more than {bytes_max} bytes", key)
        if halved and by_key.strangers_bytes + growth_bytes > bytes_max // 2:
            return _Refusal(f"strangers' entries of the key would take more than {bytes_max // 2} bytes", key)
        if by_writer.size_bytes + growth_bytes > quotas.bytes_per_writer_max:
            return _Refusal(
                f"its writer's entries would take more than {quotas.bytes_per_writer_max} bytes here"
            )
        bytes_max = quotas.bytes_max
        if self.size_bytes + growth_bytes > bytes_max:
            return _Refusal(f"this peer's storage of {bytes_max} bytes is full", of_all=True)
        halved = slot.is_stranger and self._standing.has_members()
        if halved and self.strangers_bytes + growth_bytes > bytes_max // 2:
            return _Refusal(f"this peer's {bytes_max // 2} bytes for strangers are full", of_all=True)
        if slot.far and self.far_bytes + growth_bytes > quotas.bytes_far_max:
            return _Refusal(
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
        strangers = (new is not None and new.is_stranger) - (old is not None and old.is_stranger)
        strangers_bytes = (new.size_bytes if new and new.is_stranger else 0) - (
            old.size_bytes if old and old.is_stranger else 0
        )
        self.strangers_bytes += strangers_bytes
        _count(self._by_key, key, entries, size_bytes, strangers, strangers_bytes)
        _count(self._by_writer, owner[0], entries, size_bytes)
        _count(self._by_key_and_writer, (key, owner[0]), entries, size_bytes)
        if new is None:
            del self._slots[key][owner]
            if not self._slots[key]:
                del self._slots[key]
                self._strangers_by_key.pop(key, None)
            return
        self._slots.setdefault(key, {})[owner] = new
        if new.is_stranger:
            self._strangers.add(key, owner, new, self._slots, self.entry_count)
            in_key = self._strangers_by_key.setdefault(key, _Heaviest())
            in_key.add(key, owner, new, self._slots, len(self._slots[key]))
        heapq.heappush(self._due, (new.due_us, next(self._counter), key, owner))
        # owners that renew often leave dead entries in the heap
        if len(self._due) > 64 + 4 * self.entry_count:
            slots = (
                (key, owner, slot) for key, owned in self._slots.items() for owner, slot in owned.items()
            )
            self._due = [(slot.due_us, next(self._counter), key, owner) for key, owner, slot in slots]
            heapq.heapify(self._due)


class _Heaviest:
    """Slots of strangers, those for far keys first, then the heaviest. Slots that were replaced since stay in
    the heap until they come up.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[bool, int, int, Key, Owner, _Slot]] = []
        self._counter = itertools.count()

    def add(
        self, key: Key, owner: Owner, slot: _Slot, slots: Mapping[Key, Mapping[Owner, _Slot]], held: int
    ) -> None:
        heapq.heappush(self._heap, (not slot.far, -slot.weight, next(self._counter), key, owner, slot))
        if len(self._heap) > 64 + 4 * held:
            self._heap = [entry for entry in self._heap if _is_held(slots, *entry[3:])]
            heapq.heapify(self._heap)

    def top(self, slots: Mapping[Key, Mapping[Owner, _Slot]]) -> tuple[Key, Owner, _Slot] | None:
        """Return the first slot, or None when there is none."""
        while self._heap:
            _, _, _, key, owner, slot = self._heap[0]
            if _is_held(slots, key, owner, slot):
                return key, owner, slot
            heapq.heappop(self._heap)
        return None


def _is_held(slots: Mapping[Key, Mapping[Owner, _Slot]], key: Key, owner: Owner, slot: _Slot) -> bool:
    return slots.get(key, {}).get(owner) is slot


def _count(
    usages: dict[_Name, Usage],
    name: _Name,
    entries: int,
    size_bytes: int,
    strangers_entries: int = 0,
    strangers_bytes: int = 0,
) -> None:
    usage = usages.setdefault(name, Usage())
    usage.entries += entries
    usage.size_bytes += size_bytes
    usage.strangers_entries += strangers_entries
    usage.strangers_bytes += strangers_bytes
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
