"""Measure the throughput to a peer and from it (`/swarm.Node/Throughput`), for `swarm doctor`.

The caller sends up to 1 MiB, for 4 s at most, and the peer that is asked then sends as much. A slow link is
measured by the bytes that arrive in that time. Each side counts what it receives, so that neither its own
buffers nor the other side's claims distort the result.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from swarm.core.errors import PeerError
from swarm.core.ids import Contact
from swarm.core.standing import PeerStanding
from swarm.net.logic.request_budget import RequestBudget
from swarm.net.rpc import Handlers, Stream, StreamCaller, StreamMethod

_PIECE_BYTES = 32 << 10
_BYTES_MAX = 1 << 20  # bytes sent in one direction
_SEND_S = 4.0  # time for one direction
_ALL_S = 20.0  # time for both directions, including data in buffers and on slow links
_CALLS_MAX = 8  # measurements by other peers in a minute
_COUNT_BYTES = 8
THROUGHPUT = StreamMethod(name="/swarm.Node/Throughput", message_bytes_max=_PIECE_BYTES)


@dataclass(frozen=True, slots=True)
class Throughput:
    """Bytes per second to a peer and from it."""

    up_bytes_per_s: float
    down_bytes_per_s: float


class Throughputs:
    """Lets peers measure their throughput to this one."""

    def __init__(self, standing: PeerStanding) -> None:
        self._budget = RequestBudget(standing, _CALLS_MAX, "measured")

    def register(self, handlers: Handlers) -> None:
        """Register the handler of the call."""
        handlers.stream(THROUGHPUT, self._answer)

    async def _answer(self, stream: Stream) -> None:
        try:
            async with asyncio.timeout(_ALL_S):
                first = await stream.receive()
                refusal = self._budget.enter(stream.peer_id, asyncio.get_running_loop().time())
                if refusal:
                    raise PeerError(refusal)
                came = await _receive(stream, first)
                await stream.send(came.to_bytes(_COUNT_BYTES))
                await _send(stream)
        except TimeoutError:
            raise PeerError(f"{THROUGHPUT.name} takes at most {_ALL_S:g} s") from None


async def throughput(caller: StreamCaller, contact: Contact) -> Throughput:
    """Measure a peer. Raises NetworkError when it cannot be reached, PeerError when it refuses or reports
    impossible values, DeadlineExceeded when it takes more than 20 s.
    """
    async with caller.open_stream(contact, THROUGHPUT, timeout_s=_ALL_S) as stream:
        began_s = time.perf_counter()
        sent = await _send(stream)
        await stream.finish()
        reported = await stream.receive()
        up_s = time.perf_counter() - began_s
        if reported is None or int.from_bytes(reported) != sent:
            raise PeerError(f"peer {contact.peer_id.short} reports another number of bytes than were sent")
        began_s = time.perf_counter()
        came = await _receive(stream, await stream.receive())
        return Throughput(_rate(sent, up_s), _rate(came, time.perf_counter() - began_s))


async def _send(stream: Stream) -> int:
    """Send for the set size or time, and return the number of bytes."""
    piece, until_s, sent = bytes(_PIECE_BYTES), time.monotonic() + _SEND_S, 0
    while sent < _BYTES_MAX and time.monotonic() < until_s:
        await stream.send(piece)
        sent += len(piece)
    return sent


async def _receive(stream: Stream, message: bytes | None) -> int:
    """Return the total size of this and all later messages of the stream. Raises PeerError if they exceed the
    limit.
    """
    came = 0
    while message is not None:
        came += len(message)
        if came > _BYTES_MAX:
            raise PeerError(f"{THROUGHPUT.name} takes at most {_BYTES_MAX} bytes")
        message = await stream.receive()
    return came


def _rate(size_bytes: int, seconds: float) -> float:
    return size_bytes / max(seconds, 1e-6)
