"""Newcomers that need longer than an epoch of the founder for every message, or for every step."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import pytest

from averaging.optim.reports import StepReport
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.training_swarm import TrainingConfig, TrainingPeer, TrainingSwarm
from swarm.testing.virtual_loop import run_virtual

TARGET, BATCH, EPOCH_S = 32, 4, 0.2
NEWCOMERS = 2
WATCHED_S = 40.0


async def beside_a_founder(seed: int, *, slowness: float, compute_s: float) -> Counter[int]:
    """Return each peer's samples that counted in `WATCHED_S` seconds after newcomers have come.
    `slowness`: factor on the delay of a newcomer's messages, 20 ms one way; `compute_s`: of its steps.
    """
    counted: Counter[int] = Counter()

    def on_step(one: TrainingPeer, report: StepReport, _: float) -> None:
        counted[one.index] += report.contributed

    network = SimulatedNetwork(seed, LinkConfig(delay_s=0.02, jitter=0.5))
    async with asyncio.TaskGroup() as group:
        swarm = TrainingSwarm(network, TrainingConfig(target_batch_size=TARGET), on_step, group)
        await swarm.add(batch=BATCH, compute_s=EPOCH_S * BATCH / TARGET)
        await asyncio.sleep(5.0)
        for _ in range(NEWCOMERS):
            peer = network.peer()
            peer.slowness = slowness
            await swarm.add(batch=BATCH, compute_s=compute_s, peer=peer)
        await asyncio.sleep(WATCHED_S)
        await swarm.close()
    return counted


@pytest.mark.parametrize("compute_s", [0.05, 0.5])
@pytest.mark.parametrize("seed", range(1, 4))
def test_newcomers_whose_messages_take_half_an_epoch_of_the_founder_contribute(
    seed: int, compute_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression test: the founder made epoch after epoch alone, since no report of a newcomer reached it in
    the epoch that it was about, and no newcomer came in.
    """
    caplog.set_level(logging.CRITICAL)
    counted = run_virtual(beside_a_founder(seed, slowness=5.0, compute_s=compute_s))
    assert all(counted[index] > 0 for index in range(1 + NEWCOMERS)), counted


@pytest.mark.parametrize("seed", range(1, 4))
def test_newcomers_whose_messages_take_an_epoch_of_the_founder_contribute(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    counted = run_virtual(beside_a_founder(seed, slowness=10.0, compute_s=0.05))
    assert all(counted[index] > 0 for index in range(1 + NEWCOMERS)), counted
