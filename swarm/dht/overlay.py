"""The peers around us: whom we know, how to ask them, how to search among them. What the DHT's calls have in common."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from swarm.clock import Clock
from swarm.dht.clock_offset import ClockOffset
from swarm.dht.config import DhtConfig
from swarm.dht.lookup import Lookup, LookupConfig, LookupDone
from swarm.dht.routing import RoutingTable
from swarm.dht.wire import contact_to_wire, contacts_from_wire
from swarm.errors import PeerError, SwarmError
from swarm.ids import Contact, PeerId
from swarm.net.rpc import Caller, Method, RequestT
from swarm.peerbook import PeerBook
from swarm.wire.dht_pb2 import (
    DhtFindReply,
    DhtFindRequest,
    DhtHoldsReply,
    DhtHoldsRequest,
    DhtPingReply,
    DhtPingRequest,
    DhtStoreReply,
    DhtStoreRequest,
)
from swarm.wire.peer_pb2 import Contact as WireContact

# A whole key must fit into a Find reply (StorageConfig.bytes_per_key_max), with its 20 nearest contacts.
PING = Method(name="/swarm.Dht/Ping", request=DhtPingRequest, reply=DhtPingReply, request_bytes_max=16 << 10, reply_bytes_max=16 << 10)
FIND = Method(name="/swarm.Dht/Find", request=DhtFindRequest, reply=DhtFindReply, request_bytes_max=64 << 10, reply_bytes_max=4 << 20)
STORE = Method(name="/swarm.Dht/Store", request=DhtStoreRequest, reply=DhtStoreReply, request_bytes_max=1 << 20, reply_bytes_max=256 << 10)
HOLDS = Method(name="/swarm.Dht/Holds", request=DhtHoldsRequest, reply=DhtHoldsReply, request_bytes_max=256 << 10, reply_bytes_max=64 << 10)

_NOTE_S = 1.0  # the book hears of a peer that was met at most this often
_NOTED_MAX = 2048

DhtReplyT = TypeVar("DhtReplyT", DhtPingReply, DhtFindReply, DhtStoreReply, DhtHoldsReply)
Ask = Callable[[Contact], Awaitable[Sequence[Contact] | None]]


class DhtClock(Clock, Protocol):
    """A clock whose distance to the swarm's time the DHT corrects."""

    offset_s: float


class Overlay:
    """The routing table with what keeps it true: every answer, every failure and every caller ends up here."""

    def __init__(self, own: Callable[[], Contact], caller: Caller, book: PeerBook, clock: DhtClock, config: DhtConfig) -> None:
        self.own = own
        self.own_id: PeerId = own().peer_id
        self.own_id_number = self.own_id.dht_id
        self.config = config
        self.clock = clock
        self.offset = ClockOffset()
        self.book = book
        self.table = RoutingTable(self.own_id, config.routing)
        self.on_newcomer: Callable[[Contact], None] = lambda contact: None
        self.on_lost: Callable[[Contact, bool], None] = lambda contact, left: None  # whether it said goodbye
        self.on_unproven: Callable[[Contact], bool] = lambda contact: False  # somebody is to be pinged; returns whether that is done
        self.neighbourhood = 0  # how often the peers nearest to us have changed
        self.changed_s = clock.monotonic_s()  # when they last did
        self._caller = caller
        self._noted: OrderedDict[Contact, float] = OrderedDict()  # when the book was last told of them
        self._suspects: OrderedDict[PeerId, tuple[float, int]] = OrderedDict()  # peer -> (not before, failures in a row)

    @property
    def sender(self) -> WireContact:
        return contact_to_wire(self.own())

    @property
    def raw_us(self) -> int:
        """This machine's own clock, uncorrected."""
        return int((self.clock.swarm_s() - self.clock.offset_s) * 1e6)

    @property
    def now_us(self) -> int:
        """Swarm time."""
        return int(self.clock.swarm_s() * 1e6)

    def met(self, contact: Contact, round_trip_s: float | None = None) -> None:
        """The peer itself answered, authenticated."""
        if contact.peer_id == self.own_id:
            return
        self._suspects.pop(contact.peer_id, None)
        now_s = self.clock.monotonic_s()
        if self._noted.get(contact, -math.inf) <= now_s - _NOTE_S:  # in a storm of calls the book would be a tenth of the work
            self._noted[contact] = now_s
            if len(self._noted) > _NOTED_MAX:
                self._noted.popitem(last=False)
            self.book.seen(contact, round_trip_s=round_trip_s)
        self._enter(contact, proven=True)

    def heard(self, contact: Contact) -> None:
        """The peer itself called, authenticated. That it can be called, too, is for its answer to a ping to show: it is believed until
        then, unless it has failed before.
        """
        if contact.peer_id == self.own_id:
            return
        self.book.seen(contact)
        unproven = self.table.heard(contact, self.clock.monotonic_s())
        if unproven is None or not self.on_unproven(unproven):
            return
        if unproven.peer_id == contact.peer_id and contact.peer_id not in self.table and contact.peer_id not in self._suspects:
            self._enter(contact, proven=False)

    def _enter(self, contact: Contact, *, proven: bool) -> None:
        known = contact.peer_id in self.table
        crowded = self.table.met(contact, self.clock.monotonic_s(), proven=proven)
        if crowded is not None:
            self.on_unproven(crowded)
        if not known and contact.peer_id in self.table:
            self._note_change(contact.peer_id.dht_id)
            self.on_newcomer(contact)

    def left(self, peer_id: PeerId) -> None:
        """The peer said goodbye."""
        contact = self.table.contact(peer_id)
        if contact is not None:
            self.table.failed(peer_id, at_once=True)
            self._note_change(peer_id.dht_id)
            self.on_lost(contact, True)

    def failed(self, peer_id: PeerId, *, broke_protocol: bool = False) -> None:
        """The peer did not answer. One of the table may fail once; any other, or one that sends nonsense, is left alone for a while."""
        contact = self.table.contact(peer_id)
        if contact is not None:
            if not self.table.failed(peer_id, at_once=broke_protocol):
                return
            self._note_change(peer_id.dht_id)
            self.on_lost(contact, False)
        failures = self._suspects.pop(peer_id, (0.0, 0))[1] + 1
        pause_s = min(self.config.suspect_s * 2.0 ** min(failures - 1, 16), self.config.suspect_s_max)
        self._suspects[peer_id] = (self.clock.monotonic_s() + pause_s, failures)
        if len(self._suspects) > self.config.suspects_max:
            self._suspects.popitem(last=False)

    def _note_change(self, dht_id: int) -> None:
        """Somebody came or went: a neighbour?"""
        near = self.table.nearest(self.own_id_number, self.config.routing.near_count)
        if len(near) < self.config.routing.near_count or dht_id ^ self.own_id_number <= near[-1].peer_id.dht_id ^ self.own_id_number:
            self.neighbourhood += 1
            self.changed_s = self.clock.monotonic_s()

    @property
    def is_settled(self) -> bool:
        """The neighbourhood has not changed for a while: who was to hand records over has done so."""
        return self.clock.monotonic_s() - self.changed_s >= self.config.settled_s

    @property
    def knows_all(self) -> bool:
        """A table that never filled a bucket probably knows everybody."""
        return len(self.table) < self.config.routing.bucket_max

    def replicas(self, dht_id: int) -> list[Contact]:
        """Who should hold a key, as far as this peer knows: nearest first, itself among them if others can reach it."""
        own = self.own()
        nearest = self.table.nearest(dht_id, self.config.replicas)
        if own.addresses:
            nearest = sorted([*nearest, own], key=lambda contact: contact.peer_id.dht_id ^ dht_id)
        return nearest[: self.config.replicas]

    def is_replica(self, dht_id: int) -> bool:
        """Should this peer hold a key?"""
        if not self.own().addresses:
            return False
        nearest = self.table.nearest(dht_id, self.config.replicas)
        return len(nearest) < self.config.replicas or self.own_id_number ^ dht_id < nearest[-1].peer_id.dht_id ^ dht_id

    def is_suspect(self, peer_id: PeerId) -> bool:
        suspect = self._suspects.get(peer_id)
        return suspect is not None and self.clock.monotonic_s() < suspect[0]

    async def ask(self, contact: Contact, method: Method[RequestT, DhtReplyT], request: RequestT) -> DhtReplyT | None:
        """One call; None when it failed, which the table then knows."""
        sent_us, started_s = self.raw_us, self.clock.monotonic_s()
        try:
            reply = await self._caller.call(contact, method, request, timeout_s=self.config.call_timeout_s)
        except SwarmError:
            self.failed(contact.peer_id)
            return None
        self.offset.add(contact.peer_id, sent_s=sent_us / 1e6, received_s=self.raw_us / 1e6, peer_s=reply.time_us / 1e6)
        self.met(contact, self.clock.monotonic_s() - started_s)
        return reply

    def lookup(self, target: int, *, wanted: int, parallel: int) -> Lookup:
        """A search that starts from the table. This peer itself is a candidate if others can reach it."""
        own = self.own()
        seeds = self.table.nearest(target, self.config.routing.bucket_max)
        self.table.touch(target, self.clock.monotonic_s())
        config = LookupConfig(wanted=wanted, parallel=parallel, stall_s=self.config.stall_s)
        return Lookup(target, seeds, own=self.own_id, own_contact=own if own.addresses else None, config=config)

    def heard_of(self, messages: Iterable[WireContact]) -> list[Contact]:
        """Contacts out of an answer, without those that just failed. An address that this peer has seen work beats hearsay."""
        contacts = contacts_from_wire(messages)
        return [self.table.contact(contact.peer_id) or contact for contact in contacts if not self.is_suspect(contact.peer_id)]

    async def search(self, lookup: Lookup, ask: Ask) -> tuple[Contact, ...]:
        """Perform a lookup. `ask` returns the closer contacts that a peer named, or None when it failed; PeerError counts as failed."""
        inbox: asyncio.Queue[tuple[PeerId, Sequence[Contact] | None]] = asyncio.Queue()

        async def run(contact: Contact) -> None:
            try:
                closer = await ask(contact)
            except PeerError:
                self.failed(contact.peer_id, broke_protocol=True)
                closer = None
            inbox.put_nowait((contact.peer_id, closer))

        async with asyncio.TaskGroup() as group:
            tasks: list[asyncio.Task[None]] = []
            try:
                while True:
                    for effect in lookup.poll(self.clock.monotonic_s()):
                        if isinstance(effect, LookupDone):
                            return effect.nearest
                        tasks.append(group.create_task(run(effect.contact)))
                    for peer_id, closer in await self._arrivals(inbox, lookup.deadline_s()):
                        if closer is None:
                            lookup.on_failure(peer_id)
                        else:
                            lookup.on_reply(peer_id, closer)
            finally:
                # A call that is cut off reports nothing: whoever kept the search waiting is noted here, or it would do so every time.
                for peer_id in lookup.stalled:
                    self.failed(peer_id)
                for task in tasks:
                    task.cancel()

    async def _arrivals(
        self, inbox: asyncio.Queue[tuple[PeerId, Sequence[Contact] | None]], deadline_s: float | None
    ) -> list[tuple[PeerId, Sequence[Contact] | None]]:
        """What has come in, at least one answer; nothing when the deadline comes first."""
        arrivals = []
        try:
            async with asyncio.timeout(None if deadline_s is None else max(deadline_s - self.clock.monotonic_s(), 0.001)):
                arrivals.append(await inbox.get())
        except TimeoutError:
            return arrivals
        while not inbox.empty():
            arrivals.append(inbox.get_nowait())
        return arrivals
