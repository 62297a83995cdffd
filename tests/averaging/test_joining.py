"""The matchmaking machine as a leader: who has a place in its group."""

from __future__ import annotations

from averaging.groups.group import Group
from averaging.groups.matchmaking import MatchmakingConfig
from averaging.groups.seeking import Answer, AnswerJoin, Standing
from tests.averaging.test_matchmaking import Bench, contact, holder, join_of, outcome


def test_who_comes_to_a_full_group_that_has_not_begun_is_told_so() -> None:
    bench = Bench.make(MatchmakingConfig(target_group_size=2))
    bench.start(holder(6), holder(7))
    assert isinstance(bench.machine.on_join(join_of(6, 11.0), 0.01), int)
    refused = bench.machine.on_join(join_of(7, 11.0), 0.01)
    assert isinstance(refused, Answer)
    assert refused.standing is Standing.SEEKING
    group = outcome(bench.machine.poll(0.01))
    assert isinstance(group, Group)
    assert len(group.members) == 2


def test_who_joins_again_takes_its_own_place() -> None:
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
