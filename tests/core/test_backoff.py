"""Tests of the exponential back-off against a sequence written out by hand."""

from __future__ import annotations

import random

import pytest

from swarm.core.backoff import Backoff, backoff_s


def test_pauses_double_from_the_first_to_the_longest() -> None:
    assert [backoff_s(failures, 0.5, 3.0) for failures in range(6)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


def test_any_number_of_failures_gives_a_finite_pause() -> None:
    assert backoff_s(10**9, 1.0, 60.0, growth=10.0) == 60.0


def test_a_success_resets_the_pause() -> None:
    backoff = Backoff(0.5, 8.0)
    assert [backoff.next_s() for _ in range(3)] == [0.5, 1.0, 2.0]
    backoff.reset()
    assert backoff.failures == 0
    assert backoff.next_s() == 0.5


@pytest.mark.parametrize("seed", range(5))
def test_jitter_stays_within_a_fifth(seed: int) -> None:
    backoff = Backoff(1.0, 4.0, random.Random(seed))
    pauses = [backoff.next_s() for _ in range(50)]
    for pause_s, middle_s in zip(pauses, [1.0, 2.0, *[4.0] * 48], strict=True):
        assert 0.8 * middle_s <= pause_s <= 1.2 * middle_s
    assert len(set(pauses)) > 40
