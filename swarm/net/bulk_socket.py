"""A TCP connection of the bulk path: sends and receives sealed frames on the event loop.

Bytes go from the message into the frame, and from the frame into the message or a buffer of its receiver,
with one pass for the cipher each, straight between a buffer and the socket. Transports of asyncio and threads
take more processor time (docs/decisions/0069).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

from swarm.core.ids import PeerId
from swarm.net.logic.sealing import (
    BODY_BYTES_MAX,
    HEADER_BYTES,
    TAG_BYTES,
    BulkSecret,
    FrameError,
    FrameKey,
    FrameKind,
    frame_bytes,
    sealed_bytes,
)

_logger = logging.getLogger(__name__)

# A peer that vanished without closing its connections is noticed after about 35 s, as on gRPC connections.
# While bytes are under way this takes 300 s, because a receiver that reads nothing meanwhile counts, too.
_KEEPALIVE = (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 300_000))
_AT_ONCE_MAX = 8  # frames that are sent or received without a turn for other tasks
# for a node with a cap of what it receives: unread bytes wait at the sender (`swarm.net.throttle`). Linux
# takes twice as much, so this is the window of gRPC's streams there; with more, bursts exceed low caps
_SMALL_BUFFER_BYTES = 32 << 10
_BUFFER_BYTES_MIN = 64 << 10
# time after a message at which the end of the connection is looked for, if no other receiver waits for it
_WATCH_S = 0.02
_LOOK_S = 0.1  # the same while received bytes wait for a receiver
_CLOSED, _CLOSE_WAIT = 7, 8  # states of a TCP connection whose other end sends no more
_BUFFERS_MAX = 8  # unused buffers that are kept, of at most 4.1 MiB each


class BulkLost(Exception):
    """The connection cannot be used any more; the text says why, without the peer."""


def configure(connected: socket.socket, *, small_buffer: bool) -> None:
    """Set the options of a socket of the bulk path."""
    connected.setblocking(False)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):  # not on every system
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if small_buffer:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER_BYTES)


class _Buffers:
    """Buffers for frames that are partly sent or received. One that was just used is still in the cache."""

    def __init__(self) -> None:
        self._unused: list[bytearray] = []

    def take(self, size_bytes: int) -> bytearray:
        """Return a buffer of at least this size. A smaller one is dropped, so that those that stay fit."""
        with contextlib.suppress(IndexError):  # any thread may take one
            buffer = self._unused.pop()
            if len(buffer) >= size_bytes:
                return buffer
        return bytearray(max(size_bytes, _BUFFER_BYTES_MIN))

    def give(self, buffer: bytearray) -> None:
        """Return a buffer that is no longer used."""
        if len(self._unused) < _BUFFERS_MAX:
            self._unused.append(buffer)


_buffers = _Buffers()
_discarded = bytearray(_BUFFER_BYTES_MIN)  # of any connection: nobody reads it


class BulkSocket:
    """One end of a connection, after the token was sent. It carries one stream after another. At most one
    task may send and one may receive at a time. It belongs to the event loop on which it was made.

    Attributes:
        other: The peer at the other end.
        lost: Why the connection ended; empty while it is open.
        on_lost: Called when it ends for another reason than `close`.
        on_data: Called when something arrives while no task receives.
    """

    def __init__(self, connected: socket.socket, secret: BulkSecret, *, is_caller: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = connected
        self._secret, self._is_caller = secret, is_caller
        self.other: PeerId = secret.callee if is_caller else secret.caller
        self.lost = ""
        self.on_lost: Callable[[], object] | None = None
        self.on_data: Callable[[], object] | None = None
        self._stream = -1
        self._outgoing: FrameKey
        self._incoming: FrameKey
        self.next_stream()
        self._header = bytearray(HEADER_BYTES)
        self._buffer: bytearray | None = None  # what follows the header of the frame that is arriving
        self._arrived = self._expected = 0  # bytes of it
        self._readable: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._is_watched = self._was_readable = False
        self._watch_timer: asyncio.TimerHandle | None = None
        self._sending = asyncio.Lock()
        self._is_cut = False  # a frame was sent in part
        self._at_once = 0  # frames since other tasks had a turn

    @property
    def is_between_frames(self) -> bool:
        """Return whether no frame was sent or received in part."""
        return not (self._is_cut or self._arrived or self._buffer is not None)

    def next_stream(self) -> None:
        """Begin the next stream: both ends have sent and received the last frame of the one before."""
        self._stream += 1
        self._stopped = ""  # why `send` must not wait any longer
        self._discarded_bytes: int | None = None  # None: messages are received
        self._outgoing = self._secret.key(self._stream, from_caller=self._is_caller)
        self._incoming = self._secret.key(self._stream, from_caller=not self._is_caller)

    async def send(self, kind: FrameKind, body: bytes) -> None:
        """Send a frame; return when the system has taken all of it. Raises BulkLost. A cancelled call may
        leave a part of a frame behind, after which the connection must be closed.
        """
        await self._let_others_run()
        async with self._sending:
            rest = self.begin_to_send(kind, body)
            if rest is not None:
                await rest

    def begin_to_send(self, kind: FrameKind, body: bytes) -> Coroutine[Any, Any, None] | None:
        """Send a frame as far as the system takes it at once. Return what sends the rest, which must be
        awaited before the next frame; None when there is none. Raises BulkLost.
        """
        if self._is_cut:
            raise self._lose("a frame was sent in part")
        if self._stopped:
            raise BulkLost(self._stopped)
        buffer = _buffers.take(frame_bytes(len(body)))
        has_ended = True
        try:
            frame = self._outgoing.seal(kind, body, buffer)
            self._is_cut = True
            left = frame[self._send_some(frame) :]
            self._is_cut = bool(left)
            has_ended = not left
        finally:
            if has_ended:
                _buffers.give(buffer)
        return None if has_ended else self._send_rest(left, buffer)

    async def _send_rest(self, left: memoryview, buffer: bytearray) -> None:
        try:
            while left := left[self._send_some(left) :]:
                await self._wait_writable()
            self._is_cut = False
        finally:
            _buffers.give(buffer)

    def send_at_once(self, kind: FrameKind, body: bytes) -> bool:
        """Send a small frame, and return whether the system took all of it."""
        try:
            if not self.is_between_frames:
                return False
            frame = self._outgoing.seal(kind, body, bytearray(frame_bytes(len(body))))
            self._stopped = ""
            self._is_cut = self._send_some(frame) < len(frame)
        except BulkLost:
            return False
        return not self._is_cut

    def stop_sending(self, reason: str) -> None:
        """Make the `send` that is waiting raise BulkLost."""
        self._stopped = reason
        if self._writable is not None:
            _wake(self._writable)

    async def receive(
        self, body_bytes_max: int = BODY_BYTES_MAX, buffer: memoryview | None = None
    ) -> tuple[FrameKind, bytes | memoryview]:
        """Return the next frame. Raises BulkLost when the connection ended, or carries anything but the frame
        that the other end sealed next; a body of more than `body_bytes_max` is refused before it is read. A
        message that fits into the buffer is written to its start, and its body is a view of it.
        """
        await self._let_others_run()
        while (frame := self.receive_now(body_bytes_max, buffer)) is None:
            self._at_once = 0
            self._readable = self._loop.create_future()
            self.watch()
            try:
                await self._readable
            finally:
                self._readable = None
        self._was_readable = False
        # not at once: while messages are pending, watching costs more than receiving
        self._watch_later(_WATCH_S)
        return frame

    def receive_now(
        self, body_bytes_max: int = BODY_BYTES_MAX, buffer: memoryview | None = None
    ) -> tuple[FrameKind, bytes | memoryview] | None:
        """Like `receive`, but return None when the frame has not arrived yet."""
        if self.lost:
            raise BulkLost(self.lost)
        try:
            if self._buffer is None:
                if not self._fill(self._header, HEADER_BYTES):
                    return None
                self._expected = sealed_bytes(self._header, body_bytes_max)
                if (
                    self._discarded_bytes is not None
                    and not self._is_discarded
                    and self._expected > TAG_BYTES
                ):
                    raise FrameError("the last frame of a caller has no body")
                self._buffer = _discarded if self._is_discarded else _buffers.take(self._expected)
                self._arrived = 0
            if not self._fill(self._buffer, self._expected):
                return None
            if self._discarded_bytes is not None and self._is_discarded:
                self._incoming.skip(self._expected)
                self._discarded_bytes += self._expected
                self._buffer, self._arrived = None, 0
                return FrameKind.DATA, b""
            sealed = memoryview(self._buffer)[: self._expected]
            frame = self._incoming.open(bytes(self._header), sealed, buffer)
        except FrameError as error:
            _logger.warning("a bulk connection with peer %s was closed: %s", self.other, error)
            raise self._lose(str(error)) from None
        _buffers.give(self._buffer)
        self._buffer, self._arrived = None, 0
        return frame

    async def discard(self, bytes_max: int) -> bool:
        """Discard messages up to the other end's last frame, without keeping or opening them. Return whether
        it came before `bytes_max`. Raises BulkLost.
        """
        self._discarded_bytes = 0
        if self._is_discarded and self._buffer is not None:  # a message that is arriving
            _buffers.give(self._buffer)
            self._buffer = _discarded
        kind = FrameKind.DATA
        while kind is FrameKind.DATA and self._discarded_bytes <= bytes_max:
            kind, _ = await self.receive()
        return kind is FrameKind.END

    @property
    def _is_discarded(self) -> bool:
        """Return whether the frame whose header arrived last is a message that nobody wants."""
        return self._discarded_bytes is not None and self._header[0] == FrameKind.DATA

    def watch(self) -> None:
        """Notice what arrives, and the end of the connection, while no task receives."""
        if not self._is_watched and not self.lost:
            self._loop.add_reader(self._socket, self._on_readable)
            self._is_watched = True

    def _watch_later(self, wait_s: float) -> None:
        def now() -> None:
            self._watch_timer = None
            if self._is_watched and self._readable is None:
                # begin again: uvloop tells of a reset once, which may have been together with a message
                self._loop.remove_reader(self._socket)
                self._is_watched = False
            self.watch()

        if self._watch_timer is None and not self.lost:
            self._watch_timer = self._loop.call_later(wait_s, now)

    def close(self, *, reset: bool = False) -> None:
        """Close the connection. Idempotent. `reset`: what was sent and did not arrive is dropped, so that a
        peer that reads nothing learns it, too.
        """
        self.on_lost = None
        if reset and not self.lost:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._lose("it was closed here")

    async def _let_others_run(self) -> None:
        """Give other tasks a turn now and then: a peer that is fast enough would keep this one running."""
        self._at_once += 1
        if self._at_once > _AT_ONCE_MAX:
            self._at_once = 0
            await asyncio.sleep(0)

    async def _wait_writable(self) -> None:
        self._at_once = 0
        self._writable = self._loop.create_future()
        self._loop.add_writer(self._socket, _wake, self._writable)
        try:
            await self._writable
        finally:
            self._writable = None
            if not self.lost:
                self._loop.remove_writer(self._socket)

    def _send_some(self, left: memoryview) -> int:
        if self.lost or self._stopped:
            raise BulkLost(self.lost or self._stopped)
        try:
            return self._socket.send(left)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise self._lose(_reason(error)) from None

    def _fill(self, buffer: bytearray, size: int) -> bool:
        """Read until `buffer` has `size` bytes. Return whether it has."""
        view = memoryview(buffer)
        while self._arrived < size:
            try:
                if buffer is _discarded:
                    count = self._socket.recv_into(view[: min(size - self._arrived, len(view))])
                else:
                    count = self._socket.recv_into(view[self._arrived : size])
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                raise self._lose(_reason(error)) from None
            if not count:
                raise self._lose("the other end closed the connection")
            self._arrived += count
        return True

    def _on_readable(self) -> None:
        if self._readable is not None:
            _wake(self._readable)
            return
        if not self._was_readable:  # the receiver may be about to return
            self._was_readable = True
            self._watch_later(_WATCH_S)
            return
        try:
            ended = not self._socket.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lose(_reason(error))
            return
        if ended:
            self._lose("the other end closed the connection")
            return
        if not self._is_caller and _has_hung_up(self._socket):
            self._lose("the other end closed the connection")  # it takes no answer to what is not read yet
            return
        self._loop.remove_reader(self._socket)  # the bytes wait for their receiver
        self._is_watched = False
        self._watch_later(_LOOK_S)
        if self.on_data is not None:
            self.on_data()

    def _lose(self, reason: str) -> BulkLost:
        """End the connection, and return the exception that says so."""
        if self.lost:
            return BulkLost(self.lost)
        self.lost = reason
        if self._is_watched:
            self._loop.remove_reader(self._socket)
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        if self._writable is not None:
            self._loop.remove_writer(self._socket)
        self._socket.close()
        for waiting in (self._readable, self._writable):
            if waiting is not None:
                _wake(waiting)
        if self._buffer is not None and self._buffer is not _discarded:
            _buffers.give(self._buffer)
        self._buffer = None
        if self.on_lost is not None:
            self.on_lost()
        return BulkLost(reason)


def _has_hung_up(connected: socket.socket) -> bool:
    """Return whether the other end has closed the connection, although there are bytes to be read. Only Linux
    tells; elsewhere this is noticed when they are read.
    """
    if not hasattr(socket, "TCP_INFO"):
        return False
    return connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in (_CLOSED, _CLOSE_WAIT)


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
