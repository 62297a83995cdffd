"""The matchmaking machine as a leader: which peers have a place in its group."""

from __future__ import annotations

from averaging.matchmaking.logic.group import Group
from averaging.matchmaking.logic.matchmaking import MatchmakingConfig
from averaging.matchmaking.logic.messages import (
    AbandonJoin,
    Answer,
    AnswerJoin,
    PeerStatus,
    SendJoin,
    SendSeek,
)
from tests.averaging.matchmaking.test_matchmaking import Bench, contact, holder, join_of, outcome, seeking


def test_a_peer_that_asks_a_full_group_is_refused() -> None:
    bench = Bench.make(MatchmakingConfig(target_group_size=2))
    bench.start(holder(6), holder(7))
    assert isinstance(bench.machine.on_join(join_of(6, 11.0), 0.01), int)
    refused = bench.machine.on_join(join_of(7, 11.0), 0.01)
    assert isinstance(refused, Answer)
    assert refused.standing is PeerStatus.SEEKING
    group = outcome(bench.machine.poll(0.01))
    assert isinstance(group, Group)
    assert len(group.members) == 2


def test_a_peer_that_joins_again_keeps_its_place() -> None:
    bench = Bench.make(MatchmakingConfig(target_group_size=3))
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


def test_a_leader_that_twice_denies_leading_is_left() -> None:
    """One such answer may be outdated; answers to questions from before it became the leader do not count."""
    bench = Bench.make()
    leader = contact(1).peer_id
    bench.start(holder(1))
    bench.machine.on_seek_answer(leader, seeking(9.0), 0.01)
    assert any(isinstance(effect, SendJoin) for effect in bench.machine.poll(0.01))
    now_s = 0.02
    bench.machine.on_seek_answer(leader, Answer(standing=PeerStatus.IDLE, turn=1), now_s)
    assert AbandonJoin(peer_id=leader) not in bench.machine.poll(now_s)
    for turn, left in ((2, False), (3, True)):
        now_s += bench.config.leader_ping_s
        assert any(isinstance(effect, SendSeek) for effect in bench.machine.poll(now_s))
        bench.machine.on_seek_answer(leader, Answer(standing=PeerStatus.IDLE, turn=turn), now_s)
        assert (AbandonJoin(peer_id=leader) in bench.machine.poll(now_s)) == left, turn
