"""The interval of heartbeats to live members (other tests of the failure detector are in
test_parts.py).
"""

from __future__ import annotations

import pytest

from averaging.allreduce.logic.failure_detector import FailureDetector


def answering(round_trip_s: float, seconds: int) -> tuple[FailureDetector, int]:
    """Return the detector of an idle member that answers every heartbeat after `round_trip_s`, and its number
    of heartbeats in the last second.
    """
    liveness, heartbeats_sent = FailureDetector([1], [], 0.0), [0.0]
    due: list[float] = []
    for nth in range(1, seconds * 100):
        now_s = nth / 100
        while due and due[0] <= now_s:
            due.pop(0)
            liveness.answered(1, round_trip_s)
        if nth % 10 == 0:
            heartbeats, dead = liveness.tick(now_s)
            assert not dead
            due += [now_s + round_trip_s] * len(heartbeats)
            heartbeats_sent += [now_s] * len(heartbeats)
    return liveness, sum(at_s > seconds - 1 for at_s in heartbeats_sent)


def test_a_prompt_member_gets_fewer_heartbeats_and_as_much_time_to_answer() -> None:
    liveness, heartbeats_sent = answering(0.05, 10)
    assert heartbeats_sent <= 3
    assert liveness.timeout_s(1) == pytest.approx(0.9 + 0.2)  # of which 0.2 are its rest
    silent_from_s = 10.0
    died_s = next(now_s for nth in range(30) if liveness.tick(now_s := silent_from_s + nth / 10)[1])
    assert silent_from_s + 0.7 <= died_s <= silent_from_s + 1.1 + 1e-6


def test_a_member_whose_first_tensors_fill_its_link_gets_time_until_they_arrive() -> None:
    liveness, _ = answering(0.05, 2)
    liveness.starting(1, True)
    assert liveness.timeout_s(1) >= 3.0
    liveness.starting(1, False)
    assert liveness.timeout_s(1) == pytest.approx(0.9 + 0.2)
    liveness.starting(7, True)  # nobody we know


def test_a_late_member_gets_heartbeats_at_the_usual_interval() -> None:
    liveness, heartbeats_sent = answering(0.25, 10)
    assert heartbeats_sent >= 3  # one after the other
    assert liveness.timeout_s(1) >= 0.3 + 3 * 0.25 - 1e-6


def test_a_member_that_only_receives_still_sends_heartbeats() -> None:
    """A member that cannot dial it has no other way to see that it is alive."""
    liveness, heartbeats_sent = FailureDetector([1], [], 0.0), 0
    for nth in range(1, 51):
        liveness.heard(1)
        heartbeats, dead = liveness.tick(nth * 0.05)
        assert not dead
        heartbeats_sent += len(heartbeats)
        if heartbeats:
            liveness.answered(1, 0.01)
    assert 50 * 0.05 / 0.35 <= heartbeats_sent <= 50 * 0.05 / 0.1
