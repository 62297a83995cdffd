"""A node's bandwidth caps for both directions, and counts of bytes. Streams and large calls wait for their
turn; small calls are counted but never wait.

Received messages are counted when they are read from their stream. Flow control holds unread messages back at
the sender, except one window per stream. gRPC grows these windows on fast and long links even for a slow
reader (measured: tens of megabytes), so a node with a cap keeps them at HTTP/2's initial size.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from swarm.core.ids import PeerId
from swarm.net.bucket import Bucket
from swarm.net.rpc import Stream

WIRE_PER_BYTE = 1.04  # overhead: headers of TCP and IP in packets of 1,500 bytes, TLS, HTTP/2
SMALL_BYTES = 64 << 10  # calls up to this size are not delayed
_SMALL_WINDOWS = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64 << 10))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """The part of its link that a node may use for tensors and other bulk data; None: no cap."""

    up_bytes_per_s: float | None = None  # on the wire, headers included
    down_bytes_per_s: float | None = None  # the same for what it receives

    def __post_init__(self) -> None:
        for cap in (self.up_bytes_per_s, self.down_bytes_per_s):
            if cap is not None:
                Bucket(cap)

    @property
    def min_bytes_per_s(self) -> float | None:
        """Return the lower of the caps: a member of a round sends about as much as it receives."""
        return min(
            (cap for cap in (self.up_bytes_per_s, self.down_bytes_per_s) if cap is not None), default=None
        )


class Throttle:
    """Both directions of one node, on its event loop. Any thread may read `passed`."""

    def __init__(self, bandwidth: Bandwidth) -> None:
        self.bandwidth = bandwidth
        self._small_windows = bandwidth.down_bytes_per_s is not None
        self._up = _bucket(bandwidth.up_bytes_per_s)
        self._down = _bucket(bandwidth.down_bytes_per_s)
        self._sent_bytes = self._received_bytes = 0

    @property
    def options(self) -> tuple[tuple[str, int], ...]:
        """Return gRPC options for every connection of this node."""
        return _SMALL_WINDOWS if self._small_windows else ()

    @property
    def passed(self) -> tuple[int, int]:
        """Return the bytes of messages sent and received so far, without headers."""
        return self._sent_bytes, self._received_bytes

    def set_bandwidth(self, bandwidth: Bandwidth) -> None:
        """Cap what passes from now on. Connections that are open keep the window that they have."""
        self.bandwidth = bandwidth
        self._small_windows = bandwidth.down_bytes_per_s is not None
        self._up, self._down = _bucket(bandwidth.up_bytes_per_s), _bucket(bandwidth.down_bytes_per_s)

    def count(self, sent_bytes: int, received_bytes: int) -> None:
        """Count small messages, which pass at once."""
        self._sent_bytes += sent_bytes
        self._received_bytes += received_bytes

    async def wait_to_send(self, size_bytes: int) -> None:
        """Count a message of this size, and return when it may be sent."""
        self._sent_bytes += size_bytes
        if self._up is not None:
            await _passed(self._up, size_bytes)

    async def wait_to_process(self, size_bytes: int) -> None:
        """Count a received message of this size, and return when it may be processed."""
        self._received_bytes += size_bytes
        if self._down is not None:
            await _passed(self._down, size_bytes)

    def sends_at_once(self, size_bytes: int) -> bool:
        """Count the message of a call and return True if it is so small that it passes at once. Another one
        is for `wait_to_send`.
        """
        if size_bytes > SMALL_BYTES:
            return False
        self._sent_bytes += size_bytes
        return True

    def processes_at_once(self, size_bytes: int) -> bool:
        """The same for a received message of a call, and `wait_to_process`."""
        if size_bytes > SMALL_BYTES:
            return False
        self._received_bytes += size_bytes
        return True

    def stream(self, stream: Stream) -> Stream:
        """Return the stream with the caps applied."""
        return ThrottledStream(stream, self)


def _bucket(bytes_per_s: float | None) -> Bucket | None:
    return None if bytes_per_s is None else Bucket(bytes_per_s / WIRE_PER_BYTE)


async def _passed(bucket: Bucket, size_bytes: int) -> None:
    wait_s = bucket.pass_s(size_bytes, asyncio.get_running_loop().time())
    if wait_s > 0.0:
        await asyncio.sleep(wait_s)


class ThrottledStream:
    """A stream with caps, whose messages are counted; implements `Stream`."""

    def __init__(self, stream: Stream, throttle: Throttle) -> None:
        self._stream, self._throttle = stream, throttle

    @property
    def peer_id(self) -> PeerId:
        return self._stream.peer_id

    async def send(self, message: bytes) -> None:
        await self._throttle.wait_to_send(len(message))
        await self._stream.send(message)

    async def receive(self) -> bytes | None:
        message = await self._stream.receive()
        if message is not None:
            await self._throttle.wait_to_process(len(message))
        return message

    async def receive_into(self, buffer: memoryview) -> int | None:
        size_bytes = await self._stream.receive_into(buffer)
        if size_bytes is not None:
            await self._throttle.wait_to_process(size_bytes)
        return size_bytes

    async def finish(self) -> None:
        await self._stream.finish()

    def cancel(self) -> None:
        self._stream.cancel()
