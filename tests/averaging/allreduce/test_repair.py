"""Decisions about the shard of a lost reducer, and the time to wait for work: the state machines alone."""

from __future__ import annotations

import math
import random

import pytest

from averaging.allreduce.logic.repair import (
    FAILURES_MAX,
    FETCHES_MAX,
    REDUCTIONS_MAX,
    Ask,
    Redo,
    Repair,
    Take,
    attempt,
    successor,
)
from averaging.allreduce.logic.stragglers import (
    PACE_TICK_S,
    UNDER_WAY_BYTES,
    StragglerDetector,
    TransferEta,
)
from averaging.allreduce.logic.versions import Version

EVERYBODY = b"\x0f"


def version(attempt: int = 0, digest: bytes = b"d" * 32, contributors: bytes = EVERYBODY) -> Version:
    return Version(attempt, contributors, digest)


def repair(
    own: int,
    *,
    reducer: int = 1,
    dialable: tuple[int, ...] = (0, 1, 2, 3),
    trusted: bool = False,
    chunks: int = 2,
) -> Repair:
    made = Repair(reducer, own=own, dialable=dialable, members=4, trusted=trusted)
    made.lack(range(chunks))
    return made


def test_the_next_live_member_that_can_be_dialed_takes_over() -> None:
    assert successor(1, {0, 2, 3}, {0, 2, 3}, 4) == 2
    assert successor(1, {0, 2, 3}, {0, 3}, 4) == 3
    assert successor(1, {0, 3}, {0, 2, 3}, 4) == 3
    assert successor(3, {0, 1, 2}, {1, 2}, 4) == 1
    assert successor(1, {2}, {0}, 4) is None
    assert [attempt(1, place, 4) for place in (1, 2, 3, 0)] == [0, 1, 2, 3]


def test_everybody_is_asked_once_and_the_successor_again() -> None:
    one = repair(0)
    assert not one.owned
    assert one.poll() == [Ask(2, wait=False), Ask(3, wait=False)]
    assert one.poll() == []
    one.on_report(2, {}, False)
    one.on_report(3, {}, True)
    assert one.poll() == [Ask(2, wait=True)]
    assert one.known(2) == (0, False)
    one.on_silence(2)
    assert one.poll() == [Ask(2, wait=True)]
    one.mark_failed(2)  # now peer 3 takes over
    assert one.poll() == [Ask(3, wait=True)]
    one.mark_failed(3)
    assert one.owned


def test_a_held_average_is_fetched_from_the_lowest_attempt() -> None:
    one = repair(0, chunks=1)
    one.poll()
    one.on_report(2, {0: version(1, b"x" * 32)}, True)
    one.on_report(3, {0: version(0)}, True)
    take = Take(0, 3, version(0))
    assert take in one.poll()
    one.on_failed(take)
    again = Take(0, 2, version(1, b"x" * 32))
    assert again in one.poll()
    one.on_held(0)
    assert not one.lacking
    assert one.poll() == []


def test_the_successor_reduces_chunks_that_nobody_can_get() -> None:
    one = repair(2, chunks=5)
    assert one.owned
    one.poll()
    one.on_report(0, {3: version()}, True)
    assert [action for action in one.poll() if isinstance(action, Redo)] == []  # peer 3 has not answered
    one.on_report(3, {}, False)
    assert [action for action in one.poll() if isinstance(action, Redo)] == []  # it may still get some
    one.on_report(3, {4: version()}, True)
    assert one.poll() == [Redo(0), Redo(1), Take(4, 3, version())]
    assert REDUCTIONS_MAX == 2
    one.on_held(0)
    assert one.poll() == [Redo(2)]


def test_a_member_that_cannot_give_what_it_claims_to_hold_is_not_believed() -> None:
    one = repair(2, chunks=1)
    one.poll()
    one.on_report(0, {}, True)
    for nth in range(1000):
        one.on_report(3, {0: version(0, nth.to_bytes(32, "little"))}, False)
        found = [action for action in one.poll() if not isinstance(action, Ask)]
        if found == [Redo(0)]:
            break
        (take,) = found
        assert isinstance(take, Take)
        one.on_failed(take)
    assert nth == FAILURES_MAX


def test_a_live_reducer_with_a_broken_connection_is_asked_too() -> None:
    one = repair(2, trusted=True, chunks=1)
    assert [action.place for action in one.poll() if isinstance(action, Ask)] == [0, 1, 3]
    for place in (0, 3):
        one.on_report(place, {}, True)
    one.on_report(1, {}, False)
    assert one.poll() == [Ask(1, wait=True)]
    one.distrust()
    assert one.poll() == [Redo(0)]


def test_an_empty_average_is_accepted_from_the_member_that_determined_it() -> None:
    nobody = bytes(1)
    one = repair(0, chunks=1)
    one.poll()
    one.on_report(2, {}, True)
    one.on_report(3, {0: version(0, contributors=nobody)}, True)
    assert not [action for action in one.poll() if isinstance(action, Take)]
    one.on_report(2, {0: version(1, contributors=nobody)}, True)
    assert Take(0, 2, version(1, contributors=nobody)) in one.poll()


def test_a_client_helps_the_successor_without_lacking_anything() -> None:
    client = repair(3, dialable=(0, 1, 2), chunks=0)
    assert client.poll() == [Ask(2, wait=False)]
    client.on_report(2, {}, False)
    assert client.poll() == [Ask(2, wait=True)]
    assert repair(0, chunks=0).poll() == []


@pytest.mark.parametrize("seed", range(100))
def test_repairs_end_with_all_chunks_or_a_failure(seed: int) -> None:
    """Members that hold some chunks and lose others in transit: all get everything in the end, or fail."""
    rng = random.Random(seed)
    chunks = rng.randint(1, 20)
    members = {place: repair(place, chunks=0) for place in (0, 2, 3)}
    held = {place: {chunk: version() for chunk in range(chunks) if rng.random() < 0.4} for place in members}
    for place, one in members.items():
        one.lack(chunk for chunk in range(chunks) if chunk not in held[place])
    for step in range(1000):
        if step == 5 and seed % 3 == 0:
            dead = rng.choice(sorted(members))
            members.pop(dead)
            for one in members.values():
                one.mark_failed(dead)
        busy = False
        for place, one in members.items():
            actions = one.poll()
            assert sum(isinstance(action, Take) for action in actions) <= FETCHES_MAX
            for action in actions:
                busy = True
                if isinstance(action, Ask):
                    one.on_report(
                        action.place, held[action.place], True
                    ) if action.place in members else one.on_silence(action.place)
                elif isinstance(action, Take) and (action.place not in members or rng.random() < 0.1):
                    one.on_failed(action)
                    # it can again, next time
                    if action.place in members and action.chunk not in held[place]:
                        held[place][action.chunk] = action.version
                        one.on_held(action.chunk)
                else:
                    made = (
                        action.version
                        if isinstance(action, Take)
                        else version(attempt(1, place, 4), bytes([place]) * 32)
                    )
                    held[place][action.chunk] = made
                    one.on_held(action.chunk)
        if not busy:
            break
    assert all(len(held[place]) == chunks for place in members), seed


# ---- stragglers


def ticks(
    pacing: StragglerDetector, start_s: float, seconds: float, waited_for: list[int]
) -> list[tuple[float, int]]:
    """Return the members that are marked failed, with the times."""
    over: list[tuple[float, int]] = []
    for nth in range(1, int(seconds / PACE_TICK_S) + 1):
        now_s = start_s + nth * PACE_TICK_S
        found = pacing.tick(
            [place for place in waited_for if place not in {place for _, place in over}], now_s
        )
        over += [(now_s, place) for place, _ in found]
    return over


def test_a_member_that_is_not_waited_for_is_never_given_up() -> None:
    assert ticks(StragglerDetector(4.0, 0.0), 0.0, 100.0, []) == []


def test_a_member_that_stops_working_is_given_up_after_the_floor() -> None:
    pacing = StragglerDetector(4.0, 0.0)
    pacing.worked(1)
    assert ticks(pacing, 0.0, 20.0, [1, 2]) == [(4.5, 1), (9.5, 2)]  # the second may not have begun yet


def test_a_stranger_gets_no_time_to_begin() -> None:
    pacing = StragglerDetector(4.0, 0.0, strangers=(2,))
    assert ticks(pacing, 0.0, 20.0, [1, 2]) == [(4.5, 2), (9.5, 1)]


def test_a_slow_and_steady_member_is_waited_for() -> None:
    pacing = StragglerDetector(4.0, 0.0)
    pacing.worked(1)
    for nth in range(50):
        assert ticks(pacing, nth * 3.5, 3.5, [1]) == []
        pacing.worked(1)
    assert pacing.timeout_s(1) == pytest.approx(14.0)
    for nth in range(50, 60):
        assert ticks(pacing, nth * 13.0, 13.0, [1]) == []
        pacing.worked(1)


def forecast(floor_s: float = 4.0, senders: int = 3) -> TransferEta:
    found = TransferEta(dict.fromkeys(range(senders), 1 << 20), floor_s, 0.0)
    found.due_s = 60.0
    return found


def test_a_member_that_cannot_finish_in_time_is_detected_from_its_rate() -> None:
    """Only after its rate has been measured for a while; a member that can finish is not affected."""
    given, found = forecast(), []
    for nth in range(1, 41):
        given.came(0, 2_000)
        given.came(1, 10_000)
        found.append(given.late([0, 1, 2], nth * 0.25))
    assert found[:15] == [[]] * 15
    assert [place for place, _ in found[15]] == [0]
    assert found[15][0][1] == pytest.approx((1048576 - 32_000) * 4.0 / (32_000 + UNDER_WAY_BYTES))
    assert [place for place, _ in found[-1]] == [0]


def test_no_member_counts_as_late_when_most_are_late() -> None:
    given = forecast()
    for place in range(3):
        given.came(place, 2_000)
    assert given.late([0, 1, 2], 10.0) == []
    assert [place for place, _ in given.late([2], 10.0)] == [2]
    lone = forecast(senders=1)
    lone.came(0, 2_000)
    assert [place for place, _ in lone.late([0], 10.0)] == [0]


def test_the_rate_of_a_delayed_member_is_measured_afterwards() -> None:
    given = forecast()
    given.came(0, 100)
    given.excused(0, 20.0)
    given.came(0, 30)  # a sign of life
    assert given.late([0], 40.0) == []
    given.came(0, 600_000)
    assert given.late([0], 41.0) == []
    given.excused(7, 1.0)  # nobody we know
    assert given.late([1, 7], 59.0) == []
    assert [place for place, _ in given.late([1], 61.0)] == [1]  # nothing came, and it is too late


def test_a_repeatedly_excused_member_is_late_once_its_time_is_over() -> None:
    """Before, a reducer that said every other second that it waits was waited for until the round failed."""
    given = forecast()
    given.came(0, 2_000)
    for now_s in range(0, 62, 2):
        given.excused(0, float(now_s))
        given.came(0, 20)
        assert given.late([0], float(now_s)) == ([(0, math.inf)] if now_s > 60 else [])


def test_a_member_that_sent_surplus_data_is_late_once_its_time_is_over() -> None:
    """Before, a member that sent other data than it owed had no deadline."""
    given = forecast()
    given.came(0, 2 << 20)
    assert given.late([0], 60.0) == []
    assert given.late([0], 60.5) == [(0, math.inf)]


def test_time_in_which_this_process_was_stopped_does_not_count_as_idleness() -> None:
    pacing = StragglerDetector(4.0, 0.0)
    pacing.worked(1)
    assert pacing.tick([1], 0.25) == []
    assert pacing.tick([1], 3600.0) == []
