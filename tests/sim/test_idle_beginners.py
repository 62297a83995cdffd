"""Peers that take part in a run that has not begun, and make no step."""

from __future__ import annotations

import asyncio
import logging

import pytest

from averaging.optim.reports import StepReport
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.training_swarm import TrainingConfig, TrainingPeer, TrainingSwarm
from swarm.testing.virtual_loop import run_virtual

WAIT_S = 15.0  # for the first steps of others
SLACK_S = 3.0


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("mode", ["gradients", "diloco", "local"])
@pytest.mark.parametrize("idle_comes_first", [True, False])
def test_a_peer_that_never_steps_does_not_keep_a_run_from_beginning(
    mode: str, *, idle_comes_first: bool
) -> None:
    """Regression test: the only trainer beside it did not begin within 200 s. The idle peer gets the
    state in its first step, and takes part from then on.
    """

    async def scenario() -> None:
        network, loop = SimulatedNetwork(1, LinkConfig(delay_s=0.03, jitter=0.5)), asyncio.get_running_loop()
        idle: TrainingPeer | None = None
        began_s, joined = 0.0, False

        def on_step(one: TrainingPeer, report: StepReport, seconds: float) -> None:
            nonlocal began_s, joined
            if report.stepped and not began_s:
                began_s = loop.time()
                assert report.alone
                assert one is not idle
            joined |= one is idle and report.contributed > 0

        async def add_idle() -> TrainingPeer:
            added = await swarm.add(batch=1, compute_s=0.1)
            added.hangs = True
            return added

        async with asyncio.TaskGroup() as group:
            swarm = TrainingSwarm(network, TrainingConfig(target_batch_size=8, mode=mode), on_step, group)
            if idle_comes_first:
                idle = await add_idle()
                await asyncio.sleep(3.0)
            await swarm.add(batch=1, compute_s=0.1)
            came_s = loop.time()
            idle = idle or await add_idle()
            while not began_s and loop.time() < came_s + 2 * WAIT_S:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            assert WAIT_S <= began_s - came_s <= WAIT_S + SLACK_S
            idle.hangs = False
            while not joined and loop.time() < began_s + 2 * WAIT_S:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            assert joined
            await swarm.close()
        assert not network.errors

    run_virtual(scenario())
