"""The production DHT in a simulated swarm: virtual time, real messages, one seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from swarm.core.errors import DeadlineExceeded
from swarm.core.ids import Contact, Key, PeerId
from swarm.dht.logic.records import Record
from swarm.dht.service import replica
from swarm.dht.service.dht_service import DhtService, NamespaceRules
from swarm.dht.service.overlay import Overlay
from swarm.dht.service.upkeep import Upkeep
from swarm.dht.service.wire import record_from_wire
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.virtual_loop import run_virtual
from swarm.wire.dht_pb2 import DhtRecord
from tests.sim.dht_scenarios import peer_of, service_of, value_at


async def swarm_of(network: SimulatedNetwork, count: int) -> list[DhtService]:
    """Return peers that joined one after the other, each through an earlier one."""
    services: list[DhtService] = []
    for _ in range(count):
        peer = network.peer()
        service = service_of(peer)
        if services:
            await service.join([network.rng.choice(services).own()])
        services.append(service)
    await asyncio.sleep(1)  # peers that a newcomer called check that it can be called back
    return services


async def finish(network: SimulatedNetwork) -> None:
    assert not network.errors
    await network.close()


def test_a_lone_peer_is_its_own_replica() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(seed=1)
        (alone,) = await swarm_of(network, 1)
        key = Key.parse("alone")
        result = await alone.store(key, {"x": [1, 2.5, b"y", None]}, ttl_s=60)
        assert (result.ok, result.replicas) == (True, 1)
        assert await value_at(alone, key) == {"x": [1, 2.5, b"y", None]}
        await asyncio.sleep(61)
        assert await alone.get(key) is None
        await finish(network)

    run_virtual(scenario())


def test_a_newcomer_looks_its_neighbours_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    find = Upkeep.find

    async def counted(self: Upkeep, target: int, wanted: int | None = None) -> tuple[Contact, ...]:
        found.append(target)
        return await find(self, target, wanted)

    async def scenario() -> None:
        network = SimulatedNetwork(seed=3)
        services = await swarm_of(network, 6)
        found.clear()
        newcomer = service_of(network.peer())
        await newcomer.join([services[0].own()])
        await asyncio.sleep(60)
        assert found.count(newcomer.overlay.own_id_number) == 1
        assert len(newcomer.overlay.table) == 6
        await finish(network)

    monkeypatch.setattr(Upkeep, "find", counted)
    run_virtual(scenario())


@pytest.mark.parametrize(("text", "read_s"), [("thing/presence", 0.1), ("run.abc/presence", 0.2)])
def test_store_and_get_are_one_round_each_in_a_small_swarm(text: str, read_s: float) -> None:
    """A read of a run's key by a peer that knows no member of the run asks its introducer for them after the
    replicas, whose peers may all be made to surround the key.
    """

    async def scenario() -> None:
        network = SimulatedNetwork(seed=2, config=LinkConfig(delay_s=0.05, jitter=0.0))
        services = await swarm_of(network, 4)
        loop = asyncio.get_running_loop()
        key = Key.parse(text)
        for service in services:
            started_s = loop.time()
            result = await service.store(key, {"n": 1}, ttl_s=60, subkey=str(service.peer_id))
            assert (result.ok, result.replicas) == (True, 4)
            assert loop.time() - started_s == pytest.approx(0.1)
        for service in services[1:]:
            started_s = loop.time()
            answer = await service.get(key)
            assert isinstance(answer, dict)
            assert set(answer) == {str(other.peer_id) for other in services}
            assert loop.time() - started_s == pytest.approx(read_s)
        await finish(network)

    run_virtual(scenario())


def test_a_newcomer_is_a_replica_as_soon_as_it_has_called() -> None:
    """Regression test: a store right after the last peer had joined omitted that peer until its answer to a
    ping had arrived.
    """

    async def scenario() -> None:
        network = SimulatedNetwork(seed=16)
        services: list[DhtService] = []
        for _ in range(4):
            service = service_of(network.peer())
            await service.join([other.own() for other in services[:1]])
            services.append(service)
        result = await services[1].store(Key.parse("key"), 1, ttl_s=60)
        assert (result.ok, result.replicas) == (True, 4)
        await finish(network)

    run_virtual(scenario())


@pytest.mark.parametrize("seed", range(3))
def test_newcomers_that_come_at_once_are_hardly_pinged(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each calls the others when it looks its neighbours up. That they answer shows what a ping would."""
    pinged: list[PeerId] = []
    ping = Overlay.ping

    async def counted(self: Overlay, contact: Contact) -> bool:
        pinged.append(contact.peer_id)
        return await ping(self, contact)

    async def scenario() -> None:
        network = SimulatedNetwork(seed)
        (founder,) = await swarm_of(network, 1)
        newcomers = [service_of(network.peer()) for _ in range(16)]
        async with asyncio.TaskGroup() as group:
            for newcomer in newcomers:
                group.create_task(newcomer.join([founder.own()]))
        await asyncio.sleep(8)
        everybody = {one.peer_id for one in (founder, *newcomers)}
        for one in (founder, *newcomers):
            assert {contact.peer_id for contact in one.overlay.table} == everybody - {one.peer_id}
        assert len(pinged) <= 4 * len(newcomers), "by each the founder, through which it joins, and few more"
        await finish(network)

    monkeypatch.setattr(Overlay, "ping", counted)
    run_virtual(scenario())


def test_a_caller_that_ends_before_it_is_called_leaves_the_table() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(seed=16)
        services = await swarm_of(network, 3)
        caller = service_of(network.peer())
        await caller.join([services[0].own()])
        assert all(caller.peer_id in one.overlay.table for one in services)
        await network.crash(peer_of(network, caller))
        await asyncio.sleep(8)
        assert not any(caller.peer_id in one.overlay.table for one in services)
        await finish(network)

    run_virtual(scenario())


def test_newcomers_receive_the_records_they_should_hold() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(seed=3)
        (founder,) = await swarm_of(network, 1)
        keys = [Key.parse(f"run.abc/thing{number}") for number in range(40)]
        for key in keys:
            await founder.store(key, bytes(30_000), ttl_s=3600)
        joined = []
        for _ in range(3):
            service = service_of(network.peer())
            await service.join([founder.own()])
            joined.append(service)
        await asyncio.sleep(2)
        await network.crash(peer_of(network, founder))
        for service in joined:
            for key in keys:
                assert await service.get(key, writer=founder.peer_id) is not None
        await finish(network)

    run_virtual(scenario())


def test_a_hundred_peers_keep_their_records_when_some_crash() -> None:
    seed = 4

    async def scenario() -> None:
        network = SimulatedNetwork(seed=seed, config=LinkConfig(loss=0.002))
        services = await swarm_of(network, 100)
        rng = random.Random(seed)
        keys = [Key.parse(f"thing-{number}") for number in range(50)]
        for number, key in enumerate(keys):
            result = await rng.choice(services).store(key, number, ttl_s=3600)
            assert result.replicas >= 4
        dead = rng.sample(services, 25)
        for service in dead:
            await network.crash(peer_of(network, service))
        alive = [service for service in services if service not in dead]
        loop = asyncio.get_running_loop()
        found = 0
        for number, key in enumerate(keys):
            started_s = loop.time()
            found += await value_at(rng.choice(alive), key) == number
            assert loop.time() - started_s < 10.5
        assert found == len(keys)
        for service in alive:
            assert len(service.reader.running) == 0
        await finish(network)

    run_virtual(scenario())


def test_replicas_are_the_nearest_peers() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(seed=6)
        services = await swarm_of(network, 40)
        right = 0
        for number in range(20):
            key = Key.parse(f"place-{number}")
            await services[number].store(key, number, ttl_s=600)
            nearest = sorted(services, key=lambda service: service.peer_id.dht_id ^ key.dht_id)[:5]
            right += sum(bool(service.storage.records(key, service.overlay.now_us)) for service in nearest)
        assert right >= 98  # of 100
        await finish(network)

    run_virtual(scenario())


async def stop_all(network: SimulatedNetwork, services: Sequence[DhtService]) -> None:
    for service in services:
        await network.crash(peer_of(network, service))


def test_joining_is_retried_until_the_bootstrap_peer_is_up() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(seed=7)
        bootstrap = network.peer()
        await network.crash(bootstrap)
        service = service_of(network.peer())
        await service.join([bootstrap.contact])
        assert len(service.overlay.table) == 0
        await asyncio.sleep(30)
        network.restart(bootstrap)
        there = service_of(bootstrap)
        await asyncio.sleep(15)
        assert bootstrap.peer_id in service.overlay.table
        assert service.peer_id in there.overlay.table
        await finish(network)

    run_virtual(scenario())


def test_a_frozen_peer_delays_at_most_a_few_reads() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(seed=8)
        services = await swarm_of(network, 4)
        key = Key.parse("public/x")
        await services[0].store(key, 1, ttl_s=600)
        peer_of(network, services[3]).frozen = True
        loop = asyncio.get_running_loop()
        times = []
        for _ in range(4):
            started_s = loop.time()
            assert await value_at(services[1], key) == 1
            times.append(loop.time() - started_s)
            await asyncio.sleep(0.2)
        assert max(times) < 1.1
        assert max(times[2:]) < 0.1
        await finish(network)

    run_virtual(scenario())


def test_operations_end_by_their_timeout() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(seed=9)
        services = await swarm_of(network, 3)
        for service in services[1:]:
            peer_of(network, service).frozen = True
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        with pytest.raises(DeadlineExceeded, match="none of the 2 peers"):
            await services[0].get(Key.parse("nowhere"), timeout_s=0.5)
        assert loop.time() - started_s == pytest.approx(0.5, abs=0.01)
        started_s = loop.time()
        result = await services[0].store(Key.parse("nowhere"), 1, ttl_s=60, timeout_s=0.3)
        assert loop.time() - started_s == pytest.approx(0.3, abs=0.01)
        assert (result.ok, result.replicas) == (True, 1)  # at least on the writer itself
        await finish(network)

    run_virtual(scenario())


def test_concurrent_reads_share_a_search() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(seed=10)
        services = await swarm_of(network, 4)
        key = Key.parse("shared")
        await services[0].store(key, 1, ttl_s=600)
        await asyncio.sleep(5)
        before = len(network.trace)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(value_at(services[1], key)) for _ in range(20)]
        assert [task.result() for task in tasks] == [1] * 20
        # It holds a copy itself, and two more are a majority of the replicas.
        assert len(network.trace) - before == 2 * 2
        await finish(network)

    run_virtual(scenario())


def test_a_read_after_a_write_by_any_peer_sees_it() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(seed=11)
        services = await swarm_of(network, 6)
        key = Key.parse("counter")
        for number in range(30):
            result = await services[number % 6].store(key, number, ttl_s=600)
            assert result.ok
            assert await value_at(services[(number * 5 + 1) % 6], key) == number
        await finish(network)

    run_virtual(scenario())


def test_a_deleted_entry_stays_deleted_and_other_entries_remain() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(seed=12)
        services = await swarm_of(network, 8)
        key = Key.parse("public/dictionary")
        for number, service in enumerate(services):
            await service.store(key, number, ttl_s=600, subkey="same" if number < 2 else f"sub{number}")
        # Deletes this peer's own entry, which does not exist, and no other.
        assert (await services[0].delete(key, subkey="sub5")).ok
        answer = await services[3].get(key)
        assert isinstance(answer, dict)
        assert {subkey: entry.value for subkey, entry in answer.items()} == {
            "same": 1,
            "sub2": 2,
            "sub3": 3,
            "sub4": 4,
            "sub5": 5,
            "sub6": 6,
            "sub7": 7,
        }
        assert (await services[1].delete(key, subkey="same")).replicas == 5
        answer = await services[3].get(key)
        assert isinstance(answer, dict)
        assert answer["same"].value == 0  # the other writer's entry becomes visible
        assert len(await services[4].get_all(key)) == 7
        await asyncio.sleep(601)
        assert await services[3].get(key) is None
        for service in services:
            service.storage.expire(service.overlay.now_us)
            left = service.storage.records(key, service.overlay.now_us)
            assert all(record.deleted and record.writer == services[0].peer_id for record in left), (
                "of what it had not stored"
            )
            assert service.storage.entry_count == len(left)
            assert service.storage.size_bytes == sum(record.size_bytes for record in left)
        await finish(network)

    run_virtual(scenario())


def test_a_wrong_clock_is_corrected_from_its_peers() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(seed=13)
        services = await swarm_of(network, 5)
        late = service_of(network.peer(skew_s=-400.0))
        await late.join([services[0].own()])
        assert late.clock.offset_s == pytest.approx(400.0, abs=0.1)
        assert (await late.store(Key.parse("late"), 1, ttl_s=60)).replicas == 5
        assert await value_at(services[1], Key.parse("late")) == 1
        assert all(service.clock.offset_s == 0.0 for service in services)
        await finish(network)

    run_virtual(scenario())


def test_a_healed_partition_becomes_one_swarm() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(seed=14)
        services = await swarm_of(network, 12)
        left, right = services[:6], services[6:]
        network.partition(
            [peer_of(network, service) for service in left], [peer_of(network, service) for service in right]
        )
        await asyncio.sleep(1800)
        assert all(other.peer_id not in service.overlay.table for service in left for other in right)
        network.heal()
        await asyncio.sleep(120)
        await left[0].store(Key.parse("healed"), 1, ttl_s=600)
        assert await value_at(right[0], Key.parse("healed")) == 1
        await finish(network)

    run_virtual(scenario())


def test_the_same_seed_gives_the_same_trace() -> None:
    async def scenario() -> str:
        network = SimulatedNetwork(seed=15, config=LinkConfig(loss=0.01))
        services = await swarm_of(network, 12)
        for number, service in enumerate(services):
            await service.store(Key.parse(f"k{number}"), number, ttl_s=60)
        await asyncio.sleep(100)
        await finish(network)
        return network.digest

    assert run_virtual(scenario()) == run_virtual(scenario())


def test_a_repeated_record_is_decoded_again_only_after_a_change_of_rules_or_expiration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded: list[str] = []
    decode = record_from_wire

    def counted(message: DhtRecord) -> Record:
        decoded.append(message.key.name)
        return decode(message)

    async def scenario() -> None:
        network = SimulatedNetwork(seed=5)
        services = await swarm_of(network, 12)
        key = Key.parse("again")
        await services[0].store(key, {"x": 1}, ttl_s=20)
        reader = next(one for one in services[1:] if not one.overlay.is_replica(key.dht_id))
        assert await value_at(reader, key) == {"x": 1}
        monkeypatch.setattr(replica, "record_from_wire", counted)
        assert await value_at(reader, key) == {"x": 1}
        assert "again" not in decoded
        reader.register("public", NamespaceRules(writers=frozenset()))
        assert await reader.get(key) is None  # the new rules judge it again
        assert "again" in decoded
        await asyncio.sleep(21)
        assert await services[0].get(key) is None
        await finish(network)

    run_virtual(scenario())
