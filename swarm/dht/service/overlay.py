"""The overlay network: which peers are known, how to call them, and how to search among them. All of the
DHT's calls go through it.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol, TypeAlias, TypeVar

from swarm.core.backoff import backoff_s
from swarm.core.clock import Clock
from swarm.core.errors import PeerError, SwarmError
from swarm.core.ids import Contact, PeerId
from swarm.dht.logic.clock_offset import ClockOffset
from swarm.dht.logic.config import DhtConfig
from swarm.dht.logic.lookup import Lookup, LookupConfig, LookupDone
from swarm.dht.logic.routing import RoutingTable
from swarm.dht.service.wire import known_to_wire
from swarm.net.contacts import contact_to_wire, contacts_from_wire
from swarm.net.peerbook import PeerBook
from swarm.net.rpc import Caller, Method, RequestT
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
PING = Method(
    name="/swarm.Dht/Ping",
    request=DhtPingRequest,
    reply=DhtPingReply,
    request_bytes_max=16 << 10,
    reply_bytes_max=16 << 10,
)
FIND = Method(
    name="/swarm.Dht/Find",
    request=DhtFindRequest,
    reply=DhtFindReply,
    request_bytes_max=64 << 10,
    reply_bytes_max=4 << 20,
)
STORE = Method(
    name="/swarm.Dht/Store",
    request=DhtStoreRequest,
    reply=DhtStoreReply,
    request_bytes_max=1 << 20,
    reply_bytes_max=256 << 10,
)
HOLDS = Method(
    name="/swarm.Dht/Holds",
    request=DhtHoldsRequest,
    reply=DhtHoldsReply,
    request_bytes_max=256 << 10,
    reply_bytes_max=64 << 10,
)

_BOOK_UPDATE_INTERVAL_S = 1.0  # the book is updated about the same peer at most this often
_BOOK_UPDATES_MAX = 2048

DhtReplyT = TypeVar("DhtReplyT", DhtPingReply, DhtFindReply, DhtStoreReply, DhtHoldsReply)
BookUpdates: TypeAlias = "OrderedDict[PeerId, tuple[Contact, float]]"
Ask = Callable[[Contact], Awaitable[Sequence[Contact] | None]]


class DhtClock(Clock, Protocol):
    """A clock whose offset from swarm time the DHT corrects."""

    offset_s: float


class Overlay:
    """The routing table and what keeps it up to date: every answer, failure and call is reported here."""

    def __init__(
        self, own: Callable[[], Contact], caller: Caller, book: PeerBook, clock: DhtClock, config: DhtConfig
    ) -> None:
        self.own = own
        self.own_id: PeerId = own().peer_id
        self.own_id_number = self.own_id.dht_id
        self.config = config
        self.clock = clock
        self.offset = ClockOffset()
        self.book = book
        self.table = RoutingTable(self.own_id, config.routing)
        self.on_peer_joined: Callable[[Contact], None] = lambda contact: None
        # The second argument says whether the peer said goodbye.
        self.on_peer_left: Callable[[Contact, bool], None] = lambda contact, left: None
        # Called when a peer should be pinged; returns whether the ping was started.
        self.on_ping_wanted: Callable[[Contact], bool] = lambda contact: False
        self.neighbourhood_version = 0  # number of changes among the nearest peers so far
        self.neighbourhood_changed_s = clock.monotonic_s()  # time of the latest of these changes
        self._caller = caller
        self._sender = own(), contact_to_wire(own())
        self._known_peers = -1, b""
        # peers that answered: the contact and time of the last update of the book
        self._answered: BookUpdates = OrderedDict()
        self._called: BookUpdates = OrderedDict()  # the same for peers that called
        # peer -> (earliest next call, failures in a row)
        self._suspects: OrderedDict[PeerId, tuple[float, int]] = OrderedDict()

    @property
    def sender(self) -> WireContact:
        own = self.own()
        if own is not self._sender[0]:
            self._sender = own, contact_to_wire(own)
        return self._sender[1]

    @property
    def raw_us(self) -> int:
        """Return this machine's own clock, uncorrected, in microseconds."""
        return int((self.clock.swarm_s() - self.clock.offset_s) * 1e6)

    @property
    def now_us(self) -> int:
        """Return swarm time in microseconds."""
        return int(self.clock.swarm_s() * 1e6)

    def on_answer(self, contact: Contact, round_trip_s: float | None = None) -> None:
        """Record that the peer itself, authenticated, answered."""
        if contact.peer_id == self.own_id:
            return
        self._suspects.pop(contact.peer_id, None)
        if self._is_book_update_due(self._answered, contact):
            self.book.record_seen(contact, round_trip_s=round_trip_s)
        self._enter(contact, proven=True)

    def _is_book_update_due(self, updates: BookUpdates, contact: Contact) -> bool:
        """Return whether the book needs an update about this contact. Updating it for every call would take a
        tenth of the time under load.
        """
        now_s = self.clock.monotonic_s()
        known = updates.get(contact.peer_id)
        if known is not None and known[1] > now_s - _BOOK_UPDATE_INTERVAL_S and known[0] == contact:
            return False
        updates[contact.peer_id] = contact, now_s
        if len(updates) > _BOOK_UPDATES_MAX:
            updates.popitem(last=False)
        return True

    def on_call(self, contact: Contact) -> None:
        """Record that the peer itself, authenticated, called. A ping checks that it can be called back; until
        it answers it is used anyway, unless it has failed before.
        """
        if contact.peer_id == self.own_id:
            return
        if self._is_book_update_due(self._called, contact):
            self.book.record_seen(contact)
        to_ping = self.table.on_call(contact, self.clock.monotonic_s())
        if to_ping is None or not self.on_ping_wanted(to_ping):
            return
        if (
            to_ping.peer_id == contact.peer_id
            and contact.peer_id not in self.table
            and contact.peer_id not in self._suspects
        ):
            self._enter(contact, proven=False)

    def _enter(self, contact: Contact, *, proven: bool) -> None:
        known = contact.peer_id in self.table
        to_ping = self.table.on_answer(contact, self.clock.monotonic_s(), proven=proven)
        if to_ping is not None:
            self.on_ping_wanted(to_ping)
        if not known and contact.peer_id in self.table:
            self._note_change(contact.peer_id.dht_id)
            self.on_peer_joined(contact)

    def on_goodbye(self, peer_id: PeerId) -> None:
        """Record that the peer said goodbye."""
        contact = self.table.contact(peer_id)
        if contact is not None:
            self.table.on_failure(peer_id, at_once=True)
            self._note_change(peer_id.dht_id)
            self.on_peer_left(contact, True)

    def on_failure(self, peer_id: PeerId, *, broke_protocol: bool = False) -> None:
        """Record that the peer did not answer. A peer of the table may fail once; any other peer, or one that
        broke the protocol, is avoided for some time.
        """
        contact = self.table.contact(peer_id)
        if contact is not None:
            if not self.table.on_failure(peer_id, at_once=broke_protocol):
                return
            self._note_change(peer_id.dht_id)
            self.on_peer_left(contact, False)
        failures = self._suspects.pop(peer_id, (0.0, 0))[1] + 1
        pause_s = backoff_s(failures, self.config.suspect_s, self.config.suspect_s_max)
        self._suspects[peer_id] = (self.clock.monotonic_s() + pause_s, failures)
        if len(self._suspects) > self.config.suspects_max:
            self._suspects.popitem(last=False)

    def _note_change(self, dht_id: int) -> None:
        """Count a change of the neighbourhood, if the peer that came or left is a neighbour."""
        near = self.table.nearest(self.own_id_number, self.config.routing.near_count)
        if (
            len(near) < self.config.routing.near_count
            or dht_id ^ self.own_id_number <= near[-1].peer_id.dht_id ^ self.own_id_number
        ):
            self.neighbourhood_version += 1
            self.neighbourhood_changed_s = self.clock.monotonic_s()

    @property
    def is_stable(self) -> bool:
        """Return whether the neighbourhood has been stable long enough for records to have been handed
        over.
        """
        return self.clock.monotonic_s() - self.neighbourhood_changed_s >= self.config.stable_after_s

    @property
    def knows_all(self) -> bool:
        """Return whether this peer probably knows all peers: no bucket of its table has ever been full."""
        return len(self.table) < self.config.routing.bucket_max

    def replicas(self, dht_id: int) -> list[Contact]:
        """Return the peers that should hold a key, as far as this peer knows: nearest first, itself included
        if others can reach it.
        """
        own = self.own()
        nearest = self.table.nearest(dht_id, self.config.replicas)
        if own.addresses:
            nearest = sorted([*nearest, own], key=lambda contact: contact.peer_id.dht_id ^ dht_id)
        return nearest[: self.config.replicas]

    def is_replica(self, dht_id: int) -> bool:
        """Return whether this peer should hold a key."""
        if not self.own().addresses:
            return False
        nearest = self.table.nearest(dht_id, self.config.replicas)
        return (
            len(nearest) < self.config.replicas
            or self.own_id_number ^ dht_id < nearest[-1].peer_id.dht_id ^ dht_id
        )

    def is_suspect(self, peer_id: PeerId) -> bool:
        suspect = self._suspects.get(peer_id)
        return suspect is not None and self.clock.monotonic_s() < suspect[0]

    async def ask(
        self, contact: Contact, method: Method[RequestT, DhtReplyT], request: RequestT
    ) -> DhtReplyT | None:
        """Call a peer and record the outcome in the table. Returns None when the call failed."""
        sent_us, started_s = self.raw_us, self.clock.monotonic_s()
        try:
            reply = await self._caller.call(contact, method, request, timeout_s=self.config.call_timeout_s)
        except SwarmError:
            self.on_failure(contact.peer_id)
            return None
        self.offset.add(
            contact.peer_id, sent_s=sent_us / 1e6, received_s=self.raw_us / 1e6, peer_s=reply.time_us / 1e6
        )
        self.on_answer(contact, self.clock.monotonic_s() - started_s)
        return reply

    def lookup(self, target: int, *, wanted: int, parallel: int) -> Lookup:
        """Return a lookup that starts from the table. This peer itself is a candidate if others can
        reach it.
        """
        own = self.own()
        seeds = self.table.nearest(target, self.config.routing.bucket_max)
        self.table.touch(target, self.clock.monotonic_s())
        config = _lookup_config(wanted, parallel, self.config.stall_s)
        return Lookup(
            target, seeds, own=self.own_id, own_contact=own if own.addresses else None, config=config
        )

    @property
    def known_peers(self) -> bytes:
        """Return the peers that this peer knows, abbreviated, for a request: answers omit them. Empty in a
        large swarm, where most contacts in answers are new.
        """
        if not self.knows_all:
            return b""
        if self.table.changes != self._known_peers[0]:
            self._known_peers = self.table.changes, known_to_wire(self.table)
        return self._known_peers[1]

    def contacts_from_answer(self, messages: Iterable[WireContact]) -> list[Contact]:
        """Return the contacts in an answer, without those that failed recently. An address that has worked
        for this peer takes precedence over a reported one.
        """
        contacts = contacts_from_wire(messages)
        return [
            self.table.contact(contact.peer_id) or contact
            for contact in contacts
            if not self.is_suspect(contact.peer_id)
        ]

    async def search(self, lookup: Lookup, ask: Ask, until_s: float = math.inf) -> tuple[Contact, ...]:
        """Perform a lookup. `ask` returns the closer contacts that a peer named, or None when it failed;
        PeerError counts as a failure. Raises TimeoutError when the lookup has not ended at `until_s` of the
        clock.
        """
        inbox = _Inbox(self.clock)

        async def run(contact: Contact) -> None:
            try:
                closer = await ask(contact)
            except PeerError:
                self.on_failure(contact.peer_id, broke_protocol=True)
                closer = None
            inbox.put(contact.peer_id, closer)

        async with asyncio.TaskGroup() as group:
            tasks: list[asyncio.Task[None]] = []
            try:
                while (now_s := self.clock.monotonic_s()) < until_s:
                    for effect in lookup.poll(now_s):
                        if isinstance(effect, LookupDone):
                            return effect.nearest
                        tasks.append(group.create_task(run(effect.contact)))
                    for peer_id, closer in await inbox.take(_earlier(lookup.deadline_s(), until_s)):
                        if closer is None:
                            lookup.on_failure(peer_id)
                        else:
                            lookup.on_reply(peer_id, closer)
            finally:
                inbox.close()
                # A cancelled call reports nothing: peers that delayed the search are marked failed here, or
                # they would delay every search.
                for peer_id in lookup.stalled:
                    self.on_failure(peer_id)
                for task in tasks:
                    task.cancel()
        raise TimeoutError


@functools.lru_cache(maxsize=64)
def _lookup_config(wanted: int, parallel: int, stall_s: float) -> LookupConfig:
    return LookupConfig(wanted=wanted, parallel=parallel, stall_s=stall_s)


def _earlier(deadline_s: float | None, until_s: float) -> float:
    return until_s if deadline_s is None else min(deadline_s, until_s)


class _Inbox:
    """Queue of answers to one search. It uses one timer and a future: a queue and `asyncio.timeout` would
    cost a tenth of a read.
    """

    def __init__(self, clock: DhtClock) -> None:
        self._clock = clock
        self._arrived: list[tuple[PeerId, Sequence[Contact] | None]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = math.inf  # when the timer fires

    def put(self, peer_id: PeerId, closer: Sequence[Contact] | None) -> None:
        self._arrived.append((peer_id, closer))
        self._wake()

    async def take(self, deadline_s: float) -> list[tuple[PeerId, Sequence[Contact] | None]]:
        """Wait for at least one answer and return all that have arrived; an empty list when this deadline, or
        an earlier one set before, comes first.
        """
        if not self._arrived:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            if deadline_s < self._due_s:
                self.close()
                self._due_s = deadline_s
                self._timer = loop.call_later(max(deadline_s - self._clock.monotonic_s(), 0.001), self._ring)
            await self._waiter
            self._waiter = None
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        self._timer, self._due_s = None, math.inf
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
