"""How often members are beaten who live (the rest is in test_round_machines.py)."""

from __future__ import annotations

import pytest

from averaging.allreduce.liveness import FailureDetector, LivenessConfig


def answering(round_trip_s: float, seconds: int) -> tuple[FailureDetector, int]:
    """An idle member that answers every beat after so long, and how many beats it got in the last second."""
    liveness, due, beaten = FailureDetector([1], [], LivenessConfig(), 0.0), [], [0.0]
    for nth in range(1, seconds * 100):
        now_s = nth / 100
        while due and due[0] <= now_s:
            due.pop(0)
            liveness.answered(1, round_trip_s)
        if nth % 10 == 0:
            beats, dead = liveness.tick(now_s)
            assert not dead
            due += [now_s + round_trip_s] * len(beats)
            beaten += [now_s] * len(beats)
    return liveness, sum(at_s > seconds - 1 for at_s in beaten)


def test_who_answers_promptly_is_beaten_less_often_and_has_as_long_to_answer() -> None:
    liveness, beaten = answering(0.05, 10)
    assert beaten <= 3
    assert liveness.patience_s(1) == pytest.approx(0.9 + 0.2)  # of which 0.2 are its rest
    silent_from_s = 10.0
    died_s = next(now_s for nth in range(30) if liveness.tick(now_s := silent_from_s + nth / 10)[1])
    assert silent_from_s + 0.7 <= died_s <= silent_from_s + 1.1 + 1e-6


def test_who_fills_its_link_with_its_first_tensors_has_time_until_they_begin_to_arrive() -> None:
    liveness, _ = answering(0.05, 2)
    liveness.starting(1, True)
    assert liveness.patience_s(1) >= 3.0
    liveness.starting(1, False)
    assert liveness.patience_s(1) == pytest.approx(0.9 + 0.2)
    liveness.starting(7, True)  # nobody we know


def test_who_answers_late_is_beaten_as_often_as_ever() -> None:
    liveness, beaten = answering(0.25, 10)
    assert beaten >= 3  # one after the other
    assert liveness.patience_s(1) >= 0.3 + 3 * 0.25 - 1e-6


def test_who_only_takes_still_beats() -> None:
    """Who cannot dial it has no other way to see that it lives."""
    liveness, beaten = FailureDetector([1], [], LivenessConfig(), 0.0), 0
    for nth in range(1, 51):
        liveness.heard(1)
        beats, dead = liveness.tick(nth * 0.05)
        assert not dead
        beaten += len(beats)
        if beats:
            liveness.answered(1, 0.01)
    assert 50 * 0.05 / 0.35 <= beaten <= 50 * 0.05 / 0.1
