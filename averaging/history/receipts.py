"""Receipts: how much each peer has given to a run, summed up from its certificates and signed by electors.
Pure.

Every certificate says how many samples each contributor brought, and a quorum of the electors has signed it.
The totals at a head follow from all certificates before it, so all peers of a history compute the same ones.
Peers keep only recent certificates. So after every `RECEIPT_INTERVAL` certificates, the electors sign the
totals: a receipt. A peer that has the newest receipt and the certificates after it knows what every peer gave
since the run began, and needs no earlier receipt.
"""

from __future__ import annotations

import heapq
import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack
from blake3 import blake3

from averaging.history.certificate import SIGNATURE_BYTES, Certificate, RoundKind, genesis
from averaging.history.chain import Chain
from averaging.history.electors import ELECTORS_MAX, is_quorum
from averaging.history.encoding import decode_peers, encode_peers
from swarm.core.errors import PeerError
from swarm.core.identity import verify
from swarm.core.ids import PeerId

# certificates between two receipts. Too small: electors sign and call all the time; too large: fewer receipts
# lie within the 256 certificates that peers keep, and all of them may lack a quorum
RECEIPT_INTERVAL: Final = 16
PEERS_MAX: Final = 4096  # peers in a receipt; if there are more, those with the fewest samples are dropped
# a contributor is credited with at most this many times the median of the electors in its round. Too small: a
# large GPU among laptops is credited with less than it gave; too large: a member that lies is credited with
# that much more
CREDIT_RATIO_MAX: Final = 10
COLLECTORS: Final = 3  # electors to which the others send their signatures
RECEIPT_BYTES_MAX: Final = 320 << 10
_MARKS_MAX: Final = 18  # totals that are kept: those of all receipts within the certificates that are kept
_COUNT_MAX: Final = 1 << 62
_RECEIPT: Final = b"swarm receipt\0"


@dataclass(frozen=True, slots=True)
class Credit:
    """The samples and rounds that one peer has given."""

    samples: int = 0
    rounds: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The sums of all certificates up to a head."""

    certificates: int = 0
    samples: int = 0  # of all peers, including dropped ones
    witnessed_rounds: int = 0  # rounds with several contributors
    witnessed_samples: int = 0
    by_peer: Mapping[PeerId, Credit] = field(default_factory=dict)

    def after(self, certificate: Certificate) -> Totals:
        """Return the totals after one more certificate."""
        credits = credited(certificate, self)
        by_peer = dict(self.by_peer)
        for peer, samples in credits.items():
            before = by_peer.get(peer, Credit())
            by_peer[peer] = Credit(
                samples=min(before.samples + samples, _COUNT_MAX), rounds=min(before.rounds + 1, _COUNT_MAX)
            )
        if len(by_peer) > PEERS_MAX:  # one pass for all: this runs on the network thread
            for peer in heapq.nsmallest(
                len(by_peer) - PEERS_MAX, by_peer, key=lambda peer: (by_peer[peer].samples, peer.public_key)
            ):
                del by_peer[peer]
        whole = sum(credits.values())
        is_witnessed = len(credits) > 1 and whole > 0
        return Totals(
            certificates=self.certificates + 1,
            samples=min(self.samples + whole, _COUNT_MAX),
            witnessed_rounds=self.witnessed_rounds + is_witnessed,
            witnessed_samples=min(self.witnessed_samples + whole * is_witnessed, _COUNT_MAX),
            by_peer=by_peer,
        )


def credited(certificate: Certificate, before: Totals) -> dict[PeerId, int]:
    """Return the samples with which a certificate credits each peer that worked.

    Nobody can check how many samples a peer has computed. So a peer is credited with at most
    `CREDIT_RATIO_MAX` times the median of the electors in its round, which fewer than half of them cannot
    raise. A peer alone in its round, which has no witness, is credited with at most the mean of the rounds
    that had one.
    """
    proposal = certificate.proposal
    if proposal.kind is not RoundKind.EPOCH:
        return {}
    workers = certificate.workers
    claims = dict(zip(proposal.contributors, proposal.samples, strict=False))
    deciding = [claims[peer] for peer in proposal.deciders if peer in claims]
    if len(proposal.contributors) > 1:
        most = CREDIT_RATIO_MAX * statistics.median_low(deciding) if deciding else 0
    else:
        most = before.witnessed_samples // max(before.witnessed_rounds, 1)
    return {peer: min(claims.get(peer, 0), most) for peer in workers}


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The totals at a head, signed by electors of that head."""

    run: str
    head: bytes
    totals: Totals
    signatures: Mapping[PeerId, bytes]

    def check(self, electors: Sequence[PeerId]) -> None:
        """Raise PeerError unless a quorum of the electors of its head has signed it."""
        if self.totals.certificates % RECEIPT_INTERVAL:
            raise PeerError(f"a receipt is made after every {RECEIPT_INTERVAL} certificates")
        statement = receipt_statement(self.run, self.head, self.totals)
        for peer, signature in self.signatures.items():
            if not verify(peer, statement, signature):
                raise PeerError(f"a receipt that {peer} did not sign")
        if not electors or not is_quorum(electors, self.signatures):
            signers = sum(peer in self.signatures for peer in electors)
            raise PeerError(f"a receipt that {signers} of {len(electors)} electors have signed")


def receipt_statement(run: str, head: bytes, totals: Totals) -> bytes:
    """Return the bytes that an elector signs."""
    return _RECEIPT + blake3(msgpack.packb(_statement(run, head, totals))).digest()


def encode_receipt(receipt: Receipt) -> bytes:
    """Return a receipt as bytes, at most `RECEIPT_BYTES_MAX`."""
    signatures = {peer.public_key: signature for peer, signature in receipt.signatures.items()}
    packed: bytes = msgpack.packb([*_statement(receipt.run, receipt.head, receipt.totals), signatures])
    return packed


def decode_receipt(data: bytes) -> Receipt:
    """Parse a receipt. Raise PeerError when it is malformed. Signatures are not checked here."""
    if len(data) > RECEIPT_BYTES_MAX:
        raise PeerError(f"a receipt has at most {RECEIPT_BYTES_MAX} bytes, not {len(data)}")
    try:
        run, head, numbers, keys, samples, rounds, signatures = msgpack.unpackb(data, strict_map_key=False)
        peers = decode_peers(keys, PEERS_MAX)
        if not isinstance(run, str) or not isinstance(head, bytes) or len(signatures) > ELECTORS_MAX:
            raise PeerError("a receipt names a run and a head, and has a signature of each elector")
        if len(set(peers)) != len(peers):
            raise PeerError("a receipt names a peer only once")
        by_peer = {
            peer: Credit(given, worked) for peer, given, worked in zip(peers, samples, rounds, strict=True)
        }
        numbers = dict(zip(_NUMBERS, numbers, strict=True))
        every = [*numbers.values(), *samples, *rounds]
        if any(type(number) is not int or not 0 <= number <= _COUNT_MAX for number in every):
            raise PeerError("the numbers in a receipt are whole numbers")
        if any(type(one) is not bytes or len(one) != SIGNATURE_BYTES for one in signatures.values()):
            raise PeerError(f"a signature has {SIGNATURE_BYTES} bytes")
        signed = {PeerId(key): signature for key, signature in signatures.items()}
    except PeerError:
        raise
    except (ValueError, TypeError, AttributeError, RecursionError, msgpack.UnpackException) as error:
        raise PeerError(f"not a receipt: {error}") from None
    return Receipt(run=run, head=head, totals=Totals(by_peer=by_peer, **numbers), signatures=signed)


_NUMBERS: Final = ("certificates", "samples", "witnessed_rounds", "witnessed_samples")


def _statement(run: str, head: bytes, totals: Totals) -> list[Any]:
    peers = sorted(totals.by_peer)
    return [
        run,
        head,
        [getattr(totals, name) for name in _NUMBERS],
        encode_peers(peers),
        [totals.by_peer[peer].samples for peer in peers],
        [totals.by_peer[peer].rounds for peer in peers],
    ]


def sum_up(chain: Chain, run: str, known: Mapping[bytes, Totals]) -> dict[bytes, Totals]:
    """Return the totals at the heads of a chain, starting at the newest head whose totals are `known`, or at
    the beginning of the run; empty where the chain begins later than both. The caller has checked the chain.
    """
    heads = [chain.head, *(one.head for one in chain.certificates)]
    start = next((place for place in reversed(range(len(heads))) if heads[place] in known), None)
    if start is not None:
        totals = known[heads[start]]
    elif chain.head == genesis(run):
        start, totals = 0, Totals()
    else:
        return {}
    found = {heads[start]: totals}
    for certificate in chain.certificates[start:]:
        totals = found[certificate.head] = totals.after(certificate)
    return found


def electors_at(chain: Chain, head: bytes) -> tuple[PeerId, ...]:
    """Return the electors of a head of a chain; none where it is no head of it."""
    if head == chain.head:
        return chain.electors
    return next((one.electors for one in chain.certificates if one.head == head), ())


def read_totals(chain: Chain, run: str, receipts: Iterable[Receipt]) -> Totals:
    """Return the totals at the end of a chain that the caller has checked, from the receipts that other peers
    give. Raise PeerError that says why there are none.
    """
    known, reason = {}, "no peer has a receipt of this run yet"
    for receipt in receipts:
        try:
            if receipt.run != run:
                raise PeerError("the receipt is of another run")
            receipt.check(electors_at(chain, receipt.head))
            known[receipt.head] = receipt.totals
        except PeerError as error:
            reason = str(error)
    found = sum_up(chain, run, known)
    if not found:
        raise PeerError(f"the contributions to run {run} are not known: {reason}")
    return found[chain.last_head]


@dataclass(slots=True)
class _Mark:
    """The totals at a head that the electors sign, with the signatures that are known."""

    totals: Totals
    electors: tuple[PeerId, ...]
    statement: bytes
    signatures: dict[PeerId, bytes] = field(default_factory=dict)


class ReceiptBook:
    """The totals of one peer's history, and its receipts."""

    def __init__(self, own: PeerId, run: str) -> None:
        self._own, self._run = own, run
        self._chain: Chain | None = None
        self._head = b""  # the head that `totals` belongs to
        # None: this peer joined after the run began, and has no receipt yet
        self.totals: Totals | None = None
        self._marks: OrderedDict[bytes, _Mark] = OrderedDict()  # by head, newest last
        self.newest: Receipt | None = None  # the newest receipt that a quorum has signed
        # head of the receipt that the totals were taken from; None: this peer has computed them itself
        self._adopted: bytes | None = None
        # a receipt from disk, which is used once its head is in the history
        self._saved: Receipt | None = None

    def follow(self, chain: Chain) -> None:
        """Update the totals from this peer's history, given as all certificates that it keeps, whenever its
        head has moved.
        """
        self._chain = chain
        last = chain.certificates[-1] if chain.certificates else None
        if last is not None and self.totals is not None and last.proposal.head == self._head:
            self._head, self.totals = last.head, self.totals.after(last)
            self._mark(self._head, self.totals, last.electors)
            return
        self._sum_up()

    def _sum_up(self) -> None:
        chain = self._chain
        assert chain is not None
        if self._saved is not None and self._is_signed(self._saved):
            self.newest, self._saved = self._saved, None
        heads = {chain.head, *(one.head for one in chain.certificates)}
        known = {head: mark.totals for head, mark in self._marks.items() if head in heads}
        found = sum_up(chain, self._run, known)
        if found and not known:
            self._adopted = None  # from the beginning of the run
        elif not found and self.newest is not None:
            found = sum_up(chain, self._run, {self.newest.head: self.newest.totals})
            self._adopted = self.newest.head if found else None
        self._head, self.totals = chain.last_head, found.get(chain.last_head)
        for head in [head for head in self._marks if head not in found]:
            del self._marks[head]
        for head, totals in found.items():
            if head != chain.head:
                self._mark(head, totals, electors_at(chain, head))

    def _mark(self, head: bytes, totals: Totals, electors: tuple[PeerId, ...]) -> None:
        if totals.certificates % RECEIPT_INTERVAL or head in self._marks:
            return
        self._marks[head] = _Mark(totals, electors, receipt_statement(self._run, head, totals))
        if len(self._marks) > _MARKS_MAX:
            self._marks.popitem(last=False)

    # ---- signatures

    @property
    def unsigned(self) -> dict[bytes, Mapping[PeerId, bytes]]:
        """Return the newest head that no quorum is known to have signed, with the known signatures."""
        for head, mark in reversed(self._marks.items()):
            is_signed = (
                self.newest is not None and self.newest.totals.certificates >= mark.totals.certificates
            )
            return {} if is_signed else {head: dict(mark.signatures)}
        return {}

    def signatures(self, head: bytes) -> Mapping[PeerId, bytes]:
        """Return the known signatures for the totals at a head."""
        mark = self._marks.get(head)
        return dict(mark.signatures) if mark is not None else {}

    def sign(self, sign: Callable[[bytes], bytes]) -> None:
        """Sign the totals of all heads at which this peer is an elector."""
        for head, mark in list(self._marks.items()):
            if self._own in mark.electors and self._own not in mark.signatures:
                self._add(head, self._own, sign(mark.statement))

    def add(self, head: bytes, signatures: Mapping[PeerId, bytes]) -> None:
        """Take the signatures of electors for the totals at a head; wrong ones are dropped."""
        mark = self._marks.get(head)
        if mark is None:
            return
        for peer, signature in signatures.items():
            is_new = peer in mark.electors and peer not in mark.signatures
            if is_new and verify(peer, mark.statement, signature):
                self._add(head, peer, signature)

    def _add(self, head: bytes, peer: PeerId, signature: bytes) -> None:
        mark = self._marks[head]
        mark.signatures[peer] = signature
        if is_quorum(mark.electors, mark.signatures):
            self._take(
                Receipt(run=self._run, head=head, totals=mark.totals, signatures=dict(mark.signatures))
            )

    def collectors(self, head: bytes) -> list[PeerId]:
        """Return the electors to which the others send their signatures for a head."""
        mark = self._marks.get(head)
        order = sorted(
            mark.electors if mark else (), key=lambda peer: blake3(head + peer.public_key).digest()
        )
        return order[:COLLECTORS]

    # ---- receipts

    def take(self, receipt: Receipt) -> None:
        """Take a receipt of another peer. Raise PeerError when its head is not in this peer's history, no
        quorum of the electors there has signed it, or it contradicts what this peer knows.

        Early in a run there are few electors, and they may have become malicious since. So a receipt never
        replaces totals that this peer has computed itself. Totals taken from a receipt are replaced only by a
        receipt for a later head.
        """
        if self._chain is None or receipt.run != self._run:
            raise PeerError("a receipt of another run")
        receipt.check(electors_at(self._chain, receipt.head))
        mark = self._marks.get(receipt.head)
        if self.totals is not None and mark is not None and mark.totals == receipt.totals:
            self._take(receipt)
            if self._adopted is not None and self.newest is not None:
                self._adopted = self.newest.head
            return
        if self.totals is not None and (self._adopted is None or not self._is_later(receipt)):
            raise PeerError("a receipt with other totals than those of this peer's history")
        self._marks.clear()
        self.newest = receipt
        self._sum_up()

    def _is_later(self, receipt: Receipt) -> bool:
        """Return whether a receipt is of a later head than the one that the totals were taken from."""
        assert self._chain is not None
        heads = [self._chain.head, *(one.head for one in self._chain.certificates)]
        return self._adopted not in heads or heads.index(receipt.head) > heads.index(self._adopted)

    def _take(self, receipt: Receipt) -> None:
        held = self.newest
        if held is None or held.totals.certificates < receipt.totals.certificates or not self._knows(held):
            self.newest = receipt

    def _knows(self, receipt: Receipt) -> bool:
        """Return whether the head of a receipt is in this peer's history."""
        return self._chain is not None and bool(electors_at(self._chain, receipt.head))

    def _is_signed(self, receipt: Receipt) -> bool:
        """Return whether a quorum of the electors at its head has signed a receipt."""
        assert self._chain is not None
        try:
            receipt.check(electors_at(self._chain, receipt.head))
        except PeerError:
            return False
        return True

    def load(self, data: bytes) -> None:
        """Take a receipt from this machine's disk, of an earlier process. Raise PeerError when it is
        malformed or of another run.
        """
        receipt = decode_receipt(data)
        if receipt.run != self._run:
            raise PeerError("a receipt of another run")
        self._saved = receipt
