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

from swarm.core.avoidance import Avoidance
from swarm.core.clock import Clock
from swarm.core.errors import DeadlineExceeded, NetworkError, PeerError, SwarmError
from swarm.core.ids import ADDRESSES_MAX, Contact, PeerId
from swarm.core.presets import Timings
from swarm.dht.logic.cache import FoundReplicas
from swarm.dht.logic.clock_offset import ClockOffset
from swarm.dht.logic.constants import (
    REPLICAS,
    STABLE_AFTER_S,
    SUSPECT_S,
    SUSPECT_S_MAX,
    SUSPECTS_MAX,
)
from swarm.dht.logic.lookup import Lookup, LookupBreadth, LookupDone
from swarm.dht.logic.routing import NEAR_COUNT, RoutingTable
from swarm.dht.service.wire import KNOWN_MAX, known_to_wire
from swarm.net.contacts import contact_from_wire, contact_to_wire, contacts_from_wire
from swarm.net.peerbook import PeerBook
from swarm.net.rpc import UNARY_BYTES_MAX, Caller, Method, RequestT
from swarm.runtime.supervise import Supervisor
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

# A whole key must fit into a Find reply (Quotas.bytes_per_key_max), with its 20 nearest contacts.
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
    reply_bytes_max=UNARY_BYTES_MAX,
)
STORE = Method(
    name="/swarm.Dht/Store",
    request=DhtStoreRequest,
    reply=DhtStoreReply,
    request_bytes_max=640 << 10,
    reply_bytes_max=256 << 10,
)
HOLDS = Method(
    name="/swarm.Dht/Holds",
    request=DhtHoldsRequest,
    reply=DhtHoldsReply,
    request_bytes_max=256 << 10,
    reply_bytes_max=64 << 10,
)

_NO_WAY = ("network is unreachable", "no route to host")  # failures of this machine's own network
_BOOK_UPDATE_INTERVAL_S = 1.0  # the book is updated about the same peer at most this often
_BOOK_UPDATES_MAX = 2048
_CHECKS_MAX = 256  # pings, in progress or due, that show whether a caller can be called back
_CHECK_DELAY_S = 5.0  # a new caller is pinged after this, unless it answers a call before
_CHECKED_PEERS_MAX = 1024
_CHECK_INTERVAL_S = 10.0  # a peer that calls but does not answer is checked at most this often

DhtReplyT = TypeVar("DhtReplyT", DhtPingReply, DhtFindReply, DhtStoreReply, DhtHoldsReply)
BookUpdates: TypeAlias = "OrderedDict[PeerId, tuple[Contact, float]]"
Ask = Callable[[Contact], Awaitable[Sequence[Contact] | None]]


class DhtClock(Clock, Protocol):
    """A clock whose offset from swarm time the DHT corrects."""

    offset_s: float


class TableObserver(Protocol):
    """A service that reacts to peers that enter or leave the routing table."""

    def on_peer_joined(self, contact: Contact) -> None: ...
    def on_peer_left(self, contact: Contact, *, said_goodbye: bool) -> None: ...


class Overlay:
    """The routing table and what keeps it up to date: every answer, failure and call is reported here."""

    def __init__(
        self,
        own: Callable[[], Contact],
        caller: Caller,
        book: PeerBook,
        clock: DhtClock,
        supervisor: Supervisor,
        timings: Timings,
    ) -> None:
        self.own = own
        self.own_id: PeerId = own().peer_id
        self.own_id_number = self.own_id.dht_id
        self.timings = timings
        self.clock = clock
        self.offset, self.found = ClockOffset(), FoundReplicas()
        self.book = book
        self.table = RoutingTable(self.own_id)
        self._observers: list[TableObserver] = []
        self.neighbourhood_version = 0  # number of changes among the nearest peers so far
        self.neighbourhood_changed_s = clock.monotonic_s()  # time of the latest of these changes
        self._caller, self._supervisor = caller, supervisor
        # peer -> when it was last pinged because it called
        self._checked_s: OrderedDict[PeerId, float] = OrderedDict()
        self._checks_running = 0
        self._sender = own(), contact_to_wire(own())
        self._known_peers = -1, b""
        # peers that answered: the contact and time of the last update of the book
        self._answered: BookUpdates = OrderedDict()
        self._called: BookUpdates = OrderedDict()  # the same for peers that called
        self._refused: OrderedDict[PeerId, None] = OrderedDict()  # peers whose host refused the last call
        self.suspects = Avoidance(  # peers that failed, by PeerID
            pause_first_s=SUSPECT_S, pause_s_max=SUSPECT_S_MAX, keys_max=SUSPECTS_MAX
        )

    def observe(self, observer: TableObserver) -> None:
        """Report each peer that enters or leaves the table from now on to `observer`."""
        self._observers.append(observer)

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
        self.suspects.succeeded(contact.peer_id)
        self._refused.pop(contact.peer_id, None)
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
        if (to_ping := self.table.on_call(contact, self.clock.monotonic_s())) is None:
            return
        is_new = to_ping is contact and contact.peer_id not in self.table
        enters = is_new and not self.suspects.failures(contact.peer_id)
        if self._check_callable(to_ping, _CHECK_DELAY_S if enters else 0.0) and enters:
            self._enter(contact, proven=False)

    def _enter(self, contact: Contact, *, proven: bool) -> None:
        known = contact.peer_id in self.table
        to_ping = self.table.on_answer(contact, self.clock.monotonic_s(), proven=proven)
        if to_ping is not None:
            self._check_callable(to_ping)
        if not known and contact.peer_id in self.table:
            self._note_change(contact.peer_id.dht_id)
            for observer in self._observers:
                observer.on_peer_joined(contact)

    def on_goodbye(self, peer_id: PeerId) -> None:
        """Record that the peer said goodbye."""
        contact = self.table.contact(peer_id)
        if contact is not None:
            self.table.on_failure(peer_id, at_once=True)
            self._note_departure(contact, said_goodbye=True)

    def on_failure(self, peer_id: PeerId, *, broke_protocol: bool = False) -> None:
        """Record that the peer did not answer. A peer of the table may fail once; any other peer, or one that
        broke the protocol, is avoided for some time.
        """
        contact = self.table.contact(peer_id)
        if contact is not None:
            if not self.table.on_failure(peer_id, at_once=broke_protocol):
                return
            self._note_departure(contact, said_goodbye=False)
        self.suspects.failed(peer_id, self.clock.monotonic_s())

    def _note_departure(self, contact: Contact, *, said_goodbye: bool) -> None:
        self._note_change(contact.peer_id.dht_id)
        for observer in self._observers:
            observer.on_peer_left(contact, said_goodbye=said_goodbye)

    def _note_change(self, dht_id: int) -> None:
        """Count a change of the neighbourhood, if the peer that came or left is a neighbour."""
        near = self.table.nearest(self.own_id_number, NEAR_COUNT)
        if (
            len(near) < NEAR_COUNT
            or dht_id ^ self.own_id_number <= near[-1].peer_id.dht_id ^ self.own_id_number
        ):
            self.neighbourhood_version += 1
            self.neighbourhood_changed_s = self.clock.monotonic_s()

    @property
    def is_stable(self) -> bool:
        """Return whether the neighbourhood has been stable long enough for records to have been handed
        over.
        """
        return self.clock.monotonic_s() - self.neighbourhood_changed_s >= STABLE_AFTER_S

    @property
    def knows_all(self) -> bool:
        """Return whether this peer probably knows all peers: those that fit into one bucket it was told of by
        the first peer that it met.
        """
        return len(self.table) < self.bucket_max

    def replicas(self, dht_id: int) -> list[Contact]:
        """Return the peers that should hold a key, as far as this peer knows: nearest first, itself included
        if others can reach it.
        """
        own = self.own()
        nearest = self.table.nearest(dht_id, REPLICAS)
        if own.addresses:
            nearest = sorted([*nearest, own], key=lambda contact: contact.peer_id.dht_id ^ dht_id)
        return nearest[:REPLICAS]

    def is_replica(self, dht_id: int) -> bool:
        """Return whether this peer should hold a key."""
        if not self.own().addresses:
            return False
        nearest = self.table.nearest(dht_id, REPLICAS)
        return len(nearest) < REPLICAS or self.own_id_number ^ dht_id < nearest[-1].peer_id.dht_id ^ dht_id

    def has_refused(self, peer_id: PeerId) -> bool:
        """Return whether nothing listened at the peer's addresses when it was called last: its process has
        ended, while a silent peer may be alive.
        """
        return peer_id in self._refused

    def is_suspect(self, peer_id: PeerId) -> bool:
        return self.suspects.avoided(peer_id, self.clock.monotonic_s())

    def find_contact(self, peer_id: PeerId) -> Contact | None:
        """Return how to call a peer; None where that is not known, or it has failed lately."""
        if self.is_suspect(peer_id):
            return None
        return self.table.contact(peer_id) or self.book.contact(peer_id)

    def _check_callable(self, contact: Contact, delay_s: float = 0.0) -> bool:
        """Ping a peer that called this one, or whose place in the table a newcomer waits for; with a delay
        only if it has not answered by then. Returns whether a ping was started.
        """
        now_s = self.clock.monotonic_s()
        if (
            self._checks_running >= _CHECKS_MAX
            or now_s < self._checked_s.get(contact.peer_id, -_CHECK_INTERVAL_S) + _CHECK_INTERVAL_S
        ):
            return False
        self._checked_s[contact.peer_id] = now_s
        self._checked_s.move_to_end(contact.peer_id)
        if len(self._checked_s) > _CHECKED_PEERS_MAX:
            self._checked_s.popitem(last=False)
        self._checks_running += 1

        async def check() -> None:
            try:
                await asyncio.sleep(delay_s)
                if not delay_s or not self.table.is_proven(contact.peer_id):
                    await self.ping(contact)
            finally:
                self._checks_running -= 1

        self._supervisor.spawn("DHT check of a caller", check)
        return True

    async def ping(self, contact: Contact) -> bool:
        """Return whether the peer answers."""
        reply = await self.ask(contact, PING, DhtPingRequest(sender=self.sender))
        if reply is None:
            return False
        try:
            reported = contact_from_wire(reply.contact) if reply.HasField("contact") else contact
        except PeerError:
            self.on_failure(contact.peer_id, broke_protocol=True)
            return False
        if reported.peer_id == contact.peer_id and reported.addresses:
            # The dialed address works from here and goes first; the peer may know more of its own addresses.
            self.on_answer(
                Contact(
                    reported.peer_id,
                    tuple(dict.fromkeys(contact.addresses + reported.addresses))[:ADDRESSES_MAX],
                )
            )
        return True

    @property
    def bucket_max(self) -> int:
        """Return the number of peers in a bucket of the routing table."""
        return self.table.bucket_max

    async def ask(
        self, contact: Contact, method: Method[RequestT, DhtReplyT], request: RequestT
    ) -> DhtReplyT | None:
        """Call a peer and record the outcome in the table. Returns None when the call failed."""
        sent_us, started_s = self.raw_us, self.clock.monotonic_s()
        try:
            reply = await self._caller.call(
                contact, method, request, timeout_s=self.timings.dht_call_timeout_s
            )
        except SwarmError as error:
            if _is_refusal(error):
                self._refused[contact.peer_id] = None
                if len(self._refused) > SUSPECTS_MAX:
                    self._refused.popitem(last=False)
            self.on_failure(contact.peer_id)
            return None
        self.offset.add(
            contact.peer_id, sent_s=sent_us / 1e6, received_s=self.raw_us / 1e6, peer_s=reply.time_us / 1e6
        )
        self.on_answer(contact, self.clock.monotonic_s() - started_s)
        return reply

    def lookup(self, target: int, *, wanted: int, parallel: int, near: Sequence[Contact] = ()) -> Lookup:
        """Return a lookup that starts from the table, and from peers that were `near` the target a moment
        ago. This peer itself is a candidate if others can reach it.
        """
        own = self.own()
        seeds = [*self.table.nearest(target, self.bucket_max), *near]
        self.table.touch(target, self.clock.monotonic_s())
        return Lookup(
            target,
            seeds,
            own=self.own_id,
            own_contact=own if own.addresses else None,
            breadth=_breadth(wanted, parallel, self.timings.dht_stall_s),
        )

    @property
    def known_peers(self) -> bytes:
        """Return the peers that this peer knows, abbreviated, for requests: answers omit them. Empty in a
        large swarm. Take it before a lookup begins: peers met later are no candidates of that lookup.
        """
        if len(self.table) > KNOWN_MAX:
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


def _is_refusal(error: SwarmError) -> bool:
    """Return whether a call failed because nothing listens there, and not because of the way there."""
    return (
        isinstance(error, NetworkError)
        and not isinstance(error, DeadlineExceeded)
        and not any(words in str(error).lower() for words in _NO_WAY)
    )


@functools.lru_cache(maxsize=64)
def _breadth(wanted: int, parallel: int, stall_s: float) -> LookupBreadth:
    return LookupBreadth(wanted=wanted, parallel=parallel, stall_s=stall_s)


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
