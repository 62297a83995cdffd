"""Tests of operations on many keys: they give the same answers as single operations, in far fewer calls."""

from __future__ import annotations

import asyncio

import pytest

from swarm.core.errors import DeadlineExceeded, UsageError
from swarm.core.ids import Key
from swarm.dht.logic.constants import BULK_KEYS_MAX
from swarm.dht.service.dht_service import Entry, StoreItem
from swarm.testing.network import LinkConfig, SimulatedNetwork
from tests.sim.dht_scenarios import holders, nearest, peer_of, play, service_of, swarm_of, value_at

SMALL = 8  # peers in a bucket, so that a few peers are a large swarm


@pytest.mark.parametrize("count", [6, 30], ids=["knows all peers", "knows some peers"])
def test_many_writes_and_reads_equal_single_ones_in_fewer_calls(count: int) -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, count, SMALL)
        items = [
            StoreItem(key=f"thing-{number}", value=number, subkey="x" if number % 10 == 0 else None)
            for number in range(200)
        ]
        network.trace.clear()
        results = await services[1].store_many(items, ttl_s=600)
        assert [result.replicas for result in results] == [5] * 200
        assert len(network.trace) < 2 * 5 * 200 / 3, "a third of what single writes cost, at most"
        placed = sum(
            service in holders(services, Key.parse(f"thing-{n}"))
            for n in range(200)
            for service in nearest(services, Key.parse(f"thing-{n}"))
        )
        assert placed >= 0.97 * 5 * 200
        network.trace.clear()
        many = await services[2].get_many(
            [*(f"thing-{number}" for number in range(200)), "nothing", Key.parse("thing-3")], max_age_s=0
        )
        assert len(network.trace) < 2 * 5 * 200 / 3
        assert many.failures == {}
        assert many.answers["nothing"] is None
        assert many.answers["thing-3"] == many.answers[Key.parse("thing-3")]
        for number in range(0, 200, 7):
            assert many.answers[f"thing-{number}"] == await services[3].get(
                Key.parse(f"thing-{number}"), max_age_s=0
            )
        again = await services[2].get_many([f"thing-{number}" for number in range(50)], latest=True)
        assert all(again.answers[name] == many.answers[name] for name in again.answers)

    play(scenario, seed=1)


def test_dead_peers_cost_bulk_operations_no_key_and_no_replica() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 12, SMALL)
        await services[0].store_many([StoreItem(key=f"old-{n}", value=n) for n in range(60)], ttl_s=600)
        for dead in services[3:6]:
            await network.crash(peer_of(network, dead))
        peer_of(network, services[6]).frozen = True
        alive = [service for service in services if service not in services[3:7]]
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        many = await services[1].get_many([f"old-{n}" for n in range(60)])
        assert [answer.value for answer in many.answers.values() if isinstance(answer, Entry)] == list(
            range(60)
        )
        results = await services[1].store_many(
            [StoreItem(key=f"new-{n}", value=n) for n in range(60)], ttl_s=600
        )
        assert all(result.replicas == 5 for result in results), "the next nearest take the place of the dead"
        assert loop.time() - started_s < 12
        assert all(
            len(holders(nearest(alive, Key.parse(f"new-{n}")), Key.parse(f"new-{n}"))) >= 4 for n in range(60)
        )

    play(scenario, seed=2)


def test_large_values_are_split_over_calls() -> None:
    """Eighty values of 60 kB: no request may exceed a megabyte, and no reply four."""

    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 3)
        items = [StoreItem(key=f"big-{number}", value=bytes([number]) * 60_000) for number in range(80)]
        assert all(result.replicas == 3 for result in await services[0].store_many(items, ttl_s=600))
        client = service_of(network.peer(dialable=False))
        await client.join([services[0].own()])
        many = await client.get_many([item.key for item in items])
        assert many.failures == {}
        for item in items:
            answer = many.answers[item.key]
            assert isinstance(answer, Entry)
            assert answer.value == item.value

    play(scenario, seed=3)


def test_keys_without_an_answer_are_among_the_failures() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 3)
        await services[0].store(Key.parse("here"), 1, ttl_s=600)
        for service in services[1:]:
            peer_of(network, service).frozen = True
        many = await services[0].get_many(["here", "nowhere"], timeout_s=0.5, max_age_s=0)
        assert isinstance(many.answers["here"], Entry), "its own copy"
        assert isinstance(many.failures["nowhere"], DeadlineExceeded)
        assert "none of the 2 peers asked" in str(many.failures["nowhere"])
        results = await services[0].store_many([StoreItem(key="there", value=1)], ttl_s=600, timeout_s=0.5)
        assert (results[0].ok, results[0].replicas) == (True, 1)

    play(scenario, seed=4)


def test_exceeding_the_bulk_limits_is_a_usage_error() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        (service,) = await swarm_of(network, 1)
        with pytest.raises(UsageError, match="at most 4096 keys"):
            await service.get_many([f"k{number}" for number in range(BULK_KEYS_MAX + 1)])
        with pytest.raises(UsageError, match="at most 4096 entries"):
            await service.store_many([StoreItem(key="k", value=1)] * (BULK_KEYS_MAX + 1), ttl_s=60)
        with pytest.raises(UsageError, match="ttl_s"):
            await service.store_many(
                [StoreItem(key="k", value=1), StoreItem(key="l", value=1, ttl_s=-1)], ttl_s=60
            )
        assert await service.get(Key.parse("k")) is None, "nothing was sent"
        assert await service.store_many([], ttl_s=60) == []
        assert (await service.get_many([])).answers == {}

    play(scenario, seed=5)


def test_bulk_operations_lose_no_key_on_a_lossy_link() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 12, SMALL)
        results = await services[0].store_many(
            [StoreItem(key=f"k{n}", value=n) for n in range(100)], ttl_s=600
        )
        assert all(result.ok for result in results)
        for _ in range(3):
            many = await services[7].get_many([f"k{n}" for n in range(100)], max_age_s=0)
            assert [answer.value for answer in many.answers.values() if isinstance(answer, Entry)] == list(
                range(100)
            )
        assert await value_at(services[3], Key.parse("k50")) == 50

    play(scenario, seed=6, link=LinkConfig(loss=0.03))
