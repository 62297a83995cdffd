"""Hostile DHT peers. They speak the protocol and answer every call, with harmful answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from swarm.core.errors import SwarmError
from swarm.core.ids import Address, Contact, PeerId
from swarm.dht.service.overlay import FIND, PING, STORE
from swarm.dht.service.wire import id_from_wire, key_from_wire
from swarm.net.contacts import contact_to_wire
from swarm.testing.chance import Chance
from swarm.testing.identities import SeededIdentity
from swarm.testing.network import SimulatedPeer
from swarm.wire.dht_pb2 import (
    DhtFindQuery,
    DhtFindReply,
    DhtFindRequest,
    DhtFindResult,
    DhtPingReply,
    DhtPingRequest,
    DhtStoreReply,
    DhtStoreRequest,
)
from swarm.wire.peer_pb2 import Contact as WireContact

Contacts = Callable[
    [int], Sequence[Contact]
]  # returns the contacts to send to a peer that searches for a DHT id

_NAMED_MAX = 20
_SILENT_S = 60.0  # longer than any timeout


class HostilePeer:
    """A peer that accepts every record and forgets it, knows no record, and returns the contacts that
    `contacts` chooses.
    """

    def __init__(self, peer: SimulatedPeer, contacts: Contacts) -> None:
        self.peer = peer
        self._contacts = contacts
        self.asked = 0
        peer.handlers.unary(PING, self._on_ping)
        peer.handlers.unary(FIND, self._on_find)
        peer.handlers.unary(STORE, self._on_store)

    async def enter_tables(self, victims: Sequence[Contact]) -> None:
        """Call honest peers, in order to enter their tables."""
        for victim in victims:
            try:
                await self.peer.caller.call(
                    victim, PING, DhtPingRequest(sender=contact_to_wire(self.peer.contact)), timeout_s=3.0
                )
            except SwarmError:
                continue

    @property
    def _time_us(self) -> int:
        return int(self.peer.clock.swarm_s() * 1e6)

    async def _on_ping(self, caller: PeerId, request: DhtPingRequest) -> DhtPingReply:
        return DhtPingReply(time_us=self._time_us, contact=contact_to_wire(self.peer.contact))

    async def _on_find(self, caller: PeerId, request: DhtFindRequest) -> DhtFindReply:
        self.asked += 1
        results = [DhtFindResult(nearest=self._named(_place(query))) for query in request.queries]
        return DhtFindReply(time_us=self._time_us, results=results)

    async def _on_store(self, caller: PeerId, request: DhtStoreRequest) -> DhtStoreReply:
        nearest = self._named(id_from_wire(request.target)) if request.target else []
        return DhtStoreReply(time_us=self._time_us, refusals=[""] * len(request.records), nearest=nearest)

    def _named(self, dht_id: int) -> list[WireContact]:
        return [contact_to_wire(contact) for contact in self._contacts(dht_id)]


class SilentPeer(HostilePeer):
    """A peer that answers only pings, so that it stays in the tables of others."""

    async def _on_find(self, caller: PeerId, request: DhtFindRequest) -> DhtFindReply:
        self.asked += 1
        await asyncio.sleep(_SILENT_S)
        return await super()._on_find(caller, request)

    async def _on_store(self, caller: PeerId, request: DhtStoreRequest) -> DhtStoreReply:
        await asyncio.sleep(_SILENT_S)
        return await super()._on_store(caller, request)


def only_colluders(everybody: Sequence[SimulatedPeer]) -> Contacts:
    """Return contacts for an eclipse attack: only other hostile peers, the nearest first."""

    def contacts(dht_id: int) -> list[Contact]:
        return sorted(
            (peer.contact for peer in everybody), key=lambda contact: contact.peer_id.dht_id ^ dht_id
        )[:_NAMED_MAX]

    return contacts


def invented_contacts(chance: Chance) -> Contacts:
    """Return contacts for an endless search: peers that do not exist, new ones in every answer."""

    def contacts(dht_id: int) -> list[Contact]:
        return [
            Contact(
                PeerId(chance.getrandbits(256).to_bytes(32, "big")),
                (Address(f"10.200.{chance.below(256)}.{chance.below(256)}", 9),),
            )
            for _ in range(_NAMED_MAX)
        ]

    return contacts


def nearest_identities(dht_id: int, count: int, tried: int, seed: int | str) -> list[SeededIdentity]:
    """Return the `count` identities nearest to `dht_id` out of `tried` that an attacker made. Each costs 30
    µs here: a million take half a minute.
    """
    identities = (
        SeededIdentity(f"near/{seed}/{number}") for number in itertools.islice(itertools.count(), tried)
    )
    return sorted(identities, key=lambda identity: identity.peer_id.dht_id ^ dht_id)[:count]


def _place(query: DhtFindQuery) -> int:
    return (
        id_from_wire(query.target)
        if query.WhichOneof("what") == "target"
        else key_from_wire(query.key).dht_id
    )
