"""Tests of the bandwidth cap: it is never exceeded, and it is used up whenever there is something to send."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.core.errors import UsageError
from swarm.net.bucket import BURST_S, Bucket
from swarm.net.throttle import Bandwidth

RATE = 1e6
# (pause before the message, its size)
messages = st.lists(st.tuples(st.floats(0.0, 0.4), st.integers(1, 1 << 20)), min_size=1, max_size=60)


@given(messages, st.integers(1, 6))
def test_no_time_window_carries_more_than_the_cap(asked: list[tuple[float, int]], streams: int) -> None:
    """Each stream waits for its message before it requests the next; any number of streams share the cap."""
    bucket = Bucket(RATE)
    passed: list[tuple[float, int]] = []
    ready_s = [0.0] * streams
    for pause_s, size in asked:
        stream = min(range(streams), key=ready_s.__getitem__)
        now_s = ready_s[stream] + pause_s
        # Time passes for all streams.
        ready_s = [max(other_s, now_s) if nth != stream else now_s for nth, other_s in enumerate(ready_s)]
        ready_s[stream] = now_s + bucket.pass_s(size, now_s)
        passed.append((ready_s[stream], size))
    passed.sort()
    for first in range(len(passed)):
        total = 0
        for until_s, size in passed[first + 1 :]:  # everything that passed after the first one
            total += size
            assert total <= RATE * (until_s - passed[first][0] + BURST_S) * (1 + 1e-9) + 1e-3


@given(st.lists(st.integers(1 << 16, 1 << 20), min_size=20, max_size=60), st.floats(0.0, BURST_S))
def test_the_cap_is_used_up_when_pauses_are_short(asked: list[int], pause_s: float) -> None:
    bucket, now_s = Bucket(RATE), 0.0
    for size in asked:
        now_s += bucket.pass_s(size, now_s) + pause_s
    assert now_s == pytest.approx(sum(asked) / RATE, abs=2 * BURST_S + pause_s)


def test_unused_time_above_the_burst_is_lost() -> None:
    bucket = Bucket(RATE)
    bucket.pass_s(1000, 0.0)
    assert bucket.pass_s(1_000_000, 1000.0) == pytest.approx(1.0 - BURST_S)


@pytest.mark.parametrize("cap", [0.0, -1.0, float("inf"), float("nan")])
def test_a_cap_is_a_positive_number(cap: float) -> None:
    with pytest.raises(UsageError):
        Bandwidth(up_bytes_per_s=cap)


def test_the_smaller_cap_is_reported_to_others() -> None:
    assert Bandwidth(up_bytes_per_s=2.0, down_bytes_per_s=1.0).min_bytes_per_s == 1.0
    assert Bandwidth(up_bytes_per_s=2.0).min_bytes_per_s == 2.0
    assert Bandwidth().min_bytes_per_s is None
