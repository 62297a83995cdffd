from __future__ import annotations

import itertools

import pytest

from averaging.history.certificate import Proposal, genesis, goodbye_statement
from averaging.history.tally import Tally
from swarm.core.errors import PeerError
from swarm.core.ids import PeerId
from tests.averaging.history.peers import NEW, PEERS, RUN, SIGNERS, proposal, vote

A, B, C, D, E = PEERS[:5]
HEAD = genesis(RUN)
X, Y = b"x" * 32, b"y" * 32


def tally(electors: list[PeerId], contributors: list[PeerId]) -> tuple[Tally, Proposal]:
    about = proposal(HEAD, electors, contributors)
    return Tally(about, electors), about


def test_the_vote_that_completes_majority_and_quorum_makes_the_certificate() -> None:
    votes, about = tally([A, B, C], [A, B, C])
    votes.add(vote(A, about, X))
    assert votes.certificate is None
    votes.add(vote(B, about, X))
    assert votes.certificate is not None
    votes.certificate.check([A, B, C], NEW)


def test_a_majority_without_a_quorum_waits_for_electors_outside_of_the_group() -> None:
    votes, about = tally([A, B, C], [C, D])
    votes.add(vote(C, about, X))
    votes.add(vote(D, about, X))
    assert votes.majority == X
    assert votes.certificate is None
    assert votes.electors_missing == [A, B]
    votes.add(vote(A, about, X))
    assert votes.certificate is not None


def test_votes_of_strangers_and_forged_votes_are_refused() -> None:
    votes, about = tally([A], [A, B])
    with pytest.raises(PeerError, match="neither"):
        votes.add(vote(E, about, X))
    with pytest.raises(PeerError, match="did not sign"):
        votes.add(vote(A, proposal(HEAD, [A], [A, B], attempt=1), X))
    assert not votes.votes


def test_a_peer_that_votes_twice_counts_for_nothing() -> None:
    votes, about = tally([], [A, B, C])
    votes.add(vote(A, about, X))
    votes.add(vote(B, about, X))
    votes.add(vote(B, about, Y))
    assert B in votes.liars
    assert votes.certificate is None
    votes.add(vote(B, about, X))
    assert votes.certificate is None
    assert votes.results == {X: 1}


def test_a_certificate_is_rebuilt_after_each_vote_or_goodbye() -> None:
    votes, about = tally([A, B, C], [A, B, C])
    votes.add(vote(A, about, X))
    votes.add(vote(B, about, X))
    assert votes.certificate is votes.certificate is not None
    assert set(votes.certificate.votes) == {A, B}
    votes.add(vote(C, about, X))
    assert set(votes.certificate.votes) == {A, B, C}
    votes.add(vote(C, about, Y))  # a liar
    assert set(votes.certificate.votes) == {A, B}
    votes.add(vote(B, about, Y))
    assert votes.certificate is None


@pytest.mark.parametrize("contributors", [1, 2, 3, 4])
def test_an_attempt_is_dead_exactly_when_no_votes_can_certify_it(contributors: int) -> None:
    """Against brute force: every completion of the unknown votes."""
    members, electors = PEERS[:contributors], [PEERS[0], PEERS[1], PEERS[4]]
    about = proposal(HEAD, electors, members)
    voters = list(dict.fromkeys([*members, *electors]))
    choices = (X, Y, b"")
    signed = {(voter, result): vote(voter, about, result) for voter in voters for result in choices}

    def certified(cast: dict[PeerId, bytes]) -> bool:
        full = Tally(about, electors)
        for voter, result in cast.items():
            full.add(signed[voter, result])
        return full.certificate is not None

    for known in itertools.product((None, X, b""), repeat=len(voters)):
        cast = {voter: result for voter, result in zip(voters, known, strict=True) if result is not None}
        partial = Tally(about, electors)
        for voter, result in cast.items():
            partial.add(signed[voter, result])
        unknown = [voter for voter in voters if voter not in cast]
        possible = any(
            certified({**cast, **dict(zip(unknown, rest, strict=True))})
            for rest in itertools.product(choices, repeat=len(unknown))
        )
        assert partial.is_dead() != possible, cast


def test_an_attempt_is_dead_once_a_contributor_that_it_needs_has_left_without_a_vote() -> None:
    votes, about = tally([A, B], [A, B])
    votes.add(vote(A, about, X))
    assert not votes.is_dead()
    votes.add_goodbye(B, SIGNERS[B](goodbye_statement(RUN, HEAD)))
    assert votes.is_dead()
