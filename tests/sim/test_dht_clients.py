"""Tests of client peers, which cannot be called: they read and write, but hold nothing. Also of peers with
wrong clocks.
"""

from __future__ import annotations

import asyncio
import logging

import pytest

from swarm.core.ids import Address, Contact, Key
from swarm.dht.service.overlay import FIND, HOLDS, STORE
from swarm.dht.service.wire import id_to_wire, key_to_wire, record_to_wire
from swarm.net.contacts import contact_to_wire
from swarm.net.rpc import UnaryHandler
from swarm.testing.network import SimulatedNetwork
from swarm.wire.dht_pb2 import (
    DhtFindQuery,
    DhtFindRequest,
    DhtHeldKey,
    DhtHoldsReply,
    DhtHoldsRequest,
    DhtStoreReply,
    DhtStoreRequest,
)
from tests.sim.dht_scenarios import holders, peer_of, play, record_by, service_of, swarm_of, value_at

SMALL = 8  # peers in a bucket, so that a few peers are a large swarm


def test_client_peers_hold_nothing_and_are_in_no_table() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 8, SMALL)
        clients = [service_of(network.peer(dialable=False), SMALL) for _ in range(6)]
        for client in clients:
            await client.join([services[1].own()])
        keys = [Key.parse(f"thing-{number}") for number in range(60)]
        for number, key in enumerate(keys):
            result = await clients[number % 6].store(key, number, ttl_s=8 * 3600)
            assert result.replicas == 5
        for number, key in enumerate(keys):
            assert await value_at(clients[(number + 1) % 6], key) == number
            assert await value_at(clients[number % 6], key, max_age_s=60) == number
        await network.crash(peer_of(network, services[0]))
        await asyncio.sleep(1800)
        for client in clients:
            assert client.storage.entry_count == 0
            await client.leave()
        for service in services[1:]:
            known = {contact.peer_id for contact in service.overlay.table}
            assert not known & {client.peer_id for client in clients}
            waiting = service.overlay.table.replacements()
            assert not waiting & {client.peer_id for client in clients}
            request = DhtFindRequest(
                sender=contact_to_wire(services[1].own()),
                queries=[DhtFindQuery(target=id_to_wire(clients[0].peer_id.dht_id))],
            )
            if service is not services[1]:
                reply = await peer_of(network, services[1]).caller.call(
                    service.own(), FIND, request, timeout_s=3
                )
                assert all(contact.addresses for contact in reply.results[0].nearest)
        assert all(len(holders(services[1:], key)) >= 5 for key in keys)

    play(scenario, seed=1)


def test_a_peer_unreachable_at_its_announced_address_is_treated_as_a_client() -> None:
    """Behind a router that forwards nothing, a peer announces the address that it listens on, but cannot be
    called there.
    """

    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 6)
        hidden = network.peer()
        elsewhere = Contact(hidden.peer_id, (Address("192.168.0.2", 4000),))
        hidden_service = service_of(hidden)
        hidden_service.own = hidden_service.overlay.own = lambda: elsewhere
        await hidden_service.join([services[0].own()])
        for number in range(30):
            result = await hidden_service.store(Key.parse(f"thing-{number}"), number, ttl_s=600)
            assert result.ok
        await asyncio.sleep(120)
        assert all(hidden.peer_id not in service.overlay.table for service in services)
        assert all(
            [await value_at(services[3], Key.parse(f"thing-{number}")) == number for number in range(30)]
        )
        for number in range(30):
            assert await value_at(hidden_service, Key.parse(f"thing-{number}")) == number

    play(scenario, seed=2)


def test_a_client_refuses_records() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        (service,) = await swarm_of(network, 1)
        client = service_of(network.peer(dialable=False))
        await client.join([service.own()])
        handlers = peer_of(network, client).handlers
        sender = contact_to_wire(service.own())
        record = record_by(peer_of(network, service), 1)
        found = handlers.find(HOLDS.name)
        assert isinstance(found, UnaryHandler)
        held = DhtHeldKey(key=key_to_wire(record.key), entries=bytes(16 * 5))
        request = DhtHoldsRequest(sender=sender, keys=[held])
        reply = await found.function(service.peer_id, request)
        assert isinstance(reply, DhtHoldsReply)
        assert not reply.wanted
        found = handlers.find(STORE.name)
        assert isinstance(found, UnaryHandler)
        reply = await found.function(
            service.peer_id, DhtStoreRequest(sender=sender, records=[record_to_wire(record)])
        )
        assert isinstance(reply, DhtStoreReply)
        assert "client" in reply.refusals[0]
        assert client.storage.entry_count == 0

    play(scenario, seed=3)


def test_a_peer_with_a_wrong_clock_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 5)
        assert all(service.clock_problem is None for service in services)
        late = service_of(network.peer(skew_s=-400.0))
        with caplog.at_level(logging.WARNING):
            await late.join([services[0].own()])
        text = late.clock_problem
        assert text is not None
        assert str(late.peer_id) in text
        assert "7 min behind" in text
        assert "NTP" in text
        assert caplog.text.count(text) == 1
        assert (await late.store(Key.parse("late"), 1, ttl_s=60)).replicas == 5
        peer_of(network, late).clock.skew_s = 0.0  # its owner has set it
        await asyncio.sleep(1200)
        assert late.clock_problem is None
        assert late.clock.offset_s == 0.0
        assert all(service.clock_problem is None for service in services)

    play(scenario, seed=4)


def test_two_peers_both_warn_that_one_clock_is_wrong() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        one, other = service_of(network.peer()), service_of(network.peer(skew_s=3600.0))
        await other.join([one.own()])
        text = other.clock_problem
        assert text is not None
        assert str(one.peer_id) in text
        assert "60 min ahead" in text
        assert other.clock.offset_s == 0.0, "it is unknown which of the two is wrong"
        refused = await other.store(Key.parse("x"), 1, ttl_s=60)
        assert any("one of the two clocks is wrong" in refusal for refusal in refused.refusals)

    play(scenario, seed=5)
