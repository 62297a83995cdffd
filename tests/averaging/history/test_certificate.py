from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from averaging.history.certificate import Certificate, genesis, goodbye_statement
from averaging.history.electors import (
    ELECTORS_MAX,
    electors_after,
    is_quorum,
)
from swarm.core.errors import PeerError
from tests.averaging.history.peers import NEW, PEERS, RUN, SIGNERS, certificate, identity, proposal

A, B, C, D, E = PEERS[:5]
HEAD = genesis(RUN)


@pytest.mark.parametrize("count", range(1, 7))
def test_two_quorums_of_the_same_electors_share_a_peer(count: int) -> None:
    electors = PEERS[:count]
    subsets = [set(chosen) for size in range(count + 1) for chosen in itertools.combinations(electors, size)]
    quorums = [chosen for chosen in subsets if is_quorum(electors, chosen)]
    assert quorums
    assert all(one & other for one, other in itertools.product(quorums, quorums))
    # of any two halves one can continue
    assert all(
        is_quorum(electors, chosen) != is_quorum(electors, set(electors) - chosen) for chosen in subsets
    )


@pytest.mark.parametrize("count", range(1, 6))
def test_two_quorums_share_a_peer_whoever_of_the_others_is_known_to_have_left(count: int) -> None:
    electors = PEERS[:count]
    subsets = [
        frozenset(chosen) for size in range(count + 1) for chosen in itertools.combinations(electors, size)
    ]
    # those that left voted in neither
    for left in subsets:
        staying = set(electors) - left
        if not staying:
            continue
        known = [gone for gone in subsets if gone <= left]
        votes = [chosen for chosen in subsets if chosen <= staying]
        quorums = [chosen for gone in known for chosen in votes if is_quorum(electors, chosen, gone)]
        assert all(one & other for one, other in itertools.product(quorums, quorums))


def test_half_of_the_electors_decide_only_with_the_most_senior() -> None:
    assert is_quorum([A, B, C, D], {A, C})
    assert not is_quorum([A, B, C, D], {B, C})
    assert is_quorum([A, B, C, D], {B, C}, gone={A})


def test_a_head_whose_electors_have_all_left_has_no_quorum() -> None:
    assert not is_quorum([A, B], {C}, gone={A, B})
    assert is_quorum([], {C})


def test_electors_keep_their_seniority_and_new_ones_follow() -> None:
    assert electors_after([C, A, B], NEW, [A, D, C])[0] == (C, A, D)
    assert electors_after([], NEW, [B, A])[0] == (B, A)
    many = [identity(100 + number).peer_id for number in range(ELECTORS_MAX + 8)]
    assert electors_after(many[:3], NEW, many[::-1])[0] == (*many[:3], *many[::-1][: ELECTORS_MAX - 3])


def valid() -> Certificate:
    return certificate(proposal(HEAD, [A, B, C], [A, B, D]), [A, B])


def test_a_certificate_with_a_majority_and_a_quorum_is_valid() -> None:
    valid().check([A, B, C], NEW)


def test_the_head_does_not_depend_on_which_votes_were_collected() -> None:
    about = proposal(HEAD, [A, B, C], [A, B, C])
    assert certificate(about, [A, B]).head == certificate(about, [B, C]).head


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda one: replace(one, votes={A: one.votes[A]}), "no majority"),
        (lambda one: replace(one, votes={**one.votes, D: one.votes[A]}), "did not sign"),
        (lambda one: replace(one, result=bytes(32)), "did not sign"),
        (lambda one: replace(one, result=b""), "32 bytes"),
        (lambda one: replace(one, goodbyes={C: bytes(64)}), "goodbye"),
        (lambda one: replace(one, proposal=replace(one.proposal, electors=(D,))), "other electors"),
        (lambda one: replace(one, proposal=replace(one.proposal, epoch=7)), "did not sign"),
        (lambda one: replace(one, proposal=replace(one.proposal, is_break=True)), "did not sign"),
    ],
)
def test_a_certificate_that_was_changed_is_refused(
    change: Callable[[Certificate], Certificate], reason: str
) -> None:
    with pytest.raises(PeerError, match=reason):
        change(valid()).check([A, B, C], NEW)


def test_votes_without_a_quorum_are_refused_unless_they_declare_a_break() -> None:
    with pytest.raises(PeerError, match="no quorum"):
        certificate(proposal(HEAD, [A, B, C, D], [C, D]), [C, D]).check([A, B, C, D], NEW)
    certificate(proposal(HEAD, [A, B, C, D], [C, D], is_break=True), [C, D]).check([A, B, C, D], NEW)


def test_an_elector_that_said_goodbye_is_not_counted() -> None:
    about = proposal(HEAD, [A, B, C, D], [C, D])
    farewell = SIGNERS[A](goodbye_statement(RUN, HEAD))
    replace(certificate(about, [C, D]), goodbyes={A: farewell}).check([A, B, C, D], NEW)
