"""Groups of hidden peers that have one relay: all of them call their leader, and each other, at once."""

from __future__ import annotations

import asyncio
import time

from swarm.libp2p.connection import PeerConnection
from tests.wire.libp2p_hosts import Hidden, Scene, echoed, run

PEERS = 20


async def group_of(scene: Scene, peers: int) -> tuple[list[Hidden], list[list[PeerConnection]]]:
    """Let hidden peers at one relay call each other, all of one peer at a time, and return them and the
    connections that each has made.
    """
    relay, service = await scene.relay()
    group = [await scene.hidden(relay) for _ in range(peers)]
    made = []
    for called in group:
        async with asyncio.TaskGroup() as tasks:
            calling = [
                tasks.create_task(one.circuits.connect(called.peer_id, [relay]))
                for one in group
                if one is not called
            ]
        made.append([task.result() for task in calling])
    counts = service.counts()
    assert (counts.reservations, counts.refused) == (peers, 0)
    assert service.relay.reservations(time.monotonic()) == [one.peer_id for one in group]
    return group, made


def test_twenty_hidden_peers_at_one_relay_all_call_each_other() -> None:
    async def test(scene: Scene) -> None:
        group, made = await group_of(scene, PEERS)
        for called, connections in zip(group, made, strict=True):
            assert [one.peer_id for one in connections] == [called.peer_id] * (PEERS - 1)
        for one in made[0]:
            assert await echoed(one, b"leader") == b"leader"

    run(test)
