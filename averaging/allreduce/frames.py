"""Large messages in frames, for links that are slow or were not measured yet.

A receiver sees a message only when its last byte has arrived. A megabyte takes many seconds on a slow link,
during which its sender looks idle. Cut into frames, the transfer is visible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from averaging.allreduce.config import MESSAGE_BYTES_MAX
from averaging.reduction.framing import pack, unpack
from averaging.reduction.speed import Speed
from swarm.core.clock import Clock
from swarm.core.errors import PeerError
from swarm.core.ids import PeerId
from swarm.net.rpc import Stream, copy_into
from swarm.wire.reduce_pb2 import ExchangeFrames, ExchangeHeader

# with a header; takes a second or two on a slow home link that six streams share
FRAME_BYTES_MIN = (16 << 10) + 128
# smallest frame accepted from a peer, except the last one of a message; tiny frames waste memory and would
# count as progress
FRAME_BYTES_LEAST = 16 << 10
FRAME_S = 0.02  # the size of a frame is what the link sends in this time
SEND_BUFFER_BYTES = (
    512 << 10
)  # bytes that a stream's buffers may accept at once; their speed says nothing about the link
_ANNOUNCEMENT_BYTES_MAX = 32
_GROWTH = 4  # a frame is at most this many times as large as what was sent before it


@dataclass(slots=True)
class FrameSize:
    """The size of the frames of one stream. Pure."""

    # lower bound of the link's speed; None: not known, this stream measures it
    bytes_per_s: float | None
    _buffered_bytes: int = 0
    _taken_bytes: int = 0  # after those in the buffers
    _busy_s: float = 0.0
    _last_bytes: int = FRAME_BYTES_MIN

    def taken(self, size_bytes: int, took_s: float) -> None:
        """Count bytes that the transport has taken in this time. The time between messages, in which values
        are waited for, says nothing about the link, and neither does the time of what the buffers take.
        """
        if self._buffered_bytes < SEND_BUFFER_BYTES:
            self._buffered_bytes += size_bytes
            return
        self._taken_bytes += size_bytes
        self._busy_s += took_s
        self._last_bytes = max(size_bytes, FRAME_BYTES_MIN)

    def next_bytes(self) -> int:
        """Return the size of the next frame. Frames of a link that is not known grow step by step, because
        its buffers may be larger.
        """
        if self.bytes_per_s is not None:
            size = int(self.bytes_per_s * FRAME_S)
        else:
            size = min(int(self._taken_bytes / max(self._busy_s, 1e-6) * FRAME_S), _GROWTH * self._last_bytes)
        return max(FRAME_BYTES_MIN, min(size, MESSAGE_BYTES_MAX))


class FramedStream:
    """Cuts large messages into frames, and joins received frames. Satisfies `Stream`. `came` is called with
    the size of everything received, `went` whenever something was sent; `speed` learns how long sending took.
    """

    def __init__(
        self,
        stream: Stream,
        clock: Clock,
        speed: Speed,
        came: Callable[[int], None],
        went: Callable[[], None],
    ) -> None:
        self._stream, self._clock, self._speed = stream, clock, speed
        self._came, self._went = came, went
        self._size = FrameSize(speed.known_bytes_per_s)
        self._opening: ExchangeHeader | None = None  # to be sent with the first message
        self._first = b""  # a message that arrived with the opening

    def begin(self, opening: ExchangeHeader) -> None:
        """Set the header. It is sent in one message with the first one, if that is small."""
        self._opening = opening

    def resume(self, first: memoryview) -> None:
        """Make this message the first one to be received; empty: none came with the opening."""
        self._first = bytes(first)

    @property
    def peer_id(self) -> PeerId:
        return self._stream.peer_id

    async def send(self, message: bytes) -> None:
        size = self._size.next_bytes()
        opening, self._opening = self._opening, None
        if opening is not None:
            if len(message) <= size:
                await self._send(pack(opening, message))
                return
            await self._send(pack(opening))
        if len(message) <= size:
            await self._send(message)
            return
        await self._stream.send(pack(ExchangeHeader(frames=ExchangeFrames(bytes=len(message)))))
        start = 0
        while start < len(message):
            frame = message[start : start + self._size.next_bytes()]
            await self._send(frame)
            start += len(frame)

    async def _send(self, message: bytes) -> None:
        began_s = self._clock.monotonic_s()
        self._speed.begin(began_s)
        try:
            await self._stream.send(message)
        finally:
            ended_s = self._clock.monotonic_s()
            self._speed.end(len(message), ended_s)
        self._size.taken(len(message), ended_s - began_s)
        self._went()

    async def receive_into(self, buffer: memoryview) -> int | None:
        return copy_into(await self.receive(), buffer)

    async def receive(self) -> bytes | None:
        """Receive a message as `Stream.receive` does. When the stream ends within a message, its part is
        dropped, and the stream has ended. Raises PeerError when the frames do not make the announced message.
        """
        message: bytes | None = self._first
        if message:
            self._first = b""
        else:
            message = await self._stream.receive()
        if message is None:
            return None
        remaining = _announced(message)
        if not remaining:
            self._came(len(message))
            return message
        frames: list[bytes] = []
        while remaining > 0:
            frame = await self._stream.receive()
            if frame is None:
                return None
            if len(frame) < min(remaining, FRAME_BYTES_LEAST):
                raise PeerError(
                    f"a frame of {len(frame)} bytes with {remaining} to come: at least {FRAME_BYTES_LEAST} "
                    "are a frame"
                )
            self._came(len(frame))
            frames.append(frame)
            remaining -= len(frame)
        if remaining < 0:
            raise PeerError(f"frames of {-remaining} bytes more than the message that was announced")
        return b"".join(frames)

    async def finish(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None:
            await self._send(pack(opening))
        await self._stream.finish()

    def cancel(self) -> None:
        self._stream.cancel()


def _announced(message: bytes) -> int:
    """Return the size of the message that follows in frames; 0: this is a message itself."""
    if len(message) > _ANNOUNCEMENT_BYTES_MAX:
        return 0
    try:
        header, _ = unpack(message)
    except PeerError:
        return 0  # the receiver reports the error
    if not header.HasField("frames"):
        return 0
    if not 0 < header.frames.bytes <= MESSAGE_BYTES_MAX:
        raise PeerError(
            f"a message of {header.frames.bytes} bytes in frames; at most {MESSAGE_BYTES_MAX} are taken"
        )
    return header.frames.bytes
