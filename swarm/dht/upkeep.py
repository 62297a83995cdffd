"""What the DHT does by itself: joins and rejoins, looks after its table, hands records over to newcomers, keeps its clock."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Sequence

from swarm.dht.overlay import FIND, PING, STORE, Overlay
from swarm.dht.records import Record
from swarm.dht.storage import Storage
from swarm.dht.wire import contact_from_wire, id_to_wire, record_to_wire
from swarm.errors import PeerError
from swarm.ids import Contact, PeerId
from swarm.peerbook import ADDRESSES_MAX
from swarm.runtime.supervise import Supervisor
from swarm.wire.dht_pb2 import DhtFindQuery, DhtFindRequest, DhtPingRequest, DhtStoreRequest

_log = logging.getLogger(__name__)

_REMEMBERED_MAX = 64  # addresses that this peer was told to join by
_TRIED_MAX = 32  # contacts tried in one attempt to join
_CONTACTS_AT_ONCE = 8
_PINGS_MAX = 8  # per round of tending
_REFRESHES_MAX = 4
_PUSHERS = 2  # of the peers that hold a key, this many nearest ones hand it over: one may be gone
_KEYS_AT_ONCE = 64
CLOCK_WARNING_S = 5.0


class Upkeep:
    """The background tasks of a peer's DHT."""

    def __init__(self, overlay: Overlay, storage: Storage, supervisor: Supervisor, rng: random.Random) -> None:
        self._overlay = overlay
        self._storage = storage
        self._supervisor = supervisor
        self._rng = rng
        self._remembered: dict[PeerId, Contact] = {}
        self._newcomers: deque[Contact] = deque(maxlen=overlay.config.newcomers_max)
        self._arrived = asyncio.Event()
        self._pinging: set[PeerId] = set()
        self.settled = asyncio.Event()  # a peer is known, or nobody answered when first asked
        overlay.on_newcomer = self._on_newcomer
        overlay.on_crowded = self._on_crowded
        supervisor.spawn("DHT upkeep", self._tend, restart=True)
        supervisor.spawn("DHT hand-over", self._hand_over, restart=True)

    async def join(self, contacts: Sequence[Contact]) -> None:
        """Try all of these once, and find this peer's neighbours through whoever answers. They are tried again later if need be."""
        for contact in contacts[:_REMEMBERED_MAX]:
            if contact.addresses and contact.peer_id != self._overlay.own_id:
                self._remembered[contact.peer_id] = contact
        while len(self._remembered) > _REMEMBERED_MAX:
            del self._remembered[next(iter(self._remembered))]
        await self._attempt(contacts)
        self.settled.set()

    async def _attempt(self, contacts: Sequence[Contact]) -> None:
        """Ping all of them; whoever answers first leads to the neighbours, without waiting for the dead among the others."""
        waiting = asyncio.Semaphore(_CONTACTS_AT_ONCE)
        reached: list[Contact] = []

        async def ping(contact: Contact) -> None:
            async with waiting:
                answered = await self.ping(contact)
            if answered:
                reached.append(contact)
                if len(reached) == 1:
                    await self.find(self._overlay.table.own_id)

        async with asyncio.TaskGroup() as group:
            for contact in contacts[:_TRIED_MAX]:
                if contact.addresses and contact.peer_id != self._overlay.own_id:
                    group.create_task(ping(contact))
        self._set_clock()

    async def ping(self, contact: Contact) -> bool:
        """Does the peer answer?"""
        reply = await self._overlay.ask(contact, PING, DhtPingRequest(sender=self._overlay.sender))
        if reply is None:
            return False
        try:
            told = contact_from_wire(reply.contact) if reply.HasField("contact") else contact
        except PeerError:
            self._overlay.failed(contact.peer_id, broke_protocol=True)
            return False
        if told.peer_id == contact.peer_id and told.addresses:
            # What was dialed works from here, so that it goes first; the peer may know more addresses of its own.
            self._overlay.met(Contact(told.peer_id, tuple(dict.fromkeys(contact.addresses + told.addresses))[:ADDRESSES_MAX]))
        return True

    async def find(self, target: int) -> tuple[Contact, ...]:
        """The live peers nearest to an id."""
        overlay = self._overlay
        request = DhtFindRequest(sender=overlay.sender, queries=[DhtFindQuery(target=id_to_wire(target))])

        async def ask(contact: Contact) -> Sequence[Contact] | None:
            reply = await overlay.ask(contact, FIND, request)
            return overlay.heard_of(reply.results[0].nearest) if reply is not None and len(reply.results) == 1 else None

        lookup = overlay.lookup(target, wanted=overlay.config.routing.bucket_max, parallel=overlay.config.parallel)
        return await overlay.search(lookup, ask)

    def _on_newcomer(self, contact: Contact) -> None:
        self.settled.set()
        self._newcomers.append(contact)
        self._arrived.set()

    def _on_crowded(self, contact: Contact) -> None:
        """A bucket is full: does its least recently seen peer still live?"""
        if contact.peer_id in self._pinging or len(self._pinging) >= _PINGS_MAX:
            return
        self._pinging.add(contact.peer_id)

        async def check() -> None:
            try:
                await self.ping(contact)
            finally:
                self._pinging.discard(contact.peer_id)

        self._supervisor.spawn("DHT eviction ping", check)

    async def _tend(self) -> None:
        config = self._overlay.config
        backoff_s = config.rejoin_first_s
        while True:
            if not len(self._overlay.table):
                await self._attempt(self._strangers())
            if len(self._overlay.table):
                backoff_s = config.rejoin_first_s
                await self._tend_once()
                await asyncio.sleep(config.tend_s * self._rng.uniform(0.8, 1.2))
            else:
                await asyncio.sleep(backoff_s * self._rng.uniform(0.8, 1.2))
                backoff_s = min(2 * backoff_s, config.rejoin_s_max)

    async def _tend_once(self) -> None:
        overlay, now_s = self._overlay, self._overlay.clock.monotonic_s()
        for contact in overlay.table.silent_since(now_s - overlay.config.ping_after_s)[:_PINGS_MAX]:
            await self.ping(contact)
        # Whoever was lost may be back, or on the other side of a cut that has healed: one at a time, for as long as the peer lives.
        strangers = self._strangers()
        if strangers and await self.ping(self._rng.choice(strangers)):
            await self.find(overlay.table.own_id)
        for target in overlay.table.stale_ids(now_s - overlay.config.refresh_s, self._rng)[:_REFRESHES_MAX]:
            await self.find(target)
        self._set_clock()

    def _strangers(self) -> list[Contact]:
        """Peers that this one was told of, or has known, and that are not in its table."""
        known = {peer.peer_id: peer.contact for peer in self._overlay.book.known()[:_TRIED_MAX]} | self._remembered
        return [
            contact
            for contact in known.values()
            if contact.addresses and contact.peer_id != self._overlay.own_id and contact.peer_id not in self._overlay.table
        ]

    def _set_clock(self) -> None:
        offset_s = self._overlay.offset.offset_s(self._overlay.raw_us / 1e6)
        if offset_s is None:
            return
        clock = self._overlay.clock
        if abs(offset_s) >= CLOCK_WARNING_S and abs(clock.offset_s) < CLOCK_WARNING_S:
            side = "behind" if offset_s > 0 else "ahead of"
            text = "the clock of this machine (peer %s) is %.1f s %s its peers' clocks: corrected here; set it, for everything else"
            _log.warning(text, self._overlay.own_id.short, abs(offset_s), side)
        clock.offset_s = offset_s

    async def _hand_over(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._newcomers:
                await self._give(self._newcomers.popleft())

    async def _give(self, newcomer: Contact) -> None:
        """Send a peer that has just appeared the records that it should hold."""
        overlay = self._overlay
        batch: list[Record] = []
        batch_bytes = 0
        for number, key in enumerate(self._storage.keys(), 1):
            if number % _KEYS_AT_ONCE == 0:
                await asyncio.sleep(0)
            if not self._should_give(key.dht_id, newcomer):
                continue
            for record in self._storage.records(key, overlay.now_us):
                full = len(batch) == overlay.config.records_per_call_max
                if batch and (full or batch_bytes + record.size_bytes > overlay.config.record_bytes_per_call_max):
                    if not await self._push(newcomer, batch):
                        return
                    batch, batch_bytes = [], 0
                batch.append(record)
                batch_bytes += record.size_bytes
        if batch:
            await self._push(newcomer, batch)

    def _should_give(self, dht_id: int, newcomer: Contact) -> bool:
        """Is the newcomer one of the key's replicas now, and this peer one of the nearest that held it before?"""
        nearest = [contact.peer_id for contact in self._overlay.table.nearest(dht_id, self._overlay.config.replicas)]
        if newcomer.peer_id not in nearest:
            return False
        own_distance = self._overlay.table.own_id ^ dht_id
        nearer = [peer for peer in nearest if peer != newcomer.peer_id and peer.dht_id ^ dht_id < own_distance]
        return len(nearer) < _PUSHERS

    async def _push(self, contact: Contact, records: Sequence[Record]) -> bool:
        request = DhtStoreRequest(sender=self._overlay.sender, records=map(record_to_wire, records))
        return await self._overlay.ask(contact, STORE, request) is not None
