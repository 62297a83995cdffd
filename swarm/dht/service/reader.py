"""Reading: one search per key at a time, shared by all who ask meanwhile, merged with what this peer holds,
remembered for a while.

How old an answer may be is the reader's choice (`max_age_s`). Unless it says so, a replica answers by itself
for `local_s` after it last compared the key with the others, as long as its neighbourhood stays as it is:
every write reaches it in the same call that reaches the others. Anybody else asks the replicas. `latest`
always asks, and more widely.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm.core.errors import DeadlineExceeded, NetworkError
from swarm.core.ids import Contact, Key, PeerId
from swarm.dht.logic.cache import CachedAnswer, ReadCache
from swarm.dht.logic.records import Owner, Record
from swarm.dht.logic.storage import Storage, latest_by_owner
from swarm.dht.service.overlay import FIND, Overlay
from swarm.dht.service.replica import ReplicaStore
from swarm.dht.service.replication import Replication
from swarm.dht.service.wire import key_to_wire
from swarm.runtime.supervise import Supervisor
from swarm.wire.dht_pb2 import DhtFindQuery, DhtFindRequest, DhtFindResult, DhtRecord

_REPAIR_AGE_US = 2_000_000  # a record issued later may still be on its way to its replicas
_REPAIR_LIFE_US = 5_000_000  # one that expires sooner is not worth a call


@dataclass(slots=True, eq=False)
class RecordSearch:
    """A read in progress or done."""

    key: Key
    started_s: float
    started_us: int = 0
    neighbourhood: int = 0  # `Overlay.neighbourhood` when it began: a change meanwhile counts as one since
    latest: dict[Owner, Record] = field(default_factory=dict)
    # what each peer answered with
    given: dict[PeerId, dict[Owner, tuple[int, bytes]]] = field(default_factory=dict)
    # the last answer, and what of it was accepted
    told: tuple[Sequence[DhtRecord], list[Record]] | None = None
    asked: int = 0
    answers: int = 0
    is_done: bool = False
    gave_up: bool = False  # done because its time was over
    waiting: list[asyncio.Future[None]] = field(default_factory=list)

    def merge(self, records: Sequence[Record]) -> None:
        """Of each owner's records the latest is kept."""
        self.latest = latest_by_owner([*self.latest.values(), *records])

    def end(self, task: object = None) -> None:
        """Whoever waits goes on. Idempotent."""
        self.is_done = True
        while self.waiting:
            _release(self.waiting.pop())

    async def wait(self, timeout_s: float) -> None:
        """Until it has ended, at most so long. An event and `asyncio.timeout` would cost a twentieth of a
        read.
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

    def failure(self, timeout_s: float) -> NetworkError | None:
        """The error of a reader that waits no longer; None when there is something to answer with, or nobody
        to ask.

        Peers that all failed have not said that there is nothing.
        """
        if not self.asked or self.answers or self.latest:
            return None
        text, advice = (
            f"none of the {self.asked} peers asked for {self.key} answered",
            "see node.peers() for who is known",
        )
        if self.is_done and not self.gave_up:
            return NetworkError(f"{text}, all failed or refused: {advice}")
        return DeadlineExceeded(f"{text} within {timeout_s:g} s: {advice}")


def _release(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Reader:
    """One peer's reads."""

    def __init__(
        self,
        overlay: Overlay,
        storage: Storage,
        replica: ReplicaStore,
        replication: Replication,
        supervisor: Supervisor,
    ) -> None:
        self._overlay = overlay
        self._storage = storage
        self._replica = replica
        self._replication = replication
        self._supervisor = supervisor
        self.cache = ReadCache(overlay.config.cached_max, overlay.config.cached_bytes_max)
        self.running: dict[tuple[Key, bool], RecordSearch] = {}
        replica.on_first = self.note_first

    def forget(self, key: Key) -> None:
        """This peer writes: a read that begins now must see it."""
        self.running.pop((key, False), None)
        self.running.pop((key, True), None)
        self.cache.drop(key)

    def note_first(self, key: Key) -> None:
        """This peer, a replica of the key, held nothing under it and has just been given the first record by
        its writer.
        """
        if self._overlay.is_settled:
            self.cache.put(
                key,
                CachedAnswer(
                    self._overlay.clock.monotonic_s(), self._overlay.now_us, self._overlay.neighbourhood, {}
                ),
            )

    def begin(self, key: Key) -> RecordSearch:
        """A search that starts now."""
        overlay = self._overlay
        return RecordSearch(key, overlay.clock.monotonic_s(), overlay.now_us, overlay.neighbourhood)

    def remembered(self, key: Key, max_age_s: float | None) -> RecordSearch | None:
        """What may be answered without asking anybody."""
        overlay, now_s = self._overlay, self._overlay.clock.monotonic_s()
        age_s = overlay.config.local_s if max_age_s is None else max_age_s
        answer = self.cache.get(key, now_s, overlay.now_us, age_s) if age_s > 0 else None
        if max_age_s is None:
            if answer is None or answer.neighbourhood != overlay.neighbourhood or not overlay.is_settled:
                return None
            if not overlay.is_replica(key.dht_id):
                return None
        if answer is None:
            return None
        search = self.begin(key)
        search.latest = dict(answer.latest)
        search.merge(self._storage.records(key, overlay.now_us))
        return search

    async def read(
        self, key: Key, *, exhaustive: bool, max_age_s: float | None, timeout_s: float
    ) -> RecordSearch:
        """NetworkError when no peer answered, or none in time (DeadlineExceeded); what part of them answered
        is used otherwise.
        """
        now_s = self._overlay.clock.monotonic_s()
        if not exhaustive:
            found = self.remembered(key, max_age_s)
            if found is not None:
                return found
        share_s = self._overlay.config.share_s if exhaustive or max_age_s is None else max_age_s
        search = self.running.get((key, exhaustive))
        if search is None or search.started_s < now_s - share_s or share_s == 0:
            search = self.running[key, exhaustive] = self.begin(key)
            task = self._supervisor.spawn(
                f"DHT read of {key}", functools.partial(self._search, search, exhaustive)
            )
            task.add_done_callback(search.end)
        await search.wait(timeout_s)
        error = search.failure(timeout_s)
        if error is not None:
            raise error
        return search

    async def absorb(self, search: RecordSearch, peer: PeerId, result: DhtFindResult) -> list[Contact]:
        """Take a peer's answer in; returns the closer peers that it named. PeerError when it is malformed."""
        closer = self._overlay.heard_of(result.nearest)
        told = search.told
        if told is None or told[0] != result.records:  # most often all replicas answer with the same
            records = [
                record
                for record in await self._replica.accepted(result.records)
                if isinstance(record, Record)
            ]
            told = search.told = result.records, [record for record in records if record.key == search.key]
            search.merge(told[1])
        records = told[1]
        search.given[peer] = {record.owner: record.version for record in records}
        search.answers += 1
        return closer

    def conclude(self, search: RecordSearch, nearest: Sequence[Contact]) -> None:
        """The search has found its peers: keep what this peer should hold, mend the replicas that lack
        something, remember the answer.
        """
        overlay, key = self._overlay, search.key
        replicas = nearest[: overlay.config.replicas]
        if any(contact.peer_id == overlay.own_id for contact in replicas):
            for record in search.latest.values():
                self._replica.keep(record, direct=False)
            self._mend(search, replicas)
        # written here meanwhile, by this peer or by others
        search.merge(self._storage.records(key, overlay.now_us))
        self.cache.put(
            key, CachedAnswer(search.started_s, search.started_us, search.neighbourhood, search.latest)
        )

    def _mend(self, search: RecordSearch, replicas: Sequence[Contact]) -> None:
        """Send the replicas that answered what they lacked. Replicas alone do this: every reader would be a
        storm.
        """
        now_us = self._overlay.now_us
        old = [
            record
            for record in search.latest.values()
            if record.issued_at_us < now_us - _REPAIR_AGE_US
            and record.expiration_us > now_us + _REPAIR_LIFE_US
        ]
        for contact in replicas:
            given = search.given.get(contact.peer_id)
            if given is not None:
                lacking = [record for record in old if given.get(record.owner, (-1, b"")) < record.version]
                if lacking:
                    self._replication.lacks(contact, lacking)

    def _agreed(self, search: RecordSearch, nearest: Sequence[Contact]) -> bool:
        """Whether the peers nearest to the key, a majority of its replicas, hold the same, and something."""
        own = {
            record.owner: record.version for record in self._storage.records(search.key, self._overlay.now_us)
        }
        held = [
            own if contact.peer_id == self._overlay.own_id else search.given.get(contact.peer_id)
            for contact in nearest
        ]
        return (
            len(held) > self._overlay.config.replicas // 2
            and bool(held[0])
            and all(one == held[0] for one in held)
        )

    async def _search(self, search: RecordSearch, exhaustive: bool) -> None:
        """Ask the replicas and merge what they hold. Ends by `search_timeout_s`, whoever waits.

        A majority is asked first: whatever most replicas hold, one of these holds. Only if they are at odds,
        or hold nothing, the others are asked, too.
        """
        overlay, config, key = self._overlay, self._overlay.config, search.key
        nearest_max = config.replicas if overlay.knows_all and not exhaustive else 0
        request = DhtFindRequest(
            sender=overlay.sender,
            queries=[DhtFindQuery(key=key_to_wire(key))],
            nearest_max=nearest_max,
            known=overlay.known,
        )

        async def ask(contact: Contact) -> Sequence[Contact] | None:
            search.asked += 1
            reply = await overlay.ask(contact, FIND, request)
            if reply is None or len(reply.results) != 1:
                return None
            return await self.absorb(search, contact.peer_id, reply.results[0])

        wanted = config.routing.bucket_max if exhaustive else config.replicas // 2 + 1
        until_s = search.started_s + config.search_timeout_s
        search.merge(self._storage.records(key, overlay.now_us))
        try:
            lookup = overlay.lookup(
                key.dht_id, wanted=wanted, parallel=max(wanted, config.parallel) if exhaustive else wanted
            )
            nearest = await overlay.search(lookup, ask, until_s)
            if not exhaustive and not self._agreed(search, nearest):
                lookup.widen(config.replicas)
                nearest = await overlay.search(lookup, ask, until_s)
            if search.answers or not search.asked:
                self.conclude(search, nearest)
        except TimeoutError:
            search.gave_up = True
        finally:
            search.merge(self._storage.records(key, overlay.now_us))
            if self.running.get((key, exhaustive)) is search:
                del self.running[key, exhaustive]
            search.end()
