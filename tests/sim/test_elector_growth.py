"""A thousand free identities do real work in an open run of a few honest electors."""

from __future__ import annotations

import pytest

from averaging.history.electors import HOUR_S, ROUNDS_NEEDED
from swarm.testing.elector_growth import GrowthConfig, GrowthRun

ROUND_S = 60.0


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("crowd", ["many", "patient"])
def test_newcomers_become_electors_only_as_fast_as_the_limit_says(crowd: str, seed: int) -> None:
    config = GrowthConfig(seed=seed, crowd=crowd, group_size_max=32, round_s=ROUND_S, hours=5)
    figures = GrowthRun(config).run()
    alone_s = figures.quorum_s if figures.quorum_s is not None else config.hours * HOUR_S
    print(crowd, [round(one / HOUR_S, 2) for one in figures.admitted_s], "alone after", alone_s / HOUR_S)
    assert alone_s >= config.honest * HOUR_S, "one in the first hour, and one in each further"
    early = [one for one in figures.admitted_s if one < alone_s]
    assert early, "they do real work"
    for hour in range(int(alone_s / HOUR_S)):
        assert sum(hour * HOUR_S <= one < (hour + 1) * HOUR_S for one in early) <= 1
    assert figures.refused == 0, "an honest round never waits for a clock"


def test_an_honest_newcomer_alone_becomes_an_elector_after_three_rounds() -> None:
    config = GrowthConfig(seed=1, crowd="none", identities=0, round_s=ROUND_S, hours=0.5)
    assert GrowthRun(config).run().newcomer_s == (ROUNDS_NEEDED - 1) * ROUND_S


def test_an_honest_newcomer_that_came_before_a_patient_crowd_is_admitted_before_it() -> None:
    config = GrowthConfig(
        seed=1, crowd="patient", group_size_max=32, round_s=ROUND_S, hours=1, crowd_after_s=ROUND_S
    )
    figures = GrowthRun(config).run()
    assert figures.newcomer_s == (ROUNDS_NEEDED - 1) * ROUND_S
