"""Samples of short epochs over the internet, compared with the target."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import pytest

from averaging.optim.modes import ModeSettings
from averaging.optim.modes.settings import Diloco, Gradients, Local
from averaging.optim.reports import StepReport
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.training_swarm import TrainingConfig, TrainingPeer, TrainingSwarm
from swarm.testing.virtual_loop import run_virtual

SAMPLES, EPOCH_S, EPOCHS = 4, 1.0, 12
DELAY_S = 0.03  # one way
# until all have heard that the epoch is full, and have ended their steps, they compute on
SIZE_MAX = 1.3  # of the target


@pytest.mark.parametrize(
    "mode",
    [Gradients(), Gradients(delayed=True), Local(), Diloco(streaming=2)],
    ids=["gradients", "delayed", "local", "streaming"],
)
def test_epochs_of_a_second_hold_the_target_and_little_more(
    mode: ModeSettings, caplog: pytest.LogCaptureFixture
) -> None:
    """In the first design they held up to 1.9 times the target. One of the peers has a quarter of the
    others' speed.
    """
    caplog.set_level(logging.CRITICAL)
    sizes = run_virtual(_epoch_sizes(mode, [0.1, 0.1, 0.1, 0.4]))
    assert len(sizes) >= EPOCHS / 2
    assert 0.9 <= sum(sizes) / len(sizes) <= SIZE_MAX, sizes


async def _epoch_sizes(mode: ModeSettings, steps_s: list[float]) -> list[float]:
    """Return the samples of each epoch, of the target, without the first ones."""
    contributed = Counter[int]()

    def on_step(one: TrainingPeer, report: StepReport, took_s: float) -> None:
        if report.stepped:
            contributed[report.epoch] += report.contributed

    network = SimulatedNetwork(1, LinkConfig(delay_s=DELAY_S, jitter=0.5))
    target = int(sum(SAMPLES / step_s for step_s in steps_s) * EPOCH_S)
    async with asyncio.TaskGroup() as group:
        swarm = TrainingSwarm(network, TrainingConfig(target_batch_size=target, mode=mode), on_step, group)
        peers = [await swarm.add(batch=SAMPLES, compute_s=step_s) for step_s in steps_s]
        await asyncio.sleep(10.0 + EPOCHS * EPOCH_S)
        complete = min(one.optimizer.epoch for one in peers if one.optimizer is not None)
        await swarm.close()
    return [contributed[epoch] / target for epoch in range(4, complete)]
