"""Which members are informed of the end of a round."""

from __future__ import annotations

import pytest

from averaging.allreduce.logic.values import Statement
from averaging.allreduce.logic.votes import VoteExchange
from averaging.history.certificate import Vote, vote_statement
from swarm.testing.identities import SeededIdentity
from tests.averaging.allreduce.setups import round_setup

RESULT = bytes(31) + b"\1"


@pytest.mark.parametrize(("answered_with", "told"), [([1], [2]), ([0, 1], [1, 2]), ([], [1, 2])])
def test_a_member_whose_answer_shows_that_it_knows_the_certificate_is_told_nothing(
    answered_with: list[int], told: list[int]
) -> None:
    identities = [SeededIdentity(f"votes {place}") for place in range(3)]
    setup = round_setup(identities)
    statement = vote_statement(setup.proposal.digest(), RESULT)
    votes = [Vote(voter=one.peer_id, result=RESULT, signature=one.sign(statement)) for one in identities]
    exchange = VoteExchange(setup)
    exchange.add_own(votes[0], 1.0)
    assert [ask.place for ask in exchange.asks({0, 1, 2}, 0.0)] == [1, 2]
    answer = Statement(tuple(votes[place] for place in answered_with))
    exchange.on_answer(1, answer)
    exchange.on_no_answer(2, 1.0)
    exchange.on_statement(1, answer, 1.0)
    exchange.on_statement(2, Statement((votes[1], votes[2])), 1.0)
    assert exchange.certificate is not None
    assert [ask.place for ask in exchange.farewell({0, 1, 2})] == told


def test_a_member_whose_round_is_over_and_that_says_nothing_new_is_asked_again_after_a_pause() -> None:
    """A liar has sent this member two votes, which it does not count. Another member considers one of them
    news, and answers at once.
    """
    identities = [SeededIdentity(f"votes {place}") for place in range(3)]
    setup = round_setup(identities)
    statement = vote_statement(setup.proposal.digest(), RESULT)
    votes = [Vote(voter=one.peer_id, result=RESULT, signature=one.sign(statement)) for one in identities]
    exchange = VoteExchange(setup)
    other = bytes(reversed(RESULT))
    signature = identities[2].sign(vote_statement(setup.proposal.digest(), other))
    lie = Vote(voter=identities[2].peer_id, result=other, signature=signature)
    answer = Statement((votes[1], votes[2]))
    exchange.intend(RESULT, 1.0)
    exchange.on_statement(2, Statement((lie,)), 1.0)
    for now_s, paused in ((1.0, False), (2.0, True)):
        assert 1 in [ask.place for ask in exchange.asks({0, 1, 2}, now_s)]
        exchange.on_answer(1, answer)
        new = exchange.on_statement(1, answer, now_s)
        assert new is not paused
    exchange.on_answer(2, Statement())
    assert [ask.place for ask in exchange.asks({0, 1, 2}, 2.05)] == [2]
    assert [ask.place for ask in exchange.asks({0, 1, 2}, 2.2)] == [1]
    exchange.on_answer(1, answer)
    exchange.on_statement(1, answer, 3.0)
    exchange.intend(other, 3.0)
    assert 1 in [ask.place for ask in exchange.asks({0, 1, 2}, 3.05)], "it has something new to tell"


def test_a_member_that_gives_no_answer_is_asked_again_after_a_pause_or_with_news() -> None:
    """Regression test: a call on a broken connection fails at once. A member that answers pings, and breaks
    the calls that ask for its vote, was asked again and again without a pause until the round was over.
    """
    exchange = VoteExchange(round_setup([SeededIdentity(f"votes {place}") for place in range(3)]))
    exchange.intend(RESULT, 1.0)
    assert [ask.place for ask in exchange.asks({0, 1, 2}, 1.0)] == [1, 2]
    exchange.on_no_answer(2, 1.0)
    assert exchange.asks({0, 1, 2}, 1.05) == []
    assert [ask.place for ask in exchange.asks({0, 1, 2}, 1.2)] == [2]
    exchange.on_no_answer(2, 1.2)
    exchange.intend(bytes(reversed(RESULT)), 1.2)
    assert [ask.place for ask in exchange.asks({0, 1, 2}, 1.25)] == [1, 2]


def test_a_member_that_sent_its_vote_is_asked_again_only_after_answers_of_others() -> None:
    """Each of four members tells its own vote first: this member has the certificate once the others answer,
    and asks again only where they do not.
    """
    identities = [SeededIdentity(f"votes {place}") for place in range(4)]
    setup = round_setup(identities)
    statement = vote_statement(setup.proposal.digest(), RESULT)
    votes = [Vote(voter=one.peer_id, result=RESULT, signature=one.sign(statement)) for one in identities]
    exchange, everybody = VoteExchange(setup), {0, 1, 2, 3}
    exchange.add_own(votes[0], 1.0)
    assert [ask.place for ask in exchange.asks(everybody, 1.0)] == [1, 2, 3]
    exchange.on_answer(1, Statement((votes[1],)))
    exchange.on_statement(1, Statement((votes[1],)), 1.0)
    assert exchange.certificate is None
    assert exchange.asks(everybody, 1.05) == []
    assert [ask.place for ask in exchange.asks(everybody, 1.2)] == [1]
