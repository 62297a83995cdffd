"""Reports of one peer about another while a group forms: when they count, and when a message of that peer
itself takes precedence.
"""

from __future__ import annotations

from dataclasses import replace

from averaging.matchmaking.logic.grid import key_at
from averaging.matchmaking.logic.group import Group
from averaging.matchmaking.logic.messages import Answer, PeerStatus
from tests.averaging.matchmaking.bench import (
    MatchmakerBench,
    contact,
    holder,
    join_of,
    outcome,
    query_of,
)


def test_a_peer_that_looks_for_this_round_is_not_marked_busy_by_a_report_about_the_round_before() -> None:
    """Peer 7 looks for round 270 already; peer 6, which has not ended round 269 yet, reports that it is in it
    together with 7. Both are waited for.
    """
    bench = MatchmakerBench.make(target_group_size=8)
    bench.start(holder(6), holder(7), key="270")
    bench.machine.on_query(replace(query_of(7, 11.0, key="270"), turn=1), 0.01)
    both = (contact(6).peer_id, contact(7).peer_id)
    before = Answer(status=PeerStatus.BUSY, round_key="269", expected_s=0.2, members=both, turn=1)
    bench.machine.on_query_answer(contact(6).peer_id, before, 0.02)
    bench.machine.on_join(
        replace(join_of(6, 12.0, key="270"), query=replace(query_of(6, 12.0, key="270"), turn=3)), 0.03
    )
    assert outcome(bench.machine.poll(0.03)) is None
    bench.machine.on_join(join_of(7, 11.0, key="270"), 0.04)
    group = outcome(bench.machine.poll(0.04))
    assert isinstance(group, Group)
    assert {member.peer_id for member in group.members} == {contact(5).peer_id, *both}


def test_without_round_keys_a_report_about_a_finished_round_marks_no_peer_busy() -> None:
    """Peer 7 searches again, and so does this peer; peer 6 has not ended the round of all three yet."""
    bench = MatchmakerBench.make(target_group_size=8)
    bench.start(holder(6), holder(7))
    bench.machine.on_query(replace(query_of(7, 11.0), turn=1), 0.01)
    all_three = (contact(5).peer_id, contact(6).peer_id, contact(7).peer_id)
    before = Answer(status=PeerStatus.BUSY, expected_s=0.2, members=all_three, turn=1)
    bench.machine.on_query_answer(contact(6).peer_id, before, 0.02)
    bench.machine.on_join(replace(join_of(6, 12.0), query=replace(query_of(6, 12.0), turn=3)), 0.03)
    assert outcome(bench.machine.poll(0.03)) is None
    bench.machine.on_join(join_of(7, 11.0), 0.04)
    group = outcome(bench.machine.poll(0.04))
    assert isinstance(group, Group)
    assert set(group.peer_ids) == set(all_three)


def test_a_peer_reported_to_be_in_this_round_with_others_is_not_waited_for() -> None:
    bench = MatchmakerBench.make(target_group_size=8)
    bench.start(holder(6), holder(7), holder(8), key="270")
    bench.machine.on_query(replace(query_of(7, 11.0, key="270"), turn=1), 0.01)
    theirs = (contact(7).peer_id, contact(8).peer_id)
    bench.machine.on_query_answer(
        contact(8).peer_id,
        Answer(status=PeerStatus.BUSY, round_key="270", expected_s=0.2, members=theirs, turn=1),
        0.02,
    )
    bench.machine.on_join(join_of(6, 12.0, key="270"), 0.03)
    assert isinstance(outcome(bench.machine.poll(0.03)), Group)


def test_a_single_group_waits_for_a_peer_of_another_round_and_a_cell_does_not() -> None:
    """A peer of a cell that looks for another round visits another cell before this round, or has finished
    this round. With a single cell it may be one round behind.
    """
    for place, waits in (("4.32.30", False), ("", True)):
        bench = MatchmakerBench.make(target_group_size=8)
        bench.start(holder(6), holder(7), key=key_at("270", place))
        other = replace(query_of(7, 11.0, key=key_at("271", place)), turn=1)
        bench.machine.on_query(other, 0.01)
        bench.machine.on_join(join_of(6, 12.0, key=key_at("270", place)), 0.02)
        assert (outcome(bench.machine.poll(0.02)) is None) == waits
