"""Messages of a peer that searches for a group, by the size of the swarm and of its groups."""

from __future__ import annotations

import asyncio
import math
import statistics

import pytest

from swarm.testing.grid_training import train
from swarm.testing.group_swarm import Swarm
from swarm.testing.virtual_loop import run_virtual

SEARCH_S = 15.0
SEEDS = [1, 2]


def messages_per_s(seed: int, peers: int) -> float:
    """Return how many messages a peer sends in a second while all search, each under a key of its own."""

    async def scenario() -> float:
        swarm = Swarm(seed)
        for _ in range(peers):
            swarm.add(target_group_size=64)
        async with asyncio.TaskGroup() as tasks:
            for number, volunteer in enumerate(swarm.volunteers):
                tasks.create_task(volunteer.find(key=str(number), window_s=SEARCH_S))
        sent = [volunteer.peer.messages_sent for volunteer in swarm.volunteers]
        await swarm.close()
        return statistics.fmean(sent) / SEARCH_S

    return run_virtual(scenario())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_search_that_finds_nobody_asks_a_large_swarm_no_more_often_than_a_small_one(seed: int) -> None:
    """Peers whose rounds differ, as around the first certificate of a run. Where the pauses do not grow while
    a peer answers the same, each asks sixteen times a second, and answers as often.
    """
    assert messages_per_s(seed, 24) <= messages_per_s(seed, 8)


@pytest.mark.parametrize("seed", SEEDS)
def test_messages_of_an_epoch_through_the_grid_grow_with_the_logarithm_of_the_group(seed: int) -> None:
    """Two cells of 24 peers against two of 8. Searches that ask all peers of their cells send 2.4 times as
    many messages there.
    """
    small, large = (statistics.fmean(train(2 * size, size, epochs=1, seed=seed).messages) for size in (8, 24))
    assert large <= small * math.log2(48) / math.log2(16)
