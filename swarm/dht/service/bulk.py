"""Operations on many keys: their searches run concurrently, and queries for the same peer share a call."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

from swarm.core.errors import PeerError
from swarm.core.ids import Contact, Key, PeerId
from swarm.dht.logic.companions import Companions, circle_of
from swarm.dht.logic.constants import (
    BULK_ACTIVE_MAX,
    BULK_CALLS_MAX,
    QUERIES_PER_CALL_MAX,
    RECORD_BYTES_PER_CALL_MAX,
    RECORDS_PER_CALL_MAX,
    REPLICAS,
)
from swarm.dht.logic.lookup import Lookup, LookupDone
from swarm.dht.logic.records import Record
from swarm.dht.service.overlay import FIND, STORE, Overlay
from swarm.dht.service.reader import Reader, RecordSearch
from swarm.dht.service.replica import ReplicaStore
from swarm.dht.service.replication import batches
from swarm.dht.service.wire import id_to_wire, key_to_wire, record_to_wire
from swarm.dht.service.writer import Verdicts
from swarm.wire.dht_pb2 import DhtFindQuery, DhtFindRequest, DhtFindResult, DhtStoreRequest

# attempts to place records: after each, records whose replicas failed go to the next nearest peers
_ROUNDS_MAX = 3
_ANSWER_WAIT_S_MAX = 1.0

MergeAnswer = Callable[[Key, Contact, DhtFindResult], Awaitable[Sequence[Contact]]]


def _chunks(keys: Sequence[Key], count_max: int) -> Iterator[Sequence[Key]]:
    return (keys[start : start + count_max] for start in range(0, len(keys), count_max))


class ManySearches:
    """Drive the lookups of many keys. `merge_answer` takes one peer's answer about one key, and returns the
    closer peers in it.
    """

    def __init__(
        self,
        overlay: Overlay,
        lookups: Mapping[Key, Lookup],
        query_of: Callable[[Key], DhtFindQuery],
        merge_answer: MergeAnswer,
    ) -> None:
        self._overlay = overlay
        self._lookups = dict(lookups)
        self._query_of = query_of
        self._merge_answer = merge_answer
        self._limit = asyncio.Semaphore(BULK_CALLS_MAX)
        self._inbox: asyncio.Queue[tuple[PeerId, dict[Key, Sequence[Contact] | None]]] = asyncio.Queue()
        self._nearest_max = REPLICAS if overlay.knows_all else 0

    async def run(self, on_done: Callable[[Key, tuple[Contact, ...]], None]) -> None:
        """Run until every lookup is done; call `on_done` for each one when it is done."""
        overlay = self._overlay
        async with asyncio.TaskGroup() as group:
            tasks: list[asyncio.Task[None]] = []
            try:
                changed: Iterable[Key] = list(self._lookups)
                while self._lookups:
                    for contact, keys in self._poll(changed, on_done):
                        tasks.append(group.create_task(self._call(contact, keys)))
                    if self._lookups:
                        changed = await self._wait_for_answers()
            finally:
                for peer_id in {peer_id for lookup in self._lookups.values() for peer_id in lookup.stalled}:
                    overlay.on_failure(peer_id)
                for task in tasks:
                    task.cancel()

    def _poll(
        self, changed: Iterable[Key], on_done: Callable[[Key, tuple[Contact, ...]], None]
    ) -> Iterator[tuple[Contact, Sequence[Key]]]:
        """Poll these lookups and yield the calls to make now: a peer and at most `queries_per_call_max` keys
        each.
        """
        now_s = self._overlay.clock.monotonic_s()
        calls: dict[PeerId, tuple[Contact, list[Key]]] = {}
        for key in changed:
            for effect in self._lookups[key].poll(now_s):
                if isinstance(effect, LookupDone):
                    for peer_id in self._lookups.pop(key).stalled:
                        self._overlay.on_failure(peer_id)
                    on_done(key, effect.nearest)
                else:
                    calls.setdefault(effect.contact.peer_id, (effect.contact, []))[1].append(key)
        for contact, keys in calls.values():
            for chunk in _chunks(keys, QUERIES_PER_CALL_MAX):
                yield contact, chunk

    async def _call(self, contact: Contact, keys: Sequence[Key]) -> None:
        answers: dict[Key, Sequence[Contact] | None] = dict.fromkeys(keys)
        try:
            async with self._limit:
                results = await self._find(contact, keys)
                # The reply was full: keys that did not fit are asked for alone.
                for number, key in enumerate(keys if results is not None else ()):
                    if results is not None and results[number].left_out and len(keys) > 1:
                        again = await self._find(contact, [key])
                        results[number] = again[0] if again is not None else results[number]
            if results is not None:
                for key, result in zip(keys, results, strict=True):
                    answers[key] = await self._merge_answer(key, contact, result)
        except PeerError:
            self._overlay.on_failure(contact.peer_id, broke_protocol=True)
        self._inbox.put_nowait((contact.peer_id, answers))

    async def _find(self, contact: Contact, keys: Sequence[Key]) -> list[DhtFindResult] | None:
        request = DhtFindRequest(
            sender=self._overlay.sender,
            queries=map(self._query_of, keys),
            nearest_max=self._nearest_max,
            known=self._overlay.known_peers,
        )
        reply = await self._overlay.ask(contact, FIND, request)
        return list(reply.results) if reply is not None and len(reply.results) == len(keys) else None

    async def _wait_for_answers(self) -> set[Key]:
        """Wait for answers and return the keys whose lookups must be polled, because of an answer or a
        stalled call.
        """
        deadlines = [
            deadline_s for lookup in self._lookups.values() if (deadline_s := lookup.deadline_s()) is not None
        ]
        now_s = self._overlay.clock.monotonic_s()
        answered = []
        try:
            async with asyncio.timeout(
                max(min(deadlines, default=now_s + _ANSWER_WAIT_S_MAX) - now_s, 0.001)
            ):
                answered.append(await self._inbox.get())
        except TimeoutError:
            now_s = self._overlay.clock.monotonic_s()
            return {
                key
                for key, lookup in self._lookups.items()
                if (deadline_s := lookup.deadline_s()) is not None and deadline_s <= now_s
            }
        while not self._inbox.empty():
            answered.append(self._inbox.get_nowait())
        changed = set()
        for peer_id, answers in answered:
            for key, closer in answers.items():
                lookup = self._lookups.get(key)
                if lookup is None:
                    continue
                changed.add(key)
                if closer is None:
                    lookup.on_failure(peer_id)
                else:
                    lookup.on_reply(peer_id, closer)
        return changed


class ManyReads:
    """Reads of many keys. `searches` holds the result of each key, also when `run` is cancelled."""

    def __init__(
        self, overlay: Overlay, reader: Reader, storage_records: Callable[[Key, int], list[Record]]
    ) -> None:
        self._overlay = overlay
        self._reader = reader
        self._records = storage_records
        self._limit = asyncio.Semaphore(BULK_CALLS_MAX)
        self.searches: dict[Key, RecordSearch] = {}

    async def run(self, keys: Iterable[Key], *, exhaustive: bool, max_age_s: float | None) -> None:
        """Read all keys. Keys that are near one another are read together, because they share replicas."""
        overlay = self._overlay
        unknown: list[Key] = []
        for key in sorted(set(keys), key=lambda key: key.dht_id):
            found = None if exhaustive else self._reader.cached_search(key, max_age_s)
            self.searches[key] = found or self._reader.begin(key)
            if found is not None:
                found.end()
            else:
                unknown.append(key)
        wanted = overlay.bucket_max if exhaustive else REPLICAS
        for chunk in _chunks(unknown, BULK_ACTIVE_MAX):
            lookups = {}
            for key in chunk:
                self.searches[key].merge(self._records(key, overlay.now_us))
                lookups[key] = overlay.lookup(key.dht_id, wanted=wanted, parallel=REPLICAS)
            searches = ManySearches(overlay, lookups, self._query, self._merge_answer)
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(searches.run(self._done))
                of_runs = [self.searches[key] for key in chunk if circle_of(key) is not None]
                if of_runs:
                    await asyncio.wait([asking], timeout=overlay.timings.dht_stall_s)
                for search in of_runs:
                    group.create_task(self._ask_companions(search))

    async def _ask_companions(self, search: RecordSearch) -> None:
        """Ask members of the run for what the replicas of a key lack: hostile peers may surround the key."""
        async with self._limit:
            await self._reader.ask_companions(search)

    def _query(self, key: Key) -> DhtFindQuery:
        self.searches[key].asked += 1
        return DhtFindQuery(key=key_to_wire(key))

    async def _merge_answer(self, key: Key, contact: Contact, result: DhtFindResult) -> Sequence[Contact]:
        return await self._reader.merge_answer(self.searches[key], contact.peer_id, result)

    def _done(self, key: Key, nearest: tuple[Contact, ...]) -> None:
        search = self.searches[key]
        if search.answers or not search.asked:
            self._reader.finish(search, nearest)
        search.end()


class ManyWrites:
    """Writes of many records, batched into calls of bounded size per replica. `verdicts` are in the records'
    order.
    """

    def __init__(
        self, overlay: Overlay, replica: ReplicaStore, records: Sequence[Record], companions: Companions
    ) -> None:
        """`companions`: the peers that hold records of some keys in addition to the replicas."""
        self._overlay, self._companions = overlay, companions
        self._replica = replica
        self._records = records
        self._limit = asyncio.Semaphore(BULK_CALLS_MAX)
        self._failed: set[PeerId] = set()
        self.verdicts = [Verdicts() for _ in records]
        self._numbers = {id(record): number for number, record in enumerate(records)}

    async def run(self) -> None:
        """Run until every replica has answered or failed."""
        async with asyncio.TaskGroup() as group:
            beside = {record.key: self._beside_replicas(record.key) for record in self._records}
            held = group.create_task(self._store_at_each(beside))  # peers near a key may not answer
            nearest = await self._nearest()
            await held
        for _ in range(_ROUNDS_MAX):
            live = {
                key: [one for one in found if one.peer_id not in self._failed][:REPLICAS]
                for key, found in nearest.items()
            }
            if not await self._store_at_each(live):
                return

    async def _store_at_each(self, holders: Mapping[Key, Sequence[Contact]]) -> bool:
        """Store each record at those of its holders that have not answered. Return whether any was asked."""
        calls: dict[PeerId, tuple[Contact, list[Record]]] = {}
        for record, verdicts in zip(self._records, self.verdicts, strict=True):
            for contact in holders[record.key]:
                if contact.peer_id not in verdicts:
                    calls.setdefault(contact.peer_id, (contact, []))[1].append(record)
        async with asyncio.TaskGroup() as group:
            for contact, records in calls.values():
                group.create_task(self._store_at(contact, records))
        return bool(calls)

    def _beside_replicas(self, key: Key) -> list[Contact]:
        own = self._overlay.own()
        holds = bool(own.addresses) and self._companions.is_holder(key)
        return [*self._companions.holders(key, self._overlay.clock.monotonic_s()), *([own] if holds else [])]

    def store_unplaced(self) -> None:
        """Store the records that no other peer has taken on this peer, if others can reach it: newcomers get
        them from here.
        """
        if not self._overlay.own().addresses:
            return
        for record, verdicts in zip(self._records, self.verdicts, strict=True):
            if not verdicts.held and self._overlay.own_id not in verdicts:
                verdicts.note(self._overlay.own_id, self._replica.store_record(record, direct=True))

    async def _nearest(self) -> dict[Key, Sequence[Contact]]:
        """Return the candidates for the replicas of every key, including spare ones."""
        overlay = self._overlay
        own = overlay.own()
        keys = sorted({record.key for record in self._records}, key=lambda key: key.dht_id)
        found: dict[Key, Sequence[Contact]] = {}
        if overlay.knows_all:
            all_peers = [*overlay.table, *([own] if own.addresses else [])]
            for key in keys:
                found[key] = sorted(all_peers, key=functools.partial(_distance, key))
            return found

        async def merge_answer(key: Key, contact: Contact, result: DhtFindResult) -> Sequence[Contact]:
            return overlay.contacts_from_answer(result.nearest)

        for chunk in _chunks(keys, BULK_ACTIVE_MAX):
            lookups = {key: overlay.lookup(key.dht_id, wanted=REPLICAS, parallel=REPLICAS) for key in chunk}
            searches = ManySearches(
                overlay, lookups, lambda key: DhtFindQuery(target=id_to_wire(key.dht_id)), merge_answer
            )
            await searches.run(found.__setitem__)
        return found

    async def _store_at(self, contact: Contact, records: Sequence[Record]) -> None:
        overlay = self._overlay
        if contact.peer_id == overlay.own_id:
            for record in records:
                self._note(contact.peer_id, record, self._replica.store_record(record, direct=True))
            return
        for batch in batches(records, RECORDS_PER_CALL_MAX, RECORD_BYTES_PER_CALL_MAX):
            async with self._limit:
                request = DhtStoreRequest(sender=overlay.sender, records=map(record_to_wire, batch))
                reply = await overlay.ask(contact, STORE, request)
            if reply is None or len(reply.refusals) != len(batch):
                self._failed.add(contact.peer_id)
                return
            for record, refusal in zip(batch, reply.refusals, strict=True):
                self._note(contact.peer_id, record, refusal)

    def _note(self, peer: PeerId, record: Record, refusal: str) -> None:
        self.verdicts[self._numbers[id(record)]].note(peer, refusal)


def _distance(key: Key, contact: Contact) -> int:
    """Return the XOR distance between a peer and a key."""
    return contact.peer_id.dht_id ^ key.dht_id
