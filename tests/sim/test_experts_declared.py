"""Experts declared in a simulated DHT are found level by level, by replica, and forgotten when their server
is dead.
"""

from __future__ import annotations

import asyncio

from moe.protocol.declarations import GRIDS, RENEW_S, TTL_S, Declarations, Directory, GridBranch, ServerLoad
from moe.protocol.names import ExpertGrid, ExpertUid
from moe.server.places import read_load
from swarm.core.ids import Contact
from swarm.dht.service.dht_service import DhtService, StoreItem
from swarm.testing.dht_swarm import DhtSwarm
from swarm.testing.network import SimulatedNetwork
from swarm.testing.virtual_loop import run_virtual

A, B = bytes(16), bytes([1] * 16)


def uids(*names: str) -> dict[ExpertUid, bytes]:
    return {ExpertUid.parse(name): A for name in names}


def declarations(
    dht: DhtService, experts: dict[ExpertUid, bytes], load: ServerLoad | None = None
) -> Declarations:
    return Declarations(dht, dht.own, experts, lambda: load or ServerLoad())


async def grown(seed: int, count: int) -> tuple[SimulatedNetwork, list[DhtService]]:
    network = SimulatedNetwork(seed=seed)
    swarm = DhtSwarm(network)
    await swarm.grow(count)
    await asyncio.sleep(1)
    return network, [member.service for member in swarm.members]


def test_replicas_are_found_level_by_level_best_first_and_withdrawn() -> None:
    async def scenario() -> None:
        network, services = await grown(1, 6)
        one, two, reader = services[1], services[2], services[4]
        first = declarations(one, uids("ffn.0.1", "ffn.0.2", "ffn.3.1", "ffn.7"), ServerLoad(2.0, 10.0, 0.25))
        second = declarations(two, {**uids("ffn.0.1"), ExpertUid.parse("ffn.0.2"): B}, ServerLoad(1.0))
        assert await first.declare()
        assert await second.declare()
        directory = Directory(reader)
        root, zero, three, nowhere = (
            ExpertUid.parse_prefix(text) for text in ("ffn", "ffn.0", "ffn.3", "ffn.9")
        )
        branches = await directory.branches([root, zero, three, nowhere], timeout_s=10.0)
        assert branches[root].coordinates == {0, 3, 7}
        assert branches[root].deeper == {0, 3}
        assert list(branches[root].experts) == [7]
        # the less busy one first
        assert [replica.peer_id for replica in branches[zero].experts[1]] == [two.peer_id, one.peer_id]
        assert {replica.schema for replica in branches[zero].experts[2]} == {A, B}
        assert branches[zero].experts[1][1].load == ServerLoad(2.0, 10.0, 0.25)
        assert branches[zero].experts[1][0].contact == two.own()
        assert branches[nowhere] == GridBranch()
        assert list(await directory.live(three, timeout_s=10.0)) == [1]
        found = await directory.replicas(
            [ExpertUid.parse("ffn.0.2"), ExpertUid.parse("ffn.9.9")], timeout_s=10.0
        )
        assert [len(replicas) for replicas in found.values()] == [2, 0]
        load = await read_load(directory, [ExpertGrid.parse("ffn.[0:4].[0:4]")], timeout_s=10.0)
        assert len(load) == 16
        assert {str(uid): servers for uid, servers in load.items() if servers} == {
            "ffn.0.1": {one.peer_id: 0.25, two.peer_id: 0.0},
            "ffn.0.2": {one.peer_id: 0.25, two.peer_id: 0.0},
            "ffn.3.1": {one.peer_id: 0.25},
        }
        await first.withdraw()
        branches = await directory.branches([root, zero], timeout_s=10.0)
        assert branches[root].coordinates == {0}
        assert [replica.peer_id for replica in branches[zero].experts[1]] == [two.peer_id]
        await network.close()

    run_virtual(scenario())


def test_declarations_are_renewed_and_those_of_a_dead_server_expire() -> None:
    async def scenario() -> None:
        network, services = await grown(2, 5)
        declared = declarations(services[1], uids("ffn.0"))
        directory, root = Directory(services[3]), ExpertUid.parse_prefix("ffn")

        async def alive() -> bool:
            return bool((await directory.branches([root], timeout_s=5.0, max_age_s=0.0))[root].coordinates)

        async with asyncio.TaskGroup() as tasks:
            renewing = tasks.create_task(declared.renew())
            await declared.declared.wait()
            for _ in range(10):
                await asyncio.sleep(RENEW_S)
                assert await alive()
            renewing.cancel()
        await asyncio.sleep(TTL_S + 1.0)
        assert not await alive()
        await network.close()

    run_virtual(scenario())


def test_experts_that_nobody_can_call_are_not_declared_and_withdrawn_when_that_ends() -> None:
    async def scenario() -> None:
        network, services = await grown(5, 5)
        contact = hidden = Contact(services[1].peer_id)
        declared = Declarations(services[1], lambda: contact, uids("ffn.0"), ServerLoad)
        directory, root = Directory(services[3]), ExpertUid.parse_prefix("ffn")

        async def found() -> bool:
            return bool((await directory.branches([root], timeout_s=5.0, max_age_s=0.0))[root].coordinates)

        assert not await declared.declare()
        assert not await found()
        contact = services[1].own()
        assert await declared.declare()
        assert await found()
        contact = hidden
        assert not await declared.declare()
        assert not await found()
        await network.close()

    run_virtual(scenario())


def test_a_large_grid_takes_a_record_per_prefix_and_server() -> None:
    async def scenario() -> None:
        network, services = await grown(3, 5)
        names = [str(uid) for uid in ExpertGrid.parse("ffn.[0:16].[0:16]").names()]
        assert await declarations(services[1], uids(*names)).declare()
        storage, held = services[1].storage, services[1].storage.keys()
        records = sum(len(storage.records(key, services[1].overlay.now_us)) for key in held)
        assert records == 17 + 1  # its grids
        grid = ExpertGrid.parse("ffn.[0:16].[0:16]")
        load = await read_load(Directory(services[3]), [grid], timeout_s=10.0)
        assert sum(len(servers) for servers in load.values()) == 256
        await network.close()

    run_virtual(scenario())


def test_grids_are_listed_for_readers_that_know_none() -> None:
    async def scenario() -> None:
        network, services = await grown(4, 6)
        directory = Directory(services[4])
        assert await directory.grids(timeout_s=10.0) == []
        first = declarations(services[1], uids("ffn.0.1", "ffn.0.2", "attention.3"))
        assert await first.declare()
        assert await declarations(services[2], uids("ffn.5")).declare()
        hostile = StoreItem(
            key=GRIDS, value=["ffn", "ffn.3", "no grid!", "mine", "mine"], subkey=str(services[3].peer_id)
        )
        assert (await services[3].store_many([hostile], ttl_s=30.0))[0].ok
        found = [str(grid) for grid in await directory.grids(timeout_s=10.0)]
        # most servers first; each counts once; invalid grid names are ignored
        assert found == ["ffn", "attention", "mine"]
        await first.withdraw()
        assert [str(grid) for grid in await directory.grids(timeout_s=10.0)] == ["ffn", "mine"]
        await network.close()

    run_virtual(scenario())
