"""A node's bandwidth caps for both directions: streams and large calls wait their turn; small calls never do.

Received messages count when they are taken from their stream: unread messages of a slow reader are held back
at the sender by flow control, after a window per stream. gRPC grows these windows on fast and long links even
for a slow reader (measured: tens of megabytes), so a node with a cap keeps them at HTTP/2's initial size.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from swarm.core.ids import PeerId
from swarm.net.bucket import Bucket
from swarm.net.rpc import Stream

WIRE_PER_BYTE = 1.04  # overhead: headers of TCP and IP in packets of 1,500 bytes, TLS, HTTP/2
SMALL_BYTES = 64 << 10  # calls up to this size are neither delayed nor counted
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
    """Both directions of one node, on its event loop."""

    def __init__(self, bandwidth: Bandwidth) -> None:
        self._up = (
            None if bandwidth.up_bytes_per_s is None else Bucket(bandwidth.up_bytes_per_s / WIRE_PER_BYTE)
        )
        self._down = (
            None if bandwidth.down_bytes_per_s is None else Bucket(bandwidth.down_bytes_per_s / WIRE_PER_BYTE)
        )

    @property
    def options(self) -> tuple[tuple[str, int], ...]:
        """Return gRPC options for every connection of this node."""
        return () if self._down is None else _SMALL_WINDOWS

    async def wait_to_send(self, size_bytes: int) -> None:
        """Return when a message of this size may be sent."""
        await _passed(self._up, size_bytes)

    async def wait_to_process(self, size_bytes: int) -> None:
        """Return when a received message of this size may be processed."""
        await _passed(self._down, size_bytes)

    def stream(self, stream: Stream) -> Stream:
        """Return the stream with the caps applied."""
        return stream if self._up is None and self._down is None else ThrottledStream(stream, self)


async def _passed(bucket: Bucket | None, size_bytes: int) -> None:
    wait_s = 0.0 if bucket is None else bucket.pass_s(size_bytes, asyncio.get_running_loop().time())
    if wait_s > 0.0:
        await asyncio.sleep(wait_s)


class ThrottledStream:
    """A stream with caps; implements `Stream`."""

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

    async def finish(self) -> None:
        await self._stream.finish()

    def cancel(self) -> None:
        self._stream.cancel()
