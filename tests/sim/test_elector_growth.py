"""A thousand free identities do real work in an open run of a few honest electors."""

from __future__ import annotations

import pytest

from averaging.history import electors
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


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("miss", "hours"), [(0.05, 4), (0.2, 2)])
def test_a_crowd_that_misses_no_round_is_no_majority_soon_although_electors_miss_some(
    miss: float, hours: int, seed: int
) -> None:
    """Before, an elector left the list with the first round that it missed, and a crowd could decide after
    1.5 h and 0.2 h.
    """
    config = GrowthConfig(
        seed=seed, crowd="patient", group_size_max=32, round_s=ROUND_S, hours=hours, miss=miss
    )
    figures = GrowthRun(config).run()
    print([f"{share:.0%}" for share in figures.shares])
    assert figures.quorum_s is None, f"the crowd decides after {figures.quorum_s} s"
    assert all(share <= 0.5 for share in figures.shares)


def without_quorum(count: int, miss: float, away_rounds: int) -> float:
    """Return the part of the time in which electors that come and go were no quorum."""
    lost_s = all_s = 0.0
    for seed in range(3):
        config = GrowthConfig(
            seed=seed,
            crowd="nobody",
            honest=count,
            hours=3.0,
            miss=miss,
            away_rounds=away_rounds,
            is_reachable=False,
        )
        figures = GrowthRun(config).run()
        lost_s, all_s = lost_s + figures.lost_s, all_s + figures.rounds * config.round_s
    return lost_s / all_s


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize(
    ("miss", "away_rounds", "slack"),
    [(0.2, 1, 0.0), (0.05, 1, 0.002), (0.2, 30, 0.004)],
    ids=["flap often", "flap", "die"],
)
def test_intermittent_electors_form_a_quorum_as_often_as_if_they_left_the_list_at_once(
    count: int, miss: float, away_rounds: int, slack: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = without_quorum(count, miss, away_rounds)
    monkeypatch.setattr(electors, "MISSES_MAX", 1)
    before = without_quorum(count, miss, away_rounds)
    print(f"without a quorum for {found:.2%} of the time, before {before:.2%}")
    assert found <= before + slack


def test_an_honest_newcomer_alone_becomes_an_elector_after_three_rounds() -> None:
    config = GrowthConfig(seed=1, crowd="none", identities=0, round_s=ROUND_S, hours=0.5)
    assert GrowthRun(config).run().newcomer_s == (ROUNDS_NEEDED - 1) * ROUND_S


def test_an_honest_newcomer_that_came_before_a_patient_crowd_is_admitted_before_it() -> None:
    config = GrowthConfig(
        seed=1, crowd="patient", group_size_max=32, round_s=ROUND_S, hours=1, crowd_after_s=ROUND_S
    )
    figures = GrowthRun(config).run()
    assert figures.newcomer_s == (ROUNDS_NEEDED - 1) * ROUND_S
