"""The interval of heartbeats to live members (other tests of the failure detector are in
test_parts.py).
"""

from __future__ import annotations

import pytest

from averaging.allreduce.logic.failure_detector import REST_S, FailureDetector


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
    """A member that cannot dial it cannot detect otherwise that it is alive."""
    liveness, heartbeats_sent = FailureDetector([1], [], 0.0), 0
    for nth in range(1, 51):
        liveness.heard(1)
        heartbeats, dead = liveness.tick(nth * 0.05)
        assert not dead
        heartbeats_sent += len(heartbeats)
        if heartbeats:
            liveness.answered(1, 0.01)
    assert 50 * 0.05 / 0.35 <= heartbeats_sent <= 50 * 0.05 / 0.1


def heartbeats_in_first_second(distant: bool) -> int:
    """Return how many heartbeats a member gets in the first second of a round that answers each at once."""
    liveness = FailureDetector([1], [], 0.0, distant=[1] if distant else [])
    count = 0
    for nth in range(1, 11):
        heartbeats, dead = liveness.tick(nth / 10)
        assert not dead
        for place in heartbeats:
            liveness.answered(place, 0.0)
        count += len(heartbeats)
    return count


def test_members_that_exchange_no_values_cost_a_short_round_half_as_many_heartbeats() -> None:
    assert heartbeats_in_first_second(distant=False) >= 5
    assert heartbeats_in_first_second(distant=True) <= 3


def test_a_silent_member_that_exchanges_no_values_with_this_one_is_found_nearly_as_soon() -> None:
    died_s = {}
    for distant in (False, True):
        liveness = FailureDetector([1], [], 0.0, distant=[1] if distant else [])
        liveness.answered(1, 0.01)
        died_s[distant] = next(nth / 10 for nth in range(1, 100) if liveness.tick(nth / 10)[1])
    assert died_s[True] <= died_s[False] + REST_S


def pausing(places: list[int], pause_s: float, seconds: int) -> FailureDetector:
    """Return a detector of members that send bursts of ten messages with pauses, and of member 0, which sends
    constantly.
    """
    liveness = FailureDetector([0, *places], [], 0.0)
    for nth in range(1, seconds * 10 + 1):
        liveness.heard(0)
        for place in places:
            for _ in range(10 if nth % round(pause_s * 10) == 0 else 0):
                liveness.heard(place)
        _, dead = liveness.tick(nth / 10)
        assert not dead
    return liveness


def test_a_burst_of_messages_does_not_hide_the_pause_before_it() -> None:
    assert pausing([1], 0.6, 6).timeout_s(1) >= 0.3 + 3 * 0.5


def test_where_most_members_pause_one_more_that_pauses_is_not_dead() -> None:
    usual, alone = pausing([1, 2, 3], 0.6, 6), pausing([1], 0.6, 6)
    assert usual.timeout_s(0) >= 0.3 + 3 * 0.5
    assert alone.timeout_s(0) <= 1.1 + 1e-6  # the pauses of one member say nothing about another
    assert usual.probe_s(0) >= 3 * 0.5  # nor is a probe of it answered sooner


def test_a_process_that_was_late_judges_nobody_for_some_seconds() -> None:
    liveness = FailureDetector([1], [], 0.0)
    liveness.answered(1, 0.01)
    liveness.tick(0.1)
    liveness.tick(0.6)  # 0.4 s late
    for nth in range(7, 27):
        liveness.answered(1, 0.01)
        liveness.tick(nth / 10)
    assert liveness.probe_s(1) >= 1.6  # 2 s later
    for nth in range(27, 200):
        liveness.answered(1, 0.01)
        liveness.tick(nth / 10)
    assert liveness.probe_s(1) == pytest.approx(0.6)


def heartbeats_of_a_group(
    members: int, *, distant: bool, tick_s: float = 0.1, seconds: float = 10.0
) -> float:
    """Return how many heartbeats a second this member sends in the second half of `seconds`, to others that
    all answer at once, when its ticks come every `tick_s`.
    """
    places = range(1, members)
    liveness = FailureDetector(places, [], 0.0, distant=places if distant else [])
    count = 0
    for nth in range(1, round(seconds / tick_s) + 1):
        heartbeats, dead = liveness.tick(nth * tick_s)
        assert not dead
        for place in heartbeats:
            liveness.answered(place, 0.0)
        count += len(heartbeats) * (nth * tick_s > seconds / 2)
    return count / (seconds / 2)


@pytest.mark.parametrize("distant", [False, True])
def test_the_heartbeats_of_one_member_do_not_grow_with_the_group(distant: bool) -> None:
    assert heartbeats_of_a_group(65, distant=distant) <= 1.3 * heartbeats_of_a_group(17, distant=distant)


def test_a_silent_member_of_a_large_group_is_found_in_proportion_later() -> None:
    # rests of 0.3, 0.3, 0.6 and 1.2 s; of more than 8 others each has longer to answer (decision 0046)
    for members, latest_s in ((9, 1.2), (17, 3.0), (33, 5.7), (65, 7.5)):
        liveness = FailureDetector(range(1, members), [], 0.0)
        for nth in range(1, 101):
            for place in liveness.tick(nth / 10)[0]:
                liveness.answered(place, 0.01)
        died_s = next(nth / 10 for nth in range(101, 200) if liveness.tick(nth / 10)[1])
        assert died_s - 10.0 <= latest_s + 0.1


@pytest.mark.parametrize(
    ("members", "pause_s", "fails"), [(5, 2.0, True), (17, 2.0, False), (33, 4.0, False), (65, 4.0, False)]
)
def test_a_busy_member_of_a_large_group_that_pauses_is_not_marked_failed(
    members: int, pause_s: float, fails: bool
) -> None:
    """Regression test: reducers of 33 peers on two cores answer nobody for up to 4 s, between the streams of
    all others. They were marked failed, everybody repaired their shards, and a round of 2 s took 27 s.
    """
    liveness = FailureDetector(range(1, members), [], 0.0)
    failed = set[int]()
    for nth in range(1, 81):
        now_s = nth / 10
        heartbeats, dead = liveness.tick(now_s)
        failed |= {place for place, _ in dead}
        for place in heartbeats:
            if place != 1 or not 3.0 <= now_s < 3.0 + pause_s:
                liveness.answered(place, 0.1)
            else:
                liveness.unanswered(place)
    assert failed == ({1} if fails else set())


def test_slow_members_of_a_large_group_get_no_more_heartbeats_than_prompt_ones() -> None:
    """If many peers share a processor, heartbeats to late ones make all of them later."""
    sent = {}
    for round_trip_s in (0.0, 0.4):
        liveness, due, sent[round_trip_s] = (
            FailureDetector(range(1, 33), [], 0.0),
            list[tuple[float, int]](),
            0,
        )
        for nth in range(1, 101):
            for at_s, place in [one for one in due if one[0] <= nth / 10]:
                liveness.answered(place, round_trip_s)
                due.remove((at_s, place))
            heartbeats, dead = liveness.tick(nth / 10)
            assert not dead
            due += [(nth / 10 + round_trip_s, place) for place in heartbeats]
            sent[round_trip_s] += len(heartbeats)
    assert sent[0.4] <= sent[0.0] <= 32 * 10 / 0.5


def test_a_late_process_sends_fewer_heartbeats() -> None:
    prompt = heartbeats_of_a_group(9, distant=False, tick_s=0.1)
    late = heartbeats_of_a_group(9, distant=False, tick_s=0.5)
    # its silence counts at a fifth of the speed, and its rest is as long as its lateness
    assert late <= prompt / 8


@pytest.mark.parametrize("phase", [nth / 60 for nth in range(6)])
def test_a_member_that_nobody_can_probe_sends_as_many_heartbeats_when_it_was_late(phase: float) -> None:
    """Regression test: it rested for as long as it had been late, and its reducer accused it."""
    sender = FailureDetector([1], [], 0.0, dialable=False)
    receiver = FailureDetector([], [0], 0.0)
    stalls = [(3.0 + phase, 3.7 + phase)]
    sends_s, now_s = [], 0.0
    while now_s < 8.0:
        now_s += 0.1
        for begin_s, end_s in stalls:
            now_s = end_s if begin_s <= now_s < end_s else now_s
        heartbeats, _ = sender.tick(now_s)
        if heartbeats:
            sends_s.append(now_s)
            sender.answered(1, 0.01)
    for nth in range(1, 80):
        tick_s = nth / 10
        while sends_s and sends_s[0] <= tick_s:
            sends_s.pop(0)
            receiver.heard(0)
        asked, dead = receiver.tick(tick_s)
        assert not dead
        for place in asked:
            receiver.unanswered(place)  # it cannot be called


def test_slow_answers_in_a_large_group_delay_failure_detection_only_briefly() -> None:
    """Regression test: the rest before a late answer counted as a pause; three of those are waited for."""
    members = list(range(1, 65))
    liveness = FailureDetector(members, [], 0.0, distant=members)
    answers: list[tuple[float, int, float]] = []
    asked = dict.fromkeys(members, 0)
    worst_s = 0.0
    for nth in range(1, 1200):
        now_s = nth / 20
        for answer in [one for one in answers if one[0] <= now_s]:
            liveness.answered(*answer[1:])
            answers.remove(answer)
        heartbeats, dead = liveness.tick(now_s) if nth % 2 == 0 else ([], [])
        assert not dead
        for place in heartbeats:
            asked[place] += 1
            took_s = 0.32 if asked[place] % 8 == 0 else 0.02
            answers.append((now_s + took_s, place, took_s))
        if now_s > 5.0:  # they are known
            worst_s = max(worst_s, *(liveness.timeout_s(place) for place in members))
    assert worst_s < 5.0
