"""Negotiate a protocol over a connection or stream: multistream-select over a pipe."""

from __future__ import annotations

from swarm.core.errors import PeerError
from swarm.libp2p.logic.messages import read_varint
from swarm.libp2p.logic.negotiation import (
    LINE_BYTES_MAX,
    MULTISTREAM,
    Answerer,
    decode_line,
    encode_line,
)
from swarm.libp2p.pipes import Pipe


async def propose(pipe: Pipe, protocol: str) -> None:
    """Propose a protocol as the side that opened the stream. The caller may write at once, before the answer,
    which saves a round trip. `confirm` must read the answer before anything else is read. Raises NetworkError
    when the pipe ends.
    """
    await pipe.write(encode_line(MULTISTREAM) + encode_line(protocol))


async def confirm(pipe: Pipe, protocol: str) -> None:
    """Read the answer to a proposal. Raises PeerError when the peer does not speak the protocol, NetworkError
    when the pipe ends. Has no timeout of its own: the caller sets one.
    """
    greeting = await _read_line(pipe)
    if greeting != MULTISTREAM:
        raise PeerError(f"it does not speak multistream-select 1.0.0, but sent {greeting[:40]!r}")
    answer = await _read_line(pipe)
    if answer != protocol:
        raise PeerError(f"it does not speak {protocol}")


async def answer(pipe: Pipe, protocols: frozenset[str]) -> str:
    """Agree on one of these protocols as the other side, and return it. Raises PeerError when the peer
    proposes none of them in 16 tries, NetworkError when the pipe ends. The caller sets a time limit.
    """
    answerer = Answerer(protocols)
    while answerer.agreed is None:
        await pipe.write(answerer.answer(await _read_line(pipe)))
    return answerer.agreed


async def _read_line(pipe: Pipe) -> str:
    size, _ = read_varint(await read_prefix(pipe, LINE_BYTES_MAX), 0)
    if not 0 < size <= LINE_BYTES_MAX:
        raise PeerError(f"it sent a line of {size} bytes during protocol negotiation")
    return decode_line(await pipe.read_exactly(size))


async def read_prefix(pipe: Pipe, size_max: int) -> bytes:
    """Read the varint with the length of a message, at most `size_max` bytes."""
    prefix = b""
    while not prefix or prefix[-1] >= 0x80:
        if len(prefix) * 7 >= size_max.bit_length():
            raise PeerError(f"it sent a message longer than {size_max} bytes")
        prefix += await pipe.read_exactly(1)
    return prefix
