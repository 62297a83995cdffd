"""Simulated swarms larger than a group that train: models stay equal, costs do not grow with the swarm."""

from __future__ import annotations

import statistics

import pytest

from swarm.testing.grid_training import train


@pytest.mark.parametrize("seed", [1, 2])
def test_models_stay_equal_where_the_grid_is_full(seed: int) -> None:
    found = train(16, 4, epochs=4, state_every=2, seed=seed)
    assert (found.rounds, found.electors, found.rounds_missed) == (2, 4, 0)
    assert max(found.before) < 1e-12
    assert max(found.after) < 1e-12


@pytest.mark.simulation
@pytest.mark.parametrize(("peers", "group_size"), [(9, 4), (20, 4), (23, 8)])
def test_state_rounds_bring_models_together_where_it_is_not_full(peers: int, group_size: int) -> None:
    seeds = [train(peers, group_size, epochs=4, state_every=2, seed=seed) for seed in range(1, 7)]
    assert sum(found.rounds_missed for found in seeds) < 0.02 * peers * seeds[0].rounds * (4 + 2) * len(seeds)
    for found in seeds:
        pairs = zip(found.before, found.after, strict=True)
        assert all(after < max(0.5 * before, 1e-12) for before, after in pairs)
    assert statistics.fmean(after for found in seeds for after in found.after) < 0.02


def test_messages_of_a_peer_grow_with_the_rounds_and_not_with_the_swarm() -> None:
    few, many = train(16, 4, epochs=2), train(64, 4, epochs=2)
    assert (few.rounds, many.rounds) == (2, 3)
    assert many.messages[1] / many.rounds < 1.5 * few.messages[1] / few.rounds


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_group_waits_for_nobody_that_is_on_its_way_to_another_cell(seed: int) -> None:
    """Peers of other rounds are known to the cell that they leave, or were in before. A group that waits for
    them begins late, so that its members miss the next round.
    """
    found = train(120, 4, epochs=1, state_every=1, seed=seed)
    assert (found.rounds, found.rounds_missed) == (4, 0)
    assert max(found.before) < 0.05
