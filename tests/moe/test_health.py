"""Who failed is avoided for a growing while, and forgiven by an answer."""

from __future__ import annotations

from moe.health import Health, HealthConfig


def test_failures_in_a_row_are_held_against_it_for_longer_and_longer() -> None:
    health = Health(HealthConfig(avoid_first_s=1.0, avoid_max_s=5.0))
    now_s, lengths = 0.0, []
    for _ in range(5):
        health.failed("x", now_s)
        lengths.append(health.avoided_until_s("x") - now_s)
        now_s = health.avoided_until_s("x")
        assert not health.avoided("x", now_s)
    assert lengths == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_one_outage_that_many_calls_meet_counts_once() -> None:
    health = Health()
    for _ in range(10):
        health.failed("x", 1.0)
    assert health.avoided_until_s("x") == 2.0


def test_an_answer_forgives_and_says_how_long_to_wait() -> None:
    health = Health()
    assert health.hedge_s("x") == health.config.hedge_unknown_s
    health.failed("x", 0.0)
    health.answered("x", 0.2, 0.05)
    assert not health.avoided("x", 0.1)
    assert health.hedge_s("x") > 0.5


def test_who_was_slow_long_ago_is_tried_again() -> None:
    health = Health(HealthConfig(fresh_s=30.0))
    assert health.expected_s("x", 0.0) == 0.0
    health.answered("x", 2.0, 1.0)
    assert health.expected_s("x", 30.0) == 2.0
    assert health.expected_s("x", 32.0) == 0.0
    assert health.usual_s("x") == 2.0  # still what a hedge goes by


def test_memory_is_bounded() -> None:
    health = Health(HealthConfig(known_max=10))
    for number in range(100):
        health.failed(number, 0.0)
    assert health.avoided(99, 0.5)
    assert not health.avoided(0, 0.5)
