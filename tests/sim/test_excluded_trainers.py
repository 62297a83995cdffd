"""A trainer that the owner of its run has excluded, and that the others refuse."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from averaging.blocklist import EXCLUDED
from averaging.history.grace import GRACE_S_MIN
from averaging.optim.optimizer import OptimizerConfig
from swarm.testing.virtual_loop import run_virtual
from tests.sim.trainers import SimulatedTrainer, trainers


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_excluded_trainer_does_not_wait_for_the_majority_that_refuses_it(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression test: a volunteer whose invite was revoked stayed in its step for the whole grace."""
    caplog.set_level(logging.CRITICAL)
    excluded_s = 4.0  # after the cut: the step waits for a majority

    async def scene() -> float:
        clock = asyncio.get_running_loop()
        async with trainers(seed, 3, OptimizerConfig(publish_metrics=False)) as swarm:
            await swarm.together(lambda one: one.train_to(3))
            out = swarm.peers[-1]
            places: list[Any] = [one.node for one in swarm.peers]
            swarm.network.partition([places[-1].peer], [place.peer for place in places[:-1]])
            began_s = clock.time()
            clock.call_later(excluded_s, lambda: out.opt.ban([out.node.peer_id]))

            def train(one: SimulatedTrainer) -> None:
                while one.train_once().reason != EXCLUDED:
                    pass

            await asyncio.wait_for(swarm.together(train, [out]), 10 * GRACE_S_MIN)
            return clock.time() - began_s

    assert run_virtual(scene()) < excluded_s + 2.0 < GRACE_S_MIN
