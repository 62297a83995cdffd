"""All-reduce between simulated peers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import torch

from averaging.allreduce.allreduce import AllReduce
from averaging.allreduce.config import RoundConfig
from averaging.allreduce.outcome import RoundOutcome
from averaging.matchmaking.logic.group import Group
from averaging.reduction.audit import Notary
from swarm.testing.network import SimulatedNetwork, SimulatedPeer


def all_reduce_of(peer: SimulatedPeer) -> AllReduce:
    """Return the all-reduce service of a simulated peer. Its tensor work runs on the virtual loop."""
    return AllReduce(
        handlers=peer.handlers,
        channels=peer.caller,
        pool=None,  # type: ignore[arg-type]
        clock=peer.clock,
        notary=Notary(peer.identity, random.Random(f"audits of {peer.peer_id}")),
    )


async def run_round(
    network: SimulatedNetwork,
    group: Group,
    vectors: Sequence[torch.Tensor],
    *,
    timeout_s: float,
    config: RoundConfig,
) -> list[RoundOutcome]:
    """Run one round of all peers of `network`, one vector each, and stop the network. Return how it ended
    for each of them.
    """
    peers = list(network.peers.values())
    services = [all_reduce_of(peer) for peer in peers]
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(
                service.run(group, vector, deadline_s=peer.clock.monotonic_s() + timeout_s, config=config)
            )
            for service, vector, peer in zip(services, vectors, peers, strict=True)
        ]
    for service in services:
        service.close()
    await network.close()
    assert not network.errors
    return [task.result() for task in running]
