"""Keys that fail are avoided for a time that grows with each failure."""

from __future__ import annotations

import pytest

from swarm.core.avoidance import Avoidance
from swarm.core.errors import UsageError


def test_the_pause_grows_with_each_failure_up_to_a_limit() -> None:
    avoidance, now_s, spans_s = (
        Avoidance(pause_first_s=1.0, pause_s_max=10.0),
        100.0,
        [],
    )
    for _ in range(6):
        avoidance.failed("x", now_s)
        until_s = avoidance.until_s("x")
        assert until_s is not None
        assert avoidance.avoided("x", until_s - 1e-6)
        assert not avoidance.avoided("x", until_s)
        spans_s.append(until_s - now_s)
        now_s = until_s
    assert spans_s == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_a_success_clears_earlier_failures() -> None:
    avoidance = Avoidance()
    for now_s in (0.0, 1.0, 3.0):
        avoidance.failed("x", now_s, "it lied")
    assert avoidance.failures("x") == 3
    assert avoidance.reason("x") == "it lied"
    avoidance.succeeded("x")
    assert not avoidance.avoided("x", 3.1)
    avoidance.failed("x", 4.0)
    assert avoidance.until_s("x") == 5.0


def test_failures_of_calls_sent_before_the_pause_count_once() -> None:
    avoidance = Avoidance()
    for now_s in (0.0, 0.1, 0.2, 0.9):
        avoidance.failed("x", now_s)
    assert avoidance.failures("x") == 1
    assert not avoidance.avoided("x", 1.0)


def test_two_thousand_failures_do_not_overflow() -> None:
    avoidance, now_s = Avoidance(), 0.0
    for _ in range(2000):
        avoidance.failed("x", now_s)
        now_s = avoidance.until_s("x") or 0.0
    assert avoidance.failures("x") == 2000


def test_failed_since_reports_later_failures_until_a_success() -> None:
    avoidance = Avoidance()
    avoidance.failed("x", 5.0)
    avoidance.failed("x", 5.5)  # it counts as failed although it is avoided already
    assert avoidance.failed_since("x", 5.5)
    assert not avoidance.failed_since("x", 5.6)
    avoidance.succeeded("x")
    assert not avoidance.failed_since("x", 0.0)


def test_the_number_of_keys_is_bounded() -> None:
    avoidance = Avoidance(keys_max=3)
    for number in range(5):
        avoidance.failed(number, 0.0)
    assert [avoidance.avoided(number, 0.5) for number in range(5)] == [False, False, True, True, True]


def test_the_key_that_failed_longest_ago_is_forgotten_first() -> None:
    avoidance = Avoidance(keys_max=2)
    for now_s, key in ((0.0, "a"), (0.0, "b"), (2.0, "a"), (2.0, "c")):
        avoidance.failed(key, now_s)
    assert [avoidance.failures(key) for key in "abc"] == [2, 0, 1]


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(UsageError):
        Avoidance(pause_first_s=5.0, pause_s_max=1.0)


def test_a_grave_failure_counts_as_several_also_while_the_key_is_avoided() -> None:
    avoidance = Avoidance(pause_first_s=1.0, pause_s_max=1000.0, growth=4.0)
    avoidance.failed("x", 0.0)
    avoidance.failed("x", 0.5, failures_min=3)
    assert avoidance.failures("x") == 3
    assert avoidance.until_s("x") == 0.5 + 16.0
    avoidance.failed("x", 0.7, failures_min=3)
    assert avoidance.failures("x") == 3
    avoidance.failed("x", 20.0, failures_min=3)
    assert avoidance.until_s("x") == 20.0 + 64.0
