"""The receipts of a run on one peer: electors sign the totals, and all members keep the newest receipt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from averaging.history.electors import ELECTORS_MAX
from averaging.history.receipts import Receipt, ReceiptBook, decode_receipt, encode_receipt
from averaging.optim.exchange import RECEIPT, RECEIPT_TIMEOUT_S
from averaging.optim.history import RunHistory
from averaging.optim.peer_node import PeerNode
from swarm.core.errors import NetworkError, PeerError, UsageError
from swarm.core.ids import Contact, PeerId
from swarm.wire import state_pb2

_log = logging.getLogger(__name__)

# between two checks for totals to sign. Too small: electors call one another needlessly; too large: a receipt
# has no quorum before the next one is due
_INTERVAL_S = 5.0
_ASK_EVERY = 12  # checks after which a member that has nothing to sign asks for a newer receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A request for signatures and a newer receipt, and the peers that may be asked."""

    peers: Sequence[PeerId]  # one of these is asked
    head: bytes
    signatures: Mapping[PeerId, bytes]
    certificates: int


class Receipts:
    """The exchange of one run's receipts with other members. Runs on the network thread."""

    def __init__(
        self,
        node: PeerNode,
        run: str,
        history: RunHistory,
        contact: Callable[[PeerId], Contact | None],
        sign: Callable[[bytes], bytes],
    ) -> None:
        """`contact` returns how a peer is called; `sign` signs as this node."""
        self._node, self._run, self._history, self._sign = node, run, history, sign
        self._ledger, self._contact, self._own = history.ledger, contact, history.own
        self._encoded: tuple[Receipt, bytes] | None = None  # the last one that was asked for

    async def run(self) -> None:
        """Sign, collect signatures and ask for receipts until cancelled."""
        checks = 0
        while True:
            await asyncio.sleep(_INTERVAL_S * self._node.rng.uniform(0.8, 1.2))
            checks += 1
            may_ask = checks % _ASK_EVERY == 0
            wanted = self._ledger.with_receipts(partial(self._next_request, may_ask=may_ask))
            if wanted is not None:
                await self._ask(wanted)

    def _next_request(self, book: ReceiptBook, *, may_ask: bool) -> _Request | None:
        book.sign(self._sign)
        certificates = book.newest.totals.certificates if book.newest is not None else 0
        for head, signatures in book.unsigned.items():
            if self._own in signatures:
                peers = book.collectors(head)
                return _Request(peers=peers, head=head, signatures=signatures, certificates=certificates)
        if not (may_ask or book.totals is None):
            return None
        return _Request(peers=self._history.electors(), head=b"", signatures={}, certificates=certificates)

    async def _ask(self, wanted: _Request) -> None:
        found = [self._contact(peer) for peer in wanted.peers if peer != self._own]
        contacts = [contact for contact in found if contact is not None and contact.is_callable]
        if not contacts:
            return
        contact = self._node.rng.choice(contacts)
        request = state_pb2.ReceiptRequest(
            run=self._run,
            certificates=wanted.certificates,
            head=wanted.head,
            signatures=_to_wire(wanted.signatures),
        )
        try:
            reply = await self._node.channels.call(contact, RECEIPT, request, timeout_s=RECEIPT_TIMEOUT_S)
            signatures = _from_wire(reply.signatures)
            self._ledger.with_receipts(lambda book: book.add(wanted.head, signatures))
            if reply.receipt:
                receipt = decode_receipt(reply.receipt)
                self._ledger.with_receipts(lambda book: book.take(receipt))
        except (NetworkError, PeerError) as error:
            _log.debug("no receipt of run %s from %s: %s", self._run, contact.peer_id.short, error)

    async def on_receipt(self, peer: PeerId, request: state_pb2.ReceiptRequest) -> state_pb2.ReceiptReply:
        """Take the caller's signatures, and answer with this peer's, and with its receipt if it is newer."""
        signatures = _from_wire(request.signatures)

        def answer(book: ReceiptBook) -> state_pb2.ReceiptReply:
            book.sign(self._sign)
            book.add(request.head, signatures)
            newest = book.newest
            is_newer = newest is not None and newest.totals.certificates > request.certificates
            return state_pb2.ReceiptReply(
                receipt=self._bytes_of(newest) if newest is not None and is_newer else b"",
                signatures=_to_wire(book.signatures(request.head)),
            )

        return self._ledger.with_receipts(answer)

    def _bytes_of(self, receipt: Receipt) -> bytes:
        if self._encoded is None or self._encoded[0] is not receipt:
            self._encoded = receipt, encode_receipt(receipt)
        return self._encoded[1]


def _to_wire(signatures: Mapping[PeerId, bytes]) -> list[state_pb2.ReceiptSignature]:
    return [
        state_pb2.ReceiptSignature(peer=peer.public_key, signature=signature)
        for peer, signature in signatures.items()
    ]


def _from_wire(messages: Sequence[state_pb2.ReceiptSignature]) -> dict[PeerId, bytes]:
    try:
        return {PeerId(one.peer): one.signature for one in messages[:ELECTORS_MAX]}
    except UsageError as error:
        raise PeerError(f"not the signatures of electors: {error}") from None
