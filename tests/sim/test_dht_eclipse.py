"""Keys of a run that strangers surround with identities made for it: members read each other's
records all the same, and so does a newcomer that comes by an address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import pytest

from moe.protocol.declarations import GRIDS, Declarations, Directory, ServerLoad
from moe.protocol.names import ExpertUid
from swarm.core.ids import Key, open_run_id
from swarm.dht.logic.companions import LISTING_KEY
from swarm.dht.service.dht_service import DhtService
from swarm.run.directory import RunDirectory
from swarm.run.signed import run_id_of
from swarm.testing.hostile import HostilePeer, SilentPeer, nearest_identities, only_colluders
from swarm.testing.network import SimulatedNetwork
from tests.sim.dht_scenarios import play, service_of, swarm_of

RUN = open_run_id("eclipsed")
KEYS = [Key(f"run.{RUN}", name) for name in ("progress", "donors", "presence")]
PEERS, MEMBERS = 30, 8
GROUND = 17  # identities nearer to a key than all honest peers: three are left of the twenty that are asked
TRIED = 4000

Surround = Callable[[DhtService], object]


async def surround(network: SimulatedNetwork, kind: type[HostilePeer], key: Key) -> Surround:
    """Make identities nearest to a key. Return what lets a peer know them."""
    found = nearest_identities(key.dht_id, GROUND, TRIED, f"{network.seed}/{key}")
    peers = [network.peer(identity=identity) for identity in found]
    hostile = [kind(peer, only_colluders(peers)) for peer in peers]

    def met_by(service: DhtService) -> None:
        for one in hostile:
            service.overlay.on_answer(one.peer.contact)

    return met_by


def know_one_another(members: Sequence[DhtService]) -> None:
    """Certificates name all of these to each of them."""
    for one in members:
        one.standing.add_members(RUN, [other.peer_id for other in members])


async def write(services: Iterable[DhtService], number: int) -> None:
    async with asyncio.TaskGroup() as group:
        for service in services:
            for key in KEYS:
                value = record_of(service, number) if key.name != "presence" else {"n": number}
                group.create_task(service.store(key, value, ttl_s=60.0, timeout_s=5.0))


def record_of(service: DhtService, number: int) -> dict[str, object]:
    now_s = service.clock.swarm_s()
    return {
        "epoch": number,
        "samples": 0,
        "rate": 1.0,
        "at": now_s,
        "since": now_s,
        "addresses": service.own().published,
    }


async def seen(service: DhtService, key: Key) -> set[str]:
    """Return whose records a peer reads, as an optimizer does."""
    found = await service.get(key, timeout_s=5.0)
    return set(found) if isinstance(found, dict) else set()


async def seen_together(service: DhtService) -> set[str]:
    """Return whose records a peer reads under every key, as a monitor does."""
    found = await service.get_many(KEYS, timeout_s=5.0)
    read = [one for one in found.answers.values() if isinstance(one, dict)]
    return set.intersection(*map(set, read)) if len(read) == len(KEYS) else set()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", [HostilePeer, SilentPeer])
def test_members_read_every_record_of_each_other_while_their_keys_are_surrounded(
    kind: type[HostilePeer], seed: int
) -> None:
    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, PEERS)
        members = services[:MEMBERS]
        know_one_another(members)
        everybody = {str(one.peer_id) for one in members}
        surrounded = [await surround(network, kind, key) for key in KEYS]
        for met_by in surrounded:
            for service in services:
                met_by(service)
        await asyncio.sleep(30.0)
        reads = complete = 0
        for number in range(5):
            await write(members, number)
            for service in members:
                for key in KEYS:
                    complete += await seen(service, key) >= everybody
                    reads += 1
            assert await seen_together(members[number]) >= everybody
            await asyncio.sleep(7.0)
        assert (complete, reads) == (reads, 5 * MEMBERS * len(KEYS))
        if kind is HostilePeer:
            stranger = service_of(network.peer())  # it found the swarm without an address
            await stranger.join([services[-1].own()], remembered=True)
            for met_by in surrounded:
                met_by(stranger)
            assert not await seen(stranger, KEYS[0]), "the keys are surrounded indeed"

    play(scenario, seed=seed)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", [HostilePeer, SilentPeer])
@pytest.mark.parametrize("by_member", [True, False])
def test_a_newcomer_reads_every_record_of_the_members_and_they_read_its_own(
    kind: type[HostilePeer], by_member: bool, seed: int
) -> None:
    """The newcomer comes by a member, or by a peer that takes no part in the run, as `swarm bootstrap` does,
    by which the members have come, too.
    """

    async def scenario(network: SimulatedNetwork) -> None:
        entry = service_of(network.peer())
        members = [service_of(network.peer()) for _ in range(MEMBERS)]
        others = await swarm_of(network, PEERS - MEMBERS)
        for service in [*members, others[0]]:
            await service.join([entry.own()])
        know_one_another(members)
        surrounded = [await surround(network, kind, key) for key in KEYS]
        for met_by in surrounded:
            for service in [entry, *members, *others]:
                met_by(service)
        await asyncio.sleep(10.0)
        await write(members, 1)
        everybody = {str(one.peer_id) for one in members}
        for service in members:
            assert await seen(service, KEYS[0]) >= everybody
        newcomer = service_of(network.peer())
        await newcomer.join([(members[0] if by_member else entry).own()])
        watcher = service_of(network.peer())  # it reads many keys at once, and nothing before
        await watcher.join([(members[0] if by_member else entry).own()])
        for met_by in surrounded:
            met_by(newcomer)
            met_by(watcher)
        for key in KEYS:
            assert await seen(newcomer, key) >= everybody
        assert await seen_together(watcher) >= everybody
        await write([newcomer], 1)
        await asyncio.sleep(16.0)  # members compare what they read with one another every 15 s
        await write(members, 2)
        for service in members:
            assert str(newcomer.peer_id) in await seen(service, KEYS[0])

    play(scenario, seed=seed)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", [HostilePeer, SilentPeer])
@pytest.mark.parametrize("by_member", [True, False])
def test_a_newcomer_finds_the_runs_although_the_key_of_their_list_is_surrounded(
    kind: type[HostilePeer], by_member: bool, seed: int
) -> None:
    """Identities near `public/runs` hid every run from `swarm join ADDRESS`."""

    async def scenario(network: SimulatedNetwork) -> None:
        entry = service_of(network.peer())
        founder, volunteer = (service_of(network.peer()) for _ in range(2))
        others = await swarm_of(network, PEERS - 2)
        for service in (founder, volunteer, others[0]):
            await service.join([entry.own()])
        met_by = await surround(network, kind, LISTING_KEY)
        for service in [entry, founder, volunteer, *others]:
            met_by(service)
        await asyncio.sleep(10.0)
        owner = founder.peer_id
        run_id = run_id_of(owner, "eclipsed")
        listing = {"name": "eclipsed", "owner": owner.to_bytes()}
        await volunteer.store(LISTING_KEY, listing, ttl_s=3600.0, subkey=run_id, timeout_s=5.0)
        newcomer = service_of(network.peer())
        await newcomer.join([(volunteer if by_member else entry).own()])
        met_by(newcomer)
        listings = await RunDirectory(newcomer, clock=newcomer.clock).listings()
        assert [one.run_id for one in listings] == [run_id]

    play(scenario, seed=seed)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", [HostilePeer, SilentPeer])
def test_members_find_the_experts_of_each_other_while_the_keys_of_the_grid_are_surrounded(
    kind: type[HostilePeer], seed: int
) -> None:
    """Members of one run declare experts, and so does one that takes part in another run as well."""

    async def scenario(network: SimulatedNetwork) -> None:
        services = await swarm_of(network, PEERS)
        members, readers = services[:MEMBERS], services[: MEMBERS // 2]
        know_one_another(members)
        for one in (members[-1], *services[MEMBERS : MEMBERS + 4]):  # the members of the other run
            names = [other.peer_id for other in (members[-1], *services[MEMBERS : MEMBERS + 4])]
            one.standing.add_members(open_run_id("another"), names)
        prefix = ExpertUid.parse_prefix("ffn")
        below = [ExpertUid.parse_prefix(f"ffn.{number}") for number in range(2)]
        keys = [GRIDS, *(Key("experts", str(one)) for one in (prefix, *below))]
        for met_by in [await surround(network, kind, key) for key in keys]:
            for service in services:
                met_by(service)
        await asyncio.sleep(30.0)
        hosts = members[-3:]
        uids = {ExpertUid.parse(f"ffn.{number}.{number}"): bytes(16) for number in range(2)}
        declared = [Declarations(host, host.own, uids, ServerLoad) for host in hosts]
        renewing = [asyncio.create_task(one.renew()) for one in declared]
        await asyncio.sleep(10.0)
        everybody = {host.peer_id for host in hosts}
        for _ in range(3):
            for reader in readers:
                directory = Directory(reader)
                found = await directory.branches([prefix, *below], timeout_s=8.0)
                assert found[prefix].deeper == {0, 1}
                for number, one in enumerate(below):
                    assert {replica.peer_id for replica in found[one].experts[number]} == everybody
                assert [str(grid) for grid in await directory.grids(timeout_s=8.0)] == ["ffn"]
            await asyncio.sleep(5.0)
        for task in renewing:
            task.cancel()

    play(scenario, seed=seed)


def test_where_all_peers_are_members_reading_and_writing_among_members_costs_nothing() -> None:
    async def messages(with_members: bool) -> int:
        network = SimulatedNetwork(seed=7)
        services = await swarm_of(network, 12)
        if with_members:
            know_one_another(services)
        await asyncio.sleep(60.0)
        before = sum(peer.messages_sent for peer in network.peers.values())
        for number in range(20):
            await write(services, number)
            for service in services:
                await seen(service, KEYS[0])
            await asyncio.sleep(2.0)
        sent = sum(peer.messages_sent for peer in network.peers.values()) - before
        await network.close()
        return sent

    async def scenario(network: SimulatedNetwork) -> None:
        without, with_members = await messages(False), await messages(True)
        assert with_members <= 1.05 * without, (without, with_members)

    play(scenario, seed=7)
