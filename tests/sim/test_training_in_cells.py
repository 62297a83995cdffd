"""Whole swarms that are larger than a group and train, with all checks of `make sim SCENARIO=training`:
groups of four stand for groups of 64.
"""

from __future__ import annotations

import asyncio

import pytest

from swarm.testing.chance import Chance
from swarm.testing.checkers import Violations
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.training_checkers import TrainingChecks
from swarm.testing.training_swarm import TrainingConfig, TrainingSwarm
from swarm.testing.virtual_loop import run_virtual

PEERS, GROUP = 10, 4
TRAINING_S = 20.0
STEP_S_MAX = 120.0


@pytest.mark.parametrize("mode", ["gradients", "local"])
def test_a_swarm_larger_than_a_group_trains_through_the_grid_and_breaks_no_promise(mode: str) -> None:
    async def scene() -> tuple[TrainingChecks, Violations]:
        violations, seed = Violations(), 1
        checks, chance = TrainingChecks(violations, STEP_S_MAX), Chance(seed, "speeds")
        network = SimulatedNetwork(seed, LinkConfig(delay_s=0.03, jitter=0.5))
        config = TrainingConfig(target_batch_size=16 * PEERS, mode=mode, group_size_max=GROUP)
        async with asyncio.TaskGroup() as group:
            swarm = TrainingSwarm(network, config, checks.on_step, group)
            for _ in range(PEERS):
                await swarm.add(compute_s=chance.uniform(0.7, 1.4))
            for _ in range(round(TRAINING_S / 2.0)):
                await asyncio.sleep(2.0)
                checks.watch(list(swarm.live.values()), asyncio.get_running_loop().time())
            assert not network.errors
            assert len({one.optimizer.epoch for one in swarm.live.values() if one.optimizer}) <= 2
            await swarm.close()
        return checks, violations

    checks, violations = run_virtual(scene())
    assert not violations.count, violations.lines
    certificates = checks.ledger.certificates.values()
    assert sum(one.proposal.grid_rounds > 1 for one in certificates) >= 2
    assert not any(one.proposal.is_break for one in certificates)
