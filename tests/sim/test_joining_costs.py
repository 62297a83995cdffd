"""Messages of one newcomer when many come at once, counted on the simulated network."""

from __future__ import annotations

import asyncio
import math
import statistics

import pytest

from averaging.matchmaking.logic.group import Group
from swarm.testing.chance import Chance
from swarm.testing.group_swarm import Swarm, check_groups
from swarm.testing.network import SimulatedNetwork
from swarm.testing.progress_swarm import LINK, ProgressRun
from swarm.testing.virtual_loop import run_virtual


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("newcomers", [8, 16, 32])
def test_searches_for_one_group_cost_a_member_few_messages(newcomers: int, seed: int) -> None:
    """Queries, answers, the call that joins and pings. One that queries every holder sends 2 N and more."""

    async def scenario() -> None:
        swarm, chance = Swarm(seed), Chance(seed, "arrivals")
        for _ in range(newcomers + 1):
            swarm.add(target_group_size=64)
        delays_s = [0.3 * chance.random() for _ in swarm.volunteers]
        [group] = check_groups(swarm, await swarm.all(delays_s, key="1"))
        assert isinstance(group, Group)
        assert len(group.members) == newcomers + 1
        sent = [volunteer.peer.messages_sent for volunteer in swarm.volunteers]
        assert statistics.median(sent) <= 40, sorted(sent)
        await swarm.close()

    run_virtual(scenario())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("newcomers", [8, 16, 32])
def test_reports_of_newcomers_that_come_at_once_are_few(newcomers: int, seed: int) -> None:
    """Introductions and the announcements of one full epoch: a multiple of log N messages, calls and answers
    together, instead of one to every peer for each.
    """

    async def scenario() -> None:
        network, chance = SimulatedNetwork(seed, LINK), Chance(seed, "speeds")
        run = ProgressRun(network, target=20 * (newcomers + 1))
        async with asyncio.TaskGroup() as group:
            founder = run.add(2.0)
            tasks = run.start(group, [founder])
            await asyncio.sleep(5.0)
            late = [run.add(2.0 + chance.random()) for _ in range(newcomers)]
            tasks += run.start(group, late)
            while len(run.ends.get(0, ())) <= newcomers:
                await asyncio.sleep(0.1)
            await asyncio.sleep(1.0)
            sent = [trainer.peer.messages_sent for trainer in late]
            for task in tasks:
                task.cancel()
        assert not network.errors, network.errors
        assert len(run.ends[0]) == newcomers + 1, "all left the epoch"
        assert statistics.mean(sent) <= 12 * math.log2(newcomers + 1), sorted(sent)
        await network.close()

    run_virtual(scenario())
