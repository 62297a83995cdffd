"""Reads: one search per key at a time, shared by all concurrent readers, merged with the records of this
peer, and cached.

The reader chooses how old an answer may be (`max_age_s`). By default a replica answers from memory for
`LOCAL_READ_TTL_S` after it last compared the key with the others, as long as its neighbourhood does not
change: every write reaches it in the same call that reaches the others. Any other peer asks the replicas.
`latest` always asks, and asks more peers.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from swarm.core.errors import DeadlineExceeded, NetworkError, PeerError
from swarm.core.ids import Contact, Key, PeerId
from swarm.dht.logic.cache import CachedAnswer, ReadCache
from swarm.dht.logic.companions import circle_of
from swarm.dht.logic.constants import (
    ENTRIES_PER_SUMMARY_MAX,
    LOCAL_READ_TTL_S,
    PARALLEL,
    REPLICAS,
    SEARCH_JOIN_WINDOW_S,
)
from swarm.dht.logic.records import Owner, Record
from swarm.dht.logic.storage import Storage, latest_by_owner
from swarm.dht.logic.summary import summary
from swarm.dht.service.overlay import FIND, Overlay
from swarm.dht.service.replica import ReplicaStore
from swarm.dht.service.replication import Replication
from swarm.dht.service.wire import key_to_wire
from swarm.runtime.supervise import Supervisor
from swarm.wire.dht_pb2 import DhtFindQuery, DhtFindRequest, DhtFindResult, DhtRecord

_REPAIR_AGE_US = 2_000_000  # a record issued later may still be on its way to its replicas
_REPAIR_LIFE_US = 5_000_000  # a record that expires sooner is not sent to replicas that lack it

Versions: TypeAlias = Mapping[Owner, tuple[int, bytes]]


@dataclass(slots=True, eq=False)
class RecordSearch:
    """A read, running or done."""

    key: Key
    started_s: float
    started_us: int = 0
    # value of `Overlay.neighbourhood_version` at the start: a change meanwhile invalidates the cached answer
    neighbourhood_version: int = 0
    latest: dict[Owner, Record] = field(default_factory=dict)
    # the versions that each peer answered with; one object for equal answers
    versions_by_peer: dict[PeerId, Versions] = field(default_factory=dict)
    # the last answer, and the versions of those of its records that were accepted
    last_answer: tuple[Sequence[DhtRecord], Versions] | None = None
    asked: int = 0
    answers: int = 0
    is_done: bool = False
    timed_out: bool = False  # done because `search_timeout_s` has passed
    waiting: list[asyncio.Future[None]] = field(default_factory=list)

    def merge(self, records: Sequence[Record]) -> None:
        """Merge records into the result, keeping the latest of each owner."""
        self.latest = latest_by_owner([*self.latest.values(), *records])

    def end(self, task: object = None) -> None:
        """Mark the search done and wake all waiting readers. Idempotent."""
        self.is_done = True
        while self.waiting:
            _release(self.waiting.pop())

    async def wait(self, timeout_s: float) -> None:
        """Wait until the search has ended, at most `timeout_s`. An event and `asyncio.timeout` would cost a
        twentieth of a read.
        """
        if self.is_done:
            return
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self.waiting.append(waiter)
        timer = loop.call_later(max(timeout_s, 0.0), _release, waiter)
        try:
            await waiter
        finally:
            timer.cancel()

    def failure(self, timeout_s: float, *, confirmed: bool = False) -> NetworkError | None:
        """Return the error for a reader that stops waiting; None when there is an answer, or there was no
        peer to ask. `confirmed`: the records of this peer itself are no answer.

        If all peers failed, it is unknown whether the key is empty.
        """
        if not self.asked or self.answers or (self.latest and not confirmed):
            return None
        text, advice = (
            f"none of the {self.asked} peers asked for {self.key} answered",
            "see node.peers() for who is known",
        )
        if self.is_done and not self.timed_out:
            return NetworkError(f"{text}, all failed or refused: {advice}")
        return DeadlineExceeded(f"{text} within {timeout_s:g} s: {advice}")


def _release(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Reader:
    """The reads of one peer."""

    def __init__(
        self,
        overlay: Overlay,
        storage: Storage,
        replica: ReplicaStore,
        replication: Replication,
        cache: ReadCache,
        supervisor: Supervisor,
    ) -> None:
        self._overlay = overlay
        self._storage = storage
        self._replica = replica
        self._replication = replication
        self._supervisor = supervisor
        self._companions = replication.companions
        self.cache = cache
        self.running: dict[tuple[Key, bool], RecordSearch] = {}

    def invalidate(self, key: Key) -> None:
        """Detach the key from running searches and the cache, because this peer writes it: a read that begins
        now must see the write.
        """
        self.running.pop((key, False), None)
        self.running.pop((key, True), None)
        self.cache.drop(key)

    def begin(self, key: Key) -> RecordSearch:
        """Return a new search that starts now."""
        overlay = self._overlay
        return RecordSearch(key, overlay.clock.monotonic_s(), overlay.now_us, overlay.neighbourhood_version)

    def cached_search(self, key: Key, max_age_s: float | None) -> RecordSearch | None:
        """Return an answer that needs no call, or None."""
        overlay, now_s = self._overlay, self._overlay.clock.monotonic_s()
        age_s = LOCAL_READ_TTL_S if max_age_s is None else max_age_s
        answer = self.cache.get(key, now_s, overlay.now_us, age_s) if age_s > 0 else None
        if max_age_s is None:
            if (
                answer is None
                or answer.neighbourhood_version != overlay.neighbourhood_version
                or not overlay.is_stable
            ):
                return None
            if not overlay.is_replica(key.dht_id):
                return None
        if answer is None:
            return None
        search = self.begin(key)
        search.latest = dict(answer.latest)
        search.merge(self._storage.records(key, overlay.now_us))
        if max_age_s is None and self._companions.is_due(key, search.latest, now_s, overlay.now_us):
            return None  # a writer that was misled about the replicas did not write to this peer
        return search

    async def read(
        self,
        key: Key,
        *,
        exhaustive: bool,
        max_age_s: float | None,
        timeout_s: float,
        confirmed: bool = False,
    ) -> RecordSearch:
        """Return the finished search for a key. Raises NetworkError when no peer answered (DeadlineExceeded:
        in time); a partial set of answers is used. `confirmed`: as in `RecordSearch.failure`.
        """
        now_s = self._overlay.clock.monotonic_s()
        if not exhaustive:
            found = self.cached_search(key, max_age_s)
            if found is not None:
                return found
        search_join_window_s = SEARCH_JOIN_WINDOW_S if exhaustive or max_age_s is None else max_age_s
        search = self.running.get((key, exhaustive))
        if search is None or search.started_s < now_s - search_join_window_s or search_join_window_s == 0:
            search = self.running[key, exhaustive] = self.begin(key)
            task = self._supervisor.spawn(
                f"DHT read of {key}", functools.partial(self._search, search, exhaustive)
            )
            task.add_done_callback(search.end)
        await search.wait(timeout_s)
        error = search.failure(timeout_s, confirmed=confirmed)
        if error is not None:
            raise error
        return search

    async def merge_answer(self, search: RecordSearch, peer: PeerId, result: DhtFindResult) -> list[Contact]:
        """Merge a peer's answer, and return the closer peers that it named. Raises PeerError when the answer
        is malformed.
        """
        closer = self._overlay.contacts_from_answer(result.nearest)
        last_answer = search.last_answer
        if (
            last_answer is None or last_answer[0] != result.records
        ):  # usually all replicas send the same answer
            records = [
                record
                for record in await self._replica.validate(result.records)
                if isinstance(record, Record) and record.key == search.key
            ]
            versions = {record.owner: record.version for record in records}
            last_answer = search.last_answer = result.records, versions
            search.merge(records)
        search.versions_by_peer[peer] = last_answer[1]
        search.answers += 1
        return closer

    def finish(self, search: RecordSearch, nearest: Sequence[Contact]) -> None:
        """Finish a search that has found its peers: store what this peer should hold, repair replicas that
        lack records, cache the answer.
        """
        overlay, key = self._overlay, search.key
        replicas = nearest[:REPLICAS]
        if len(replicas) == REPLICAS:
            self._overlay.found.note(key, replicas)
        if any(contact.peer_id == overlay.own_id for contact in replicas):
            for record in search.latest.values():
                if record != self._storage.record_of(key, record.owner):
                    self._replica.store_record(record, direct=False)
            self._repair_replicas(search, replicas)
        # Records may have been written here meanwhile, by this peer or by others.
        search.merge(self._storage.records(key, overlay.now_us))
        self.cache.put(
            key,
            CachedAnswer(search.started_s, search.started_us, search.neighbourhood_version, search.latest),
        )

    def _repair_replicas(self, search: RecordSearch, replicas: Sequence[Contact]) -> None:
        """Send the replicas that answered the records that they lack. Only replicas do this: if every reader
        did, the load would be excessive.
        """
        now_us = self._overlay.now_us
        old = [
            record
            for record in search.latest.values()
            if record.issued_at_us < now_us - _REPAIR_AGE_US
            and record.expiration_us > now_us + _REPAIR_LIFE_US
        ]
        for contact in replicas:
            versions = search.versions_by_peer.get(contact.peer_id)
            if versions is not None:
                lacking = [record for record in old if versions.get(record.owner, (-1, b"")) < record.version]
                if lacking:
                    self._replication.schedule_repair(contact, lacking)

    def _replicas_agree(self, search: RecordSearch, nearest: Sequence[Contact]) -> bool:
        """Return whether the peers nearest to the key, a majority of its replicas, hold the same records, and
        at least one.
        """
        if len(nearest) <= REPLICAS // 2:
            return False
        held = [self._versions_at(contact.peer_id, search) for contact in nearest]
        return bool(held[0]) and all(one is held[0] or one == held[0] for one in held)

    def _versions_at(self, peer: PeerId, search: RecordSearch) -> Versions:
        """Return the versions of the records that a peer, perhaps this one, has under the key."""
        if peer != self._overlay.own_id:
            return search.versions_by_peer.get(peer, {})
        return {one.owner: one.version for one in self._storage.records(search.key, self._overlay.now_us)}

    async def _search(self, search: RecordSearch, exhaustive: bool) -> None:
        """Ask the replicas, and companions where that is due, and merge their records. Ends by
        `search_timeout_s`, even if readers would wait longer.
        """
        overlay, key = self._overlay, search.key
        try:
            if circle_of(key) is None:
                await self._ask_replicas(search, exhaustive)
                return
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(self._ask_replicas(search, exhaustive))
                await asyncio.wait([asking], timeout=overlay.timings.dht_stall_s)
                if await self.ask_companions(search) and not asking.done():
                    search.merge(self._storage.records(key, overlay.now_us))
                    search.end()  # peers that claim to be near the key do not answer
        finally:
            search.merge(self._storage.records(key, overlay.now_us))
            if self.running.get((key, exhaustive)) is search:
                del self.running[key, exhaustive]
            search.end()

    async def ask_companions(self, search: RecordSearch) -> bool:
        """Ask members of a run for what the replicas lack, if that is due. Return whether one answered."""
        overlay, key, companions = self._overlay, search.key, self._companions
        asked = {overlay.own_id, *search.versions_by_peer}
        now_s = overlay.clock.monotonic_s()
        due = companions.to_ask(key, search.latest, search.versions_by_peer, now_s, overlay.now_us)
        has_answered = False
        while due:  # members named in the answers are asked next
            asked.update(contact.peer_id for contact in due)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._ask_companion(search, contact)) for contact in due]
            named = [contact for task in tasks for contact in task.result() or ()]
            has_answered |= any(task.result() is not None for task in tasks)
            due = [contact for contact in dict.fromkeys(named) if contact.peer_id not in asked]
        cached = self.cache.get(key, now_s, overlay.now_us, math.inf)
        if has_answered and cached is not None and cached.taken_s == search.started_s:
            self.cache.put(key, replace(cached, latest=search.latest))  # includes what the replicas lack
        return has_answered

    async def _ask_companion(self, search: RecordSearch, contact: Contact) -> list[Contact] | None:
        """Merge the records of a key that a member has and this peer lacks. Return the members that it names;
        None when it does not answer.
        """
        overlay, key = self._overlay, search.key
        have = summary(key, itertools.islice(search.latest.values(), ENTRIES_PER_SUMMARY_MAX))
        request = DhtFindRequest(
            sender=overlay.sender,
            queries=[DhtFindQuery(key=key_to_wire(key))],
            nearest_max=1,
            members=True,
            have=have,
        )
        reply = await overlay.ask(contact, FIND, request)
        if reply is None or len(reply.results) != 1:
            return None  # perhaps an invented address: a companion never makes a read fail
        try:
            members = overlay.contacts_from_answer(reply.results[0].members)
        except PeerError:
            overlay.on_failure(contact.peer_id, broke_protocol=True)
            return None
        validated = await self._replica.validate(reply.results[0].records)
        records = [one for one in validated if isinstance(one, Record) and one.key == key]
        search.merge(records)
        search.asked, search.answers = search.asked + 1, search.answers + 1
        owners = {record.owner: record.expiration_us for record in records}
        self._companions.on_answer(key, owners, overlay.clock.monotonic_s(), overlay.now_us)
        return self._companions.on_named(key, contact.peer_id, members)

    async def _ask_replicas(self, search: RecordSearch, exhaustive: bool) -> None:
        """Ask the replicas and merge their records.

        A majority is asked first: it contains at least one holder of any record that most replicas hold. The
        others are asked only if the majority disagrees or holds nothing.
        """
        overlay, key = self._overlay, search.key
        nearest_max = REPLICAS if overlay.knows_all and not exhaustive else 0
        request = DhtFindRequest(
            sender=overlay.sender,
            queries=[DhtFindQuery(key=key_to_wire(key))],
            nearest_max=nearest_max,
            known=overlay.known_peers,
        )

        async def ask(contact: Contact) -> Sequence[Contact] | None:
            search.asked += 1
            reply = await overlay.ask(contact, FIND, request)
            if reply is None or len(reply.results) != 1:
                return None
            return await self.merge_answer(search, contact.peer_id, reply.results[0])

        wanted = overlay.bucket_max if exhaustive else REPLICAS // 2 + 1
        until_s = search.started_s + overlay.timings.dht_search_timeout_s
        search.merge(self._storage.records(key, overlay.now_us))
        try:
            lookup = overlay.lookup(
                key.dht_id, wanted=wanted, parallel=max(wanted, PARALLEL) if exhaustive else wanted
            )
            nearest = await overlay.search(lookup, ask, until_s)
            if not exhaustive and not self._replicas_agree(search, nearest):
                lookup.widen(REPLICAS)
                nearest = await overlay.search(lookup, ask, until_s)
            if search.answers or not search.asked:
                self.finish(search, nearest)
        except TimeoutError:
            search.timed_out = True
