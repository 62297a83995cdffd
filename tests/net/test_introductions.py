"""Introductions: one call exchanges the addresses of two peers, whichever of them makes it."""

from __future__ import annotations

import asyncio
from typing import Any

from swarm.core.ids import Address, Contact, PeerId
from swarm.net.hello import HELLO, Introductions
from swarm.net.logic.relay_counts import RelayCounts
from swarm.net.peerbook import PeerBook
from swarm.net.rpc import Handlers
from swarm.testing.identities import SeededIdentity

CONTACTS = [Contact(SeededIdentity(n).peer_id, (Address("127.0.0.1", 4000 + n),)) for n in range(2)]


class Wire:
    """Calls between the two peers, with their number."""

    def __init__(self) -> None:
        self.handlers: dict[PeerId, Any] = {}
        self.calls = 0

    def caller(self, own: PeerId) -> Any:
        wire = self

        class Caller:
            async def call(self, contact: Contact, method: Any, request: Any, *, timeout_s: float) -> Any:
                assert method is HELLO
                wire.calls += 1
                return await wire.handlers[contact.peer_id](own, request)

        return Caller()


class Registered(Handlers):
    """Keeps the handler of Hello."""

    def __init__(self, wire: Wire, own: PeerId) -> None:
        super().__init__()
        self._wire, self._own = wire, own

    def unary(self, method: Any, handler: Any, **how: Any) -> None:
        self._wire.handlers[self._own] = handler


def test_a_peer_that_was_asked_does_not_ask_back() -> None:
    async def play() -> None:
        wire, both, books = Wire(), [], []
        for contact in CONTACTS:
            book = PeerBook(contact.peer_id, lambda: 1000.0, None, 8)
            one = Introductions(lambda contact=contact: contact, "agent", wire.caller(contact.peer_id), book)
            one.register(Registered(wire, contact.peer_id))
            both.append(one)
            books.append(book)
        assert both[0].is_due(CONTACTS[1].peer_id)
        assert both[1].is_due(CONTACTS[0].peer_id)
        await both[0].introduce(CONTACTS[1], timeout_s=1.0, connected=True)
        assert wire.calls == 1
        assert not both[0].is_due(CONTACTS[1].peer_id)
        assert not both[1].is_due(CONTACTS[0].peer_id)
        assert await both[1].introduce_once(CONTACTS[0], timeout_s=1.0) is None
        assert wire.calls == 1
        for book, other in zip(books, reversed(CONTACTS), strict=True):
            (known,) = book.known()
            assert (known.contact, known.agent) == (other, "agent")

    asyncio.run(play())


def test_a_relay_says_at_which_port_it_relays_and_how_much() -> None:
    async def play() -> None:
        wire, both = Wire(), []
        for contact in CONTACTS:
            book = PeerBook(contact.peer_id, lambda: 1000.0, None, 8)
            one = Introductions(lambda contact=contact: contact, "agent", wire.caller(contact.peer_id), book)
            one.register(Registered(wire, contact.peer_id))
            both.append(one)
        answer = await both[0].introduce(CONTACTS[1], timeout_s=1.0, connected=True)
        assert (answer.relay_port, answer.relayed) == (0, None)
        counts = RelayCounts(reservations=2, circuits=1, carried_bytes=1 << 40, refused=3)
        both[1].relay_port, both[1].relayed = 4001, lambda: counts
        answer = await both[0].introduce(CONTACTS[1], timeout_s=1.0, connected=True)
        assert (answer.relay_port, answer.relayed) == (4001, counts)

    asyncio.run(play())
