"""Matchmaking through a simulated DHT: presence records, newcomers, deaths and departures."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from averaging.matchmaking.logic.group import Group, Member
from averaging.matchmaking.logic.messages import AveragerName, SearchFailed, VectorSchema
from averaging.matchmaking.service.exchange import GroupExchange
from averaging.matchmaking.service.matchmaking_service import GroupService
from averaging.matchmaking.service.presence import DhtPresence
from swarm.dht.service.dht_service import DhtService
from swarm.net.peerbook import PeerBook
from swarm.testing.network import SimulatedNetwork, SimulatedPeer
from swarm.testing.virtual_loop import run_virtual

NAME = AveragerName(run="r", averager="a")
SCHEMA = VectorSchema(digest=b"s", text="s", codec="float32")


@dataclass
class Volunteer:
    peer: SimulatedPeer
    presence: DhtPresence
    groups: GroupService
    renewing: asyncio.Task[None]

    async def step(self, window_s: float = 10.0) -> Group | SearchFailed:
        now_s = asyncio.get_running_loop().time()
        member = Member(contact=self.peer.contact, weight=1.0, bandwidth=1.0)
        found = await self.groups.find(member=member, round_key="", deadline_s=now_s + window_s)
        if isinstance(found, Group):
            self.groups.round_over(committed=True)
        return found


async def volunteer(network: SimulatedNetwork, bootstrap: SimulatedPeer | None) -> Volunteer:
    peer = network.peer()
    dht = DhtService(
        own=lambda: peer.contact,
        identity=peer.identity,
        caller=peer.caller,
        handlers=peer.handlers,  # type: ignore[arg-type]
        book=PeerBook(peer.peer_id, peer.clock.swarm_s),
        clock=peer.clock,
        supervisor=peer.supervisor,
        rng=random.Random(peer.index),
    )
    await dht.join([bootstrap.contact] if bootstrap is not None else [])
    presence = DhtPresence(dht=dht, name=NAME, own=lambda: peer.contact, schema=SCHEMA)
    renewing = peer.supervisor.spawn("presence", presence.renew)
    await presence.wait_until_declared(2.0)
    groups = GroupService(
        exchange=GroupExchange(
            handlers=peer.handlers, caller=peer.caller, own=peer.peer_id, clock=peer.clock
        ),
        presence=presence,
        name=NAME,
        schema=SCHEMA,
        rng=random.Random(peer.index),
        supervisor=peer.supervisor,
    )
    await groups.announce(peer.contact)
    return Volunteer(peer, presence, groups, renewing)


async def everybody(volunteers: list[Volunteer]) -> tuple[list[Group | SearchFailed], float]:
    began_s = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as tasks:
        found = [tasks.create_task(one.step()) for one in volunteers]
    return [task.result() for task in found], asyncio.get_running_loop().time() - began_s


def members(found: list[Group | SearchFailed]) -> int:
    """Assert that all peers are in one group, and return its size."""
    assert all(isinstance(one, Group) for one in found), found
    [group] = {one.group_id: one for one in found if isinstance(one, Group)}.values()
    return len(group.members)


def test_groups_follow_peers_that_come_die_and_leave() -> None:
    async def scenario() -> None:
        network = SimulatedNetwork(seed=1)
        volunteers = [await volunteer(network, None)]
        failed = await volunteers[0].step()
        assert isinstance(failed, SearchFailed)
        assert failed.reason == "alone"
        for _ in range(3):
            volunteers.append(await volunteer(network, volunteers[0].peer))
        found, took_s = await everybody(volunteers)
        assert members(found) == 4
        assert took_s < 0.5

        dead = volunteers.pop()
        await network.crash(dead.peer)
        found, took_s = await everybody(volunteers)
        assert members(found) == 3
        assert took_s < 0.5

        volunteers.append(await volunteer(network, volunteers[1].peer))
        found, took_s = await everybody(volunteers)
        assert members(found) == 4
        assert took_s < 0.5

        leaver = volunteers.pop(0)  # the one that the others joined by
        leaver.renewing.cancel()
        await leaver.presence.withdraw()
        leaver.groups.close()
        found, took_s = await everybody(volunteers)
        assert members(found) == 3
        assert took_s < 0.5

        await asyncio.sleep(120.0)  # records are renewed, that of the dead peer has expired
        assert set(await volunteers[0].presence.read(5.0)) == {one.peer.peer_id for one in volunteers}
        found, took_s = await everybody(volunteers)
        assert members(found) == 3
        assert took_s < 0.5
        await network.close()
        assert not network.errors

    run_virtual(scenario())
