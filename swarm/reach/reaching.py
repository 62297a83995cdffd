"""Use relays for a node that cannot be called, and relay for others on a node that can.

A node that others have called in vain keeps reservations at relays, and announces these. A node that can be
called relays for others if its owner allows it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from swarm.core.backoff import backoff_s
from swarm.core.errors import SwarmError
from swarm.core.ids import Address, Contact, PeerId
from swarm.core.notify import ChangeEvent
from swarm.net.announcing import Announcing
from swarm.net.channels import Channels
from swarm.net.hello import Introduction, Introductions
from swarm.net.listening import machine_addresses
from swarm.net.logic.nat import NatKind, nat_kind
from swarm.net.logic.relay_search import RELAYS_WANTED, RelaySearch
from swarm.net.peerbook import PeerBook
from swarm.reach.on_demand import Libp2p

_logger = logging.getLogger(__name__)

_HELLO_S = 5.0
_PING_S = 5.0  # timeout for connecting to a relay and pinging it
_INTERVAL_S = 15.0  # interval of checks for changes that raise no event
# delay before this peer announces that nobody can call it: while no relay is known, and while known ones are
# asked
_SEARCH_S, _RESERVE_S = 6.0, 30.0
_SETTLED_S = 0.5  # time for a second reservation to follow the first, so that both are announced together
# interval of asking others whether they reach the relay's port, since a single "no" may be a lost packet
_CHECK_S, _CHECK_S_MAX = 12.0, 120.0
_LOOKUP_S = 5.0
_KNOWN_MAX = 32
_BYTES_PER_MBIT = 125_000.0


@dataclass(frozen=True, slots=True)
class RelayView:
    """A relay as this node sees it. `round_trip_s`: of a ping; None: it did not answer. `is_reserved`: this
    node can be called through it. `seen_at`: the IP address and port of this node's libp2p host as the relay
    observes it; None: not known.
    """

    peer_id: PeerId
    address: Address
    round_trip_s: float | None
    is_reserved: bool
    seen_at: Address | None = None


@dataclass(frozen=True, slots=True)
class RelayTerms:
    """The facts that decide about a node's relays. `server`: where its gRPC server listens; None: nowhere.
    `relay_mbit`: how much it relays for others, in Mbit/s; 0: nothing.
    """

    server: Address | None
    relay_mbit: float


class Reaching:
    """The relays of a node. It belongs to the network thread."""

    def __init__(
        self,
        libp2p: Libp2p,
        announcing: Announcing,
        introductions: Introductions,
        channels: Channels,
        book: PeerBook,
        terms: RelayTerms,
    ) -> None:
        self._libp2p, self._announcing = libp2p, announcing
        self._introductions, self._channels = introductions, channels
        self._book, self._terms = book, terms
        # relays with the round-trip time of their gRPC ports
        self._relays: dict[PeerId, tuple[Contact, float]] = {}
        self._search = RelaySearch()
        self._hidden_since_s: float | None = None
        self._check_s = -math.inf  # time of the next question to others whether they reach the relay's port
        self._unreached = 0  # number of consecutive negative answers
        self._held_before = 0  # number of reservations at the last check
        self._takes_calls = False
        self._has_failed = False
        self._changed, self._sought = ChangeEvent(), ChangeEvent()
        introductions.on_introduced.append(self._on_introduced)
        for followers in (libp2p.on_change, announcing.on_verdict):
            followers.append(self._changed.notify)
        announcing.on_relays((), is_searching=True)

    async def run(self, meet: Callable[[], Awaitable[None]]) -> None:
        """React to changes of this node's reachability, and look for relays while it needs some, until
        cancelled. `meet` looks for peers of the swarm that this node has not met.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._seek(meet))

    async def _follow(self) -> None:
        while True:
            self._changed.clear()
            wait_s = _INTERVAL_S
            try:
                if self._announcing.is_hidden:
                    wait_s = await self._hide()
                else:
                    self._hidden_since_s = None
                    self._announcing.on_relays((), is_searching=True)
                    await self._offer()
            except SwarmError as error:
                if not self._has_failed:
                    _logger.warning("libp2p cannot be used: %s", error)
                self._has_failed = True
                self._announcing.on_relays((), is_searching=False)
            await self._changed.wait(wait_s)

    async def relays(self) -> list[RelayView]:
        """Ping the relays that this node knows, and return them: first those with a reservation of this node,
        then the nearest. libp2p is loaded if there are any.
        """
        async with asyncio.TaskGroup() as group:
            views = [group.create_task(self._view(one)) for one, _ in list(self._relays.values())]
        found = [one.result() for one in views]
        return sorted(found, key=lambda one: (not one.is_reserved, one.round_trip_s or math.inf))

    async def _view(self, relay: Contact) -> RelayView:
        is_reserved = relay.peer_id in {one.peer_id for one in self._libp2p.held}
        round_trip_s, seen_at = None, None
        try:
            async with asyncio.timeout(_PING_S):
                round_trip_s, seen_at = await (await self._libp2p.stack()).look_at(relay)
        except (SwarmError, TimeoutError) as error:
            _logger.debug("relay %s does not answer: %s", relay.peer_id.short, error)
        return RelayView(relay.peer_id, relay.addresses[0], round_trip_s, is_reserved, seen_at)

    def nat(self, relays: Sequence[RelayView]) -> NatKind:
        """Return how the router of this machine maps ports, as observed by relays."""
        stack = self._libp2p.loaded
        if stack is None or stack.host.listening is None or self._terms.server is None:
            return "unknown"
        own = machine_addresses(self._terms.server.host, self._terms.server.port)
        seen = [one.seen_at for one in relays if one.seen_at is not None]
        return nat_kind(stack.host.listening.port, {one.host for one in own}, seen)

    async def _hide(self) -> float:
        """Get reservations, and announce the valid ones. Return the seconds until the next check."""
        loop = asyncio.get_running_loop()
        if self._introductions.relay_port:
            self._introductions.relay_port = 0
        held = self._libp2p.held
        is_new = self._hidden_since_s is None
        if self._hidden_since_s is None:
            self._hidden_since_s = loop.time()
        if is_new or len(held) < self._held_before:
            self._search.restart()
            self._sought.notify()
        self._held_before = len(held)
        if len(held) == 1 and not self._announcing.contact.relays and len(self._relays) > 1:
            await asyncio.sleep(_SETTLED_S)
            held = self._libp2p.held
        until_s = self._hidden_since_s + (_RESERVE_S if self._relays else _SEARCH_S)
        is_searching = not held and loop.time() < until_s
        self._announcing.on_relays(held, is_searching=is_searching)
        if self._relays:
            await self._reserve()
        return min(max(until_s - loop.time(), 0.05), _INTERVAL_S) if is_searching else _INTERVAL_S

    async def _seek(self, meet: Callable[[], Awaitable[None]]) -> None:
        """While this node has too few relays, ask peers whether they relay: known peers, and others that it
        contacts for this.
        """
        loop = asyncio.get_running_loop()
        while True:
            self._sought.clear()
            wait_s = _INTERVAL_S
            if self._announcing.is_hidden and len(self._libp2p.held) < RELAYS_WANTED:
                if self._search.wait_s(loop.time()) == 0.0:
                    await self._ask(loop.time(), meet)
                wait_s = min(max(self._search.wait_s(loop.time()), 0.05), _INTERVAL_S)
            await self._sought.wait(wait_s)

    async def _reserve(self) -> None:
        stack = await self._libp2p.stack()
        stack.circuits.offer([contact for contact, _ in self._relays.values()], self._round_trip_s)
        if not self._takes_calls:
            assert self._terms.server is not None
            self._takes_calls = True
            stack.take_calls(self._terms.server)

    def _round_trip_s(self, peer_id: PeerId) -> float:
        return self._relays[peer_id][1]

    async def _ask(self, now_s: float, meet: Callable[[], Awaitable[None]]) -> None:
        """Greet peers that may relay; their answer says whether they do. Also contact unknown peers, which
        introduce themselves.
        """
        known = [peer.contact for peer in self._book.known()]
        candidates = [one for one in known if one.addresses and one.peer_id not in self._relays]
        async with asyncio.TaskGroup() as group:
            group.create_task(_look_around(meet))
            for contact in self._search.due(candidates, now_s):
                group.create_task(self._greet(contact))

    async def _greet(self, contact: Contact) -> None:
        try:
            await self._introductions.introduce(contact, timeout_s=_HELLO_S)
        except SwarmError as error:
            _logger.debug("%s was not asked whether it relays: %s", contact.peer_id.short, error)

    def _on_introduced(self, introduction: Introduction) -> None:
        """Learn from a peer's answer whether it relays. A relay is dialed at the IP address at which the peer
        was reached.
        """
        peer_id = introduction.contact.peer_id
        connection = self._channels.connection_to(peer_id)
        if not introduction.relay_port or connection is None or connection.address is None:
            if self._relays.pop(peer_id, None) is not None:
                self._changed.notify()
            return
        host = sorted(host for host, _ in connection.endpoints)[0]
        contact = Contact(peer_id, (Address(host, introduction.relay_port),))
        if not self._libp2p.dialable([contact]):
            return
        self._relays.pop(peer_id, None)  # keeps the relays in the order of their last answers
        self._relays[peer_id] = contact, introduction.round_trip_s
        if len(self._relays) > _KNOWN_MAX:
            in_use = {one.peer_id for one in self._libp2p.held}
            del self._relays[next(one for one in self._relays if one not in in_use)]
        self._changed.notify()

    async def _offer(self) -> None:
        """Relay for others, if this node may, and peers of the internet can call it."""
        rate = self._terms.relay_mbit
        if not rate or self._terms.server is None or not self._announcing.is_open_to_all:
            return
        stack = await self._libp2p.stack()
        if stack.relay is None:
            self._introductions.relayed = stack.offer_relay(rate * _BYTES_PER_MBIT).counts
        assert stack.host.listening is not None
        port = stack.host.listening.port
        announced = self._introductions.relay_port
        if announced and announced == self._announcing.relay_port(port):
            return
        self._introductions.relay_port = 0
        now_s = asyncio.get_running_loop().time()
        if now_s < self._check_s:
            return
        reached = await self._announcing.relay_reached(port)
        if not reached:
            self._unreached += reached is not None
            self._check_s = now_s + (backoff_s(self._unreached, _CHECK_S, _CHECK_S_MAX) or _CHECK_S)
            if reached is not None and self._unreached == 1:
                _logger.warning(
                    "this machine does not relay: others do not reach its TCP port %d; open it, too", port
                )
            return
        self._unreached = 0
        self._introductions.relay_port = self._announcing.relay_port(port)
        _logger.info("relaying for others on TCP port %d, at most %g Mbit/s", port, rate)


async def _look_around(meet: Callable[[], Awaitable[None]]) -> None:
    try:
        async with asyncio.timeout(_LOOKUP_S):
            await meet()
    except TimeoutError:
        pass  # the answers so far are recorded
