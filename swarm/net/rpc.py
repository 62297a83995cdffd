"""Remote calls: methods, streams, and the registry of handlers. The client side is `swarm.net.channels`, the
server `swarm.net.server`.

There are two kinds of methods. A `Method` is unary, with protobuf messages in both directions. A
`StreamMethod` carries raw byte messages in both directions until either end closes it: tensors, about 1 MiB
per message. Every handler gets the caller's authenticated PeerId (`swarm.net.certificate`).

A handler refuses by raising PeerError or UsageError: the caller gets PeerError with that text. Any other
exception is logged here, and the caller gets "internal error". A message that is too large or cannot be
parsed is refused, with its sender named, and ends only that call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import Message

from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import Contact, PeerId
from swarm.net.logic.sealing import BODY_BYTES_MAX

RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)
AnswerT = TypeVar("AnswerT")

# Limits of the transport; methods have their own, lower limits. Larger data travels on a stream, in messages.
UNARY_BYTES_MAX = 2 << 20
MESSAGE_BYTES_MAX = BODY_BYTES_MAX  # size of a message on a stream
# The caller finishes a stream with an empty message, to distinguish this from a broken connection.
END_OF_STREAM = b""

# Reading a whole message at a time saves a caller processor time on bulk streams, and costs 70 kB per
# connection. Servers do not use it, because strangers determine the number of their connections. Larger
# frames of HTTP/2, windows and write buffers than gRPC's defaults gained nothing or cost time
# (docs/decisions/0001).
BULK_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.experimental.tcp_read_chunk_size", 1 << 20),
    ("grpc.experimental.tcp_max_read_chunk_size", 4 << 20),
)
SIZE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method(Generic[RequestT, ReplyT]):
    """A unary call. The limits hold at both ends."""

    name: str  # "/swarm.Dht/Find"
    request: type[RequestT]
    reply: type[ReplyT]
    request_bytes_max: int = 1 << 20
    reply_bytes_max: int = 1 << 20

    def __post_init__(self) -> None:
        _check_method(self.name, max(self.request_bytes_max, self.reply_bytes_max), UNARY_BYTES_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMethod:
    """A bidirectional stream of byte messages, none of them empty."""

    name: str  # "/swarm.Averaging/Reduce"
    message_bytes_max: int = 4 << 20

    def __post_init__(self) -> None:
        _check_method(self.name, self.message_bytes_max, MESSAGE_BYTES_MAX)


class Stream(Protocol):
    """An end of a stream, with the same interface on both ends. At most one task may send and one may receive
    at a time.
    """

    @property
    def peer_id(self) -> PeerId:
        """Return the authenticated other end."""
        ...

    async def send(self, message: bytes) -> None:
        """Send one message (not empty); return when flow control has taken it. Raises NetworkError when the
        stream broke, PeerError when it was refused.

        Cancelling a `send` or a `receive` ends the stream, because a message may have been sent in part.
        """
        ...

    async def receive(self) -> bytes | None:
        """Return the next message; None once the other end has finished. Raises NetworkError when the stream
        broke, PeerError when it was refused.
        """
        ...

    async def receive_into(self, buffer: memoryview) -> int | None:
        """Receive the next message into the start of a buffer of bytes, and return its size; None once the
        other end has finished. A message whose size exceeds that of the buffer is lost. Raises as `receive`
        does. On the bulk path this saves a copy.
        """
        ...

    async def finish(self) -> None:
        """Finish sending on the caller's end; receiving may continue. A handler finishes by returning, and
        this does nothing there.
        """
        ...

    def cancel(self) -> None:
        """End the stream now; the other end gets NetworkError."""
        ...


class Caller(Protocol):
    """The interface for unary calls that services need: `Channels`, or a simulated network."""

    async def call(
        self, contact: Contact, method: Method[RequestT, ReplyT], request: RequestT, *, timeout_s: float
    ) -> ReplyT:
        """Make a unary call. Raises NetworkError when the peer cannot be reached, DeadlineExceeded, or
        PeerError when it refuses.
        """
        ...


class StreamCaller(Caller, Protocol):
    """The interface for unary calls and streams: `Channels`, or a simulated network."""

    def open_stream(
        self, contact: Contact, method: StreamMethod, *, timeout_s: float | None, connection: int = 0
    ) -> AbstractAsyncContextManager[Stream]:
        """See `Channels.open_stream`."""
        ...


@dataclass(frozen=True, slots=True)
class Later(Generic[AnswerT]):
    """A reply that is made when something has ended elsewhere, without a task that waits for it.

    `reply` makes it when `ended` is done, and raises as a handler does. A call that is cancelled cancels
    `ended`, after which `withdraw` is called.
    """

    ended: asyncio.Future[Any]
    reply: Callable[[], AnswerT]
    withdraw: Callable[[], None]


@dataclass(frozen=True, slots=True)
class UnaryHandler:
    """A registered unary method, with erased types."""

    method: Method[Any, Any]
    function: Callable[[PeerId, Any], Awaitable[Message]]
    # the same for requests that need no task; returns None for other requests
    function_now: Callable[[PeerId, Any], Message | Later[Any] | None] | None = None
    reply_bytes_reserved: int = 0  # room for its answer that is taken before it begins


@dataclass(frozen=True, slots=True)
class StreamHandler:
    """A registered stream method."""

    method: StreamMethod
    function: Callable[[Stream], Awaitable[None]]


class Handlers:
    """The methods that a server answers. They may be added and removed while it serves."""

    def __init__(self) -> None:
        self._by_name: dict[str, UnaryHandler | StreamHandler] = {}

    def unary(
        self, method: Method[RequestT, ReplyT], handler: Callable[[PeerId, RequestT], Awaitable[ReplyT]]
    ) -> None:
        """Register `handler(caller, request)` for this method. Raises UsageError when the name is taken."""
        self._add(method.name, UnaryHandler(method, handler))

    def direct(self, method: Method[RequestT, ReplyT], handler: Callable[[PeerId, RequestT], ReplyT]) -> None:
        """Register a handler that never waits and takes well under a millisecond, and so needs no task.
        Otherwise like `unary`.
        """

        async def function(caller: PeerId, request: RequestT) -> ReplyT:
            return handler(caller, request)

        self._add(method.name, UnaryHandler(method, function, handler, method.reply_bytes_max))

    def quick(
        self,
        method: Method[RequestT, ReplyT],
        handler_now: Callable[[PeerId, RequestT], ReplyT | None],
        handler: Callable[[PeerId, RequestT], Awaitable[ReplyT]],
    ) -> None:
        """Register `handler_now` for requests that take well under a millisecond and have small answers. For
        any other request it returns None, and `handler` answers it.
        """
        self._add(method.name, UnaryHandler(method, handler, handler_now, method.reply_bytes_max))

    def deferred(
        self,
        method: Method[RequestT, ReplyT],
        begin: Callable[[PeerId, RequestT], ReplyT | Later[ReplyT] | None],
        handler: Callable[[PeerId, RequestT], Awaitable[ReplyT]],
    ) -> None:
        """Register `begin` for requests that take well under a millisecond until they wait for something
        elsewhere, and have answers of at most `SHARED_REQUEST_BYTES_MAX`. For any other request it returns
        None, and `handler` answers it.
        """
        self._add(method.name, UnaryHandler(method, handler, begin))

    def stream(self, method: StreamMethod, handler: Callable[[Stream], Awaitable[None]]) -> None:
        """Register `handler(stream)` for this method; the stream finishes when it returns. Raises UsageError
        when the name is taken.
        """
        self._add(method.name, StreamHandler(method, handler))

    def remove(self, name: str) -> None:
        """Remove a method; calls that are being handled continue."""
        self._by_name.pop(name, None)

    def names(self) -> list[str]:
        """Return the names of all methods that are answered now."""
        return list(self._by_name)

    def find(self, name: str) -> UnaryHandler | StreamHandler | None:
        """Return the handler of a method, for transports; None when there is none."""
        return self._by_name.get(name)

    def _add(self, name: str, handler: UnaryHandler | StreamHandler) -> None:
        if name in self._by_name:
            raise UsageError(f"{name} has a handler already")
        self._by_name[name] = handler


def check_outgoing(method: StreamMethod, message: bytes) -> None:
    """Raise UsageError when this end may not send this message."""
    if not message:
        raise UsageError("a stream cannot carry empty messages")
    if len(message) > method.message_bytes_max:
        raise UsageError(
            f"{method.name} takes messages of at most {method.message_bytes_max} bytes; this one has "
            f"{len(message)}"
        )


def copy_into(message: bytes | memoryview | None, buffer: memoryview) -> int | None:
    """Copy a received message to the start of a buffer if it fits, and return its size; None for None. A
    memoryview says that the message is there already.
    """
    if message is None:
        return None
    if isinstance(message, bytes) and len(message) <= len(buffer):
        buffer[: len(message)] = message
    return len(message)


def check_incoming(method: StreamMethod, message: bytes | memoryview) -> None:
    """Raise PeerError when the other end must not send this message."""
    if not 0 < len(message) <= method.message_bytes_max:
        raise PeerError(
            f"{method.name} takes messages of 1 to {method.message_bytes_max} bytes; this one has "
            f"{len(message)}"
        )


def _check_method(name: str, size_bytes: int, size_bytes_max: int) -> None:
    if name.count("/") != 2 or not name.startswith("/"):
        raise UsageError(f"the name of a method is like /swarm.Service/Name, not {name!r}")
    if size_bytes > size_bytes_max:
        raise UsageError(f"{name}: a message has at most {size_bytes_max} bytes, not {size_bytes}")
