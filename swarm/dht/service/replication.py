"""Replication while peers come and go: hand-over to newcomers, repair after departures, periodic comparison,
and hand-over when this peer leaves.

Peers compare summaries (`summary`) before any record is sent: a record that both hold costs 16 bytes. Of a
key's holders the nearest acts first. The second nearest acts `SECOND_HOLDER_DELAY_S` later, in case the first
was unaware or has left as well; the others act only when the key has not been compared for a long time. A
single task does all this, one call at a time, so that the simultaneous death of half a swarm causes no burst
of traffic.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence

from swarm.core.ids import Contact, Key, PeerId
from swarm.core.notify import ChangeEvent
from swarm.dht.logic.companions import Companions
from swarm.dht.logic.constants import (
    ENTRIES_PER_SUMMARY_MAX,
    KEYS_PER_SUMMARY_MAX,
    NEWCOMERS_MAX,
    RECORD_BYTES_PER_CALL_MAX,
    RECORDS_PER_CALL_MAX,
    REPLICAS,
    REPLICATION_INTERVAL_S,
    SECOND_HOLDER_DELAY_S,
)
from swarm.dht.logic.records import Record
from swarm.dht.logic.storage import Storage
from swarm.dht.logic.summary import ENTRY_BYTES, missing_entries, summary
from swarm.dht.service.overlay import HOLDS, PING, STORE, Overlay
from swarm.dht.service.wire import key_to_wire, record_to_wire
from swarm.wire.dht_pb2 import DhtHeldKey, DhtHoldsRequest, DhtPingRequest, DhtStoreRequest

_HOLDERS_ACTING = 2  # nearest holders of a key that act directly when a peer comes or goes
_RECENT_S = 60.0  # a peer met less than this ago may itself still be waiting for the key
_KEYS_AT_ONCE = 64  # keys processed before other tasks get their turn
_CHECK_INTERVAL_S = 15.0
# interval at which a peer that holds a record without being its replica offers it to the replicas
_MISPLACED_INTERVAL_S = 120.0
# A record that expires sooner or was issued more recently is not compared: its writer will renew it soon, or
# never.
_STABLE_MARGIN_S = 60.0
_REPAIRS_MAX = 64
_REPAIRED_MAX = 2048
_REPAIR_INTERVAL_S = 60.0
_GOODBYES_MAX = 20
_CALLS_AT_LEAVING_MAX = 8


class Replication:
    """The replication work of one peer."""

    def __init__(
        self, overlay: Overlay, storage: Storage, rng: random.Random, companions: Companions
    ) -> None:
        """`companions`: the peers that hold records of runs in addition to the replicas."""
        self.companions = companions
        self._overlay = overlay
        self._storage = storage
        self._rng = rng
        # (contact, due, turn: 0 for the nearest holder)
        self._joined: OrderedDict[PeerId, tuple[Contact, float, int]] = OrderedDict()
        self._departed: OrderedDict[PeerId, tuple[Contact, float, int]] = OrderedDict()
        self._repairs: OrderedDict[PeerId, tuple[Contact, list[Record]]] = OrderedDict()
        self._repaired_s: OrderedDict[tuple[PeerId, Key], float] = OrderedDict()
        self._compared_s: dict[Key, float] = {}
        self._changed = ChangeEvent()
        self._next_check_s = 0.0

    @property
    def compared_keys(self) -> frozenset[Key]:
        """Return the keys of which this peer has compared its entries with those of other replicas."""
        return frozenset(self._compared_s)

    def on_peer_joined(self, contact: Contact) -> None:
        """Schedule a hand-over to a peer that has entered the table: it may have to hold records of this
        peer.
        """
        self._schedule(self._joined, contact)

    def on_peer_left(self, contact: Contact, *, said_goodbye: bool) -> None:
        """Schedule a repair after a peer has left the table: another peer may have to hold its records."""
        self._joined.pop(contact.peer_id, None)
        self._schedule(self._departed, contact)

    def schedule_repair(self, contact: Contact, records: Sequence[Record]) -> None:
        """Schedule sending records that a replica lacks, as a read showed: in the background, and each key to
        a peer at most once a minute.
        """
        now_s = self._overlay.clock.monotonic_s()
        key = records[0].key
        if (
            self._repaired_s.get((contact.peer_id, key), -_REPAIR_INTERVAL_S) > now_s - _REPAIR_INTERVAL_S
            or len(self._repairs) >= _REPAIRS_MAX
        ):
            return
        self._repaired_s[contact.peer_id, key] = now_s
        self._repaired_s.move_to_end((contact.peer_id, key))
        if len(self._repaired_s) > _REPAIRED_MAX:
            self._repaired_s.popitem(last=False)
        self._repairs.setdefault(contact.peer_id, (contact, []))[1].extend(records)
        self._changed.notify()

    def on_summary(self, caller: PeerId, key: Key, entries: bytes) -> list[int]:
        """Compare another holder's summary of a key with this peer's records. Returns the indices of the
        entries that this peer wants.

        If the caller is a replica that has answered a call, and this peer holds nothing more, the key counts
        as compared: one of its holders compares it with all others.
        """
        versions = self._storage.versions(key)
        missing = missing_entries(key, entries, versions)
        live = self._storage.records(key, self._overlay.now_us)
        theirs = {entries[at : at + ENTRY_BYTES] for at in range(0, len(entries), ENTRY_BYTES)}
        agreed = bool(live) and not missing and all(summary(key, [record]) in theirs for record in live)
        replicas = [contact.peer_id for contact in self._overlay.replicas(key.dht_id)]
        if agreed and caller in replicas and self._overlay.table.is_proven(caller):
            self._compared_s[key] = self._overlay.clock.monotonic_s()
        return missing

    async def run(self) -> None:
        """Perform scheduled work and periodic comparisons until cancelled."""
        self._next_check_s = self._overlay.clock.monotonic_s() + _CHECK_INTERVAL_S
        while True:
            self._changed.clear()
            await self._send_repairs()
            now_s = self._overlay.clock.monotonic_s()
            for waiting, targets in (
                (self._joined, self._for_newcomer),
                (self._departed, self._for_departed),
            ):
                for peer_id, (contact, due_s, turn) in list(waiting.items()):
                    if due_s <= now_s and waiting.pop(peer_id, None) is not None:
                        await self._offer_to_targets(contact, turn, targets)
                        if turn + 1 < _HOLDERS_ACTING:
                            waiting[peer_id] = (
                                contact,
                                now_s + SECOND_HOLDER_DELAY_S * self._rng.uniform(0.8, 1.2),
                                turn + 1,
                            )
            if now_s >= self._next_check_s:
                await self._compare(now_s)
                self._next_check_s = (
                    self._overlay.clock.monotonic_s() + _CHECK_INTERVAL_S * self._rng.uniform(0.8, 1.2)
                )
            await self._wait_until_due()

    async def hand_over(self) -> None:
        """Offer each record of this peer to the next nearest peer. The caller limits the time; partial
        progress is useful.
        """
        overlay = self._overlay
        limit = asyncio.Semaphore(_CALLS_AT_LEAVING_MAX)

        async def offer(contact: Contact, keys: Sequence[Key]) -> None:
            async with limit:
                await self._offer(contact, keys)

        by_target: dict[PeerId, tuple[Contact, list[Key]]] = {}
        for key in self._storage.keys():  # noqa: SIM118
            for contact in overlay.table.nearest(key.dht_id, 1):
                by_target.setdefault(contact.peer_id, (contact, []))[1].append(key)
        async with asyncio.TaskGroup() as group:
            for contact, keys in by_target.values():
                group.create_task(offer(contact, keys))

    async def say_goodbye(self) -> None:
        """Send a goodbye to the neighbours. This must come last, because any later call counts as a sign of
        life.
        """
        overlay = self._overlay
        if not overlay.own().addresses:
            return  # a client peer is in no table
        async with asyncio.TaskGroup() as group:
            for contact in overlay.table.nearest(overlay.own_id_number, _GOODBYES_MAX):
                group.create_task(
                    overlay.ask(contact, PING, DhtPingRequest(sender=overlay.sender, leaving=True))
                )

    def _schedule(self, waiting: OrderedDict[PeerId, tuple[Contact, float, int]], contact: Contact) -> None:
        waiting[contact.peer_id] = (contact, self._overlay.clock.monotonic_s(), 0)
        if len(waiting) > NEWCOMERS_MAX:
            waiting.popitem(last=False)
        self._changed.notify()

    async def _wait_until_due(self) -> None:
        """Wait until some work is due."""
        due_s = min(
            [
                self._next_check_s,
                *(due_s for waiting in (self._joined, self._departed) for _, due_s, _ in waiting.values()),
            ]
        )
        await self._changed.wait(max(due_s - self._overlay.clock.monotonic_s(), 0.001))

    async def _offer_to_targets(
        self, contact: Contact, turn: int, targets: Callable[[Key, Contact, int], Contact | None]
    ) -> None:
        """Offer every key to the peer that has to hold it now, if it is this peer's turn."""
        by_target: dict[PeerId, tuple[Contact, list[Key]]] = {}
        for number, key in enumerate(self._storage.keys(), 1):
            if number % _KEYS_AT_ONCE == 0:
                await asyncio.sleep(0)
            target = targets(key, contact, turn)
            if target is not None:
                by_target.setdefault(target.peer_id, (target, []))[1].append(key)
        for target, keys in by_target.values():
            await self._offer(target, keys)

    def _for_newcomer(self, key: Key, newcomer: Contact, turn: int) -> Contact | None:
        overlay, dht_id = self._overlay, key.dht_id
        replicas = overlay.replicas(dht_id)
        if newcomer.peer_id not in [contact.peer_id for contact in replicas]:
            return None
        return newcomer if self._rank(dht_id, replicas, newcomer.peer_id) == turn else None

    def _for_departed(self, key: Key, departed: Contact, turn: int) -> Contact | None:
        """Return the peer that has become a replica in place of the departed one, if it is this peer's
        turn.
        """
        overlay, dht_id = self._overlay, key.dht_id
        replicas = overlay.replicas(dht_id)
        last = replicas[-1] if replicas else None
        if last is None or last.peer_id == overlay.own_id or departed.peer_id in overlay.table:
            return None
        if departed.peer_id.dht_id ^ dht_id > last.peer_id.dht_id ^ dht_id:
            return None  # it was no replica of this key
        return last if self._rank(dht_id, replicas, last.peer_id) == turn else None

    def _rank(self, dht_id: int, replicas: Iterable[Contact], receiver: PeerId) -> int:
        """Return how many of the key's replicas are nearer than this peer and have been known long enough to
        hold it.
        """
        overlay = self._overlay
        own_distance, recent_s = overlay.own_id_number ^ dht_id, overlay.clock.monotonic_s() - _RECENT_S
        return sum(
            contact.peer_id not in (receiver, overlay.own_id)
            and contact.peer_id.dht_id ^ dht_id < own_distance
            and (overlay.table.since_s(contact.peer_id) or 0.0) < recent_s
            for contact in replicas
        )

    async def _compare(self, now_s: float) -> None:
        """Offer every key that has not been compared for a long time to all of its replicas. The delay grows
        with rank, so the nearest holder usually does it.
        """
        overlay, period_s = self._overlay, REPLICATION_INTERVAL_S
        by_target: dict[PeerId, tuple[Contact, list[Key]]] = {}
        held = self._storage.keys()
        for number, key in enumerate(held, 1):
            if number % _KEYS_AT_ONCE == 0:
                await asyncio.sleep(0)
            compared_s = self._compared_s.setdefault(key, now_s - period_s * self._rng.uniform(0.0, 0.5))
            if now_s - compared_s < min(period_s, _MISPLACED_INTERVAL_S) or not self._stable_records(key):
                continue
            replicas = overlay.replicas(key.dht_id)
            rank = sum(
                contact.peer_id.dht_id ^ key.dht_id < overlay.own_id_number ^ key.dht_id
                for contact in replicas
            )
            # The peer that stored it here could not reach the replicas at that time.
            misplaced = rank >= REPLICAS
            if now_s - compared_s < (_MISPLACED_INTERVAL_S if misplaced else period_s * (1.0 + 0.25 * rank)):
                continue
            self._compared_s[key] = now_s
            for contact in replicas:
                if contact.peer_id != overlay.own_id:
                    by_target.setdefault(contact.peer_id, (contact, []))[1].append(key)
        if len(self._compared_s) > len(held):
            kept = set(held)
            self._compared_s = {
                key: compared_s for key, compared_s in self._compared_s.items() if key in kept
            }
        for contact, keys in by_target.values():
            await self._offer(contact, keys, self._stable_records)

    def _stable_records(self, key: Key) -> list[Record]:
        """Return the records of a key that are neither about to expire nor just being written."""
        now_us = self._overlay.now_us
        margin_us = int(_STABLE_MARGIN_S * 1e6)
        return [
            record
            for record in self._storage.records(key, now_us)
            if record.expiration_us > now_us + margin_us
            and (record.is_blob or record.issued_at_us < now_us - margin_us)
        ]

    def _records(self, key: Key) -> list[Record]:
        return self._storage.records(key, self._overlay.now_us)

    async def _offer(
        self, contact: Contact, keys: Sequence[Key], records_of: Callable[[Key], list[Record]] | None = None
    ) -> None:
        """Send summaries of keys to a peer, then the records that it wants, in several calls if necessary.
        Stops when the peer does not answer.
        """
        overlay = self._overlay
        chunk: list[tuple[Key, list[Record]]] = []
        entries = 0
        for key in keys:
            records = (records_of or self._records)(key)
            for start in range(0, len(records), ENTRIES_PER_SUMMARY_MAX):
                part = records[start : start + ENTRIES_PER_SUMMARY_MAX]
                if chunk and (
                    entries + len(part) > ENTRIES_PER_SUMMARY_MAX or len(chunk) >= KEYS_PER_SUMMARY_MAX
                ):
                    if not await self._offer_chunk(contact, chunk):
                        return
                    chunk, entries = [], 0
                chunk.append((key, part))
                entries += len(part)
        if chunk and not overlay.is_suspect(contact.peer_id):
            await self._offer_chunk(contact, chunk)

    async def _offer_chunk(self, contact: Contact, chunk: Sequence[tuple[Key, list[Record]]]) -> bool:
        overlay = self._overlay
        held = [DhtHeldKey(key=key_to_wire(key), entries=summary(key, records)) for key, records in chunk]
        reply = await overlay.ask(contact, HOLDS, DhtHoldsRequest(sender=overlay.sender, keys=held))
        if reply is None:
            return False
        offered = [record for _, records in chunk for record in records]
        numbers = sorted({number for number in reply.wanted if number < len(offered)})
        return await self._push(contact, [offered[number] for number in numbers])

    async def _send_repairs(self) -> None:
        while self._repairs:
            _, (contact, records) = self._repairs.popitem(last=False)
            await self._push(contact, records)

    async def _push(self, contact: Contact, records: Sequence[Record]) -> bool:
        """Send records in calls of bounded size. Returns False when the peer does not answer."""
        for batch in batches(records, RECORDS_PER_CALL_MAX, RECORD_BYTES_PER_CALL_MAX):
            request = DhtStoreRequest(sender=self._overlay.sender, records=map(record_to_wire, batch))
            if await self._overlay.ask(contact, STORE, request) is None:
                return False
        return True


def batches(records: Iterable[Record], count_max: int, bytes_max: int) -> list[list[Record]]:
    """Split records into batches of at most `count_max` records and `bytes_max` bytes (or a single
    record).
    """
    found: list[list[Record]] = []
    sizes: defaultdict[int, int] = defaultdict(int)
    for record in records:
        last = len(found) - 1
        if not found or len(found[last]) >= count_max or sizes[last] + record.size_bytes > bytes_max:
            found.append([])
            last += 1
        found[last].append(record)
        sizes[last] += record.size_bytes
    return found
