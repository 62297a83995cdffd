"""Tests of replication under churn: the number of copies is kept, without excess traffic."""

from __future__ import annotations

import asyncio
import random

import pytest

from swarm.core.ids import Key
from swarm.testing.network import SimulatedNetwork
from tests.sim.dht_scenarios import holders, nearest, peer_of, play, record_by, service_of, swarm_of, value_at

SMALL = 8  # peers in a bucket, so that a few peers are a large swarm


def test_successive_departures_lose_no_record() -> None:
    """Twenty of thirty peers die, one every four minutes: far more than the replicas of any key, and no
    record is renewed.
    """

    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 30, SMALL)
        keys = [Key.parse(f"thing-{number}") for number in range(20)]
        for number, key in enumerate(keys):
            await services[0].store(key, number, ttl_s=6 * 3600)
        order = services[:]
        network.rng.shuffle(order)
        for dead in order[:20]:
            await network.crash(peer_of(network, dead))
            await asyncio.sleep(240)
        alive = order[20:]
        for number, key in enumerate(keys):
            assert len(holders(nearest(alive, key), key)) >= 4, "the five nearest that live hold it"
            assert await value_at(network.rng.choice(alive), key, max_age_s=0) == number

    play(scenario, seed=1)


def test_a_repair_sends_each_record_about_once() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 15, SMALL)
        keys = [Key.parse(f"thing-{number}") for number in range(60)]
        for key in keys:
            await services[0].store(key, bytes(2000), ttl_s=6 * 3600)
        await asyncio.sleep(60)
        dead = services[7]
        owed = sum(dead in nearest(services, key) for key in keys)
        assert owed
        network.trace.clear()
        await network.crash(peer_of(network, dead))
        await asyncio.sleep(600)
        alive = [service for service in services if service is not dead]
        assert all(len(holders(nearest(alive, key), key)) == 5 for key in keys)
        stored = [
            int(line.rsplit(" ", 1)[1])
            for line in network.trace
            if "/Store" in line and line.rsplit(" ", 1)[1].isdigit()
        ]
        assert sum(stored) < 1.3 * owed * 2400, "what is there already is not sent again"

    play(scenario, seed=2)


def test_a_leaving_peer_hands_over_its_records_and_is_forgotten() -> None:
    """Records that only the leaving peer holds are handed over, its neighbours forget it at once, all within
    its time limit.
    """

    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 8)
        leaver = services[3]
        only = [
            record_by(peer_of(network, leaver), number, key=Key.parse(f"only-{number}"))
            for number in range(30)
        ]
        for record in only:
            assert leaver.storage.store(record, leaver.overlay.now_us) is None
        peer_of(network, services[5]).frozen = True
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        await leaver.leave(timeout_s=0.5)
        assert loop.time() - started_s <= 0.5
        await network.crash(peer_of(network, leaver))
        await asyncio.sleep(1)
        others = [service for service in services if service not in (leaver, services[5])]
        assert all(leaver.peer_id not in service.overlay.table for service in others)
        reachable = [
            record for record in only if nearest([*others, services[5]], record.key, 1)[0] is not services[5]
        ]
        assert len(reachable) > 15
        for record in reachable:
            assert holders(others, record.key), "handed on"

    play(scenario, seed=3)


def test_one_holder_of_a_key_compares_it_periodically() -> None:
    """A replica that lost a record (a restart, a full quota) gets it back; between comparisons the holders
    exchange few bytes.
    """

    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 12, SMALL)
        key = Key.parse("thing")
        await services[0].store(key, 1, ttl_s=12 * 3600)
        loser = nearest(services, key)[2]
        loser.storage.discard(lambda record: record.key == key)
        assert loser not in holders(services, key)
        await asyncio.sleep(2 * 900)
        assert loser in holders(services, key)
        network.trace.clear()
        await asyncio.sleep(3600)
        compared = sum("/Holds" in line for line in network.trace)
        assert compared <= 2 * 4 * (3600 / 900) * 1.7, (
            "one of the holders asks the four others, the rest have heard it"
        )
        assert not any("/Store" in line for line in network.trace)

    play(scenario, seed=4)


def test_a_tombstone_is_replicated_and_deleted_entries_stay_deleted() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 12, SMALL)
        key = Key.parse("thing")
        await services[0].store(key, "old", ttl_s=8 * 3600)
        late = nearest(services, key)[1]
        peer_of(network, late).frozen = True  # it misses the deletion
        assert (await services[0].delete(key)).replicas >= 4
        await asyncio.sleep(30)
        peer_of(network, late).frozen = False
        await asyncio.sleep(3600)
        for service in services:
            assert await value_at(service, key) is None
            shown = [
                record
                for record in service.storage.records(key, service.overlay.now_us)
                if not record.deleted
            ]
            assert not shown, "the copy that slept through it has learned of the tombstone"
        for dead in nearest(services, key)[:3]:
            await network.crash(peer_of(network, dead))
        await asyncio.sleep(600)
        for service in services:
            if peer_of(network, service).up:
                assert await value_at(service, key) is None

    play(scenario, seed=5)


@pytest.mark.parametrize("seed", [6, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 16))])
def test_reads_survive_churn(seed: int) -> None:
    """A fifth of the peers is exchanged in ten minutes; records live for an hour and are not renewed."""

    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 40, SMALL)
        rng = random.Random(seed)
        keys = [Key.parse(f"thing-{number}") for number in range(40)]
        for number, key in enumerate(keys):
            await rng.choice(services).store(key, number, ttl_s=3600)
        reads = failures = 0
        for _ in range(8):
            dead = services.pop(rng.randrange(len(services)))
            await network.crash(peer_of(network, dead))
            service = service_of(network.peer(), SMALL)
            await service.join([rng.choice(services).own()])
            services.append(service)
            for _ in range(15):
                await asyncio.sleep(5)
                number = rng.randrange(len(keys))
                reads += 1
                failures += await value_at(rng.choice(services), keys[number]) != number
        assert failures <= 0.005 * reads, f"seed {seed}: {failures} of {reads}"

    play(scenario, seed=seed)


def test_an_idle_swarm_causes_little_traffic() -> None:
    """Without operations, a peer heard from recently is not pinged, and a long-lived peer is pinged
    rarely.
    """

    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 20)
        for number in range(100):
            await services[number % 20].store(Key.parse(f"thing-{number}"), number, ttl_s=6 * 3600)
        await asyncio.sleep(1200)
        before = [(peer.messages_sent, peer.bytes_sent) for peer in network.peers.values()]
        await asyncio.sleep(1200)
        after = [(peer.messages_sent, peer.bytes_sent) for peer in network.peers.values()]
        messages = 3 * sum(now[0] - then[0] for now, then in zip(after, before, strict=True)) / len(services)
        size_bytes = (
            3 * sum(now[1] - then[1] for now, then in zip(after, before, strict=True)) / len(services)
        )
        assert messages < 1200, "per peer and hour; 794 for forty peers when this was written"
        assert size_bytes < 250_000, "147 kB for forty peers"
        assert all(len(service.overlay.table) >= 16 for service in services), "no peer was forgotten"

    play(scenario, seed=8)
