"""The matchmaking machine as a leader: which peers have a place in its group."""

from __future__ import annotations

from averaging.matchmaking.logic.group import Group
from averaging.matchmaking.logic.matchmaking import LEADER_PING_INTERVAL_S
from averaging.matchmaking.logic.messages import (
    AbandonJoin,
    Answer,
    AnswerJoin,
    PeerStatus,
    SendJoin,
    SendLookForGroup,
)
from tests.averaging.matchmaking.bench import (
    MatchmakerBench,
    contact,
    holder,
    join_of,
    outcome,
    searching_answer,
)


def test_a_join_to_a_full_group_that_has_not_begun_is_declined() -> None:
    bench = MatchmakerBench.make(target_group_size=2)
    bench.start(holder(6), holder(7))
    assert isinstance(bench.machine.on_join(join_of(6, 11.0), 0.01), int)
    refused = bench.machine.on_join(join_of(7, 11.0), 0.01)
    assert isinstance(refused, Answer)
    assert refused.status is PeerStatus.SEARCHING
    group = outcome(bench.machine.poll(0.01))
    assert isinstance(group, Group)
    assert len(group.members) == 2


def test_a_second_join_of_a_peer_replaces_its_first() -> None:
    bench = MatchmakerBench.make(target_group_size=3)
    bench.start(holder(6), holder(7))
    first = bench.machine.on_join(join_of(6, 11.0), 0.01)
    assert isinstance(bench.machine.on_join(join_of(7, 11.0), 0.01), int)
    again = bench.machine.on_join(join_of(6, 11.0, weight=2.0), 0.01)
    assert isinstance(first, int)
    assert isinstance(again, int), "the group would be full if it counted twice"
    bench.machine.on_join_lost(contact(6).peer_id, first)  # the superseded call ends
    answers = [effect for effect in bench.machine.poll(0.02) if isinstance(effect, AnswerJoin)]
    assert len(answers) == 2
    assert again in {answer.ticket for answer in answers}
    assert all(isinstance(answer.answer, Group) for answer in answers)


def test_a_follower_leaves_a_leader_that_denies_leading_twice() -> None:
    """A single contrary reply may have been overtaken on its way; replies to queries sent before it led this
    peer do not count.
    """
    bench = MatchmakerBench.make()
    leader = contact(1).peer_id
    bench.start(holder(1))
    bench.machine.on_query_answer(leader, searching_answer(9.0), 0.01)
    assert any(isinstance(effect, SendJoin) for effect in bench.machine.poll(0.01))
    now_s = 0.02
    bench.machine.on_query_answer(leader, Answer(status=PeerStatus.IDLE, turn=1), now_s)
    assert AbandonJoin(peer_id=leader) not in bench.machine.poll(now_s)
    for turn, left in ((2, False), (3, True)):
        now_s += LEADER_PING_INTERVAL_S
        assert any(isinstance(effect, SendLookForGroup) for effect in bench.machine.poll(now_s))
        bench.machine.on_query_answer(leader, Answer(status=PeerStatus.IDLE, turn=turn), now_s)
        assert (AbandonJoin(peer_id=leader) in bench.machine.poll(now_s)) == left, turn
