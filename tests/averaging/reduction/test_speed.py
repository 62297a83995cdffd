"""The speed of a link, from the times in which messages were on their way."""

from __future__ import annotations

import pytest

from averaging.reduction.speed import BYTES_PER_S_MAX, UNKNOWN_BYTES_PER_S, Speed

MIB = 1 << 20


def one_round(speed: Speed, start_s: float, messages: int, each_s: float) -> None:
    for nth in range(messages):
        speed.begin(start_s + nth * each_s)
        speed.end(MIB, start_s + (nth + 1) * each_s)
    speed.round_over()


def test_concurrent_messages_share_the_time() -> None:
    speed = Speed()
    for start_s in (0.0, 100.0):  # what lies between two bursts does not count
        for _ in range(8):
            speed.begin(start_s)
        for nth in range(8):
            speed.end(MIB, start_s + (nth + 1) / 8)
    speed.round_over()
    assert speed.bytes_per_s == pytest.approx(8 * MIB)


def test_short_rounds_are_ignored_and_fast_links_count_as_equal() -> None:
    speed = Speed()
    assert speed.bytes_per_s == UNKNOWN_BYTES_PER_S
    one_round(speed, 0.0, 7, 1e-6)
    assert speed.bytes_per_s == UNKNOWN_BYTES_PER_S
    one_round(speed, 0.0, 8, 1e-6)
    assert speed.bytes_per_s == BYTES_PER_S_MAX


def test_a_quick_short_round_gives_a_lower_bound() -> None:
    speed = Speed()
    speed.committed(MIB, 1.0)
    assert speed.bytes_per_s == UNKNOWN_BYTES_PER_S  # it may have waited for others
    speed.committed(4 * MIB, 0.1)
    speed.committed(4 * MIB, 4.0)
    assert speed.bytes_per_s == pytest.approx(40 * MIB)
    speed.committed(4 * MIB, 1e-6)
    assert speed.bytes_per_s == BYTES_PER_S_MAX
    one_round(speed, 0.0, 8, 1.0)  # long enough to be measured
    assert speed.bytes_per_s == pytest.approx(MIB)


def test_a_slow_link_is_measured_from_few_bytes() -> None:
    speed = Speed()
    one_round(speed, 0.0, 2, 8.0)
    assert speed.bytes_per_s == pytest.approx(MIB / 8)


def test_one_outlier_changes_nothing_and_a_lasting_change_does() -> None:
    speed = Speed()
    for nth in range(5):
        one_round(speed, 10.0 * nth, 8, 0.1)
    assert speed.bytes_per_s == pytest.approx(10 * MIB)
    one_round(speed, 100.0, 8, 1.0)
    assert speed.bytes_per_s == pytest.approx(10 * MIB)
    for nth in range(2):
        one_round(speed, 200.0 + 10.0 * nth, 8, 1.0)
    assert speed.bytes_per_s == pytest.approx(1 * MIB)


def test_a_round_that_ends_while_another_sends_waits_for_it() -> None:
    speed = Speed()
    speed.begin(0.0)
    one_round(speed, 0.0, 8, 0.125)
    assert speed.bytes_per_s == UNKNOWN_BYTES_PER_S
    speed.end(8 * MIB, 2.0)
    speed.round_over()
    assert speed.bytes_per_s == pytest.approx(8 * MIB)
