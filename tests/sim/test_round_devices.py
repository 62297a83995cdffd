"""Rounds of members whose tensors lie on devices, some on the host: the same bits for all, also when a member
dies in the middle.
"""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from averaging.allreduce.allreduce import RoundMemory
from averaging.allreduce.config import RoundConfig
from averaging.allreduce.outcome import RoundOutcome
from averaging.matchmaking.logic.group import Group, Member
from averaging.reduction.averages import ResultBuffer
from averaging.reduction.devices import Queues
from averaging.reduction.feedback import Feedback
from averaging.reduction.staging import Staging
from averaging.reduction.vector import HOST
from swarm.compression import find
from swarm.testing.devices import LateQueue
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.rounds import all_reduce_of
from swarm.testing.virtual_loop import run_virtual

CONFIG = RoundConfig(chunk_bytes=2048)
SHAPES = [(5000,), (), (60, 90), (3, 3), (7000,)]
PEERS = 4


@pytest.mark.parametrize("codec", ["float16", "int4"])
@pytest.mark.parametrize("dies", [False, True])
def test_members_on_devices_and_on_the_host_hold_the_same(codec: str, dies: bool) -> None:
    on_host, on_device = (run_virtual(_rounds(codec, dies, devices)) for devices in ((), (0, 2, 3)))
    assert on_host == on_device  # what a device does makes no difference to anybody


async def _rounds(codec: str, dies: bool, devices: tuple[int, ...]) -> list[list[float]]:
    network = SimulatedNetwork(3, LinkConfig(delay_s=0.02, bandwidth=1e5))
    rng, chance = random.Random(5), torch.Generator().manual_seed(5)
    peers = [network.peer() for _ in range(PEERS)]
    services = [all_reduce_of(peer) for peer in peers]
    members = tuple(
        Member(contact=peer.contact, weight=1.0 + place, bandwidth=1.0) for place, peer in enumerate(peers)
    )
    stagings = [
        Staging(
            [torch.zeros(shape) for shape in SHAPES], Queues([HOST], LateQueue) if place in devices else None
        )
        for place in range(PEERS)
    ]
    feedback = [
        Feedback(staging.layout.numel, find(codec), cut=staging.cut, queues=staging.queues)
        for staging in stagings
    ]
    result_buffers = [ResultBuffer(staging.queues) for staging in stagings]
    for nth in range(3):
        for staging in stagings:
            for tensor in staging.tensors:
                tensor.copy_(torch.randn(tensor.shape, generator=chance))
        group = Group(group_id=rng.randbytes(32), members=members, codec=codec, gathered=(b"",) * PEERS)

        async def run(place: int, group: Group = group) -> RoundOutcome:
            return await services[place].run(
                group,
                stagings[place].take(read_in_place=True),
                deadline_s=peers[place].clock.monotonic_s() + 60.0,
                config=CONFIG,
                memory=RoundMemory(result_buffers[place], feedback[place]),
            )

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(place)) for place in range(PEERS)]
            if dies and nth == 2:
                await asyncio.sleep(0.08)
                running[1].cancel()
                await network.crash(peers[1])
        living = [place for place in range(PEERS) if not running[place].cancelled()]
        outcomes = [running[place].result() for place in living]
        assert not any(outcome.failed for outcome in outcomes), outcomes
        assert len({outcome.digest for outcome in outcomes}) == 1
        for place, outcome in zip(living, outcomes, strict=True):
            assert outcome.averages is not None
            stagings[place].put(outcome.averages)
            for tensor, first in zip(stagings[place].tensors, stagings[living[0]].tensors, strict=True):
                assert torch.equal(tensor, first)
    assert len(living) == PEERS - dies
    for service in services:
        service.close()
    await network.close()
    return [
        *(tensor.flatten().tolist() for tensor in stagings[0].tensors),
        *(list(one.norms()) for one in feedback),
    ]
