"""RPC methods between the peers of a run: progress reports and downloads of the state. One registration per
node serves all its runs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from averaging.history.chain import Chain
from averaging.history.electors import ELECTORS_MAX
from averaging.history.encoding import PARTS_BYTES_MAX, decode_chain, encode_part, is_cut
from averaging.history.lineage import CERTIFICATES_MAX
from averaging.history.receipts import RECEIPT_BYTES_MAX, Receipt, decode_receipt
from averaging.optim.state.snapshot import CHUNK_BYTES
from swarm.core.errors import NetworkError, PeerError, UsageError
from swarm.core.ids import Contact, PeerId
from swarm.net.rpc import UNARY_BYTES_MAX, Caller, Method, Stream, StreamMethod
from swarm.wire import state_pb2

if TYPE_CHECKING:
    from averaging.optim.history import RunHistory
    from averaging.optim.progress.tracker import Tracker
    from averaging.optim.receipts import Receipts
    from averaging.optim.state.donor import Donor
    from swarm.node import Node

_HISTORY_TIMEOUT_S = 2.0
RECEIPT_TIMEOUT_S = 5.0
SIGNATURES_BYTES_MAX = 8192  # signatures of all electors, with their keys

REPORT = Method(
    name="/swarm.Run/Report",
    request=state_pb2.ReportRequest,
    reply=state_pb2.ReportReply,
    request_bytes_max=4096,
    reply_bytes_max=4096,
)
OPEN = Method(
    name="/swarm.State/Open",
    request=state_pb2.OpenRequest,
    reply=state_pb2.OpenReply,
    request_bytes_max=4096,
    reply_bytes_max=UNARY_BYTES_MAX,  # a digest for each MiB: states of up to 60 GiB
)
CLOSE = Method(
    name="/swarm.State/Close",
    request=state_pb2.CloseRequest,
    reply=state_pb2.CloseReply,
    request_bytes_max=4096,
    reply_bytes_max=4096,
)
HISTORY = Method(
    name="/swarm.Run/History",
    request=state_pb2.HistoryRequest,
    reply=state_pb2.HistoryReply,
    request_bytes_max=4096,
    reply_bytes_max=UNARY_BYTES_MAX,
)
RECEIPT = Method(
    name="/swarm.Run/Receipt",
    request=state_pb2.ReceiptRequest,
    reply=state_pb2.ReceiptReply,
    request_bytes_max=SIGNATURES_BYTES_MAX,
    reply_bytes_max=RECEIPT_BYTES_MAX + SIGNATURES_BYTES_MAX,
)
CHUNKS = StreamMethod(name="/swarm.State/Chunks", message_bytes_max=CHUNK_BYTES)


@dataclass(slots=True)
class _Run:
    progress: Tracker
    state: Donor
    history: RunHistory | None  # None: the run has no common state
    receipts: Receipts | None


class RunExchange:
    """Dispatcher of incoming messages to the optimizer of the run that they name."""

    def __init__(
        self,
        register_unary: Callable[[Any, Callable[[PeerId, Any], Awaitable[Any]]], None],
        register_stream: Any,
    ) -> None:
        self._runs: dict[str, _Run] = {}
        self._lock = threading.Lock()  # runs are added from users' threads
        register_unary(REPORT, self._report)
        register_unary(OPEN, self._open)
        register_unary(CLOSE, self._close)
        register_unary(HISTORY, self._history)
        register_unary(RECEIPT, self._receipt)
        register_stream(CHUNKS, self._chunks)

    @classmethod
    def from_node(cls, node: Node) -> RunExchange:
        """Create the instance of a node; use `node.service(RunExchange.from_node)`."""
        return cls(node.handlers.unary, node.handlers.stream)

    def add(
        self,
        run: str,
        progress: Tracker,
        state: Donor,
        history: RunHistory | None = None,
        receipts: Receipts | None = None,
    ) -> None:
        """Register the handlers of a run. Raise UsageError when this node already has an optimizer for it."""
        with self._lock:
            if run in self._runs:
                raise UsageError(
                    f"this node already has an Optimizer for run {run!r}: close it first, or use another node"
                )
            self._runs[run] = _Run(progress, state, history, receipts)

    def remove(self, run: str) -> None:
        """Remove the handlers of a run, if there are any."""
        with self._lock:
            self._runs.pop(run, None)

    def _find(self, run: str) -> _Run:
        found = self._runs.get(run)
        if found is None:
            raise PeerError(f"this peer does not take part in run {run[:64]!r}")
        return found

    async def _report(self, peer: PeerId, request: state_pb2.ReportRequest) -> state_pb2.ReportReply:
        return await self._find(request.run).progress.on_report(peer, request)

    async def _open(self, peer: PeerId, request: state_pb2.OpenRequest) -> state_pb2.OpenReply:
        return await self._find(request.run).state.on_open(peer, request)

    async def _close(self, peer: PeerId, request: state_pb2.CloseRequest) -> state_pb2.CloseReply:
        return await self._find(request.run).state.on_close(peer, request)

    async def _history(self, peer: PeerId, request: state_pb2.HistoryRequest) -> state_pb2.HistoryReply:
        history = self._find(request.run).history
        if history is None:
            raise PeerError("this run has no common state")
        return await history.on_history(peer, request)

    async def _receipt(self, peer: PeerId, request: state_pb2.ReceiptRequest) -> state_pb2.ReceiptReply:
        receipts = self._find(request.run).receipts
        if receipts is None:
            raise PeerError("this run has no common state")
        return await receipts.on_receipt(peer, request)

    async def _chunks(self, stream: Stream) -> None:
        message = await stream.receive()
        if message is not None:
            first = parse_chunks_request(message)
            await self._find(first.run).state.on_chunks(first, stream)


def parse_chunks_request(message: bytes) -> state_pb2.ChunksRequest:
    """Parse a request for chunks. Raise PeerError when it is malformed."""
    request = state_pb2.ChunksRequest()
    try:
        request.ParseFromString(message)
    except DecodeError as error:
        raise PeerError(f"not a request for chunks: {error}") from None
    return request


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownHistory:
    """The answer of a peer that was asked for its history."""

    chain: Chain
    declines: bool  # it currently does not vote for groups on its head without itself
    abstains: bool  # nor for groups with itself
    goodbyes: Mapping[PeerId, bytes]  # signatures of electors of its head that have left, not verified


def history_reply(
    chain: Chain, goodbyes: Mapping[PeerId, bytes], *, declines: bool, abstains: bool
) -> state_pb2.HistoryReply:
    """Return the answer to a question for a history; parameters as in `ShownHistory`."""
    left = [state_pb2.Goodbye(peer=one.public_key, signature=said) for one, said in goodbyes.items()]
    part = encode_part(chain)
    return state_pb2.HistoryReply(chain=part, declines=declines, abstains=abstains, goodbyes=left)


async def fetch_history(
    caller: Caller, run: str, contact: Contact, heads: Sequence[bytes], bytes_max: int = PARTS_BYTES_MAX
) -> ShownHistory:
    """Return a peer's history of a run after the newest of `heads`: its first part, and further ones while
    all have less than `bytes_max` bytes. Raise NetworkError or PeerError.
    """
    found, size_bytes, more = None, 0, True
    while more:
        request = state_pb2.HistoryRequest(run=run, heads=heads if found is None else [found.last_head])
        reply = await caller.call(contact, HISTORY, request, timeout_s=_HISTORY_TIMEOUT_S)
        part = decode_chain(reply.chain)
        if found is None:
            found = part
        elif part.head == found.last_head:
            certificates = (*found.certificates, *part.certificates)[:CERTIFICATES_MAX]
            found = replace(found, certificates=certificates)
        else:
            break  # that peer now follows another history, or has dropped the next certificates
        size_bytes += len(reply.chain)
        more = is_cut(reply.chain) and size_bytes < bytes_max and len(found.certificates) < CERTIFICATES_MAX
    assert found is not None
    return ShownHistory(
        chain=found,
        declines=reply.declines,
        abstains=reply.abstains,
        goodbyes=goodbyes_of(reply),
    )


def goodbyes_of(reply: state_pb2.HistoryReply) -> dict[PeerId, bytes]:
    """Return the goodbyes in an answer, not verified. Raise PeerError for what is no PeerID."""
    try:
        return {PeerId(one.peer): one.signature for one in reply.goodbyes[:ELECTORS_MAX]}
    except UsageError as error:
        raise PeerError(f"a goodbye names no peer: {error}") from None


async def fetch_receipt(caller: Caller, run: str, contact: Contact) -> Receipt | None:
    """Return a peer's newest receipt of a run, not checked; None: it has none. Raise NetworkError or
    PeerError.
    """
    request = state_pb2.ReceiptRequest(run=run)
    reply = await caller.call(contact, RECEIPT, request, timeout_s=RECEIPT_TIMEOUT_S)
    return decode_receipt(reply.receipt) if reply.receipt else None


async def ask_holders(
    holders: Iterable[Sequence[Contact]],
    at_once: int,
    ask: Callable[[Contact], Awaitable[bool]],
    *,
    pause_s: float = 0.0,
) -> None:
    """Ask the peers of each list, which hold the same item, one after the other until one has answered;
    `at_once` lists concurrently. `ask` returns whether the peer has answered. After a peer that has not,
    its list waits `pause_s` and keeps its place among the `at_once`, so that failures slow the calls down.
    """
    places = asyncio.Semaphore(at_once)

    async def ask_in_turn(contacts: Sequence[Contact]) -> None:
        async with places:
            for contact in contacts:
                if await ask(contact):
                    return
                await asyncio.sleep(pause_s)

    async with asyncio.TaskGroup() as tasks:
        for contacts in holders:
            tasks.create_task(ask_in_turn(contacts))


async def voters_at_head(
    caller: Caller, run: str, contacts: Sequence[Contact], head: bytes, members: Collection[PeerId]
) -> set[PeerId]:
    """Ask peers concurrently. Return those that answer, whose history ends with this head, and that vote
    there on the round of a group with these `members`.
    """

    async def votes(contact: Contact) -> bool:
        try:
            shown = await fetch_history(caller, run, contact, [head], 0)
        except (NetworkError, PeerError):
            return False
        refuses = shown.abstains if contact.peer_id in members else shown.declines
        return shown.chain.last_head == head and not refuses

    async with asyncio.TaskGroup() as tasks:
        asked = {one.peer_id: tasks.create_task(votes(one)) for one in contacts}
    return {peer for peer, answer in asked.items() if answer.result()}
