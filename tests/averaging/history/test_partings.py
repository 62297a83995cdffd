"""Histories that parted more certificates ago than they keep: the location of the electors of that time
decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from averaging.history.ahead import Ahead
from averaging.history.chain import Relation
from averaging.history.lineage import PARTINGS_MAX, Lineage
from averaging.history.offers import Offers
from swarm.core.ids import Contact, PeerId
from tests.averaging.history.peers import PEERS, RUN, certificate, upon

A, B, C, D, E, LIAR = PEERS[:6]
KEPT = 8


@pytest.fixture(autouse=True)
def few_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("averaging.history.lineage.CERTIFICATES_MAX", KEPT)


def grow(history: Lineage, members: Sequence[PeerId], rounds: int, *, is_break: bool = False) -> None:
    """Let these members commit rounds; with `is_break` the first of them is a break."""
    for number in range(rounds):
        history.extend(certificate(upon(history, members, is_break=is_break and not number), members))


def parted(members: Sequence[PeerId], sides: Sequence[tuple[Sequence[PeerId], int, bool]]) -> list[Lineage]:
    """Return the histories of the first peer of each side. A side is its peers, how many rounds it has made
    since, and whether the first one is a break.
    """
    found = []
    for side, rounds, is_break in sides:
        history = Lineage(RUN, side[0])
        grow(history, members, 3)
        grow(history, side, rounds, is_break=is_break)
        found.append(history)
    return found


def choice(own: Lineage, shown: Mapping[PeerId, Lineage], at_own: Sequence[PeerId] = ()) -> Ahead | None:
    """Return what a peer follows when others show these histories, and `at_own` report its own head."""
    offers = Offers()
    heads = {peer: history.head for peer, history in shown.items()} | dict.fromkeys(at_own, own.head)
    electors = {peer for parting in own.partings() for peer in parting.electors}
    assert {*offers.to_ask(own, heads)} == electors.intersection(shown)
    for peer, history in shown.items():
        chain = history.chain(own.heads())
        offers.takes(own.relation(chain), own, chain, Contact(peer))
    return offers.choose(own, heads)


def test_a_minority_that_was_cut_off_for_long_follows_the_others() -> None:
    main, own = parted([A, B, C, D], [([A, B, C], 2 * KEPT, False), ([D], 2 * KEPT, True)])
    assert own.relation(main.chain(own.heads())) is Relation.UNRELATED
    found = choice(own, {A: main, B: main, C: main})
    assert found is not None
    assert found.chain.last_head == main.head
    assert found.epochs_given_up == 2 * KEPT, "all that it made since the break"
    assert choice(main, {D: own}, [B, C]) is None


def test_of_two_the_senior_one_keeps_its_history() -> None:
    senior, junior = parted([A, B], [([A], 2 * KEPT, False), ([B], 2 * KEPT, True)])
    found = choice(junior, {A: senior})
    assert found is not None
    assert found.chain.last_head == senior.head
    assert choice(senior, {B: junior}) is None


def test_three_sides_that_all_broke_agree() -> None:
    lines = parted([A, B, C, D, E], [(side, 2 * KEPT, True) for side in ([A, B], [C, D], [E])])
    shown = {peer: lines[place] for place, side in enumerate(([A, B], [C, D], [E])) for peer in side}
    heads = []
    for own in lines:
        others = {peer: line for peer, line in shown.items() if line is not own}
        found = choice(own, others, [peer for peer in shown if shown[peer] is own])
        heads.append(found.chain.last_head if found is not None else own.head)
    assert heads == [lines[0].head] * 3


def test_one_liar_among_the_electors_leads_nobody_away() -> None:
    own, forged = parted([LIAR, B, C], [([B, C], 2 * KEPT, True), ([LIAR], 9 * KEPT, True)])
    assert choice(own, {LIAR: forged}, [B, C]) is None
    stranger = Lineage(RUN, D)
    grow(stranger, [D], 9 * KEPT)
    assert choice(own, {D: stranger}, [B, C]) is None, "it was no elector"


def test_a_peer_that_slept_does_not_take_back_what_others_made_meanwhile() -> None:
    """The senior one of two peers is a quorum alone. It has slept, and its history is older than the others'
    break.
    """
    asleep, own = parted([A, B], [([A], 0, False), ([B], 2 * KEPT, True)])
    assert choice(own, {A: asleep}) is None
    grow(asleep, [A], 1)
    assert choice(own, {A: asleep}) is None


def test_the_newest_breaks_are_remembered() -> None:
    own = Lineage(RUN, A)
    for _ in range(2 * PARTINGS_MAX):
        grow(own, [A, B], KEPT // 2)
        grow(own, [B], 1, is_break=True)
    found = own.partings()
    assert len(found) == PARTINGS_MAX
    assert [one.root_epoch for one in found] == sorted((one.root_epoch for one in found), reverse=True)
    assert found[0].root_epoch == own.epoch - 1
    assert not any(one.certificates for one in found)
