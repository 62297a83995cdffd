"""Hostile peers that lie, forge, flood and send malformed messages to the production service."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import Address, Contact, Key, PeerId
from swarm.dht.logic.records import encode_value
from swarm.dht.logic.storage import Quotas
from swarm.dht.service.dht_service import DhtService, Entry
from swarm.dht.service.overlay import FIND, PING, STORE
from swarm.dht.service.wire import record_to_wire
from swarm.net.contacts import contact_to_wire
from swarm.testing.network import SimulatedNetwork, SimulatedPeer
from swarm.testing.virtual_loop import run_virtual
from swarm.wire.dht_pb2 import (
    DhtFindQuery,
    DhtFindReply,
    DhtFindRequest,
    DhtFindResult,
    DhtKey,
    DhtPingReply,
    DhtPingRequest,
    DhtRecord,
    DhtStoreReply,
    DhtStoreRequest,
)
from swarm.wire.peer_pb2 import Contact as WireContact
from tests.sim.dht_scenarios import record_by, service_of

KEY = Key("public", "thing")


async def offer(attacker: SimulatedPeer, victim: DhtService, *records: DhtRecord) -> list[str]:
    request = DhtStoreRequest(sender=contact_to_wire(attacker.contact), records=records)
    reply = await attacker.caller.call(victim.own(), STORE, request, timeout_s=3)
    return list(reply.refusals)


def test_forged_replayed_and_misdated_records_are_refused() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(seed=1)
        victim, attacker, writer = service_of(network.peer()), network.peer(), network.peer()
        old = record_by(writer, "old")
        new = record_by(writer, "new", issued_at_us=old.issued_at_us + 1)
        assert await offer(attacker, victim, record_to_wire(old), record_to_wire(new)) == ["", ""]
        now_us = int(writer.clock.swarm_s() * 1e6)
        wrong = [
            replace(new, value=encode_value("forged")),
            replace(new, issued_at_us=new.issued_at_us + 1),
            replace(new, deleted=True, value=b""),
            replace(record_by(attacker, "mine"), writer=writer.peer_id),
            old,
            record_by(writer, "soon", issued_at_us=now_us + 40_000_000, expiration_us=now_us + 50_000_000),
            record_by(writer, "long", expiration_us=now_us + 25 * 3600 * 1_000_000),
            record_by(attacker, "run", key=Key("run.abc", "presence"), subkey=str(writer.peer_id)),
        ]
        refusals = await offer(attacker, victim, *(record_to_wire(record) for record in wrong))
        assert all(refusals), refusals
        assert victim.storage.records(KEY, victim.overlay.now_us) == [new]
        answer = await victim.get(KEY)
        assert isinstance(answer, Entry)
        assert answer.value == "new"
        assert not network.errors
        await network.close()

    run_virtual(scenario())


def test_malformed_calls_are_refused_and_the_service_continues() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(seed=2)
        victim, attacker = service_of(network.peer()), network.peer()
        sender = contact_to_wire(attacker.contact)
        good = record_to_wire(record_by(attacker, 1))
        malformed = [
            DhtRecord(),
            DhtRecord(writer=b"x" * 38),
            DhtRecord(writer=good.writer),
            DhtRecord(writer=good.writer, key=DhtKey(namespace="a/b", name="c")),
        ]
        assert all(await offer(attacker, victim, *malformed))
        many = [good] * 257
        with pytest.raises(PeerError, match="at most 256 records"):
            await offer(attacker, victim, *many)
        call = attacker.caller.call
        contact = victim.own()
        for request in (
            DhtFindRequest(),
            DhtFindRequest(sender=WireContact(peer_id=b"nonsense")),
            DhtFindRequest(sender=contact_to_wire(network.peer().contact)),
            DhtFindRequest(sender=sender, queries=[DhtFindQuery()]),
            DhtFindRequest(sender=sender, queries=[DhtFindQuery(target=b"short")]),
            DhtFindRequest(sender=sender, queries=[DhtFindQuery(key=DhtKey(namespace="", name="x"))]),
            DhtFindRequest(
                sender=sender, queries=[DhtFindQuery(key=DhtKey(namespace="public", name="x" * 300))]
            ),
            DhtFindRequest(sender=sender, queries=[DhtFindQuery(target=bytes(32))] * 65),
        ):
            with pytest.raises(PeerError, match="refused"):
                await call(contact, FIND, request, timeout_s=3)
        with pytest.raises(PeerError, match="refused"):
            await call(contact, PING, DhtPingRequest(), timeout_s=3)
        with pytest.raises(UsageError, match="bytes"):
            await call(
                contact,
                STORE,
                DhtStoreRequest(sender=sender, records=[DhtRecord(value=bytes(2 << 20))]),
                timeout_s=3,
            )
        odd = WireContact(
            peer_id=sender.peer_id,
            addresses=["", "/ip4/1.2.3.4/udp/1", "x" * 1000, *["/ip4/1.2.3.4/tcp/5"] * 100],
        )
        await call(contact, PING, DhtPingRequest(sender=odd), timeout_s=3)
        await asyncio.sleep(30)
        assert attacker.peer_id not in victim.overlay.table, "it calls, but does not answer"
        known = victim.overlay.book.contact(attacker.peer_id)
        assert known is not None
        assert len(known.addresses) <= 8
        assert not network.errors
        await network.close()

    run_virtual(scenario())


def test_a_flood_fills_only_the_attackers_quota() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(seed=3)
        quotas = Quotas(entries_per_writer_max=100)
        victim, attacker = service_of(network.peer(), quotas=quotas), network.peer()
        refusals: list[str] = []
        for start in range(0, 300, 100):
            batch = [
                record_by(attacker, number, key=Key("public", f"flood{start + number}"))
                for number in range(100)
            ]
            refusals += await offer(attacker, victim, *(record_to_wire(record) for record in batch))
        assert refusals.count("") == 100
        assert (await victim.store(KEY, "mine", ttl_s=60)).ok
        assert not network.errors
        await network.close()

    run_virtual(scenario())


class Liar:
    """A peer that answers every call with records and contacts of its choice."""

    def __init__(self, peer: SimulatedPeer, records: list[DhtRecord], contacts: list[WireContact]) -> None:
        self.peer, self.records, self.contacts = peer, records, contacts
        peer.handlers.unary(PING, self.ping)
        peer.handlers.unary(FIND, self.find)
        peer.handlers.unary(STORE, self.store)

    async def ping(self, caller: PeerId, request: DhtPingRequest) -> DhtPingReply:
        return DhtPingReply(time_us=2**62, contact=WireContact(peer_id=b"?"))

    async def find(self, caller: PeerId, request: DhtFindRequest) -> DhtFindReply:
        return DhtFindReply(
            time_us=-(2**62), results=[DhtFindResult(records=self.records, nearest=self.contacts)]
        )

    async def store(self, caller: PeerId, request: DhtStoreRequest) -> DhtStoreReply:
        return DhtStoreReply(refusals=["no " * 1000], nearest=self.contacts)


def test_lying_replicas_do_not_mislead_readers() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(seed=4)
        honest = [service_of(network.peer()) for _ in range(6)]
        for service in honest[1:]:
            await service.join([honest[0].own()])
        writer = network.peers[honest[1].peer_id]
        invented = [Contact(PeerId(bytes([number]) * 32), (Address("10.9.9.9", 9),)) for number in range(100)]
        forged = replace(record_by(writer, "forged"), value=encode_value("evil"))
        nonsense = [WireContact(peer_id=b"nonsense")]
        for contacts in ([contact_to_wire(contact) for contact in invented], nonsense, []):
            liar = Liar(
                network.peer(),
                [
                    record_to_wire(forged),
                    record_to_wire(record_by(writer, "x", key=Key("public", "other"))),
                    DhtRecord(),
                ],
                contacts,
            )
            if contacts is nonsense:
                breaker = liar.peer
            for service in honest:
                service.overlay.on_answer(liar.peer.contact)
        refusals = 0
        for number, service in enumerate(honest):
            result = await service.store(KEY, number, ttl_s=60)
            assert result.ok
            assert all(len(refusal) <= 200 for refusal in result.refusals)
            refusals += len(result.refusals)
            for other in honest:
                answer = await other.get(KEY)
                assert isinstance(answer, Entry)
                assert answer.value == number
        for service in honest:
            answer = await service.get(KEY, latest=True)  # asks all peers
            assert isinstance(answer, Entry)
            assert answer.value == len(honest) - 1
        assert refusals, "no liar was asked to store anything"
        assert all(service.clock.offset_s == 0.0 for service in honest)
        assert all(breaker.peer_id not in service.overlay.table for service in honest), (
            "who sends nonsense is dropped"
        )
        assert not network.errors
        await network.close()

    run_virtual(scenario())


def test_joining_through_a_lying_peer_raises_no_error() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(seed=5)
        liar = Liar(network.peer(), [], [WireContact(peer_id=b"nonsense")])
        service = service_of(network.peer())
        await service.join([liar.peer.contact, network.peer(dialable=False).contact, service.own()])
        assert (await service.store(KEY, 1, ttl_s=60)).ok
        assert not network.errors
        await network.close()

    run_virtual(scenario())


def test_usage_errors_are_raised_before_anything_is_sent() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(seed=6)
        service = service_of(network.peer())
        other = str(network.peer().peer_id)
        for key, subkey, value, ttl_s, text in (
            (KEY, None, object(), 60.0, "DHT value"),
            (KEY, None, bytes(70_000), 60.0, "bytes"),
            (KEY, None, 1, 0.0, "ttl_s"),
            (KEY, None, 1, 90_000.0, "24 hours"),
            (KEY, None, 1, float("nan"), "ttl_s"),
            (KEY, "x" * 300, 1, 60.0, "subkey"),
            (KEY, "\ud800", 1, 60.0, "UTF-8"),
            (Key("run.abc", "presence"), other, 1, 60.0, "its writer's PeerID"),
            (Key("run.", "x"), None, 1, 60.0, "names no run"),
        ):
            with pytest.raises(UsageError, match=text):
                await service.store(key, value, ttl_s=ttl_s, subkey=subkey)
        await network.close()

    run_virtual(scenario())
