"""The RPC methods of a server of experts, and how their messages are read and written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from moe.protocol.tensors import CHUNK_BYTES, Header, TensorPayload, chunks
from swarm.core.errors import PeerError
from swarm.net.rpc import UNARY_BYTES_MAX, Method, Stream, StreamMethod
from swarm.wire.expert_pb2 import (
    DescribeReply,
    DescribeRequest,
    ExpertCount,
    ExpertReply,
    ExpertRequest,
    TensorHeader,
)

# payloads up to this size are sent within the call; both the request's and the reply's must fit
INLINE_BYTES_MAX = 256 << 10
PAYLOAD_BYTES_MAX = 256 << 20
UIDS_PER_DESCRIBE_MAX = 192  # this many fit into one reply, with schemas and settings of the largest size
LINEAGES_PER_DESCRIBE_MAX = 64  # the same with lineages
REQUEST_ID_BYTES = 16
SILENCE_S_MAX = 30.0
# A payload must arrive at least this fast on average, once `SILENCE_S_MAX` has passed, because it holds
# memory meanwhile.
PACE_BYTES_PER_S_MIN = 32 << 10
HEADER_BYTES_MAX = 128 << 10  # of a message without its payload: of up to 64 requests or replies
REASON_BYTES_MAX = 500  # of a reply

DESCRIBE = Method(
    name="/swarm.Expert/Describe",
    request=DescribeRequest,
    reply=DescribeReply,
    request_bytes_max=64 << 10,
    reply_bytes_max=UNARY_BYTES_MAX,
)
CALL = Method(
    name="/swarm.Expert/Call",
    request=ExpertRequest,
    reply=ExpertReply,
    request_bytes_max=INLINE_BYTES_MAX + HEADER_BYTES_MAX,
    reply_bytes_max=INLINE_BYTES_MAX + HEADER_BYTES_MAX,
)
EXCHANGE = StreamMethod(name="/swarm.Expert/Exchange", message_bytes_max=CHUNK_BYTES + HEADER_BYTES_MAX)
COUNT = Method(
    name="/swarm.Expert/Count",
    request=ExpertCount,
    reply=ExpertCount,
    request_bytes_max=1 << 10,
    reply_bytes_max=1 << 10,
)
STATE = StreamMethod(name="/swarm.Expert/State", message_bytes_max=CHUNK_BYTES + HEADER_BYTES_MAX)


class HeaderList(Protocol):
    """The tensors of a message, in the generated classes of protobuf."""

    def add(self) -> TensorHeader: ...


def add_headers(headers: HeaderList, payloads: Sequence[TensorPayload]) -> None:
    """Add the headers that describe these payloads to those of a message."""
    for piece in payloads:
        header = headers.add()
        if piece.codec:
            header.codec, header.codec_version = piece.codec, piece.version
        header.payload_bytes = len(piece.payload)
        if piece.absent:
            header.absent = True


def read_headers(headers: Iterable[TensorHeader]) -> list[Header]:
    """Convert headers that a peer sent."""
    return [Header(one.codec, one.codec_version, one.payload_bytes, one.absent) for one in headers]


async def send_payload(stream: Stream, payloads: Sequence[TensorPayload]) -> None:
    """Send a payload in chunks."""
    for chunk in chunks(payloads):
        await stream.send(chunk)


async def receive_payload(
    stream: Stream, size_bytes: int, on_received: Callable[[int], None] = lambda size_bytes: None
) -> torch.Tensor:
    """Receive a payload of exactly `size_bytes` bytes; return it as flat uint8 on the host. `on_received` is
    called with the size of each message, and may raise.

    Raises PeerError when the stream ends before that, continues after it, is silent for SILENCE_S_MAX, or is
    slower than PACE_BYTES_PER_S_MIN, because received data holds memory.
    """
    payload = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
    buffer = payload.numpy().data
    filled, started_s = 0, asyncio.get_running_loop().time()
    while filled < size_bytes:
        slowest_s = started_s + SILENCE_S_MAX + filled / PACE_BYTES_PER_S_MIN
        left_s = min(slowest_s - asyncio.get_running_loop().time(), SILENCE_S_MAX)
        try:
            async with asyncio.timeout(left_s):
                received_bytes = await stream.receive_into(buffer[filled:])
        except TimeoutError:
            if left_s < SILENCE_S_MAX:
                so_far = f"{filled} of {size_bytes} bytes so far"
                raise PeerError(f"peer {stream.peer_id} sends its tensors too slowly: {so_far}") from None
            raise PeerError(
                f"peer {stream.peer_id} sent nothing for {SILENCE_S_MAX:g} s in the middle of its tensors"
            ) from None
        if received_bytes is None:
            raise PeerError(f"peer {stream.peer_id} announced {size_bytes} bytes and sent {filled}")
        if filled + received_bytes > size_bytes:
            raise PeerError(f"peer {stream.peer_id} announced {size_bytes} bytes and sends more")
        filled += received_bytes
        on_received(received_bytes)
    return payload
