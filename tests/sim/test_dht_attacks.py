"""Attacks on the DHT's maintenance: comparisons, goodbyes, blobs, replication, tables. `test_dht_hostile`
attacks records.
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace

import pytest

from swarm.core.errors import PeerError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact, Key, PeerId
from swarm.dht.logic.records import encode_value, record_of_blob
from swarm.dht.logic.rules import NamespaceRules
from swarm.dht.logic.schema import Number
from swarm.dht.logic.storage import Quotas
from swarm.dht.logic.summary import ENTRY_BYTES, summary
from swarm.dht.service.dht_service import DhtService, Entry, StoreItem
from swarm.dht.service.overlay import FIND, HOLDS, PING, STORE
from swarm.dht.service.wire import key_to_wire, record_to_wire
from swarm.net.contacts import contact_to_wire
from swarm.run.directory import RunDirectory
from swarm.run.signed import SignedSpecification, sign, specification_key
from swarm.run.specification import RunSpecification
from swarm.testing.network import SimulatedNetwork, SimulatedPeer
from swarm.wire.dht_pb2 import (
    DhtFindQuery,
    DhtFindReply,
    DhtFindRequest,
    DhtFindResult,
    DhtHeldKey,
    DhtHoldsReply,
    DhtHoldsRequest,
    DhtPingReply,
    DhtPingRequest,
    DhtRecord,
    DhtStoreReply,
    DhtStoreRequest,
)
from tests.sim.dht_scenarios import holders, nearest, peer_of, play, record_by, service_of, swarm_of, value_at

SMALL = 8  # peers in a bucket, so that a few peers are a large swarm


class Swallower:
    """A peer that claims to store every record and never returns one; it names only its accomplices."""

    def __init__(self, peer: SimulatedPeer, friends: list[Contact]) -> None:
        self.peer, self.friends = peer, friends
        self.calls = 0
        peer.handlers.unary(PING, self.ping)
        peer.handlers.unary(FIND, self.find)
        peer.handlers.unary(STORE, self.store)
        peer.handlers.unary(HOLDS, self.holds)

    async def ping(self, caller: PeerId, request: DhtPingRequest) -> DhtPingReply:
        return DhtPingReply(
            time_us=int(self.peer.clock.swarm_s() * 1e6), contact=contact_to_wire(self.peer.contact)
        )

    async def find(self, caller: PeerId, request: DhtFindRequest) -> DhtFindReply:
        self.calls += 1
        contacts = [contact_to_wire(contact) for contact in self.friends]
        return DhtFindReply(
            time_us=int(self.peer.clock.swarm_s() * 1e6),
            results=[DhtFindResult(nearest=contacts) for _ in request.queries],
        )

    async def store(self, caller: PeerId, request: DhtStoreRequest) -> DhtStoreReply:
        return DhtStoreReply(
            time_us=int(self.peer.clock.swarm_s() * 1e6), refusals=[""] * len(request.records)
        )

    async def holds(self, caller: PeerId, request: DhtHoldsRequest) -> DhtHoldsReply:
        return DhtHoldsReply(wanted=list(range(0, 4_000_000_000, 400_000)))


def test_four_malicious_replicas_cannot_hide_a_record() -> None:
    """Four identities claim to store a record and deny having it: the fifth replica returns it, and so do
    earlier holders.
    """

    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 12, SMALL)
        candidates = [network.peer() for _ in range(300)]
        key = Key.parse("victim")
        closest = sorted(candidates, key=lambda peer: peer.peer_id.dht_id ^ key.dht_id)[:4]
        assert (
            closest[-1].peer_id.dht_id ^ key.dht_id < nearest(services, key, 1)[0].peer_id.dht_id ^ key.dht_id
        )
        await services[1].store(key, "before", ttl_s=3600, subkey="before")
        liars = [Swallower(peer, [other.contact for other in closest]) for peer in closest]
        for service in services:
            for liar in liars:
                service.overlay.on_answer(liar.peer.contact)
        await services[2].store(key, "after", ttl_s=3600, subkey="after")
        await asyncio.sleep(60)
        for service in services:
            found = await service.get(key, max_age_s=0)
            assert isinstance(found, dict)
            assert found["after"].value == "after"
            widely = await service.get(key, latest=True)
            assert isinstance(widely, dict)
            assert set(widely) == {"before", "after"}
        assert sum(liar.calls for liar in liars) < 12 * 20

    play(scenario, seed=1)


def test_a_peer_that_requests_all_and_invalid_entries_gets_each_record_once() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 3)
        await services[0].store_many([StoreItem(key=f"k{n}", value=n) for n in range(50)], ttl_s=3600)
        liar = Swallower(network.peer(), [])
        network.trace.clear()
        for service in services:
            service.overlay.on_answer(liar.peer.contact)
        await asyncio.sleep(600)
        sent = sum(
            int(line.rsplit(" ", 1)[1])
            for line in network.trace
            if "/Store" in line and line.rsplit(" ", 1)[1].isdigit()
        )
        assert sent < 3 * 2 * 50 * 500

    play(scenario, seed=2)


def test_too_large_or_malformed_comparisons_are_refused() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        (victim,) = await swarm_of(network, 1)
        attacker = network.peer()
        sender, call = contact_to_wire(attacker.contact), attacker.caller.call
        key = key_to_wire(Key.parse("thing"))
        for keys, text in (
            ([DhtHeldKey(key=key)] * 257, "at most 256 keys"),
            ([DhtHeldKey(key=key, entries=bytes(ENTRY_BYTES * 2049))], "2048 records"),
            ([DhtHeldKey()], "malformed key"),
        ):
            with pytest.raises(PeerError, match=text):
                await call(victim.own(), HOLDS, DhtHoldsRequest(sender=sender, keys=keys), timeout_s=3)
        with pytest.raises(PeerError, match="sender"):
            await call(
                victim.own(), HOLDS, DhtHoldsRequest(sender=contact_to_wire(victim.own())), timeout_s=3
            )
        reply = await call(
            victim.own(),
            HOLDS,
            DhtHoldsRequest(sender=sender, keys=[DhtHeldKey(key=key, entries=bytes(40))]),
            timeout_s=3,
        )
        assert list(reply.wanted) == [0, 1]
        assert victim.storage.entry_count == 0
        assert not victim.replication.compared_keys, "nothing is remembered of what is not held"
        record = record_by(attacker, 1)
        assert victim.storage.store(record, victim.overlay.now_us) is None
        held = DhtHeldKey(key=key, entries=summary(record.key, [record]))
        await call(victim.own(), HOLDS, DhtHoldsRequest(sender=sender, keys=[held]), timeout_s=3)
        assert not victim.replication.compared_keys, "a peer that is no replica cannot mark a key as compared"

    play(scenario, seed=3)


def test_goodbyes_for_other_peers_are_refused_and_callers_do_not_enter_tables() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 4)
        attacker = network.peer()
        goodbye = DhtPingRequest(sender=contact_to_wire(services[1].own()), leaving=True)
        with pytest.raises(PeerError, match="sender"):
            await attacker.caller.call(services[0].own(), PING, goodbye, timeout_s=3)
        own = DhtPingRequest(
            sender=contact_to_wire(Contact(attacker.peer_id, services[1].own().addresses)), leaving=True
        )
        await attacker.caller.call(services[0].own(), PING, own, timeout_s=3)
        assert services[1].peer_id in services[0].overlay.table
        crowd = [network.peer() for _ in range(200)]
        async with asyncio.TaskGroup() as group:
            for peer in crowd:
                request = DhtPingRequest(sender=contact_to_wire(peer.contact))
                group.create_task(peer.caller.call(services[0].own(), PING, request, timeout_s=3))
        await asyncio.sleep(30)
        assert len(services[0].overlay.table) == 3, "none of them answers, so none of them counts"
        assert services[0].supervisor.running.count("DHT check of a caller") == 0

    play(scenario, seed=4)


def specification(owner: Identity, version: int = 1) -> SignedSpecification:
    table = {"name": "tiny", "target_batch_size": 64, "batch_size": 8, "task": {"name": "bytelm"}}
    return sign(RunSpecification.from_table(table, "test"), owner, version=version, created_s=0.0)


def directory_of(network: SimulatedNetwork, service: DhtService) -> RunDirectory:
    return RunDirectory(service, clock=peer_of(network, service).clock, rng=network.rng)


async def ignore(newer: SignedSpecification) -> None:
    return None


def test_a_specification_outlives_its_founder_and_forgeries_are_not_stored() -> None:
    """Members keep one copy per replica alive long after the founder's would have expired; no other record
    can be stored under the key.
    """

    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 12, SMALL)
        owner = Identity.generate()
        one, two = specification(owner), specification(owner, 2)
        key = specification_key(one.run_id)
        await directory_of(network, services[0]).publish(one)
        for service in services[1:]:
            peer_of(network, service).supervisor.spawn(
                "keeping",
                functools.partial(directory_of(network, service).renew, one, ignore),
            )
        await asyncio.sleep(5)
        await network.crash(peer_of(network, services[0]))
        attacker = services[1]
        for value in (b"garbage", specification(Identity.generate(), 9).blob, one.blob, one.blob[:-1] + b"x"):
            with pytest.raises(UsageError):
                await attacker.store(key, value, ttl_s=3600)
        forged = replace(
            record_of_blob(key, one.blob, int((peer_of(network, attacker).clock.swarm_s() + 3600) * 1e6)),
            issued_at_us=7,
        )
        request = DhtStoreRequest(sender=contact_to_wire(attacker.own()), records=[record_to_wire(forged)])
        for victim in nearest(services[2:], key):
            reply = await peer_of(network, attacker).caller.call(victim.own(), STORE, request, timeout_s=3)
            assert reply.refusals[0]
        network.trace.clear()
        await asyncio.sleep(5400)
        alive = services[1:]
        assert (await directory_of(network, services[9]).specification(one.run_id)) == one
        assert [listing.run_id for listing in await directory_of(network, services[3]).listings()] == [
            one.run_id
        ]
        holding = holders(alive, key)
        assert holding
        for service in holding:
            assert [record.writer for record in service.storage.records(key, service.overlay.now_us)] == [
                owner.peer_id
            ]
        await directory_of(network, services[5]).publish(two)  # any holder of the blob may publish it
        assert (await directory_of(network, services[9]).specification(one.run_id)).version == 2
        await attacker.store_blob(key, one.blob, ttl_s=24 * 3600)
        assert (await directory_of(network, services[9]).specification(one.run_id)).version == 2

    play(scenario, seed=5)


def test_rules_apply_to_replicas_readers_and_writers() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 6)
        judge, other_writer = services[0], services[1]
        rules = NamespaceRules(
            writers=frozenset({judge.peer_id}), schema=Number(0, 1), entries_per_writer_max=2
        )
        key = Key.parse("scores/one")
        await other_writer.store(key, "graffiti", ttl_s=3600)  # before any other peer knows the rules
        for service in services[2:]:
            service.register("scores", rules)
        assert await value_at(services[2], key, max_age_s=0) is None, "a reader sees nothing that breaks them"
        result = await other_writer.store(key, "more of it", ttl_s=3600)
        assert any("not among those who may write" in refusal for refusal in result.refusals), (
            "a replica keeps nothing of it"
        )
        assert (await judge.store(key, 0.5, ttl_s=3600)).replicas == 5
        assert await value_at(services[2], key, max_age_s=0) == 0.5
        with pytest.raises(UsageError, match="may write"):
            await services[3].store(key, 0.5, ttl_s=60)
        results = [
            await judge.store(Key.parse("scores/two"), 0.1, ttl_s=60, subkey=str(number))
            for number in range(3)
        ]
        assert any("2 entries under this key" in refusal for refusal in results[2].refusals)

    play(scenario, seed=6)


def test_a_flood_by_many_identities_leaves_room_for_near_keys() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        quotas = Quotas(bytes_max=60_000, bytes_far_max=15_000)
        services = await swarm_of(network, 25, SMALL, quotas=quotas)
        victim = services[7]
        for flood in range(20):
            attacker = network.peer()
            far = [Key.parse(f"flood-{flood}-{number}") for number in range(60)]
            far = [key for key in far if victim not in nearest(services, key, 8)][:20]
            records = [record_by(attacker, bytes(500), key=key) for key in far]
            request = DhtStoreRequest(
                sender=contact_to_wire(attacker.contact), records=map(record_to_wire, records)
            )
            await attacker.caller.call(victim.own(), STORE, request, timeout_s=3)
        assert victim.storage.size_bytes <= 30_000
        near = [
            key
            for key in (Key.parse(f"honest-{number}") for number in range(100))
            if victim in nearest(services, key, 3)
        ][:10]
        for key in near:
            await services[1].store(key, 1, ttl_s=600)
            assert victim in holders(services, key)

    play(scenario, seed=7)


def test_a_bulk_reply_with_the_longest_addresses_fits_its_limit() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 3)
        crowd = [network.peer() for _ in range(30)]
        label = ".".join(["x" * 60] * 4)
        for peer in crowd:
            contact = Contact(peer.peer_id, tuple(Address(label, 4000 + port) for port in range(8)))
            services[0].overlay.on_answer(contact)
        caller = peer_of(network, services[1]).caller
        queries = [DhtFindQuery(key=key_to_wire(Key.parse(f"k{number}"))) for number in range(64)]
        request = DhtFindRequest(sender=contact_to_wire(services[1].own()), queries=queries, nearest_max=1000)
        reply = await caller.call(services[0].own(), FIND, request, timeout_s=3)
        assert len(reply.results) == 64
        assert reply.ByteSize() < 1 << 20, "the rest of a reply is for records"
        assert all(6 <= len(result.nearest) <= 20 for result in reply.results)

    play(scenario, seed=11)


class Endless(Swallower):
    """A peer that names twenty new peers in every answer, all at its own address, each nearer than the
    last.
    """

    async def find(self, caller: PeerId, request: DhtFindRequest) -> DhtFindReply:
        self.calls += 1
        invented = [
            Contact(PeerId(self.peer.network.rng.randbytes(32)), (Address("10.9.9.9", 9),))
            for _ in range(500)
        ]
        contacts = [contact_to_wire(contact) for contact in invented]
        time_us = int(self.peer.clock.swarm_s() * 1e6)
        return DhtFindReply(
            time_us=time_us,
            results=[DhtFindResult(records=[DhtRecord()] * 300, nearest=contacts) for _ in request.queries],
        )


def test_endless_contacts_cause_bounded_calls_and_enter_no_table() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 10, SMALL)
        await services[0].store_many([StoreItem(key=f"k{n}", value=n) for n in range(10)], ttl_s=3600)
        liars = [Endless(network.peer(), []) for _ in range(3)]
        for service in services:
            for liar in liars:
                service.overlay.on_answer(liar.peer.contact)
        loop = asyncio.get_running_loop()
        for number in range(10):
            began_s = loop.time()
            assert await value_at(services[number], Key.parse(f"k{number}"), max_age_s=0) == number
            assert loop.time() - began_s < 10
        many = await services[4].get_many([f"k{n}" for n in range(10)], latest=True, timeout_s=20)
        assert [answer.value for answer in many.answers.values() if isinstance(answer, Entry)] == list(
            range(10)
        )
        await asyncio.sleep(600)
        real = set(network.peers)
        for service in services:
            assert {contact.peer_id for contact in service.overlay.table} <= real
            assert len(service.overlay.suspects) <= 1024

    play(scenario, seed=8)


def test_excessive_values_and_lifetimes_are_refused_on_every_path() -> None:
    """Excessive values and lifetimes arrive in a Store, in the answer to a read, and in a bulk with good
    records, which are kept.
    """

    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 4)
        attacker = network.peer()
        now_us = int(attacker.clock.swarm_s() * 1e6)
        key, good = Key.parse("thing"), record_by(attacker, "good")
        bad = [
            replace(good, value=bytes(66_000)),
            record_by(attacker, 0, expiration_us=now_us + 25 * 3600 * 1_000_000),
            record_by(
                attacker, 0, issued_at_us=now_us + 3600 * 1_000_000, expiration_us=now_us + 3700 * 1_000_000
            ),
            record_by(attacker, 0, expiration_us=2**62),
            record_by(attacker, 0, issued_at_us=-1),
            record_by(attacker, 0, subkey="x" * 300),
            replace(good, value=b"\xc1"),
        ]
        request = DhtStoreRequest(
            sender=contact_to_wire(attacker.contact), records=[record_to_wire(one) for one in (*bad, good)]
        )
        reply = await attacker.caller.call(services[0].own(), STORE, request, timeout_s=3)
        assert [bool(refusal) for refusal in reply.refusals] == [True] * len(bad) + [False]

        class Feeder(Swallower):
            async def find(self, caller: PeerId, request: DhtFindRequest) -> DhtFindReply:
                return DhtFindReply(
                    results=[
                        DhtFindResult(records=[record_to_wire(one) for one in (*bad, good)])
                        for _ in request.queries
                    ]
                )

        Feeder(attacker, [])
        for service in services:
            service.overlay.on_answer(attacker.contact)
            assert await value_at(service, key, max_age_s=0) == "good"
            assert all(record == good for record in service.storage.records(key, service.overlay.now_us))
        assert holders(services, key)

    play(scenario, seed=9)


def test_replicated_records_are_validated_like_all_others() -> None:
    """Records that arrive by hand-over are trusted no more than records from a writer."""

    async def scenario(network: SimulatedNetwork) -> None:
        victim, writer, attacker = service_of(network.peer()), network.peer(), network.peer()
        old, new = (
            record_by(writer, "old"),
            record_by(writer, "new", issued_at_us=int(writer.clock.swarm_s() * 1e6) + 1),
        )
        assert victim.storage.store(new, victim.overlay.now_us) is None
        request = DhtStoreRequest(
            sender=contact_to_wire(attacker.contact),
            records=[record_to_wire(old), record_to_wire(replace(new, value=encode_value("x")))],
        )
        reply = await attacker.caller.call(victim.own(), STORE, request, timeout_s=3)
        assert all(reply.refusals)
        assert victim.storage.records(Key.parse("thing"), victim.overlay.now_us) == [new]

    play(scenario, seed=10)
