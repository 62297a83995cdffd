"""The matchmaking machine alone: its effects, its replies, and the reasons for which a search ends."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from averaging.matchmaking.logic.grace_period import GracePeriod
from averaging.matchmaking.logic.group import Group, Member
from averaging.matchmaking.logic.matchmaking import Matchmaker
from averaging.matchmaking.logic.messages import (
    AbandonJoin,
    Answer,
    AnswerJoin,
    Effect,
    Holder,
    Leader,
    PeerStatus,
    ReadRecords,
    SearchFailed,
    SearchFinished,
    SearchRequest,
    SendJoin,
    SendLookForGroup,
)
from swarm.core.errors import UsageError
from tests.averaging.matchmaking.bench import (
    OURS,
    MatchmakerBench,
    contact,
    holder,
    join_of,
    outcome,
    query_of,
    searching_answer,
)

IDLE = Answer(status=PeerStatus.IDLE)


def test_a_search_ends_as_alone_after_one_read_without_holders() -> None:
    bench = MatchmakerBench.make()
    failed = outcome(bench.start())
    assert isinstance(failed, SearchFailed)
    assert failed.reason == "alone"


def test_a_new_averager_searches_for_a_moment_before_it_ends_as_alone() -> None:
    machine = Matchmaker(own=contact(5).peer_id, schema=OURS, rng=random.Random(0), now_s=0.0)
    bench = MatchmakerBench(machine)
    assert outcome(bench.start()) is None
    assert machine.wake_s(0.0) == pytest.approx(0.25)
    assert ReadRecords() in machine.poll(0.25)
    machine.on_holders({}, 0.26)
    assert outcome(machine.poll(0.5)) is not None


def test_all_known_holders_are_queried_at_once() -> None:
    effects = MatchmakerBench.make().start(holder(1), holder(2))
    assert {effect.contact for effect in effects if isinstance(effect, SendLookForGroup)} == {
        contact(1),
        contact(2),
    }


def test_a_search_asks_many_idle_peers_again_no_more_often_than_a_few() -> None:
    asked = {}
    for others in (8, 32):
        bench = MatchmakerBench.make(target_group_size=64)
        effects, now_s, asked[others] = bench.start(*map(holder, range(10, 10 + others))), 0.0, 0
        while now_s < 4.0:
            for effect in effects:
                if isinstance(effect, SendLookForGroup):
                    bench.machine.on_query_answer(effect.contact.peer_id, IDLE, now_s)
                    asked[others] += now_s > 2.0
            now_s += 0.05
            effects = bench.machine.poll(now_s)
    assert 8 <= asked[32] <= 1.5 * asked[8]


def test_a_later_message_counts_even_if_it_arrives_first() -> None:
    """The peer was idle when it was queried, and its own search began before its reply arrived here: it will
    join, and has not gone elsewhere.
    """
    bench = MatchmakerBench.make(target_group_size=8)
    bench.start(holder(6), holder(7))
    bench.machine.on_join(join_of(6, 11.0), 0.01)
    bench.machine.on_query(replace(query_of(7, 11.0), turn=2), 0.02)
    bench.machine.on_query_answer(contact(7).peer_id, replace(IDLE, turn=1), 0.03)
    assert outcome(bench.machine.poll(0.03)) is None
    bench.machine.on_query_answer(contact(7).peer_id, replace(IDLE, turn=4), 0.04)  # this one is news
    assert isinstance(outcome(bench.machine.poll(0.04)), Group)


def test_a_follower_whose_call_was_lost_does_not_delay_the_group() -> None:
    """The peer believes that it follows this one and pings it; a ping is not a newcomer's query each time, so
    that the group begins without it.
    """
    bench = MatchmakerBench.make(target_group_size=8)
    bench.start(holder(6), holder(7))
    bench.machine.on_join(join_of(7, 11.0), 0.01)
    follows_us = Answer(
        status=PeerStatus.FOLLOWING, deadline_s=11.0, leader=Leader(contact=contact(5), deadline_s=10.0)
    )
    found = None
    for number in range(5):
        now_s = 0.1 + 0.5 * number
        bench.machine.on_query(query_of(6, 11.0), now_s)
        bench.machine.on_query_answer(contact(6).peer_id, follows_us, now_s + 0.01)
        found = outcome(bench.machine.poll(now_s + 0.02))
        if found is not None:
            break
    assert isinstance(found, Group)
    assert [member.peer_id for member in found.members] == [contact(5).peer_id, contact(7).peer_id]


def test_each_change_of_status_increases_the_turn() -> None:
    bench = MatchmakerBench.make()
    turns = [bench.machine.on_query(query_of(6, 11.0), 0.0).turn]
    queries = [effect.query for effect in bench.start(holder(1)) if isinstance(effect, SendLookForGroup)]
    turns.append(queries[0].turn)
    bench.machine.on_query_answer(contact(1).peer_id, searching_answer(9.0), 0.01)
    [join] = [effect.join for effect in bench.machine.poll(0.01) if isinstance(effect, SendJoin)]
    turns.append(join.query.turn)
    assert bench.machine.on_query(query_of(6, 11.0), 0.02).turn == join.query.turn
    bench.machine.on_join_failed(contact(1).peer_id, "it is gone", 0.02)
    turns.append(bench.machine.on_query(query_of(6, 11.0), 0.02).turn)
    bench.machine.stop(0.03)
    turns.append(bench.machine.on_query(query_of(6, 11.0), 0.03).turn)
    assert turns == sorted(set(turns))


@pytest.mark.parametrize(("key", "joins"), [("", True), ("other", False)])
def test_a_search_joins_at_once_a_leader_that_asked_before_it_began(key: str, joins: bool) -> None:
    """Peer 1 searched for a group while this peer was busy: this peer joins it without querying it first."""
    bench = MatchmakerBench.make()
    bench.machine.on_query(query_of(1, 9.0, key=key), 0.0)
    effects = bench.start(holder(1), holder(6))
    assert any(isinstance(effect, SendJoin) for effect in effects) == joins
    asked = [effect.contact for effect in effects if isinstance(effect, SendLookForGroup)]
    assert asked == [contact(6)] if joins else [contact(1), contact(6)]


@pytest.mark.parametrize(("deadline_s", "joins"), [(9.0, True), (11.0, False), (10.0, True)])
def test_the_earlier_deadline_leads_and_the_peer_id_breaks_ties(deadline_s: float, joins: bool) -> None:
    bench = MatchmakerBench.make()
    bench.start(holder(1))
    bench.machine.on_query_answer(contact(1).peer_id, searching_answer(deadline_s), 0.01)
    assert any(isinstance(effect, SendJoin) for effect in bench.machine.poll(0.01)) == joins


def test_a_leader_begins_when_everybody_expected_has_joined() -> None:
    bench = MatchmakerBench.make(target_group_size=8)
    bench.start(holder(6), holder(7))
    assert isinstance(bench.machine.on_join(join_of(6, 11.0), 0.01), int)
    assert outcome(bench.machine.poll(0.01)) is None
    ticket = bench.machine.on_join(join_of(7, 11.0, weight=3.0), 0.02)
    effects = bench.machine.poll(0.02)
    group = outcome(effects)
    assert isinstance(group, Group)
    assert [member.weight for member in group.members] == [1.0, 1.0, 3.0]
    answers = [effect for effect in effects if isinstance(effect, AnswerJoin)]
    assert [answer.answer for answer in answers] == [group, group]
    assert answers[1].ticket == ticket


def test_a_full_group_begins_and_later_joins_are_declined() -> None:
    bench = MatchmakerBench.make(target_group_size=2)
    bench.start(holder(6), holder(7))
    bench.machine.on_join(join_of(6, 11.0), 0.01)
    assert isinstance(outcome(bench.machine.poll(0.01)), Group)
    refused = bench.machine.on_join(join_of(7, 11.0), 0.02)
    assert isinstance(refused, Answer)
    assert refused.status is PeerStatus.BUSY
    assert contact(6).peer_id in refused.members


def test_the_grace_period_of_an_idle_peer_halves_with_each_missed_round() -> None:
    bench = MatchmakerBench.make()
    now_s, waited = 0.0, []
    for _ in range(4):
        bench.start(holder(6), holder(7), now_s=now_s)
        bench.machine.on_join(join_of(6, now_s + 11.0), now_s)
        bench.machine.on_query_answer(contact(7).peer_id, IDLE, now_s)
        began_s, found = now_s, outcome(bench.machine.poll(now_s))
        while found is None:
            wake_s = bench.machine.wake_s(now_s)
            assert wake_s is not None
            now_s = wake_s
            for effect in bench.machine.poll(now_s):
                found = effect.outcome if isinstance(effect, SearchFinished) else found
                if isinstance(effect, SendLookForGroup):
                    bench.machine.on_query_answer(contact(7).peer_id, IDLE, now_s)
        assert isinstance(found, Group)
        waited.append(now_s - began_s)
        bench.machine.round_over(committed=True, left_out=frozenset(), now_s=now_s)
    assert waited == pytest.approx([3.0, 1.5, 0.75, 0.375])


def test_a_peer_that_does_not_answer_is_not_waited_for() -> None:
    bench = MatchmakerBench.make()
    bench.start(holder(6), holder(7))
    bench.machine.on_join(join_of(6, 11.0), 0.0)
    bench.machine.poll(0.0)
    bench.machine.on_query_failed(contact(7).peer_id, "connection refused", 0.1)
    assert isinstance(outcome(bench.machine.poll(0.1)), Group)
    bench.machine.round_over(committed=True, left_out=frozenset(), now_s=0.2)
    effects = bench.start(holder(6), holder(7), now_s=0.3)  # nor in the next search, although it is queried
    assert contact(7) in [effect.contact for effect in effects if isinstance(effect, SendLookForGroup)]
    bench.machine.on_join(join_of(6, 11.3), 0.3)
    assert isinstance(outcome(bench.machine.poll(0.3)), Group)


def test_a_follower_accepts_nobody_and_names_its_leader() -> None:
    bench = MatchmakerBench.make()
    bench.start(holder(1))
    bench.machine.on_query_answer(contact(1).peer_id, searching_answer(9.0), 0.01)
    bench.machine.poll(0.01)
    answer = bench.machine.on_join(join_of(6, 11.0), 0.02)
    assert isinstance(answer, Answer)
    assert answer.status is PeerStatus.FOLLOWING
    assert answer.leader is not None
    assert answer.leader.contact == contact(1)


def test_a_leader_sends_its_followers_to_a_better_one() -> None:
    bench = MatchmakerBench.make()
    bench.start(holder(6), holder(7))
    ticket = bench.machine.on_join(join_of(6, 11.0), 0.01)
    bench.machine.on_query(query_of(1, 5.0), 0.02)
    effects = bench.machine.poll(0.02)
    [sent] = [effect for effect in effects if isinstance(effect, AnswerJoin)]
    assert sent.ticket == ticket
    assert isinstance(sent.answer, Answer)
    assert sent.answer.leader is not None
    assert sent.answer.leader.contact == contact(1)
    assert [effect.contact for effect in effects if isinstance(effect, SendJoin)] == [contact(1)]


def test_nobody_leads_a_peer_that_ranks_before_it() -> None:
    bench = MatchmakerBench.make()
    bench.start(holder(1))
    answer = bench.machine.on_join(join_of(1, 9.0), 0.01)
    assert isinstance(answer, Answer)
    assert answer.status is PeerStatus.SEARCHING
    assert answer.deadline_s == 10.0
    # it is asked to lead instead
    assert any(isinstance(effect, SendJoin) for effect in bench.machine.poll(0.01))


def test_a_silent_leader_is_left_and_not_asked_again_until_it_sends_a_message() -> None:
    bench = MatchmakerBench.make()
    bench.start(holder(1))
    bench.machine.on_query_answer(contact(1).peer_id, searching_answer(9.0), 0.0)
    bench.machine.poll(0.0)
    # the ping
    assert [effect.contact for effect in bench.machine.poll(0.5) if isinstance(effect, SendLookForGroup)] == [
        contact(1)
    ]
    bench.machine.on_query_failed(contact(1).peer_id, "no answer within 1 s", 1.5)
    effects = bench.machine.poll(1.5)
    assert AbandonJoin(peer_id=contact(1).peer_id) in effects
    assert not any(isinstance(effect, SendJoin) for effect in effects)
    bench.machine.on_query(query_of(1, 9.0), 1.6)
    assert any(isinstance(effect, SendJoin) for effect in bench.machine.poll(1.6))


def test_only_equal_round_keys_meet() -> None:
    bench = MatchmakerBench.make()
    bench.start(holder(1), key="7")
    bench.machine.on_query_answer(contact(1).peer_id, searching_answer(9.0, key="8"), 0.01)
    assert not any(isinstance(effect, SendJoin) for effect in bench.machine.poll(0.01))
    assert isinstance(bench.machine.on_join(join_of(6, 11.0, key="8"), 0.02), Answer)
    failed = outcome(bench.machine.poll(10.0))
    assert isinstance(failed, SearchFailed)
    assert failed.reason == "deadline"
    assert "look for another round than '7' ('8')" in failed.detail


def test_a_search_ends_at_once_when_its_round_was_committed_without_it() -> None:
    bench = MatchmakerBench.make()
    bench.start(holder(1), key="7")
    bench.machine.on_query_answer(contact(1).peer_id, Answer(status=PeerStatus.PASSED, round_key="7"), 0.01)
    bench.machine.poll(0.01)
    failed = outcome(poll_after_read(bench, 0.02, holder(1)))
    assert isinstance(failed, SearchFailed)
    assert failed.reason == "passed"


def poll_after_read(bench: MatchmakerBench, now_s: float, *holders: Holder) -> list[Effect]:
    bench.machine.on_holders({one.contact.peer_id: one for one in holders}, now_s)
    return bench.machine.poll(now_s)


def test_a_peer_with_other_tensors_is_named_and_not_waited_for() -> None:
    bench = MatchmakerBench.make()
    failed = outcome(bench.start(holder(1, b"other")))
    assert isinstance(failed, SearchFailed)
    assert failed.reason == "schema"
    assert "schema other; here ours" in failed.detail
    assert contact(1).peer_id.short in failed.detail


def test_a_search_uses_changed_addresses_and_relays_of_a_peer() -> None:
    """Regression test: until its end, a search called peers with changed relays through the relays of its
    first records.
    """
    bench = MatchmakerBench.make()
    bench.start(holder(1), holder(2), key="7")
    bench.machine.on_query_failed(contact(1).peer_id, "no relay", 0.01)
    moved = [
        replace(holder(n), contact=replace(contact(n), addresses=contact(n + 6).addresses)) for n in (1, 2)
    ]
    bench.machine.on_query(query_of(2, 11.0, key="7"), 0.01)  # it says itself how it is called
    effects = poll_after_read(bench, 0.02, *moved)
    assert [one.contact for one in effects if isinstance(one, SendLookForGroup)] == [moved[0].contact]


def test_a_search_ends_as_unreachable_after_a_second_failed_query() -> None:
    bench = MatchmakerBench.make()
    bench.start(holder(1))
    bench.machine.on_query_failed(contact(1).peer_id, "connection refused", 0.01)
    assert outcome(bench.machine.poll(0.01)) is None
    assert any(isinstance(effect, SendLookForGroup) for effect in bench.machine.poll(0.21))
    bench.machine.on_query_failed(contact(1).peer_id, "connection refused", 0.22)
    bench.machine.poll(0.22)
    failed = outcome(poll_after_read(bench, 0.3, holder(1)))
    assert isinstance(failed, SearchFailed)
    assert failed.reason == "unreachable"
    assert "connection refused" in failed.detail


def test_a_peer_behind_relays_is_given_up_only_after_the_time_to_replace_a_lost_relay() -> None:
    """Regression test: peers behind a relay that froze gave each other up after two calls, and the one that
    came last waited for the others to its deadline.
    """
    bench = MatchmakerBench.make()
    relay = contact(9)
    hidden = replace(holder(1), contact=replace(contact(1), addresses=(), relays=(relay, contact(8))))
    bench.start(hidden)
    now_s = 0.0
    for now_s in (0.01, 0.3, 2.4, 4.5):
        bench.machine.on_query_failed(contact(1).peer_id, "no answer within 1 s", now_s)
        assert outcome(poll_after_read(bench, now_s, hidden)) is None
    bench.machine.on_query_failed(contact(1).peer_id, "no answer within 1 s", 6.5)
    assert ReadRecords() in poll_after_read(bench, 6.5, hidden)
    failed = outcome(poll_after_read(bench, 6.6, hidden))
    assert isinstance(failed, SearchFailed)
    assert failed.reason == "unreachable"


def test_idle_peers_are_named_at_the_deadline() -> None:
    bench = MatchmakerBench.make()
    bench.start(holder(1))
    bench.machine.on_query_answer(contact(1).peer_id, IDLE, 0.01)
    failed = outcome(bench.machine.poll(10.0))
    name = contact(1).peer_id.short
    assert failed == SearchFailed(
        reason="deadline", detail=f"1 peer ({name}) holds this averager and is not averaging now"
    )


def test_two_peers_that_cannot_be_dialed_cannot_meet() -> None:
    bench = MatchmakerBench.make()
    failed = outcome(bench.start(holder(1, dialable=False), dialable=False))
    assert isinstance(failed, SearchFailed)
    assert failed.reason == "few"
    assert failed.detail.startswith("neither this peer nor any other here can be called")


def test_a_wrong_clock_of_a_peer_is_mentioned_in_the_failure() -> None:
    bench = MatchmakerBench.make()
    bench.start(holder(1))
    bench.machine.on_query_answer(contact(1).peer_id, replace(IDLE, clock_off_s=40.0), 0.01)
    failed = outcome(bench.machine.poll(10.0))
    assert isinstance(failed, SearchFailed)
    assert "+40 s" in failed.detail


def test_a_group_with_wrong_values_of_this_peer_is_refused() -> None:
    bench = MatchmakerBench.make()
    bench.start(holder(1))
    bench.machine.on_query_answer(contact(1).peer_id, searching_answer(9.0), 0.0)
    bench.machine.poll(0.0)
    members = (
        Member(contact=contact(1), weight=1.0, bandwidth=1.0),
        Member(contact=contact(5), weight=100.0, bandwidth=1.0),
    )
    bench.machine.on_join_answer(
        contact(1).peer_id,
        Group(group_id=bytes(32), members=members, codec="float16", gathered=(b"", b"")),
        0.01,
    )
    assert outcome(bench.machine.poll(0.01)) is None
    assert isinstance(outcome(bench.machine.poll(10.0)), SearchFailed), "it continued searching"


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), 1e13])
def test_a_join_with_a_weight_out_of_bounds_is_refused(weight: float) -> None:
    bench = MatchmakerBench.make()
    bench.start(holder(6))
    with pytest.raises(UsageError, match="weight"):
        bench.machine.on_join(join_of(6, 11.0, weight=weight), 0.01)


def test_a_follower_that_leaves_is_not_in_the_group() -> None:
    bench = MatchmakerBench.make()
    bench.start(holder(6), holder(7))
    ticket = bench.machine.on_join(join_of(6, 11.0), 0.0)
    assert isinstance(ticket, int)
    bench.machine.on_join_lost(contact(6).peer_id, ticket)
    bench.machine.on_join(join_of(7, 11.0), 0.01)
    assert contact(6) in [
        effect.contact for effect in bench.machine.poll(0.01) if isinstance(effect, SendLookForGroup)
    ]
    bench.machine.on_query_failed(contact(6).peer_id, "gone", 0.02)
    group = outcome(bench.machine.poll(0.02))
    assert isinstance(group, Group)
    assert group.peer_ids == (contact(5).peer_id, contact(7).peer_id)


def test_a_second_search_at_a_time_is_refused() -> None:
    bench = MatchmakerBench.make()
    bench.start(holder(1))
    with pytest.raises(UsageError, match="already averaging"):
        bench.start(holder(1))


def test_records_of_strangers_do_not_fill_the_places_that_are_asked() -> None:
    """80 records without addresses and with another schema stopped a run for up to an hour."""
    flood = [
        Holder(contact=contact(20 + number, dialable=False), schema=b"other", schema_text="another schema")
        for number in range(80)
    ]
    copies = [holder(120 + number) for number in range(80)]
    effects = MatchmakerBench.make(members=(1, 2)).start(*flood, *copies, holder(1), holder(2), holder(3))
    asked = [effect.contact for effect in effects if isinstance(effect, SendLookForGroup)]
    assert {contact(1), contact(2)} <= set(asked)
    without_members = MatchmakerBench.make().start(*flood, holder(1), holder(2), holder(3))
    asked = [effect.contact for effect in without_members if isinstance(effect, SendLookForGroup)]
    assert {contact(1), contact(2), contact(3)} <= set(asked), "those with another schema come last"


def test_a_member_takes_the_place_of_a_stranger_in_a_full_group() -> None:
    bench = MatchmakerBench.make(target_group_size=3, members=(7, 8, 9))
    bench.start(*(holder(number) for number in range(6, 12)))
    assert isinstance(bench.machine.on_join(join_of(10, 20.0), 0.1), int)
    stranger = bench.machine.on_join(join_of(11, 20.0), 0.1)
    assert isinstance(bench.machine.on_join(join_of(6, 20.0), 0.1), Answer), "strangers wait for a place"
    assert isinstance(bench.machine.on_join(join_of(7, 20.0), 0.1), int)
    assert bench.machine.followers == {contact(10).peer_id, contact(7).peer_id}
    assert isinstance(bench.machine.on_join(join_of(8, 20.0), 0.1), int)
    assert isinstance(bench.machine.on_join(join_of(9, 20.0), 0.1), Answer), "members keep their places"
    answers = [effect for effect in bench.machine.poll(0.1) if isinstance(effect, AnswerJoin)]
    assert stranger in {effect.ticket for effect in answers}


def begins_s(answer: Answer, *, may_be_alone: bool) -> float | None:
    """Return when this peer begins a group alone when another peer has this status; None: it waits for it
    until the deadline, or gives up.
    """
    bench = MatchmakerBench.make()
    bench.start(holder(6), key="a round", may_be_alone=may_be_alone)
    for tenth in range(1, 95):
        bench.machine.on_query_answer(contact(6).peer_id, replace(answer, turn=tenth), tenth / 10)
        found = outcome(bench.machine.poll(tenth / 10))
        if found is not None:
            assert not isinstance(found, Group) or found.peer_ids == (contact(5).peer_id,)
            return tenth / 10 if isinstance(found, Group) else None
    return None


def test_a_group_of_one_begins_after_the_grace_of_a_busy_peer_if_it_may() -> None:
    grace_s = GracePeriod().grace_s(contact(6).peer_id)
    assert begins_s(IDLE, may_be_alone=True) == pytest.approx(grace_s, abs=0.11)
    assert begins_s(IDLE, may_be_alone=False) is None
    assert begins_s(Answer(status=PeerStatus.BUSY, round_key="a round"), may_be_alone=True) is None
    assert begins_s(Answer(status=PeerStatus.PASSED, round_key="a round"), may_be_alone=True) is None


def test_a_group_of_one_does_not_begin_before_the_others_are_known() -> None:
    bench = MatchmakerBench.make()
    bench.start(holder(6), key="a round", may_be_alone=True)
    assert outcome(bench.machine.poll(0.0)) is None, "a query is pending"
    late = Matchmaker(own=contact(5).peer_id, schema=OURS, rng=random.Random(0), now_s=-100.0)
    request = SearchRequest(round_key="a round", deadline_s=10.0, rank_deadline_s=10.0, may_be_alone=True)
    late.start(request, Member(contact=contact(5), weight=1.0, bandwidth=1.0), 0.0)
    assert outcome(late.poll(0.5)) is None, "no records were read"
