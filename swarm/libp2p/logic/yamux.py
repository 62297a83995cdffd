"""yamux: many streams over one connection, as a state machine (hashicorp's specification, version 0).

Bytes from the peer go in (`receive`, which returns events), bytes for the peer come out (`output`). Every
stream has a window: the number of bytes that its receiver will still accept. The machine limits the memory
that a peer can occupy here: a peer that sends beyond a window breaks the protocol, and streams above the
limit are reset.

py-libp2p's own yamux stores bytes beyond a window and only logs this, accepts any number of streams, and
closes a stream when its reader pauses for 5 s (docs/decisions/0040).
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass

from swarm.core.errors import NetworkError, PeerError

PROTOCOL = "/yamux/1.0.0"
# payload of one frame: with its header it fits into one Noise message, also inside a circuit
PIECE_BYTES = 65_000
WINDOW_BYTES = 256 << 10  # initial window of every stream (specification)
WINDOW_BYTES_MAX = 1 << 20  # largest window of a stream in use: 100 ms at 10 MB/s
WINDOWS_BYTES_MAX = 16 << 20  # sum of the windows of a connection above which no window grows
STREAMS_MAX = 64  # open streams of a peer; a node opens no more itself

_HEADER = struct.Struct("!BBHII")  # version, type, flags, stream, length
_DATA, _WINDOW_UPDATE, _PING, _GO_AWAY = range(4)
_SYN, _ACK, _FIN, _RST = 1, 2, 4, 8
_SEND_WINDOW_MAX = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Opened:
    """The peer has opened a stream."""

    stream: int


@dataclass(frozen=True, slots=True)
class Received:
    """Bytes have arrived. Call `consumed` once they are read, so that the peer can send more."""

    stream: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """The peer sends no more on this stream; this side may."""

    stream: int


@dataclass(frozen=True, slots=True)
class WasReset:
    """The peer has ended the stream in both directions; what was sent may be lost."""

    stream: int


@dataclass(frozen=True, slots=True)
class Writable:
    """The peer takes more bytes on this stream."""

    stream: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The peer has answered the ping of this value."""

    value: int


@dataclass(frozen=True, slots=True)
class GoneAway:
    """The peer is closing the connection."""

    code: int


Event = Opened | Received | Ended | WasReset | Writable | Answered | GoneAway


@dataclass(slots=True)
class _StreamState:
    window: int = WINDOW_BYTES  # bytes that the peer was granted, counted from the last byte read
    may_receive: int = WINDOW_BYTES  # the unused part of that window
    may_send: int = WINDOW_BYTES
    unread: int = 0  # bytes received and not consumed
    consumed: int = 0  # bytes consumed since the last window update
    received: int = 0  # ever
    ended_here: bool = False
    ended_there: bool = False


class YamuxSession:
    """One end of a connection. `is_client`: this side has opened it; its streams have odd numbers.

    Every method that takes a stream's number ignores a stream that is gone: a stream may end before the
    caller has seen the event.
    """

    def __init__(self, *, is_client: bool) -> None:
        self._next = 1 if is_client else 2
        self._parity_there = 0 if is_client else 1
        self._streams: dict[int, _StreamState] = {}
        self._count_there = 0
        self._windows = 0
        self._header = bytearray()
        self._body = (0, 0, 0)  # the current frame: stream, remaining bytes, flags to apply at its end
        self._output: deque[bytes] = deque()  # whole frames
        self.pending = 0  # bytes to be sent
        self.unread = 0  # unread bytes of all streams
        self.refused = 0  # streams that the peer opened beyond the limit

    @property
    def streams(self) -> int:
        """Return the number of streams that are open in at least one direction."""
        return len(self._streams)

    def has(self, stream: int) -> bool:
        """Return whether this stream is open in at least one direction."""
        return stream in self._streams

    def output(self, bytes_max: int) -> bytes:
        """Return the next bytes to send, once: whole frames, as many as `bytes_max` holds (at least one)."""
        size, frames = 0, list[bytes]()
        while self._output and (not frames or size + len(self._output[0]) <= bytes_max):
            frames.append(self._output.popleft())
            size += len(frames[-1])
        self.pending -= size
        return b"".join(frames)

    def open(self) -> int:
        """Open a stream, and return its number. Raises NetworkError when this side has 64 open."""
        if len(self._streams) - self._count_there >= STREAMS_MAX:
            raise NetworkError(f"{STREAMS_MAX} streams to this peer are open already")
        stream = self._next
        self._next += 2
        self._add(stream)
        self._frame(_WINDOW_UPDATE, _SYN, stream, 0)
        return stream

    def send(self, stream: int, data: bytes) -> int:
        """Send the beginning of `data`, as much as a frame and the peer's window take; return how much."""
        state = self._streams.get(stream)
        if state is None or state.ended_here:
            return 0
        size = min(len(data), PIECE_BYTES, state.may_send)
        if size > 0:
            state.may_send -= size
            self._frame(_DATA, 0, stream, size, data[:size])
        return size

    def consumed(self, stream: int, size: int, *, grows: bool = True) -> None:
        """Record that `size` bytes were read. Once half a window was read, the peer is allowed to send as
        many again. The window of a stream that `grows` doubles while it is in use, up to a limit.
        """
        state = self._streams.get(stream)
        if state is None:
            return
        state.unread -= size
        self.unread -= size
        state.consumed += size
        if state.consumed < state.window // 2 or state.ended_there:
            return
        granted = state.consumed
        grown = min(state.window * 2, WINDOW_BYTES_MAX)
        if (
            grows
            and state.received > state.window
            and self._windows + grown - state.window <= WINDOWS_BYTES_MAX
        ):
            granted += grown - state.window
            self._windows += grown - state.window
            state.window = grown
        state.consumed = 0
        state.may_receive += granted
        self._frame(_WINDOW_UPDATE, 0, stream, granted)

    def finish(self, stream: int) -> None:
        """Send no more on this stream; the peer may."""
        state = self._streams.get(stream)
        if state is None or state.ended_here:
            return
        state.ended_here = True
        self._frame(_WINDOW_UPDATE, _FIN, stream, 0)
        if state.ended_there:
            self._remove(stream)

    def reset(self, stream: int) -> None:
        """End a stream in both directions at once."""
        if stream in self._streams:
            self._frame(_WINDOW_UPDATE, _RST, stream, 0)
            self._remove(stream)

    def ping(self, value: int) -> None:
        """Ask the peer for an answer with this value (32 bits)."""
        self._frame(_PING, _SYN, 0, value)

    def receive(self, data: bytes) -> list[Event]:
        """Process bytes from the peer, split at any position. Raises PeerError if the peer breaks the
        protocol; the connection must then be closed.
        """
        events: list[Event] = []
        at = 0
        while at < len(data):
            stream, left, flags = self._body
            if left:
                part = data[at : at + left]
                at += len(part)
                self._body = (stream, left - len(part), flags)
                self._take(stream, part, events)
                if left == len(part):
                    self._end(stream, flags, events)
                continue
            part = data[at : at + _HEADER.size - len(self._header)]
            at += len(part)
            self._header += part
            if len(self._header) == _HEADER.size:
                header = bytes(self._header)
                self._header.clear()
                self._receive_frame(header, events)
        return events

    def _receive_frame(self, header: bytes, events: list[Event]) -> None:
        version, kind, flags, stream, length = _HEADER.unpack(header)
        if version != 0 or kind > _GO_AWAY:
            raise PeerError(f"it sent a yamux frame of version {version} and type {kind}")
        if kind == _PING:
            if flags & _SYN:
                self._frame(_PING, _ACK, 0, length)
            elif flags & _ACK:
                events.append(Answered(length))
            return
        if kind == _GO_AWAY:
            events.append(GoneAway(length))
            return
        if stream == 0:
            raise PeerError("it sent a yamux frame of stream 0")
        if flags & _SYN:
            self._receive_open(stream, events)
        state = self._streams.get(stream)
        if kind == _DATA and length:
            # the stream was reset here meanwhile; bytes in flight are at most its window
            window = WINDOW_BYTES_MAX if state is None else state.may_receive
            if length > window:
                raise PeerError(f"it sent {length} bytes on a yamux stream that takes {window}")
            if state is not None:
                if state.ended_there:
                    raise PeerError("it sent on a yamux stream that it had finished")
                state.may_receive -= length
            self._body = (stream, length, flags)
            return
        if kind == _WINDOW_UPDATE and length and state is not None:
            state.may_send = min(state.may_send + length, _SEND_WINDOW_MAX)
            events.append(Writable(stream))
        self._end(stream, flags, events)

    def _receive_open(self, stream: int, events: list[Event]) -> None:
        if stream % 2 != self._parity_there or stream in self._streams:
            raise PeerError(f"it opened yamux stream {stream}, which is not free")
        if self._count_there >= STREAMS_MAX:
            self.refused += 1
            self._frame(_WINDOW_UPDATE, _RST, stream, 0)
            return
        self._add(stream)
        self._count_there += 1
        self._frame(_WINDOW_UPDATE, _ACK, stream, 0)
        events.append(Opened(stream))

    def _take(self, stream: int, part: bytes, events: list[Event]) -> None:
        state = self._streams.get(stream)
        if state is not None:
            state.unread += len(part)
            state.received += len(part)
            self.unread += len(part)
            events.append(Received(stream, part))

    def _end(self, stream: int, flags: int, events: list[Event]) -> None:
        state = self._streams.get(stream)
        if state is None:
            return
        if flags & _RST:
            self._remove(stream)
            events.append(WasReset(stream))
        elif flags & _FIN and not state.ended_there:
            state.ended_there = True
            events.append(Ended(stream))
            if state.ended_here:
                self._remove(stream)

    def _add(self, stream: int) -> None:
        self._streams[stream] = _StreamState()
        self._windows += WINDOW_BYTES

    def _remove(self, stream: int) -> None:
        state = self._streams.pop(stream)
        self._windows -= state.window
        self.unread -= state.unread
        if stream % 2 == self._parity_there:
            self._count_there -= 1

    def _frame(self, kind: int, flags: int, stream: int, length: int, data: bytes = b"") -> None:
        frame = _HEADER.pack(0, kind, flags, stream, length) + data
        self._output.append(frame)
        self.pending += len(frame)
