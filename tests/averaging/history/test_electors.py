"""How peers become electors: by certified work, and only a few in an hour; and the gain of a thousand free
identities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from averaging.history.certificate import Certificate, Proposal, genesis, goodbye_statement, make_result
from averaging.history.chain import Relation, beginning
from averaging.history.electors import (
    ALWAYS,
    CANDIDATES_MAX,
    ELECTORS_MAX,
    FOUNDING_MAX,
    HOUR_S,
    MISSES_MAX,
    ROUNDS_NEEDED,
    GrowthClock,
    Known,
    Register,
    electors_after,
)
from averaging.history.encoding import (
    ROOT_BYTES_MAX,
    chain_text,
    decode_chain,
    decode_root,
    encode_chain,
    encode_root,
)
from averaging.history.lineage import Lineage
from averaging.history.tally import Tally, is_supported
from swarm.core.errors import PeerError
from swarm.core.ids import PeerId
from swarm.core.standing import Founding
from tests.averaging.history.peers import PEERS, RUN, SIGNERS, certificate, identity, proposal, upon, vote

OWNER, A, B, C, D, E = PEERS[:6]
SETTLED = Register(at_once=0)
OWNED, INVITED = Founding(OWNER), Founding(OWNER, is_invited=True)
CROWD = [identity(1000 + number).peer_id for number in range(200)]


def rounds(
    electors: Sequence[PeerId], register: Register, *groups: Sequence[PeerId]
) -> tuple[tuple[PeerId, ...], Register]:
    """Return electors and register after rounds of these contributors."""
    found = tuple(electors), register
    for group in groups:
        found = electors_after(*found, group)
    return found


def test_a_newcomer_becomes_an_elector_with_its_third_certified_round() -> None:
    for count in range(1, ROUNDS_NEEDED):
        assert rounds([A], SETTLED, *[[A, B]] * count)[0] == (A,)
    electors, register = rounds([A], SETTLED, *[[A, B]] * ROUNDS_NEEDED)
    assert electors == (A, B)
    assert register == Register(at_once=0, seats=0)


def test_in_an_hour_a_quarter_more_become_electors_and_the_most_diligent_first() -> None:
    electors, register = rounds([A], SETTLED, [A, D], [A, D], [A, D, B, C], [A, D, B], *[[A, D, C, B]] * 3)
    assert electors == (A, D), "no further seat in this hour"
    electors, register = electors_after(electors, register, [A, D, C, B], new_hour=True)
    assert (electors, register.seats) == ((A, D, B), 0), "B has more rounds than C"
    many = CROWD[:16]
    electors, register = rounds(many, Register(at_once=0, seats=0), *[[*many, B, C, D]] * 5)
    assert electors == tuple(many)
    electors, register = electors_after(electors, register, [*many, B, C], new_hour=True)
    assert (len(electors), register.seats) == (18, 2)
    electors, register = electors_after(electors, register, [*many, B, C, D])
    assert (len(electors), register.seats) == (19, 1)


def test_contributors_of_an_invited_run_are_electors_at_once_and_of_others_while_it_is_founded() -> None:
    start = beginning(RUN, INVITED)
    assert (start.electors, start.root_register.at_once) == ((), ALWAYS)
    assert rounds(start.electors, start.root_register, *[[A]] * 50, [A, *CROWD])[0] == (A, *CROWD[:63])
    start = beginning(RUN, Founding())
    early = rounds(start.electors, start.root_register, *[[A]] * (FOUNDING_MAX - 1), [A, B])
    late = rounds(start.electors, start.root_register, *[[A]] * FOUNDING_MAX, [A, B])
    assert (early[0], late[0]) == ((A, B), (A,))


def test_the_owner_is_the_first_elector_of_an_open_run() -> None:
    history = Lineage(RUN, OWNER, OWNED)
    assert history.electors == (OWNER,)
    with pytest.raises(PeerError, match="no quorum"):
        certificate(upon(history, [A]), [A]).check(history.electors, history.register)
    certificate(upon(history, [OWNER, A]), [OWNER, A]).check(history.electors, history.register)


def test_a_stranger_with_a_longer_chain_does_not_win_against_the_line_of_the_owner() -> None:
    """Any identity can make a chain from the beginning of a run, as long as it likes."""
    honest, stranger, newcomer = (Lineage(RUN, one, OWNED) for one in (A, B, C))
    honest.extend(certificate(upon(honest, [OWNER, A]), [OWNER, A]))
    stranger.extend(certificate(upon(stranger, [B], is_break=True), [B]))
    for _ in range(4):
        stranger.extend(certificate(upon(stranger, [B]), [B]))
    assert honest.relation(stranger.chain()) is Relation.LOSES
    assert stranger.relation(honest.chain()) is Relation.WINS
    assert newcomer.relation(honest.chain()) is Relation.AHEAD
    first = certificate(proposal(genesis(RUN), (), [B]), [B])  # as if the run had no owner
    with pytest.raises(PeerError):
        honest.relation(
            Lineage(RUN, B).chain().__class__(head=genesis(RUN), electors=(), certificates=(first,))
        )


def test_a_library_process_that_knows_only_the_id_of_a_run_follows_the_line_of_its_owner() -> None:
    owner, library = Lineage(RUN, OWNER, OWNED), Lineage(RUN, A)
    owner.extend(certificate(upon(owner, [OWNER]), [OWNER]))
    assert library.relation(owner.chain()) is Relation.AHEAD
    library.adopt(owner.chain())
    owner.extend(certificate(upon(owner, [OWNER, A]), [OWNER, A]))
    assert library.relation(owner.chain(library.heads())) is Relation.AHEAD
    assert library.electors == (OWNER,)


def test_an_elector_leaves_with_the_third_certificate_in_a_row_that_it_misses() -> None:
    """Before, it left with the first one: the list was short whenever an honest elector missed a round, and a
    few newcomers that never miss one were a majority of it.
    """
    full = Register(at_once=0, seats=0)
    electors, register = rounds([A, B, C], full, *[[B, C]] * (MISSES_MAX - 1))
    assert (electors, register.misses) == ((A, B, C), (MISSES_MAX - 1, 0, 0))
    assert register.absent(electors) == [A]
    assert rounds(electors, register, [A, C]) == ((A, B, C), Register(at_once=0, seats=0, misses=(0, 1, 0)))
    left, register = rounds(electors, register, [B, C])
    assert (left, register.misses) == ((B, C), ()), "three in a row"
    assert rounds(left, register, [A, B, C])[0] == (B, C, A), "it returns, as the most junior one"


@pytest.mark.parametrize(
    ("electors", "here", "left"),
    [
        ((A, B), [B], (B,)),  # the senior one was away, and votes on no head that it does not know
        ((A, B), [A], (A, B)),
        ((A, B, C, D), [C, D], (A, B, C, D)),  # among more, a crowd that misses nothing would soon decide
        ((A, B), [B, E], (B,)),
    ],
)
def test_the_junior_one_of_two_electors_does_not_depend_on_an_absent_one(
    electors: tuple[PeerId, ...], here: list[PeerId], left: tuple[PeerId, ...]
) -> None:
    """Otherwise it would pause for a grace, because the absent one does not know the head any more."""
    assert rounds(electors, SETTLED, here)[0] == left


@pytest.mark.parametrize("rule", ["break", "goodbye", "founding", "invited"])
def test_an_elector_leaves_with_the_first_certificate_that_it_misses(rule: str) -> None:
    at_once = {"founding": FOUNDING_MAX, "invited": ALWAYS}.get(rule, 0)
    electors, register = electors_after(
        [A, B],
        Register(at_once=at_once),
        [B],
        is_break=rule == "break",
        gone=[A] if rule == "goodbye" else [],
    )
    assert (electors, register.misses) == ((B,), ())


def test_a_certificate_to_which_no_elector_contributed_was_missed_by_none() -> None:
    electors, register = rounds([A, B], SETTLED, [A], [C, D])
    assert (electors, register.misses) == ((A, B), (0, 1)), "they voted"


def test_only_an_elector_that_has_said_goodbye_is_taken_from_the_list_at_once() -> None:
    electors, register = (A, B, C), Register(at_once=0)
    about = proposal(genesis(RUN), electors, [A, B], register=register, gone=[C])
    assert about.electors == (A, B)
    signed = certificate(about, [A, B])
    with pytest.raises(PeerError, match="not said goodbye"):
        signed.check(electors, register)
    tally = Tally(about, electors)
    for voter in (A, B):
        tally.add(vote(voter, about, signed.result))
    assert tally.certificate is None
    farewell = SIGNERS[C](goodbye_statement(RUN, about.head))
    tally.add_goodbye(C, farewell)
    assert tally.certificate is not None
    tally.certificate.check(electors, register)
    still_there = replace(about, gone=(B,), electors=(A, C))
    with pytest.raises(PeerError, match="other electors"):
        replace(signed, proposal=still_there, goodbyes={B: farewell}).check(electors, register)


def test_an_elector_that_left_the_list_returns_with_its_next_contribution_and_takes_no_seat() -> None:
    full = Register(at_once=0, seats=0)
    electors, register = rounds([A, B, C], full, *[[A, C]] * MISSES_MAX, [A, C, D])
    assert electors == (A, C)
    assert rounds(electors, register, [A, B, C])[0] == (A, C, B)
    # also when it was away while others came and went
    away = [[A, C, *CROWD[start : start + 62]] for start in range(0, 124, 62)]
    assert rounds(electors, register, *away, [A, B, C])[0] == (A, C, B)


def test_electors_that_had_nothing_to_contribute_but_voted_stay() -> None:
    assert rounds([A, B], SETTLED, [C, D])[0] == (A, B)


@pytest.mark.parametrize(
    ("electors", "known", "contributors", "heirs"),
    [
        ((A, B), (), [B, C], (B,)),  # an elector is among them
        ((A,), (Known(B, 0, True), Known(C, 2)), [C, B, D], (B,)),
        ((A,), (Known(C, 1),), [D, C, E], (C,)),
        ((A,), (), [D, C], (D, C)),
    ],
    ids=["electors", "former electors", "peers with certified rounds", "all"],
)
def test_after_a_break_the_contributors_inherit_that_the_history_knows_best(
    electors: Sequence[PeerId],
    known: tuple[Known, ...],
    contributors: Sequence[PeerId],
    heirs: tuple[PeerId, ...],
) -> None:
    register = Register(at_once=0, seats=1, known=known)
    assert electors_after(electors, register, contributors, is_break=True)[0] == heirs


def test_identities_that_contribute_once_displace_no_newcomer_that_continues() -> None:
    found = rounds([A], SETTLED, [A, B])
    for start in range(0, 180, 60):
        found = electors_after(*found, [A, B, *CROWD[start : start + 60]], is_break=True)
    assert found[1].rounds_of(B) == 4
    assert len(found[1].known) == CANDIDATES_MAX


def test_no_number_of_newcomers_in_a_group_keeps_its_electors_from_committing() -> None:
    history = Lineage(RUN, OWNER, OWNED)
    about = upon(history, [*PEERS[1:8], OWNER])
    certificate(about, [OWNER]).check(history.electors, history.register)
    votes = [vote(OWNER, about, b"x" * 32)]
    assert is_supported(about, b"x" * 32, votes)
    assert not is_supported(about, b"x" * 32, [vote(one, about, b"x" * 32) for one in PEERS[1:8]])


@pytest.mark.parametrize("change", ["electors", "known", "seats", "early hour", "hour of a minority"])
def test_a_certificate_with_other_electors_than_the_rule_says_is_refused(change: str) -> None:
    known = tuple(Known(one, 5) for one in (D, E))
    register = Register(at_once=0, seats=0, known=known)
    electors = (A, B, C)
    forged = {
        "electors": proposal(genesis(RUN), (*electors, D), [A, B, C, D], register=register),
        "known": proposal(genesis(RUN), electors, [A, B, C, D], register=Register(at_once=0, seats=0)),
        "seats": proposal(genesis(RUN), electors, [A, B, C, D], register=Register(at_once=0, seats=2)),
        "early hour": proposal(
            genesis(RUN), electors, [A, B, C, D], register=register, new_hour=True, is_break=True
        ),
        "hour of a minority": proposal(genesis(RUN), electors, [A, D, E], register=register, new_hour=True),
    }[change]
    with pytest.raises(PeerError, match="other electors"):
        certificate(forged, [A, B, C, D, E]).check(electors, register)


def test_a_growth_clock_grants_an_hour_after_it_has_passed_and_not_earlier() -> None:
    clock = GrowthClock()
    assert not clock.is_over(1000.0)
    assert not clock.is_too_early(1001.0, outside=False), "it may have started late"
    assert clock.is_too_early(1001.0, outside=True)
    assert clock.is_over(1000.0 + HOUR_S)
    clock.begin(is_sure=True)
    assert not clock.is_over(5000.0)
    assert clock.is_too_early(5001.0, outside=False)
    assert not clock.is_too_early(4990.0 + HOUR_S, outside=True), "clocks differ by a little"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_lists_stay_bounded_and_electors_unique_whatever_contributes(data: st.DataObject) -> None:
    pool = [*PEERS, *CROWD[:120]]
    register = data.draw(st.sampled_from([SETTLED, Register(), Register(at_once=ALWAYS)]))
    found: tuple[tuple[PeerId, ...], Register] = (tuple(PEERS[:3]), register)
    for _ in range(data.draw(st.integers(1, 12))):
        size = data.draw(st.integers(1, 100))
        group = data.draw(st.permutations(pool))[:size]
        is_break = data.draw(st.booleans())
        hour = not (is_break or found[1].at_once) and data.draw(st.booleans())
        before, seats = set(found[0]), found[1].seats
        formerly = {one.peer for one in found[1].known if one.was_elector}
        gone = data.draw(st.sets(st.sampled_from(pool), max_size=3)) - set(group)
        next_electors, next_register = electors_after(
            *found, group, gone=gone, is_break=is_break, new_hour=hour
        )
        assert len(next_register.misses) in (0, len(next_electors))
        assert 0 < len(next_electors) <= ELECTORS_MAX
        assert len(set(next_electors)) == len(next_electors)
        assert not {one.peer for one in next_register.known} & set(next_electors)
        if not found[1].at_once and (before & set(group) or not is_break):
            new = set(next_electors) - before - formerly
            assert len(new) <= (max(1, len(before) // 4) if hour else seats)
        found = next_electors, next_register


def idly(about: Proposal, idle: Sequence[PeerId], voters: Sequence[PeerId]) -> Certificate:
    """Return the certificate of a round to which these contributors sent nothing."""
    places = [about.contributors.index(peer) for peer in idle]
    result = make_result(b"r" * 32, places, len(about.contributors))
    return Certificate(
        proposal=about,
        result=result,
        votes={voter: vote(voter, about, result).signature for voter in voters},
        goodbyes={},
    )


@pytest.mark.parametrize("founding", [OWNED, INVITED], ids=["open", "invited"])
def test_contributors_that_sent_nothing_do_not_come_nearer_to_being_electors(founding: Founding) -> None:
    """Before, a certificate counted everybody that was to contribute."""
    history = Lineage(RUN, OWNER, founding)
    if founding is INVITED:
        history.extend(certificate(upon(history, [OWNER]), [OWNER]))
    for _ in range(ROUNDS_NEEDED + 1):
        about, register = upon(history, [OWNER, A, B]), history.register
        named = idly(about, [B], [OWNER, A])
        with pytest.raises(PeerError, match="from who worked"):
            named.check(history.electors, register)
        tally = Tally(about, history.electors, register)
        for voter in (OWNER, A):
            tally.add(vote(voter, about, named.result))
        assert tally.certificate is not None
        tally.certificate.check(history.electors, register)
        assert tally.certificate.workers == (OWNER, A)
        history.extend(tally.certificate)
        assert B not in history.electors
        assert history.register.rounds_of(B) == 0
    assert history.electors == (OWNER, A)
    assert decode_chain(encode_chain(history.chain())) == history.chain()
    history.chain().check(RUN)


def test_an_elector_whose_values_were_lost_has_not_missed_the_certificate() -> None:
    """Reducers could otherwise make an elector leave."""
    history = Lineage(RUN, OWNER, OWNED)
    history.extend(idly(upon(history, [OWNER, A]), [OWNER], [OWNER, A]))
    assert (history.electors, history.register.misses) == ((OWNER,), ())
    assert history.register.rounds_of(A) == 1


@pytest.mark.parametrize("tail", [b"\0", b"\4", b"\1\0"], ids=["nobody", "no contributor", "too long"])
def test_a_result_that_names_no_contributor_is_refused(tail: bytes) -> None:
    about = proposal(genesis(RUN), (), [A, B])
    signed = [vote(one, about, b"r" * 32 + tail) for one in (A, B)]
    with pytest.raises(PeerError, match="a result of"):
        Tally(about, ()).add(signed[0])
    assert not is_supported(about, b"r" * 32 + tail, signed)
    votes = {one.voter: one.signature for one in signed}
    with pytest.raises(PeerError, match="a result of"):
        Certificate(proposal=about, result=b"r" * 32 + tail, votes=votes, goodbyes={}).check((), Register())


def full_history() -> Lineage:
    """Return a history whose register is as large as it can be."""
    known = [Known(one, 127, index < ELECTORS_MAX) for index, one in enumerate(CROWD[64:192])]
    history = Lineage(RUN, CROWD[0], OWNED)
    misses = (MISSES_MAX - 1,) * (ELECTORS_MAX - 1) + (0,)
    register = Register(at_once=0, seats=16, known=tuple(known), misses=misses)
    about = proposal(history.head, CROWD[:64], [CROWD[0]], register=register)
    signed = Certificate(proposal=about, result=b"r" * 32, votes={CROWD[0]: bytes(64)}, goodbyes={})
    history.extend(signed)
    return history


def test_the_largest_root_fits_into_a_state_and_chains_keep_their_registers() -> None:
    history = full_history()
    assert len(chain_text(history.chain((history.head,)))) <= 2 * ROOT_BYTES_MAX
    assert decode_chain(encode_chain(history.chain())) == history.chain()
    root = history.chain((history.head,))
    assert decode_root(encode_root(root)) == root


@pytest.mark.parametrize(
    "values",
    [
        (0, 1, b""),
        (0, 1, b"x" * 32, b""),
        (0, 1, b"x" * 33 * 129, b""),
        (-1, 1, b"", b""),
        (0, 65, b"", b""),
        (0, True, b"", b""),
        (0, 1, None, b""),
        (0, 1, b"", None),
        (0, 1, b"", bytes([0, MISSES_MAX])),
        (0, 1, b"", bytes(ELECTORS_MAX + 1)),
    ],
)
def test_values_that_are_no_register_are_refused(values: tuple[object, ...]) -> None:
    root = encode_root(beginning(RUN, OWNED))
    with pytest.raises(PeerError):
        decode_root([*root[:5], *values])


@pytest.mark.parametrize("attempt", range(16))
def test_of_two_breaks_without_an_elector_the_hash_does_not_decide(attempt: int) -> None:
    """Anybody can compute hashes until one is the larger one."""
    honest, stranger = Lineage(RUN, A, OWNED), Lineage(RUN, B, OWNED)
    honest.extend(certificate(upon(honest, [A], is_break=True), [A]))
    stranger.extend(certificate(upon(stranger, [B], is_break=True, attempt=attempt), [B]))
    for _ in range(FOUNDING_MAX):
        honest.extend(certificate(upon(honest, [A]), [A]))
    assert honest.relation(stranger.chain()) is Relation.LOSES
