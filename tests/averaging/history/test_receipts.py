"""Receipts: which samples are credited, who signs, and which receipts of other peers are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgpack
import pytest

from averaging.history.certificate import Certificate, Vote, vote_statement
from averaging.history.encoding import decode_chain, encode_chain
from averaging.history.lineage import Lineage
from averaging.history.receipts import (
    CREDIT_RATIO_MAX,
    PEERS_MAX,
    RECEIPT_BYTES_MAX,
    RECEIPT_INTERVAL,
    Credit,
    Receipt,
    ReceiptBook,
    Totals,
    credited,
    decode_receipt,
    encode_receipt,
    read_totals,
    receipt_statement,
)
from swarm.core.errors import PeerError
from swarm.core.ids import PeerId
from tests.averaging.history.peers import PEERS, RUN, SIGNERS, certificate, upon

HEAD = bytes(range(32))


def made(history: Lineage, samples: Sequence[int], contributors: Sequence[PeerId] = PEERS[:3]) -> Certificate:
    about = replace(upon(history, contributors), samples=tuple(samples))
    return certificate(about, contributors)


def history_of(rounds: int, samples: Sequence[int] = (10, 20, 30)) -> Lineage:
    history = Lineage(RUN, PEERS[0])
    for _ in range(rounds):
        history.extend(made(history, samples))
    return history


def signed(totals: Totals, signers: Sequence[PeerId], head: bytes = HEAD) -> Receipt:
    statement = receipt_statement(RUN, head, totals)
    return Receipt(
        run=RUN, head=head, totals=totals, signatures={one: SIGNERS[one](statement) for one in signers}
    )


def test_the_vote_on_a_round_signs_the_samples_too() -> None:
    history = Lineage(RUN, PEERS[0])
    honest = made(history, [10, 20, 30])
    more = replace(honest.proposal, samples=(10, 20, 31))
    signature = honest.votes[PEERS[0]]
    with pytest.raises(PeerError, match="did not sign"):
        Vote(voter=PEERS[0], result=honest.result, signature=signature).check(more.digest())
    assert vote_statement(more.digest(), honest.result) != vote_statement(
        honest.proposal.digest(), honest.result
    )


def test_a_chain_keeps_its_samples_on_the_network() -> None:
    chain = decode_chain(encode_chain(history_of(3).chain()))
    chain.check(RUN)
    assert [one.proposal.samples for one in chain.certificates] == [(10, 20, 30)] * 3
    totals = read_totals(chain, RUN, [])
    assert totals.by_peer == {
        peer: Credit(3 * samples, 3) for peer, samples in zip(PEERS, (10, 20, 30), strict=False)
    }


def test_a_claim_counts_up_to_ten_times_the_median_of_the_electors() -> None:
    one = made(history_of(1), [100, 1 << 40, 50])
    assert credited(one, Totals()) == {
        PEERS[0]: 100,
        PEERS[1]: CREDIT_RATIO_MAX * 100,
        PEERS[2]: 50,
    }


def test_a_round_of_one_peer_counts_as_much_as_the_mean_of_those_with_witnesses() -> None:
    alone = made(history_of(1), [1 << 40], PEERS[:1])
    assert credited(alone, Totals()) == {PEERS[0]: 0}
    before = Totals(witnessed_rounds=4, witnessed_samples=400)
    assert credited(alone, before) == {PEERS[0]: 100}


def test_a_receipt_needs_the_signatures_of_a_quorum_of_electors() -> None:
    totals = Totals(certificates=RECEIPT_INTERVAL, by_peer={PEERS[0]: Credit(5, 1)})
    signed(totals, PEERS[:2]).check(PEERS[:3])
    with pytest.raises(PeerError, match="1 of 3 electors"):
        signed(totals, PEERS[1:2]).check(PEERS[:3])
    with pytest.raises(PeerError, match="1 of 3 electors"):
        signed(totals, PEERS[2:8]).check(PEERS[:3])  # peers that are no electors
    with pytest.raises(PeerError, match="0 of 0 electors"):
        signed(totals, PEERS[:2]).check(())
    forged = replace(signed(totals, PEERS[:2]), totals=replace(totals, by_peer={PEERS[0]: Credit(6, 1)}))
    with pytest.raises(PeerError, match="did not sign"):
        forged.check(PEERS[:3])


def test_a_book_signs_what_follows_from_its_history_and_takes_a_receipt_of_a_later_history() -> None:
    history = history_of(RECEIPT_INTERVAL + 5)
    books = [ReceiptBook(peer, RUN) for peer in PEERS[:2]]
    for book in books:
        book.follow(history.chain())
        book.sign(SIGNERS[PEERS[books.index(book)]])
    (head,) = books[0].unsigned
    assert books[0].newest is None
    books[0].add(head, {PEERS[1]: bytes(64)})  # a wrong signature
    assert books[0].newest is None
    books[0].add(head, books[1].signatures(head))
    assert books[0].newest is not None
    assert not books[0].unsigned

    later = ReceiptBook(PEERS[2], RUN)
    later.follow(history.chain((), 4))  # it knows the last four certificates
    assert later.totals is None
    with pytest.raises(PeerError, match="0 of 0 electors"):
        later.take(books[0].newest)  # which begin after that receipt
    later.follow(history.chain((), 6))
    later.follow(history.chain((), 16))
    later.take(decode_receipt(encode_receipt(books[0].newest)))
    assert later.totals == books[0].totals


def test_of_more_peers_than_a_receipt_names_those_with_the_fewest_samples_are_dropped() -> None:
    crowd = {PeerId(number.to_bytes(32, "big")): Credit(1000 + number, 1) for number in range(PEERS_MAX)}
    before = Totals(by_peer=crowd, samples=sum(one.samples for one in crowd.values()))
    after = before.after(made(history_of(1), [900, 1000, 1100]))
    assert len(after.by_peer) == PEERS_MAX
    assert after.samples == before.samples + 3000
    assert PEERS[2] in after.by_peer
    assert PEERS[0] not in after.by_peer
    largest = replace(
        after, by_peer={peer: Credit(1 << 61, 1 << 61) for peer in after.by_peer}, samples=1 << 61
    )
    assert len(encode_receipt(signed(largest, PEERS))) < RECEIPT_BYTES_MAX


def test_sums_stay_within_what_a_receipt_can_hold() -> None:
    most = Credit(1 << 62, 1 << 62)
    before = Totals(samples=1 << 62, by_peer=dict.fromkeys(PEERS[:3], most))
    after = before.after(made(history_of(1), [900, 1000, 1100]))
    assert after.by_peer == before.by_peer
    decode_receipt(encode_receipt(signed(after, PEERS[:2])))


BODY = [RUN, HEAD, [1, 1, 1, 1], PEERS[0].public_key, [5], [1], {}]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, 5),
        (1, "head"),
        (2, [1, 1, 1]),
        (2, [1, 1, 1, -1]),
        (2, [1, 1, 1, 1.5]),
        (2, [True, 1, 1, 1]),
        (3, b"short"),
        (3, 2 * PEERS[0].public_key),
        (4, [5, 6]),
        (4, ["5"]),
        (4, [1 << 63]),
        (5, None),
        (6, {b"short": bytes(64)}),
        (6, {32 * "a": bytes(64)}),
        (6, [1]),
        (6, {bytes([number]) * 32: bytes(64) for number in range(65)}),
        (6, {PEERS[0].public_key: 1 << 40}),
        (6, {PEERS[0].public_key: bytes(65)}),
    ],
)
def test_a_malformed_receipt_is_refused(place: int, value: object) -> None:
    decode_receipt(msgpack.packb(BODY))
    with pytest.raises(PeerError):
        decode_receipt(msgpack.packb([*BODY[:place], value, *BODY[place + 1 :]]))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x00", msgpack.packb([1, 2]), bytes(RECEIPT_BYTES_MAX + 1)])
def test_bytes_that_are_no_receipt_are_refused(data: bytes) -> None:
    with pytest.raises(PeerError):
        decode_receipt(data)


def test_former_electors_of_an_early_head_cannot_replace_what_a_peer_knows() -> None:
    """An attack that a review found: two peers decided when the run was small, and sign other totals for that
    head later.
    """
    history = Lineage(RUN, PEERS[0])
    for _ in range(RECEIPT_INTERVAL):
        history.extend(made(history, [10, 20], PEERS[:2]))
    early = history.head
    for _ in range(2 * RECEIPT_INTERVAL):
        history.extend(made(history, [10, 20, 30, 40, 50], PEERS[:5]))
    true = ReceiptBook(PEERS[4], RUN)
    true.follow(history.chain())
    before = true.totals
    lie = Totals(
        certificates=RECEIPT_INTERVAL * 1000, samples=1 << 40, by_peer={PEERS[0]: Credit(1 << 40, 9)}
    )
    forged = signed(lie, PEERS[:2], early)
    forged.check(PEERS[:2])
    with pytest.raises(PeerError, match="other totals"):
        true.take(forged)
    assert true.totals == before

    for one, signer in zip(PEERS[:3], PEERS[:3], strict=True):
        book = ReceiptBook(one, RUN)
        book.follow(history.chain())
        book.sign(SIGNERS[signer])
        (head,) = book.unsigned
        true.add(head, book.signatures(head))
    assert true.newest is not None
    newcomer = ReceiptBook(PEERS[5], RUN)
    newcomer.follow(history.chain((), 2 * RECEIPT_INTERVAL + 1))
    newcomer.take(forged)  # it knows nothing better
    assert newcomer.totals != before
    newcomer.take(true.newest)  # of a later head
    assert newcomer.totals == before
    with pytest.raises(PeerError, match="other totals"):
        newcomer.take(forged)
    assert newcomer.totals == before
