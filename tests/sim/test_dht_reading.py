"""Tests of the age of answers: which are cached, which peers answer from memory, and that no cache revives
deleted entries.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest

from swarm.core.errors import DeadlineExceeded, NetworkError, PeerError, UsageError
from swarm.core.ids import Contact, Key
from swarm.core.presets import WAN
from swarm.dht.logic.constants import BUCKET_MAX, REPLICAS
from swarm.dht.service.overlay import FIND, STORE
from swarm.dht.service.wire import KNOWN_MAX, id_to_wire, key_to_wire, known_to_wire
from swarm.net.contacts import contacts_from_wire
from swarm.testing.caller import SimulatedCaller
from swarm.testing.network import SimulatedNetwork
from swarm.wire.dht_pb2 import DhtFindQuery, DhtFindRequest, DhtStoreRequest
from tests.sim.dht_scenarios import holders, nearest, peer_of, play, record_by, service_of, swarm_of, value_at

KEY = Key.parse("thing")
SMALL = 8  # peers in a bucket, so that a few peers are a large swarm


def test_answers_are_cached_for_as_long_as_the_reader_allows() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 8)
        reader = next(service for service in services if service not in nearest(services, KEY))
        await services[0].store(KEY, "first", ttl_s=20)
        assert await value_at(reader, KEY) == "first"
        await services[0].store(KEY, "second", ttl_s=20)
        network.trace.clear()
        assert await value_at(reader, KEY, max_age_s=5) == "first", "five seconds old is what it asked for"
        assert not network.trace
        assert await value_at(reader, KEY) == "second", "by default it asks"
        assert network.trace
        assert await value_at(reader, KEY, max_age_s=5) == "second"
        await asyncio.sleep(6)
        network.trace.clear()
        assert await value_at(reader, KEY, max_age_s=5) == "second"
        assert network.trace
        network.trace.clear()
        await asyncio.sleep(15)
        assert await value_at(reader, KEY, max_age_s=100) is None, "nothing outlives its time in a memory"
        assert not network.trace
        for wrong in (-1.0, float("nan")):
            with pytest.raises(UsageError, match="max_age_s"):
                await reader.get(KEY, max_age_s=wrong)

    play(scenario, seed=1)


@pytest.mark.parametrize("ahead", [(2,), (4,), (1, 3), (0, 1, 2)])
def test_the_other_replicas_are_asked_only_when_the_majority_disagrees(ahead: tuple[int, ...]) -> None:
    """`ahead` gives the replicas, numbered by nearness, that hold a newer record than the others."""

    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 8)
        replicas = nearest(services, KEY)
        reader, writer = [service for service in services if service not in replicas][:2]
        await writer.store(KEY, "old", ttl_s=600)
        newer = record_by(
            peer_of(network, writer), "new", key=KEY, expiration_us=writer.overlay.now_us + 600_000_000
        )
        for rank in ahead:
            assert replicas[rank].storage.store(newer, newer.issued_at_us) is None
        network.trace.clear()
        seen = await value_at(reader, KEY)
        asked = sum("/swarm.Dht/Find" in line for line in network.trace) // 2
        at_odds = 0 < len({0, 1, 2} & set(ahead)) < 3
        assert asked == (5 if at_odds else 3)
        assert seen == ("new" if {0, 1, 2} & set(ahead) else "old")
        assert await value_at(reader, KEY, latest=True) == "new"

    play(scenario, seed=3)


@pytest.mark.parametrize("holding", list(itertools.combinations(range(REPLICAS), REPLICAS // 2 + 1)))
def test_a_read_sees_every_write_that_a_majority_of_the_replicas_took(holding: tuple[int, ...]) -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 12)
        replicas = nearest(services, KEY)
        writer, *readers = [service for service in services if service not in replicas]
        await writer.store(KEY, "old", ttl_s=600)
        expiration_us = writer.overlay.now_us + 600_000_000
        newer = record_by(peer_of(network, writer), "new", key=KEY, expiration_us=expiration_us)
        for rank in holding:
            assert replicas[rank].storage.store(newer, newer.issued_at_us) is None
        assert [await value_at(reader, KEY) for reader in readers] == ["new"] * len(readers)

    play(scenario, seed=5)


def test_a_record_held_only_by_the_farthest_replica_is_found() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 8)
        replicas = nearest(services, KEY)
        reader = next(service for service in services if service not in replicas)
        record = record_by(network.peer(), "lone", key=KEY)
        assert replicas[4].storage.store(record, record.issued_at_us) is None
        assert await value_at(reader, KEY) == "lone"

    play(scenario, seed=4)


def test_own_writes_and_deletions_are_seen_despite_the_cache() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 8)
        for service in services:  # replicas and other peers
            await service.store(KEY, service.peer_id.short, ttl_s=600)
            assert await value_at(service, KEY, max_age_s=100) == service.peer_id.short
            await service.delete(KEY)
            assert await value_at(service, KEY, max_age_s=100) != service.peer_id.short
        for service in services:
            assert await value_at(service, KEY) is None
        replica = nearest(services, KEY)[0]
        await services[7].store(KEY, 1, ttl_s=600)
        assert await value_at(replica, KEY, max_age_s=100) == 1
        await services[7].delete(KEY)
        assert await value_at(replica, KEY, max_age_s=100) is None, (
            "a replica's memory is no older than what reached it"
        )

    play(scenario, seed=2)


def test_a_replica_answers_its_own_reads_while_its_neighbourhood_is_stable() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 8)
        replica, writer = nearest(services, KEY)[0], nearest(services, KEY, 8)[7]
        for number in range(20):
            await writer.store(KEY, number, ttl_s=600)
            network.trace.clear()
            assert await value_at(replica, KEY) == number
            assert not network.trace, "it was given the key's first record, and every one since"
        assert await value_at(replica, KEY, latest=True) == 19
        assert network.trace
        network.trace.clear()
        assert await value_at(replica, KEY, max_age_s=0) == 19
        assert network.trace, "who asks for it gets the replicas' word"
        await asyncio.sleep(31)
        network.trace.clear()
        assert await value_at(replica, KEY) == 19
        assert any("/Find" in line for line in network.trace), "now and then it compares"
        other = Key.parse("never-written")
        network.trace.clear()
        assert await value_at(replica, other) is None
        assert network.trace, "what it never heard of, it asks for"

    play(scenario, seed=3)


def test_a_replica_asks_again_after_a_change_of_its_neighbourhood() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 8)
        replica, writer = nearest(services, KEY)[0], nearest(services, KEY, 8)[7]
        await writer.store(KEY, 1, ttl_s=600)

        async def asks() -> bool:
            network.trace.clear()
            assert await value_at(replica, KEY) == 1
            return any("/Find" in line for line in network.trace)

        assert not await asks()
        await network.crash(peer_of(network, nearest(services, KEY)[1]))
        replica.overlay.on_failure(nearest(services, KEY)[1].peer_id, broke_protocol=True)
        assert await asks(), "a neighbour left: its first answer may be incomplete now"
        assert await asks(), "and others may not have noticed yet"
        await asyncio.sleep(3)
        assert not await asks(), "compared since, and quiet for a while"
        newcomer = service_of(network.peer())
        await newcomer.join([replica.own()])
        assert await asks()

    play(scenario, seed=7)


def test_a_replica_asks_again_after_its_machine_was_suspended() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 8)
        replica = nearest(services, KEY)[0]
        await services[7].store(KEY, 1, ttl_s=6 * 3600)
        network.trace.clear()
        assert await value_at(replica, KEY) == 1
        assert not network.trace
        # Its monotonic clock stood still for an hour, while its wall clock continued.
        peer_of(network, replica).clock.skew_s += 3600.0
        assert await value_at(replica, KEY) == 1
        assert network.trace

    play(scenario, seed=8)


def test_a_new_replica_asks_until_it_has_received_its_records() -> None:
    """A dictionary of many writers: a peer that has just become a replica must not answer from the part that
    reached it.
    """

    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 12, SMALL)
        key = Key.parse("run.abc/members")
        for service in services:
            await service.store(key, 1, ttl_s=3600)
        for _ in range(12):
            newcomer = service_of(network.peer(), SMALL)
            await newcomer.join([services[0].own()])
            await newcomer.store(key, 1, ttl_s=3600)
            services.append(newcomer)
            for service in (newcomer, *nearest(services, key)):
                found = await service.get(key)
                assert isinstance(found, dict)
                assert len(found) == len(services)

    play(scenario, seed=4)


def test_reads_after_writes_are_consistent_on_every_peer() -> None:
    """Every read that begins after a write has ended returns that write or a later one, on every peer."""

    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 10, SMALL)
        rng = network.rng
        written: dict[int, int] = {}

        async def write(which: int) -> None:
            service = services[which]
            for number in range(40):
                await service.store(Key.parse(f"counter-{which}"), number, ttl_s=600)
                written[which] = number
                await asyncio.sleep(rng.uniform(0, 0.5))

        async def read(service_number: int) -> None:
            for _ in range(60):
                which = rng.randrange(4)
                least = written.get(which, -1)
                found = await value_at(services[service_number], Key.parse(f"counter-{which}"))
                assert (found if isinstance(found, int) else -1) >= least
                await asyncio.sleep(rng.uniform(0, 0.3))

        async with asyncio.TaskGroup() as group:
            for which in range(4):
                group.create_task(write(which))
            for number in range(10):
                group.create_task(read(number))

    play(scenario, seed=5)


def test_a_read_repairs_a_replica_that_lacks_a_record() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 8)
        replicas = nearest(services, KEY)
        peer_of(network, replicas[1]).frozen = True
        await services[0].store(KEY, "missed", ttl_s=3600)
        peer_of(network, replicas[1]).frozen = False
        await asyncio.sleep(20)
        assert await value_at(replicas[1], KEY, max_age_s=0) == "missed", "it mends itself"
        assert replicas[1].storage.records(KEY, replicas[1].overlay.now_us)
        replicas[2].storage.discard(lambda record: record.key == KEY)
        await value_at(replicas[0], KEY, max_age_s=0)
        await asyncio.sleep(1)
        assert replicas[2].storage.records(KEY, replicas[2].overlay.now_us), "and others"

    play(scenario, seed=6)


def test_answers_omit_peers_that_the_caller_knows() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        one, two, *_ = services = await swarm_of(network, 9)
        all_contacts = [service.own() for service in services]
        caller, sender = peer_of(network, one).caller, one.overlay.sender

        async def named(known: bytes) -> list[object]:
            query = DhtFindQuery(key=key_to_wire(KEY))
            request = DhtFindRequest(
                sender=sender,
                queries=[query, DhtFindQuery(target=id_to_wire(KEY.dht_id))],
                nearest_max=5,
                known=known,
            )
            found = [
                contacts_from_wire(result.nearest)
                for result in (await caller.call(two.own(), FIND, request, timeout_s=3)).results
            ]
            store = DhtStoreRequest(sender=sender, target=id_to_wire(KEY.dht_id), nearest_max=5, known=known)
            found.append(
                contacts_from_wire((await caller.call(two.own(), STORE, store, timeout_s=3)).nearest)
            )
            assert found[0] == found[1] == found[2]
            return list(found[0])

        near = await named(b"")
        assert len(near) == 5
        assert await named(known_to_wire(all_contacts)) == []
        for place in range(5):
            assert await named(
                known_to_wire(contact for contact in all_contacts if contact != near[place])
            ) == [near[place]]
        assert await named(bytes(8)) == near
        for wrong in (b"1234567", bytes(8 * KNOWN_MAX + 8)):
            with pytest.raises(PeerError, match=f"at most {KNOWN_MAX} known peers"):
                await named(wrong)
        assert one.overlay.known_peers == known_to_wire(one.overlay.table)
        one.overlay.on_goodbye(two.peer_id)
        assert one.overlay.known_peers == known_to_wire(one.overlay.table), (
            "a list of long ago would hide who came back"
        )

    play(scenario, seed=3)


@pytest.mark.parametrize("peers", [30, KNOWN_MAX + 1])
def test_a_peer_that_knows_up_to_64_others_is_named_nobody_that_it_knows(peers: int) -> None:
    """Regression test: answers named twenty contacts from 21 peers on."""

    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, peers)
        own = services[-1]
        for service in services[:-1]:
            await own.overlay.ping(service.own())
        assert len(own.overlay.table) > BUCKET_MAX
        assert own.overlay.known_peers == known_to_wire(own.overlay.table)

        named, answers = list[Contact](), 0

        async def call(caller: SimulatedCaller, *given: Any, **more: Any) -> Any:
            nonlocal answers
            reply = await asked(caller, *given, **more)
            if given[1] is FIND:
                answers += 1
                named.extend(contact for one in reply.results for contact in contacts_from_wire(one.nearest))
            return reply

        asked = SimulatedCaller.call
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(SimulatedCaller, "call", call)
            await own.get(KEY)
        assert answers > 0
        assert not {contact.peer_id for contact in named}.intersection(
            contact.peer_id for contact in own.overlay.table
        )

    play(scenario, seed=2)


def test_a_replica_unknown_to_the_reader_is_named_and_asked() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 8)
        replicas = nearest(services, KEY)
        reader = next(service for service in services if service not in replicas)
        reader.overlay.table.on_failure(replicas[0].peer_id, at_once=True)
        network.trace.clear()
        await reader.get(KEY)
        own, other = peer_of(network, reader).index, peer_of(network, replicas[0]).index
        assert any(f" {own}->{other} /swarm.Dht/Find" in line for line in network.trace)

    play(scenario, seed=1)


@pytest.mark.parametrize("how", ["crashed", "refusing"])
def test_a_read_fails_when_no_replica_answers(how: str) -> None:
    """The read fails at once, for one key as for many: no peer has said that there is nothing."""

    async def scenario(network: SimulatedNetwork) -> None:
        reader, *others = await swarm_of(network, 5)
        for other in others:
            peer = peer_of(network, other)
            if how == "crashed":
                peer.up = False
            else:
                peer.handlers.remove(FIND.name)
        begun_s = asyncio.get_running_loop().time()
        with pytest.raises(
            NetworkError, match=r"none of the [234] peers asked for .* all failed or refused"
        ) as caught:
            await reader.get(KEY, timeout_s=60.0, max_age_s=0.0)
        assert not isinstance(caught.value, DeadlineExceeded)
        assert asyncio.get_running_loop().time() - begun_s < 5.0

    play(scenario, seed=3)


def test_a_search_without_answers_ends_with_an_error() -> None:
    """This holds even if the reader would wait longer, and for any number of answers that lead nowhere."""

    async def scenario(network: SimulatedNetwork) -> None:
        timings = replace(WAN, dht_search_timeout_s=2.0)
        reader, *others = await swarm_of(network, 8, timings=timings)
        for other in others:
            peer_of(network, other).frozen = True
        begun_s = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded, match="none of the"):
            await reader.get(KEY, timeout_s=60.0, max_age_s=0.0)
        assert asyncio.get_running_loop().time() - begun_s <= 2.01

    play(scenario, seed=1)


@pytest.mark.parametrize(("peers", "bucket_max", "reads"), [(33, 20, False), (200, 8, True), (200, 8, False)])
def test_a_write_needs_no_search_where_most_peers_are_known_or_the_key_was_read(
    peers: int, bucket_max: int, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, peers, bucket_max)
        key, writer = Key.parse("written"), services[-1]
        await services[0].store(key, 1, ttl_s=600)
        await asyncio.sleep(1.0)
        if reads:
            await writer.get(key, latest=True)
        called: list[str] = []
        call = SimulatedCaller.call

        async def counted(caller: Any, contact: Contact, method: Any, request: Any, **how: Any) -> Any:
            called.append(method.name)
            return await call(caller, contact, method, request, **how)

        monkeypatch.setattr(SimulatedCaller, "call", counted)
        result = await writer.store(key, 2, ttl_s=600)
        assert result.replicas >= REPLICAS - 1
        assert STORE.name in called
        assert (FIND.name in called) == (peers > 33 and not reads)
        assert set(nearest(services, key)) <= {*holders(services, key), writer}

    play(scenario, seed=9)
