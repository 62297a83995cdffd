from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from averaging.history.certificate import Certificate, RoundKind, genesis, goodbye_statement
from averaging.history.chain import Chain, Relation
from averaging.history.encoding import (
    CHAIN_BYTES_MAX,
    chain_text,
    decode_chain,
    encode_chain,
    read_chain_text,
)
from averaging.history.grace import grace_s
from averaging.history.lineage import CERTIFICATES_MAX, Lineage
from swarm.core.errors import PeerError
from swarm.core.ids import PeerId
from tests.averaging.history.peers import PEERS, RUN, SIGNERS, certificate, proposal, upon

A, B, C, D, E = PEERS[:5]


def lineage(own: PeerId = A) -> Lineage:
    return Lineage(RUN, own)


def following(
    after: Lineage,
    members: Sequence[PeerId],
    voters: Iterable[PeerId] | None = None,
    *,
    is_break: bool = False,
) -> Certificate:
    """Return the certificate of a round of these members on the head of a history."""
    about = upon(after, members, is_break=is_break)
    return certificate(about, members if voters is None else voters, content=b"".join(members_key(members)))


def members_key(members: Sequence[PeerId]) -> list[bytes]:
    return [member.public_key for member in members]


def together(members: Sequence[PeerId], rounds: int) -> list[Lineage]:
    """Return the histories of these peers after common rounds."""
    histories = [lineage(member) for member in members]
    for _ in range(rounds):
        step(histories, members)
    return histories


def step(histories: Iterable[Lineage], members: Sequence[PeerId], *, is_break: bool = False) -> None:
    """Let these members commit a round, and these histories take it."""
    histories = list(histories)
    made = following(histories[0], members, is_break=is_break)
    for history in histories:
        history.extend(made)


def alone(history: Lineage, *, is_break: bool, group_id: bytes = b"g" * 32) -> Certificate:
    """Return the certificate of a round of this history's peer alone."""
    return history.alone(
        epoch=history.epoch + 1,
        kind=RoundKind.EPOCH,
        group_id=group_id,
        is_break=is_break,
        sign=SIGNERS[history.own],
    )


def relation(own: Lineage, other: Lineage) -> Relation:
    """Return the relation that `own` finds, with the chain that `other` would send it."""
    return own.relation(decode_chain(encode_chain(other.chain(own.heads()))))


def test_equal_histories_are_the_same_and_a_shorter_one_is_behind() -> None:
    a, b = together([A, B], 3)
    assert relation(a, b) is Relation.SAME
    step([a], [A, B])
    assert (relation(a, b), relation(b, a)) == (Relation.BEHIND, Relation.AHEAD)


def test_a_peer_that_slept_for_many_rounds_is_behind_and_for_too_many_rounds_unrelated() -> None:
    a, b = together([A, B], 3)
    for _ in range(CERTIFICATES_MAX - 1):
        step([a], [A])
    assert relation(b, a) is Relation.AHEAD
    for _ in range(2):
        step([a], [A])
    assert relation(b, a) is Relation.UNRELATED


@pytest.mark.parametrize("behind", [1, 40, CERTIFICATES_MAX - 1])
def test_a_peer_that_lags_in_a_history_longer_than_what_is_kept_gets_exactly_what_it_lacks(
    behind: int,
) -> None:
    a, b = together([A, B], 2 * CERTIFICATES_MAX)
    heads = [a.head]
    for _ in range(behind):
        step([a], [A, B])
        heads.append(a.head)
    lacking = a.chain(b.heads())
    assert [one.proposal.head for one in lacking.certificates] == heads[:-1]
    assert (lacking.head, lacking.root_epoch) == (b.head, b.epoch)
    assert [a.epoch_at(head) for head in heads] == list(range(b.epoch, a.epoch + 1))
    assert relation(b, a) is Relation.AHEAD
    b.adopt(lacking)
    assert (b.head, b.epoch) == (a.head, a.epoch)
    step([a], [A, B])
    assert relation(b, a) is Relation.AHEAD


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_side_that_continued_without_a_break_continues(order: tuple[int, int]) -> None:
    a, b, c, _ = together([A, B, C, D], 2)
    step([a, b], [A, B])  # half of them, with the most senior
    step([c], [C, D], is_break=True)
    for _ in range(5):
        step([c], [C, D])  # however far it goes
    sides = [(a, c, Relation.LOSES), (c, b, Relation.WINS)]
    for own, other, expected in (sides[index] for index in order):
        assert relation(own, other) is expected


def test_of_two_breaks_the_one_with_more_of_the_electors_continues() -> None:
    histories = together([A, B, C, D, E], 2)
    small, large = histories[0], histories[2]
    step([small], [A, B], is_break=True)
    step([large], [C, D, E], is_break=True)
    assert (relation(small, large), relation(large, small)) == (Relation.WINS, Relation.LOSES)


def test_of_two_equal_breaks_the_one_with_the_most_senior_elector_continues() -> None:
    histories = together([A, B, C, D], 2)
    one, other = histories[1], histories[2]
    step([one], [B], is_break=True)
    step([other], [C], is_break=True)
    assert (relation(one, other), relation(other, one)) == (Relation.LOSES, Relation.WINS)


def test_a_peer_that_restarts_from_a_checkpoint_of_a_break_still_gives_way_to_the_quorum() -> None:
    a, b, c = together([A, B, C], 2)
    step([a, b], [A, B])
    for _ in range(2):
        step([c], [C], is_break=True)
    restarted = lineage(C)
    restarted.adopt(read_chain_text(chain_text(c.chain())))
    assert restarted.head == c.head
    assert restarted.relation(a.chain()) is Relation.WINS
    assert restarted.epochs_after(a.chain()) == 2
    forged = c.chain()
    votes = dict.fromkeys(forged.certificates[-1].votes, bytes(64))
    forged = replace(
        forged, certificates=(*forged.certificates[:-1], replace(forged.certificates[-1], votes=votes))
    )
    assert forged.valid_part(RUN) == forged.end, "of a chain that proves nothing only the head is taken"
    with pytest.raises(PeerError, match="at most"):
        read_chain_text("00" * (CHAIN_BYTES_MAX + 1))


def test_three_histories_agree_which_one_continues() -> None:
    histories = together([A, B, C, D, E], 1)
    lines = [histories[0], histories[2], histories[4]]
    step([lines[0]], [A, B], is_break=True)
    step([lines[1]], [C, D], is_break=True)
    step([lines[2]], [E], is_break=True)
    for own in (1, 2):
        assert relation(lines[own], lines[0]) is Relation.WINS
    assert relation(lines[2], lines[1]) is Relation.WINS
    assert relation(lines[1], lines[2]) is Relation.LOSES


def test_peers_that_come_later_change_nothing_about_which_side_continues() -> None:
    a, b, c, d = together([A, B, C, D], 2)
    step([a, b, c], [A, B, C])
    step([d], [D], is_break=True)
    for _ in range(3):
        step([d], [D, *PEERS[5:8], E])  # many newcomers
    assert (relation(a, d), relation(d, a)) == (Relation.LOSES, Relation.WINS)


def test_a_stranger_cannot_lead_a_peer_away_with_a_break() -> None:
    a, b = together([A, B], 2)
    stranger = lineage(E)
    stranger.adopt(b.chain())
    step([stranger], [D, E], is_break=True)
    assert relation(a, stranger) is Relation.LOSES
    a.may_break(0.0, 1.0)
    assert relation(a, stranger) is Relation.LOSES


def test_a_peer_that_waits_for_a_quorum_follows_an_elector_that_continued_with_a_break() -> None:
    a, b, c = together([A, B, C], 2)
    step([c], [C], is_break=True)
    assert relation(a, c) is Relation.LOSES  # it has not missed a quorum
    b.may_break(0.0, 1.0)
    assert relation(b, c) is Relation.AHEAD


def test_an_invalid_history_is_refused() -> None:
    a, b = together([A, B], 2)
    step([b], [A, B])
    valid = b.chain()
    forged = certificate(upon(a, [D]), [D])
    with pytest.raises(PeerError, match="no quorum"):
        a.relation(Chain(head=a.head, electors=a.electors, certificates=(forged,)))
    with pytest.raises(PeerError, match="do not follow"):
        Chain(head=valid.head, electors=valid.electors, certificates=valid.certificates[1:]).check(RUN)


def test_runs_that_began_apart_unite_with_the_one_that_is_further() -> None:
    one, other = together([A], 1)[0], together([B], 4)[0]
    assert (relation(one, other), relation(other, one)) == (Relation.WINS, Relation.LOSES)


def test_a_lineage_votes_once_on_a_head_until_the_attempt_is_dead() -> None:
    a, _ = together([A, B], 2)
    first = upon(a, [A, B], attempt=1)
    second = upon(a, [A, B], attempt=2)
    assert a.refusal(first, b"x" * 32) == ""
    a.promise(first, b"x" * 32)
    assert a.refusal(first, b"x" * 32) == ""
    assert "another attempt" in a.refusal(second, b"x" * 32)
    assert "another attempt" in a.refusal(first, b"y" * 32)
    assert not a.has_quorum({B})
    a.release(second)
    assert a.is_promised
    a.release(first)
    assert a.refusal(second, b"x" * 32) == ""
    assert "failed" in a.refusal(first, b"y" * 32)


def test_a_vote_binds_openly_once_its_attempt_has_ended_without_an_outcome() -> None:
    a, _ = together([A, B], 2)
    first, second = upon(a, [A, B], attempt=1), upon(a, [A, B], attempt=2)
    a.promise(first, b"x" * 32)
    assert not a.is_bound  # the round runs: it may be committed at any moment
    assert not a.leave(second)
    assert not a.is_bound
    assert a.leave(first)
    assert a.is_bound
    a.release(first)
    assert not a.is_bound
    assert not a.leave(first)


def test_the_vote_of_an_elector_outside_of_the_group_binds_openly_at_once() -> None:
    a, _ = together([A, B], 2)
    a.promise(upon(a, [B]), b"x" * 32, outside=True)
    assert a.is_bound
    step([a], [A, B])
    assert not a.is_bound


def test_a_lineage_votes_on_its_own_head_only() -> None:
    a, _ = together([A, B], 2)
    about = proposal(genesis(RUN), (), [A, B])
    assert "another head" in a.refusal(about, b"x" * 32)


def test_a_restored_elector_does_not_vote_on_its_former_head() -> None:
    b = together([A, B], 2)[1]
    again = lineage(A)
    again.adopt(b.chain())
    about = upon(again, [A, B])
    assert "restored" in again.refusal(about, b"x" * 32)
    assert again.refusal(upon(again, [A], is_break=True), b"x" * 32) == ""
    step([again], [A, B])
    assert not again.abstains


def test_loading_the_present_head_again_keeps_the_promise() -> None:
    a, b = together([A, B], 2)
    a.promise(upon(a, [A, B]), b"x" * 32)
    a.adopt(b.chain())
    assert a.is_promised


def test_the_grace_counts_only_awake_time_and_restarts_after_a_quorum() -> None:
    a, _ = together([A, B], 1)
    assert not a.may_break(0.0, epoch_s=20.0)
    assert not a.may_break(3600.0, epoch_s=20.0)  # it was suspended
    now_s = 3600.0
    while not a.may_break(now_s, epoch_s=20.0):
        now_s += 1.0
    assert 17.0 <= now_s - 3600.0 <= 20.0
    a.found_quorum()
    assert not a.may_break(now_s, epoch_s=20.0)
    assert grace_s(1.0) == 15.0
    assert grace_s(600.0) == 60.0
    assert grace_s(600.0, refused=True) == 1.0


@pytest.mark.parametrize(
    ("own", "electors", "abstains"),
    [(A, [A, B], True), (B, [A, B], False), (A, [A, B, C], False), (A, [A], False)],
    ids=["senior of two", "junior of two", "one of three", "the only one"],
)
def test_a_peer_that_is_a_quorum_by_itself_abstains_after_a_sleep(
    own: PeerId, electors: list[PeerId], abstains: bool
) -> None:
    one = together(electors, 2)[electors.index(own)]
    one.wake()
    assert one.abstains is abstains
    assert one.has_quorum(electors) is not abstains or len(electors) == 1
    assert bool(one.refusal(upon(one, electors), b"x" * 32)) is abstains


def test_a_peer_that_has_slept_follows_the_elector_that_continued_with_a_break() -> None:
    a, b = together([A, B], 2)
    b.extend(alone(b, is_break=True))
    assert a.relation(b.chain()) is Relation.LOSES
    a.wake()
    assert not a.has_quorum(())
    assert not a.may_break(0.0, epoch_s=1.0)
    assert a.relation(b.chain()) is Relation.AHEAD


def test_a_peer_that_has_slept_does_not_wait_for_one_that_has_left() -> None:
    a, _ = together([A, B], 2)
    a.take_goodbye(B, SIGNERS[B](goodbye_statement(RUN, a.head)))
    a.wake()
    assert a.has_quorum(())


def test_a_peer_alone_makes_a_certificate_that_others_accept() -> None:
    a = lineage()
    a.extend(alone(a, is_break=False))
    newcomer = lineage(B)
    assert newcomer.relation(a.chain()) is Relation.AHEAD
    newcomer.adopt(a.chain())
    assert (newcomer.head, newcomer.electors, newcomer.epoch) == (a.head, (A,), 1)


def test_adopting_another_history_keeps_what_is_common() -> None:
    a, b = together([A, B], 5)
    step([a], [A])
    step([b], [B], is_break=True)
    step([b], [B])
    assert b.epochs_after(a.chain(b.heads())) == 2
    assert a.epochs_after(a.chain(a.heads())) == 0
    b.adopt(a.chain(b.heads()))
    assert relation(b, a) is Relation.SAME
    assert len(b.chain().certificates) == 6


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x90", bytes(CHAIN_BYTES_MAX + 1)])
def test_bytes_that_are_no_history_are_refused(data: bytes) -> None:
    with pytest.raises(PeerError):
        decode_chain(data)


@pytest.mark.parametrize("flipped", range(0, 600, 7))
def test_a_history_with_a_changed_byte_is_refused_or_unrelated(flipped: int) -> None:
    a, b = together([A, B], 1)
    step([b], [A, B])
    data = bytearray(encode_chain(b.chain(a.heads())))
    data[flipped % len(data)] ^= 0x41
    try:
        found = a.relation(decode_chain(bytes(data)))
    except PeerError:
        return
    assert found in (Relation.UNRELATED, Relation.AHEAD)
    if found is Relation.AHEAD:  # an unused byte of the root
        assert decode_chain(bytes(data)).last_head == b.head


def test_a_restarted_elector_does_not_vote_on_a_head_to_which_it_returned() -> None:
    a, b, c = together([A, B, C], 2)
    checkpoint = b.chain()
    step([a, b, c], [A, B, C])
    # B votes with A for a certificate that C never hears of, and ends
    again = lineage(B)
    again.adopt(checkpoint)
    again.extend(alone(again, is_break=True))
    assert relation(again, c) is Relation.WINS
    again.adopt(c.chain(again.heads()))
    assert again.head == c.head
    assert "restored" in again.refusal(upon(c, [B, C]), b"x" * 32)


def test_an_elector_that_merely_fell_behind_votes_on_the_heads_that_are_newer_than_its_process() -> None:
    a, b, c = together([A, B, C], 2)
    step([a, b], [A, B, C])
    c.adopt(a.chain(c.heads()))
    assert c.refusal(upon(c, [B, C]), b"x" * 32) == ""


def test_adopting_takes_nothing_that_lies_before_the_newest_common_head() -> None:
    a, b = together([A, B], 3)
    step([b], [A, B])
    forged = certificate(proposal(bytes(32), [E], [E]), [])
    sent = Chain(head=bytes(32), electors=(E,), certificates=(forged, *b.chain(a.heads()).certificates))
    assert a.relation(sent) is Relation.AHEAD  # it checks what follows the common head
    a.adopt(sent)
    assert a.chain() == b.chain()


def test_a_promise_is_for_one_proposal_even_if_a_leader_gives_two_groups_the_same_name() -> None:
    a, _, _ = together([A, B, C], 2)
    first = upon(a, [A, B], attempt=1)
    second = upon(a, [A, C], attempt=1)
    a.promise(first, b"x" * 32)
    assert "another attempt" in a.refusal(second, b"x" * 32)
    a.release(second)
    assert a.is_promised


def test_an_elector_that_has_voted_elsewhere_may_vote_for_none_and_then_for_nothing_else() -> None:
    a, _, _ = together([A, B, C], 2)
    first = upon(a, [A, B], attempt=1)
    second = upon(a, [B, C], attempt=2)
    a.promise(first, b"x" * 32)
    assert a.refusal(first, b"")
    assert a.refusal(second, b"") == ""
    a.promise(second, b"")
    a.release(first)
    assert "none" in a.refusal(second, b"x" * 32)


def test_a_restored_elector_does_not_sign_for_attempts_before_its_restart() -> None:
    b = together([A, B, C], 2)[1]
    again = lineage(A)
    again.adopt(b.chain())
    assert again.refusal(upon(again, [B, C]), b"")
    assert again.refusal(upon(again, [A, B]), b"") == ""  # a member of a new group


@pytest.mark.parametrize("result", [b"", b"x" * 32])
def test_an_elector_that_has_voted_on_a_head_does_not_say_goodbye_there(result: bytes) -> None:
    a, b = together([A, B], 2)
    about = upon(a, [A, B])
    assert a.may_say_goodbye()
    a.promise(about, result)
    a.release(about)
    assert not a.may_say_goodbye()
    step([a, b], [A, B])
    assert a.may_say_goodbye()


def test_the_goodbye_of_an_elector_that_committed_a_moment_earlier_counts() -> None:
    a, b, c = together([A, B, C], 2)
    made = following(c, [A, B, C])
    c.extend(made)
    goodbye = SIGNERS[C](goodbye_statement(RUN, c.head))
    for early in (a, b):
        early.take_goodbye(C, goodbye)
        early.take_goodbye(B, b"not a signature")
        assert not early.goodbyes
        early.extend(made)
        assert set(early.goodbyes) == {C}
    assert a.has_quorum(()), "it is one of the two electors that are left, and the more senior one"
    step([a], [A])
    assert not a.goodbyes, "of another head"


def test_a_peer_that_repeats_a_round_alone_after_a_restart_comes_to_another_head() -> None:
    first, again = together([A], 2)[0], together([A], 2)[0]
    first.extend(alone(first, is_break=False, group_id=b"1" * 32))
    again.extend(alone(again, is_break=False, group_id=b"2" * 32))
    assert first.head != again.head


def test_a_state_from_before_a_round_over_the_state_cannot_be_brought_up_to_date() -> None:
    """Regression test: a newcomer that took one and followed the history had the head of the others, and
    other parameters until the next round over the state.
    """
    history = together([A, B], 1)[0]
    before = history.head
    step([history], [A, B])
    assert history.is_repeatable(before)
    about = replace(upon(history, [A, B]), kind=RoundKind.STATE, epoch=history.epoch)
    history.extend(certificate(about, [A, B]))
    assert not history.is_repeatable(before)
    assert history.is_repeatable(history.head)
    step([history], [A, B])
    assert not history.is_repeatable(before)


def test_a_chain_says_how_many_contributed_now_and_some_epochs_ago() -> None:
    grown = lineage()
    assert grown.chain().contributors(2) == (0, 0)
    for epoch, members in enumerate(([A], [A, B], [A, B, C], [A, B, C, D]), 1):
        about = proposal(grown.head, grown.electors, members, epoch=epoch, register=grown.register)
        grown.extend(certificate(about, members))
    assert grown.chain().contributors(1) == (4, 3)
    assert grown.chain().contributors(3) == (4, 1)
    assert grown.chain().contributors(100) == (4, 1), "the first one that is known"
    state = replace(upon(grown, [A, B]), kind=RoundKind.STATE, epoch=4)
    grown.extend(certificate(state, [A, B]))
    assert grown.chain().contributors(1) == (4, 3), "a round over the state is no epoch"
