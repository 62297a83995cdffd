"""Estimates of delays: the first, the mean and deviation of many, and how seldom they are exceeded."""

from __future__ import annotations

import random

import pytest

from swarm.core.delays import DelayEstimate


def test_half_of_the_first_delay_counts_as_its_deviation() -> None:
    estimate = DelayEstimate.of_first(2.0)
    assert (estimate.mean_s, estimate.deviation_s) == (2.0, 1.0)
    assert estimate.rarely_exceeded_s == 6.0


def test_the_deviation_is_measured_from_the_mean_before_the_new_delay() -> None:
    estimate = DelayEstimate.of_first(1.0)
    estimate.observe(3.0, 0.25)
    assert (estimate.mean_s, estimate.deviation_s) == (1.5, 0.5 + 0.25 * (2.0 - 0.5))


@pytest.mark.parametrize("seed", range(5))
def test_one_delay_in_twenty_at_most_exceeds_the_estimate(seed: int) -> None:
    rng = random.Random(seed)
    estimate, exceeded = DelayEstimate.of_first(1.0), 0
    for _ in range(2000):
        delay_s = rng.expovariate(1.0)
        exceeded += delay_s > estimate.rarely_exceeded_s
        estimate.observe(delay_s, 0.25)
    assert exceeded <= 100
