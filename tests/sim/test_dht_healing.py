"""A swarm that a network partition has split becomes one again: its tables, and everything that both halves
wrote meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from swarm.core.ids import Key
from swarm.dht.logic.rejoin import RejoinCandidates
from swarm.dht.service.dht_service import DhtService
from swarm.testing.network import SimulatedNetwork, SimulatedPeer
from swarm.testing.virtual_loop import run_virtual
from tests.sim.dht_scenarios import peer_of, play, service_of, swarm_of, value_at

SMALL = 8  # peers in a bucket, so that a few peers are a large swarm
BOTH_KNOWN = Key.parse("from-before")


class OneWayCut(SimulatedNetwork):
    """A one-way partition: no message from one side reaches the other, neither questions nor answers; the
    other direction works.
    """

    deaf: frozenset[object] = frozenset()
    mute: frozenset[object] = frozenset()

    def silent_between(self, source: SimulatedPeer, target: SimulatedPeer) -> bool:
        return (source.peer_id in self.mute and target.peer_id in self.deaf) or super().silent_between(
            source, target
        )


async def write_on(half: Sequence[DhtService], name: str) -> None:
    for number, service in enumerate(half[:3]):
        await service.store(Key.parse(f"{name}-{number}"), number, ttl_s=4 * 3600)
        await service.store(Key.parse("run.abc/members"), name, ttl_s=4 * 3600)


async def assert_one_swarm(services: Sequence[DhtService], names: Sequence[str]) -> None:
    """Assert that every peer reads what either half wrote, and finds every other peer."""
    for service in services:
        for name in names:
            for number in range(3):
                assert await value_at(service, Key.parse(f"{name}-{number}"), max_age_s=0) == number
        members = await service.get(Key.parse("run.abc/members"), max_age_s=0)
        assert isinstance(members, dict)
        assert len(members) == 3 * len(names)


def joined_up(left: Sequence[DhtService], right: Sequence[DhtService]) -> bool:
    """Return whether every peer knows a peer of the other half, and the nearest neighbours across the two
    halves know one another.
    """

    def knows(one: DhtService, others: Sequence[DhtService]) -> int:
        return sum(other.peer_id in one.overlay.table for other in others)

    return all(knows(one, right) >= 3 for one in left) and all(knows(one, left) >= 3 for one in right)


@pytest.mark.parametrize(
    ("minutes", "count"), [(5, 20), (60, 12), pytest.param(60, 60, marks=pytest.mark.slow)]
)
def test_two_halves_merge_after_a_partition(minutes: int, count: int) -> None:

    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, count, SMALL)
        left, right = services[::2], services[1::2]
        network.partition(
            [peer_of(network, service) for service in left], [peer_of(network, service) for service in right]
        )
        await asyncio.sleep(minutes * 30)
        await write_on(left, "left")
        await write_on(right, "right")
        await asyncio.sleep(minutes * 30)
        if minutes >= 60:
            assert all(other.peer_id not in one.overlay.table for one in left for other in right)
        network.heal()
        healed_s = 0
        while not joined_up(left, right):
            await asyncio.sleep(10)
            healed_s += 10
            assert healed_s <= 300
        await asyncio.sleep(60)
        await assert_one_swarm(services, ["left", "right"])

    play(scenario, seed=minutes + count)


def test_the_sample_of_lost_peers_alone_merges_a_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a book, a bootstrap or a lookup that leads across, each peer's sample of lost peers must
    suffice.
    """
    monkeypatch.setattr(RejoinCandidates, "add_bootstrap", lambda *_: None)

    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 12, SMALL)
        left, right = services[::2], services[1::2]
        network.partition(
            [peer_of(network, service) for service in left], [peer_of(network, service) for service in right]
        )
        await asyncio.sleep(1800)
        for service in services:
            for known in service.book.known():
                if known.peer_id not in service.overlay.table:
                    service.book.forget(known.peer_id)
        network.heal()
        await asyncio.sleep(300)
        assert joined_up(left, right)

    play(scenario, seed=4)


def test_a_one_way_partition_hides_no_record_and_heals() -> None:
    """Six peers receive from the other six and cannot answer them. Neither side waits forever, and
    afterwards they are one swarm.
    """
    network = OneWayCut(seed=3)

    async def scenario() -> None:
        services = await swarm_of(network, 12, SMALL)
        mute, deaf = services[::2], services[1::2]
        network.mute = frozenset(service.peer_id for service in mute)
        network.deaf = frozenset(service.peer_id for service in deaf)
        await asyncio.sleep(600)
        await write_on(mute, "mute")
        await write_on(deaf, "deaf")
        loop = asyncio.get_running_loop()
        for half, name in ((mute, "mute"), (deaf, "deaf")):
            started_s = loop.time()
            for service in half:
                assert await value_at(service, Key.parse(f"{name}-1"), max_age_s=0) == 1
            assert loop.time() - started_s < 3 * len(half), (
                "those who only seem to be there do not stop the search"
            )
        await asyncio.sleep(1800)
        network.mute = frozenset()
        waited_s = 0
        while not joined_up(mute, deaf):
            await asyncio.sleep(10)
            waited_s += 10
            assert waited_s <= 300
        await asyncio.sleep(60)
        await assert_one_swarm(services, ["mute", "deaf"])
        assert not network.errors
        await network.close()

    run_virtual(scenario())


def test_an_isolated_peer_rejoins_through_its_book() -> None:
    """All of the peer's bootstrap peers are gone permanently, and it has been without any contact for two
    hours.
    """

    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 10)
        alone = service_of(network.peer())
        await alone.join([services[0].own()])
        await asyncio.sleep(30)
        await network.crash(peer_of(network, services[0]))
        network.partition([peer_of(network, alone)])
        await asyncio.sleep(7200)
        assert len(alone.overlay.table) == 0
        network.heal()
        await asyncio.sleep(60)
        assert len(alone.overlay.table) >= 8
        await services[4].store(BOTH_KNOWN, 1, ttl_s=60)
        assert await value_at(alone, BOTH_KNOWN) == 1

    play(scenario, seed=5)


def test_bootstrap_peers_are_retried_forever_but_rarely() -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, 4)
        gone = network.peer()
        await network.crash(gone)
        late = service_of(network.peer())
        await late.join([gone.contact, services[0].own()])
        await asyncio.sleep(7200)
        network.trace.clear()
        await asyncio.sleep(3600)
        calls = sum(
            line.split()[1] == f"{late.own() and network.peers[late.peer_id].index}->{gone.index}"
            for line in network.trace
        )
        assert 5 <= calls <= 30
        network.restart(gone)
        back = service_of(gone)
        await asyncio.sleep(400)
        assert back.peer_id in late.overlay.table
        assert len(back.overlay.table) == 5, "it finds all others"

    play(scenario, seed=6)
