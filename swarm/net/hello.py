"""Introductions: two peers that connect exchange their addresses."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from swarm.core.ids import ADDRESSES_MAX, Contact, PeerId
from swarm.net.callers import caller_host
from swarm.net.contacts import contact_to_wire, sender_from_wire
from swarm.net.logic.relay_counts import RelayCounts
from swarm.net.peerbook import PeerBook
from swarm.net.rpc import Caller, Handlers, Method
from swarm.net.scope import ip_of
from swarm.wire import peer_pb2

_AGENT_CHARACTERS_MAX = 100
_INTERVAL_S = 600.0
_MET_MAX = 4096
# Bounds of the random delay, in seconds, between dialing a peer of the same site and sending it a Hello. The
# DHT has announced its addresses already. Without the delay, each pair of newcomers that arrive together
# would exchange two Hellos at their busiest moment; with it, usually only one of the two sends one.
NEAR_HELLO_S = (20.0, 60.0)
HELLO = Method(
    name="/swarm.Node/Hello",
    request=peer_pb2.Hello,
    reply=peer_pb2.Hello,
    request_bytes_max=4096,
    reply_bytes_max=4096,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """The result of a Hello. `observed`: the IP address from which this peer called, as reported by the other
    one; empty if not reported. `relay_port`: the port at which the other peer relays calls; 0: it does not
    relay. `relayed`: its counts of relayed calls; None: not reported.
    """

    contact: Contact
    agent: str
    round_trip_s: float
    observed: str = ""
    relay_port: int = 0
    relayed: RelayCounts | None = None


class Introductions:
    """Send and answer Hello; results go into the peer book, and to `on_introduced`."""

    def __init__(self, own: Callable[[], Contact], agent: str, caller: Caller, book: PeerBook) -> None:
        self._own = own
        self._agent = agent[:_AGENT_CHARACTERS_MAX]
        self._caller = caller
        self._book = book
        self._met_s: OrderedDict[PeerId, float] = OrderedDict()
        self.relay_port = 0  # port at which this peer relays calls for others; 0: it does not
        self.relayed: Callable[[], RelayCounts] | None = None  # returns its counts of relayed calls
        self.on_introduced: list[Callable[[Introduction], None]] = []

    def register(self, handlers: Handlers) -> None:
        """Register the handler of Hello."""
        handlers.unary(HELLO, self._answer)

    def is_due(self, peer_id: PeerId) -> bool:
        """Return whether a Hello to this peer is due: neither of the two has sent the other one recently."""
        met_s = self._met_s.get(peer_id)
        return met_s is None or asyncio.get_running_loop().time() - met_s > _INTERVAL_S

    async def introduce_once(self, contact: Contact, *, timeout_s: float) -> Introduction | None:
        """Send a Hello over an open connection, unless one of the two has sent one to the other recently.
        Raises as `introduce` does.
        """
        if not self.is_due(contact.peer_id):
            return None
        return await self.introduce(contact, timeout_s=timeout_s, connected=True)

    async def introduce(self, contact: Contact, *, timeout_s: float, connected: bool = False) -> Introduction:
        """Send a Hello. `connected`: there is a connection already. Raises NetworkError, DeadlineExceeded or
        PeerError when that fails.
        """
        self._note(contact.peer_id)
        reply, round_trip_s = await self._exchange(contact, timeout_s, connected)
        theirs = sender_from_wire(reply.contact, contact.peer_id)
        # The dialed addresses are proven to work, even if the peer does not report them: behind a router it
        # may not know its public address.
        addresses = tuple(dict.fromkeys((*theirs.addresses, *contact.addresses)))[:ADDRESSES_MAX]
        introduction = Introduction(
            contact=Contact(contact.peer_id, addresses, theirs.relays),
            agent=_readable(reply.agent),
            round_trip_s=round_trip_s,
            observed=reply.observed if ip_of(reply.observed) is not None else "",
            relay_port=reply.relay_port if reply.relay_port <= 65535 else 0,
            relayed=_counts(reply.relayed) if reply.HasField("relayed") else None,
        )
        self._book.record_seen(introduction.contact, round_trip_s=round_trip_s, agent=introduction.agent)
        for listener in self.on_introduced:
            listener(introduction)
        return introduction

    async def _exchange(
        self, contact: Contact, timeout_s: float, connected: bool
    ) -> tuple[peer_pb2.Hello, float]:
        """Return the answer and the round-trip time. The connection is made first, so that the round-trip
        time does not include it.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        if not connected:
            await self._caller.call(contact, HELLO, self._message(), timeout_s=timeout_s)
        remaining_s = max(deadline_s - loop.time(), 0.001)
        started_s = time.perf_counter()  # the loop's own clock counts whole milliseconds
        reply = await self._caller.call(contact, HELLO, self._message(), timeout_s=remaining_s)
        return reply, time.perf_counter() - started_s

    def _note(self, peer_id: PeerId) -> None:
        """Record that this peer and another one have exchanged their addresses now."""
        self._met_s[peer_id] = asyncio.get_running_loop().time()
        self._met_s.move_to_end(peer_id)
        if len(self._met_s) > _MET_MAX:
            self._met_s.popitem(last=False)

    async def _answer(self, peer_id: PeerId, request: peer_pb2.Hello) -> peer_pb2.Hello:
        self._note(peer_id)  # a Hello of our own would bring the same answer
        self._book.record_seen(sender_from_wire(request.contact, peer_id), agent=_readable(request.agent))
        return self._message(observed=caller_host())

    def _message(self, observed: str = "") -> peer_pb2.Hello:
        contact = contact_to_wire(self._own())
        counts = self.relayed() if self.relayed is not None else None
        return peer_pb2.Hello(
            contact=contact,
            agent=self._agent,
            observed=observed,
            relay_port=self.relay_port,
            relayed=peer_pb2.Relayed(**dataclasses.asdict(counts)) if counts is not None else None,
        )


def _counts(wire: peer_pb2.Relayed) -> RelayCounts:
    return RelayCounts(wire.reservations, wire.circuits, wire.carried_bytes, wire.refused)


def _readable(agent: str) -> str:
    return "".join(character for character in agent[:_AGENT_CHARACTERS_MAX] if character.isprintable())
