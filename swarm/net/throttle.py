"""A node's bandwidth cap, up and down: what streams send and accept, and large calls, waits its turn; small
calls never do.

Down, a message counts when it is taken from its stream: what a slow reader leaves unread, flow control holds
back at the sender, after a window of each stream. gRPC makes these as large as it finds the way fast and
long, a slow reader notwithstanding (measured: tens of megabytes), so that a node with a cap keeps them at
what HTTP/2 begins with.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from swarm.core.ids import PeerId
from swarm.net.bucket import Bucket
from swarm.net.rpc import Stream

WIRE_PER_BYTE = 1.04  # headers of TCP and IP in packets of 1,500 bytes, TLS, HTTP/2
SMALL_BYTES = 64 << 10  # calls with no more are not held up, and not counted
_SMALL_WINDOWS = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64 << 10))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """What a node may use of its link for tensors and other bulk; None: all of it."""

    up_bytes_per_s: float | None = None  # on the wire, headers included
    down_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for cap in (self.up_bytes_per_s, self.down_bytes_per_s):
            if cap is not None:
                Bucket(cap)

    @property
    def least_bytes_per_s(self) -> float | None:
        """The lower of the caps: in a round a member sends about as much as it takes."""
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
        """gRPC's, for every connection of this node."""
        return () if self._down is None else _SMALL_WINDOWS

    async def sends(self, size_bytes: int) -> None:
        """Returns when a message of this size may leave."""
        await _passed(self._up, size_bytes)

    async def accepts(self, size_bytes: int) -> None:
        """Returns when a message of this size, which is here, may be taken."""
        await _passed(self._down, size_bytes)

    def stream(self, stream: Stream) -> Stream:
        """The same stream, held to the cap."""
        return stream if self._up is None and self._down is None else ThrottledStream(stream, self)


async def _passed(bucket: Bucket | None, size_bytes: int) -> None:
    wait_s = 0.0 if bucket is None else bucket.pass_s(size_bytes, asyncio.get_running_loop().time())
    if wait_s > 0.0:
        await asyncio.sleep(wait_s)


class ThrottledStream:
    """Satisfies `Stream`."""

    def __init__(self, stream: Stream, throttle: Throttle) -> None:
        self._stream, self._throttle = stream, throttle

    @property
    def peer_id(self) -> PeerId:
        return self._stream.peer_id

    async def send(self, message: bytes) -> None:
        await self._throttle.sends(len(message))
        await self._stream.send(message)

    async def receive(self) -> bytes | None:
        message = await self._stream.receive()
        if message is not None:
            await self._throttle.accepts(len(message))
        return message

    async def finish(self) -> None:
        await self._stream.finish()

    def cancel(self) -> None:
        self._stream.cancel()
