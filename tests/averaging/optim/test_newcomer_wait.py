"""How long a peer that trains alone keeps its epoch open for newcomers."""

from __future__ import annotations

import random

import pytest

from averaging.optim.progress.logic.newcomers import NewcomerWait

SHARE_MAX, FULL_S, BEGIN_S = 0.2, 20.0, 10.0
STEP_S = 0.1


def waited_s(wait: NewcomerWait, begin_s: float, seconds: float) -> float:
    """Return how long newcomers that never come are waited for in this time."""
    steps = round(seconds / STEP_S)
    return STEP_S * sum(wait.waits(begin_s + step * STEP_S, newcomers=True) for step in range(steps))


def test_nobody_is_waited_for_without_newcomers() -> None:
    wait = NewcomerWait(0.0)
    assert not any(wait.waits(now_s, newcomers=False) for now_s in range(100))


def test_a_wait_ends_when_the_newcomers_have_come() -> None:
    wait = NewcomerWait(0.0)
    assert wait.waits(1.0, newcomers=True)
    assert not wait.waits(2.0, newcomers=False)


def test_newcomers_that_never_come_are_waited_for_a_fifth_of_the_time() -> None:
    wait = NewcomerWait(0.0)
    assert waited_s(wait, 0.0, 60.0) == pytest.approx(FULL_S / (1.0 - SHARE_MAX), abs=2 * STEP_S)
    assert waited_s(wait, 60.0, 600.0) == pytest.approx(SHARE_MAX * 600.0, abs=BEGIN_S)


def test_a_wait_begins_with_enough_time_for_a_newcomer_to_come() -> None:
    wait = NewcomerWait(0.0)
    waited_s(wait, 0.0, 60.0)  # beyond its end
    ended_s = 60.0
    while not wait.waits(ended_s, newcomers=True):
        ended_s += STEP_S
    assert waited_s(wait, ended_s, 60.0) == pytest.approx(BEGIN_S / (1.0 - SHARE_MAX), abs=2 * STEP_S)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_newcomers_do_they_take_a_fifth_of_the_time_and_one_account(seed: int) -> None:
    chance, wait, now_s, waited = random.Random(seed), NewcomerWait(0.0), 0.0, 0.0
    while now_s < 2000.0:
        waits, elapsed_s = wait.waits(now_s, newcomers=chance.random() < 0.7), chance.uniform(0.01, 1.0)
        waited, now_s = waited + waits * elapsed_s, now_s + elapsed_s
        assert waited <= FULL_S + SHARE_MAX * now_s + 1.0


def test_a_wait_that_is_given_up_begins_again_when_half_is_paid() -> None:
    wait = NewcomerWait(0.0)
    assert wait.waits(1.0, newcomers=True)
    wait.empty()
    half_s = BEGIN_S / SHARE_MAX
    assert waited_s(wait, 1.0, half_s - 1.0) == 0.0
    assert wait.waits(half_s + 2.0, newcomers=True)
