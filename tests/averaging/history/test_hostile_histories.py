"""Liars that show self-made histories: one honest peer with a voice is enough."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from averaging.history.ahead import what_to_follow
from averaging.history.certificate import EPOCH_MAX, Proposal, genesis
from averaging.history.chain import Chain, Relation
from averaging.history.electors import FOUNDING_MAX, Register
from averaging.history.encoding import decode_chain, encode_chain
from averaging.history.lineage import CERTIFICATES_MAX, Lineage
from averaging.history.offers import Offers
from swarm.core.errors import PeerError
from swarm.core.ids import Contact, PeerId
from tests.averaging.history.peers import PEERS, RUN, certificate, identity, upon

A, B, C, D, LIAR, LIAR_2, LIAR_3 = PEERS[:7]
NOBODY = genesis(RUN)


def grow(history: Lineage, members: Sequence[PeerId], rounds: int = 1, *, is_break: bool = False) -> None:
    """Extend a history by rounds of these members, which sign everything themselves."""
    for number in range(rounds):
        about = upon(history, members, is_break=is_break and not number, attempt=number)
        history.extend(certificate(about, members))


def made_by(members: Sequence[PeerId], rounds: int, own: PeerId | None = None) -> Lineage:
    history = Lineage(RUN, own or members[0])
    grow(history, members, rounds)
    return history


def choice(
    own: Lineage,
    shown: dict[PeerId, Lineage],
    introducers: Iterable[PeerId] = (),
    named: Sequence[PeerId] = (),
) -> Chain | None:
    """Return the history that a peer follows when each of these peers reports and shows one. `named`: the
    members that the introducers have named.
    """
    offers = Offers(tuple(introducers), lambda: named)
    for peer, history in shown.items():
        chain = history.chain(own.heads())
        offers.takes(own.relation(chain), own, chain, Contact(peer))
    found = offers.choose(own, {peer: history.head for peer, history in shown.items()})
    return found.chain if found is not None else None


@pytest.mark.parametrize("epoch", [3, 4, 5, EPOCH_MAX])
@pytest.mark.parametrize("is_break", [False, True])
def test_a_certificate_that_skips_epochs_is_refused_whoever_signed_it(epoch: int, is_break: bool) -> None:
    mine = made_by([A, B], 1)
    forged = certificate(replace(upon(mine, [A, B], is_break=is_break), epoch=epoch), [A, B])
    with pytest.raises(PeerError, match="after one of epoch 1"):
        mine.relation(replace(mine.chain((mine.head,)), certificates=(forged,)))
    assert "epoch does not follow" in mine.refusal(forged.proposal, forged.result)


@pytest.mark.parametrize("rounds", [FOUNDING_MAX + 1, CERTIFICATES_MAX + 1])
def test_a_stranger_with_a_longer_chain_from_the_beginning_moves_nobody(rounds: int) -> None:
    mine = made_by([A, B], rounds)
    forged = made_by([LIAR], CERTIFICATES_MAX)
    grow(forged, [LIAR], 50)
    for waiting in (False, True):
        if waiting:
            mine.may_break(0.0, 1.0)
        chain = forged.chain(mine.heads())
        relation = mine.relation(chain)
        assert relation in (Relation.LOSES, Relation.UNRELATED)
        assert what_to_follow(relation, mine, chain, Contact(LIAR), breaks=waiting) is None
        assert choice(mine, {LIAR: forged}, introducers=[LIAR_2]) is None


@pytest.mark.parametrize("liars", [1, 3])
def test_a_returning_peer_follows_live_electors_of_its_head_and_not_strangers(
    liars: int,
) -> None:
    mine, others = made_by([A, B, C], 3), made_by([A, B, C], 3, B)
    grow(others, [B, C], CERTIFICATES_MAX + 5)
    mine.may_break(0.0, 1.0)
    forged = made_by([LIAR], CERTIFICATES_MAX)
    grow(forged, [LIAR], 100)
    strangers = dict.fromkeys([LIAR, LIAR_2, LIAR_3][:liars], forged)
    found = choice(mine, {**strangers, B: others})
    assert found is not None
    assert found.last_head == others.head
    assert choice(mine, strangers) is None, "without an elector it stays"
    assert choice(mine, {**strangers, B: others}, introducers=[LIAR]) == found, (
        "electors come before introducers"
    )


def test_a_peer_that_was_away_until_no_elector_was_left_follows_its_introducer() -> None:
    """Without an introducer in the run it stays, because later members cannot be distinguished from
    strangers.
    """
    mine, others = made_by([A, B], 3), made_by([A, B], 3, C)
    grow(others, [C], CERTIFICATES_MAX + 5, is_break=True)
    mine.may_break(0.0, 1.0)
    forged = made_by([LIAR], CERTIFICATES_MAX)
    grow(forged, [LIAR], 100)
    found = choice(mine, {LIAR: forged, LIAR_2: forged, C: others}, introducers=[C])
    assert found is not None
    assert found.last_head == others.head
    assert choice(mine, {LIAR: forged, LIAR_2: forged, C: others}, introducers=[D]) is None


@pytest.mark.parametrize("order", [[LIAR, LIAR_2, LIAR_3, A], [A, LIAR, LIAR_2, LIAR_3]])
def test_a_newcomer_with_one_honest_introducer_follows_it_among_any_number_of_liars(
    order: list[PeerId],
) -> None:
    honest, forged = made_by([A, B], 5), made_by([LIAR], 90)
    shown = {peer: honest if peer == A else forged for peer in order}
    found = choice(Lineage(RUN, D), shown, introducers=[A])
    assert found is not None
    assert found.last_head == honest.head


def test_a_newcomer_without_introducers_follows_two_honest_peers_and_not_a_liar_that_is_further() -> None:
    honest, forged = made_by([A, B], 5), made_by([LIAR], 7)
    found = choice(Lineage(RUN, D), {LIAR: forged, A: honest, B: honest})
    assert found is not None
    assert found.last_head == honest.head


def test_a_break_that_a_stranger_appends_to_an_honest_history_wins_no_voices() -> None:
    honest = made_by([A, B], 5)
    forged = Lineage(RUN, LIAR)
    forged.adopt(honest.chain())
    grow(forged, [LIAR], 20, is_break=True)
    found = choice(Lineage(RUN, D), {LIAR: forged, A: honest, B: honest})
    assert found is not None
    assert found.last_head == honest.head


def test_a_newcomer_whose_introducers_take_no_part_follows_the_members_that_these_named() -> None:
    """Regression test: behind a bootstrap peer that is not a member, the larger number of identities
    decided.
    """
    honest, forged = made_by([A, B], 5), made_by([LIAR], 90)
    strangers = [identity(200 + number).peer_id for number in range(30)]
    shown = {A: honest, B: honest, **dict.fromkeys(strangers, forged)}
    newcomer = Lineage(RUN, D)
    unnamed = choice(newcomer, shown, introducers=[C])
    assert unnamed is not None
    assert unnamed.last_head == forged.head, "nobody was named"
    for named in ([A], [B, A], [C, A]):
        found = choice(newcomer, shown, introducers=[C], named=named)
        assert found is not None
        assert found.last_head == honest.head


def test_in_a_tie_of_introducers_the_first_one_given_decides() -> None:
    one, other = made_by([A], 5), made_by([B], 9)
    for introducers, expected in (([A, B], one), ([B, A], other)):
        found = choice(Lineage(RUN, D), {B: other, A: one}, introducers=introducers)
        assert found is not None
        assert found.last_head == expected.head


def test_a_newcomer_waits_while_the_history_of_more_peers_could_not_be_fetched() -> None:
    honest, forged = made_by([A, B], 5), made_by([LIAR], 7)
    mine, offers = Lineage(RUN, D), Offers()
    chain = forged.chain(mine.heads())
    offers.takes(mine.relation(chain), mine, chain, Contact(LIAR))
    heads = {LIAR: forged.head, A: honest.head, B: honest.head}
    assert offers.choose(mine, heads) is None
    assert offers.choose(mine, {LIAR: forged.head, A: NOBODY, B: b""}) is not None


def test_a_newcomer_asks_no_peer_that_is_as_new_as_itself() -> None:
    mine = Lineage(RUN, D)
    offers = Offers((A, B), lambda: (C,))
    assert offers.to_ask(mine, {A: made_by([A], 5).head, B: mine.head, C: mine.head}) == [A]
    assert offers.to_ask(mine, {A: mine.head, C: made_by([A], 5).head}) == [B, C], "B reports nothing"


def test_a_history_that_many_peers_show_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, newcomer = encode_chain(made_by([A, B], 5).chain()), Lineage(RUN, D)
    offers, checked = Offers(), list[bytes]()
    follows = Proposal.follows

    def counted(proposal: Proposal, electors: Sequence[PeerId], register: Register) -> bool:
        checked.append(proposal.head)
        return follows(proposal, electors, register)

    monkeypatch.setattr(Proposal, "follows", counted)
    for peer in (A, B, C):
        chain = decode_chain(bytes(bytearray(shown)))  # each answer has its own bytes
        assert offers.takes(newcomer.relation(chain), newcomer, chain, Contact(peer))
    assert len(checked) == len(set(checked)) == 5
    with pytest.raises(PeerError, match="other electors"):
        chain.certificates[1].check((LIAR,), chain.certificates[0].register)
