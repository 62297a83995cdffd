"""Tests of the clock offset that is estimated from round trips."""

from __future__ import annotations

import pytest

from swarm.core.ids import PeerId
from swarm.dht.logic.clock_offset import AGE_S_MAX, SAMPLES_MAX, ClockOffset


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


def estimate(*offsets_s: float) -> float | None:
    clock = ClockOffset()
    for number, offset_s in enumerate(offsets_s):
        clock.add(peer(number), sent_s=1000.0, received_s=1000.2, peer_s=1000.1 + offset_s)
    return clock.offset_s(1000.2)


def test_the_offset_is_unknown_with_too_few_peers() -> None:
    assert estimate() is None
    assert estimate(100.0, 100.0) is None


def test_the_offset_is_the_median_of_the_midpoints() -> None:
    assert estimate(100.0, 101.0, 102.0) == pytest.approx(101.0)
    assert estimate(0.0, 100.0, -300.0) == 0.0
    assert estimate(0.0, 0.0, 100.0, 100.0) == 0.0, "two against two: nothing moves"
    assert estimate(100.0, 100.0, 100.0, 100.0) == pytest.approx(100.0)


def test_a_small_offset_is_not_corrected() -> None:
    assert estimate(0.3, 0.4, 0.45) == 0.0


def test_a_minority_of_lying_clocks_has_no_effect() -> None:
    assert estimate(*([0.0] * 6 + [1e9] * 5)) == 0.0


def test_slow_impossible_and_old_samples_are_ignored() -> None:
    clock = ClockOffset()
    for number in range(3):
        clock.add(peer(number), sent_s=0.0, received_s=5.0, peer_s=100.0)
        clock.add(peer(number), sent_s=5.0, received_s=0.0, peer_s=100.0)
    assert clock.offset_s(5.0) is None
    for number in range(3):
        clock.add(peer(number), sent_s=0.0, received_s=0.1, peer_s=100.0)
    assert clock.offset_s(1.0) == pytest.approx(99.95)
    assert clock.offset_s(AGE_S_MAX + 1.0) is None


def test_samples_are_bounded() -> None:
    clock = ClockOffset()
    for number in range(1000):
        clock.add(peer(number), sent_s=0.0, received_s=0.1, peer_s=0.0)
    assert len(clock._samples) == SAMPLES_MAX
