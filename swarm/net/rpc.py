"""Remote calls: methods, the registry of handlers, and the server. The client side is `swarm.net.channels`.

Two kinds of methods. A `Method` is unary, with protobuf messages both ways. A `StreamMethod` carries raw byte messages both ways for as
long as both ends like: tensors, about 1 MiB a message. Every handler gets the caller's authenticated PeerId (`swarm.net.certificate`).

A handler refuses by raising PeerError or UsageError: the caller gets PeerError with that text. Whatever else it raises is logged here, and
the caller gets "internal error". A message that is too large or cannot be parsed is refused with its sender named, and ends nothing but
that call.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio

from swarm.errors import NetworkError, PeerError, SwarmError, UsageError
from swarm.identity import Identity
from swarm.ids import Contact, PeerId
from swarm.net.calls import CALLS_NAME, Outcome, ServedCalls
from swarm.net.certificate import CallerCheck, courtesy_ca, server_certificate

_logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)

MESSAGE_BYTES_MAX = 16 << 20  # what the transport takes at all; methods have their own, lower limits
END_OF_STREAM = b""  # a stream that breaks must not look like one that ended: its caller's end says so with an empty message
_STREAMS_PER_PEER_MAX = 4  # of shared calls: one a connection
_REFUSAL_CHARACTERS_MAX = 1000  # gRPC carries it in a header

# Reading as much as a message at a time saves a sixth of the processor time of a bulk stream, for 70 kB more per connection and end. Larger
# HTTP/2 frames, windows and write buffers than gRPC's own brought nothing or cost (docs/decisions/0001).
BULK_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.experimental.tcp_read_chunk_size", 1 << 20),
    ("grpc.experimental.tcp_max_read_chunk_size", 4 << 20),
)
TRANSPORT_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
)
_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *TRANSPORT_OPTIONS,
    *BULK_OPTIONS,
    ("grpc.so_reuseport", 0),  # a port that is taken must be an error, not a shared port
    ("grpc.max_concurrent_streams", 256),  # per connection
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
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
        _check_method(self.name, max(self.request_bytes_max, self.reply_bytes_max))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMethod:
    """A bidirectional stream of byte messages, none of them empty."""

    name: str  # "/swarm.Averaging/Reduce"
    message_bytes_max: int = 4 << 20

    def __post_init__(self) -> None:
        _check_method(self.name, self.message_bytes_max)


class Stream(Protocol):
    """One end of a stream; the same on both ends. One sender and one receiver at a time may use it, each in a task of its own."""

    @property
    def peer_id(self) -> PeerId:
        """The other end, authenticated."""
        ...

    async def send(self, message: bytes) -> None:
        """Send one message (not empty); returns when flow control has taken it. NetworkError when the stream broke, PeerError when it was
        refused.

        Cancelling a `send` or a `receive` ends the stream: a message may have gone half-way.
        """
        ...

    async def receive(self) -> bytes | None:
        """The next message; None once the other end has finished. NetworkError when the stream broke, PeerError when it was refused."""
        ...

    async def finish(self) -> None:
        """The caller's end: no more messages from here; it may go on receiving. A handler finishes by returning, and this does nothing
        there.
        """
        ...

    def cancel(self) -> None:
        """End the stream now; the other end gets NetworkError."""
        ...


class Caller(Protocol):
    """What services that make unary calls need: `Channels`, or a simulated network."""

    async def call(self, contact: Contact, method: Method[RequestT, ReplyT], request: RequestT, *, timeout_s: float) -> ReplyT:
        """NetworkError when the peer cannot be reached, DeadlineExceeded, PeerError when it refuses."""
        ...


@dataclass(frozen=True, slots=True)
class UnaryHandler:
    """A registered unary method, types erased."""

    method: Method[Any, Any]
    function: Callable[[PeerId, Any], Awaitable[Message]]


@dataclass(frozen=True, slots=True)
class StreamHandler:
    """A registered stream method."""

    method: StreamMethod
    function: Callable[[Stream], Awaitable[None]]


class Handlers:
    """The methods that a server answers. They may be added and removed while it serves."""

    def __init__(self) -> None:
        self._by_name: dict[str, UnaryHandler | StreamHandler] = {}

    def unary(self, method: Method[RequestT, ReplyT], handler: Callable[[PeerId, RequestT], Awaitable[ReplyT]]) -> None:
        """`handler(caller, request)` answers this method from now on. UsageError when the name is taken."""
        self._add(method.name, UnaryHandler(method, handler))

    def stream(self, method: StreamMethod, handler: Callable[[Stream], Awaitable[None]]) -> None:
        """`handler(stream)` serves this method from now on; the stream finishes when it returns. UsageError when the name is taken."""
        self._add(method.name, StreamHandler(method, handler))

    def remove(self, name: str) -> None:
        """Answer it no longer; calls that are being handled go on."""
        self._by_name.pop(name, None)

    def find(self, name: str) -> UnaryHandler | StreamHandler | None:
        """For transports."""
        return self._by_name.get(name)

    def _add(self, name: str, handler: UnaryHandler | StreamHandler) -> None:
        if name in self._by_name:
            raise UsageError(f"{name} has a handler already")
        self._by_name[name] = handler


class Server:
    """The gRPC server of a node. It knows every caller by its certificate and bounds what they may ask at once."""

    def __init__(self, *, calls_max: int = 1024, calls_per_peer_max: int = 256) -> None:
        self._calls_max = calls_max
        self._calls_per_peer_max = calls_per_peer_max
        self._calls: Counter[PeerId] = Counter()
        self._open_calls = 0  # their sum
        self._streams: set[ServedCalls] = set()
        self._streams_by: Counter[PeerId] = Counter()
        self._server: aio.Server | None = None

    async def start(self, identity: Identity, handlers: Handlers, host: str, port: int) -> int:
        """Listen; returns the port (the system's choice for 0). UsageError when it cannot listen there."""
        server = aio.server(options=_SERVER_OPTIONS, maximum_concurrent_rpcs=3 * self._calls_max)
        server.add_generic_rpc_handlers((_Dispatch(self, handlers),))
        leaf = server_certificate(identity)
        credentials = grpc.ssl_server_credentials(
            [(leaf.key_pem, leaf.certificate_pem)], root_certificates=courtesy_ca(), require_client_auth=True
        )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound: int = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise UsageError(f"cannot listen on {address}: is the port taken, or not an address of this machine? ({error})") from None
        if not bound:
            raise UsageError(f"cannot listen on {address}: is the port taken, or not an address of this machine?")
        await server.start()
        self._server = server
        return bound

    async def stop(self, grace_s: float) -> None:
        """Take no more calls; those in progress have `grace_s` to end and are cancelled then. Idempotent."""
        server, self._server = self._server, None
        for stream in self._streams:
            stream.stop()
        if server is not None:
            await server.stop(grace_s)

    async def share(self, peer_id: PeerId, stream: ServedCalls) -> None:
        """Serve a stream of shared calls to its end. _Busy when there are too many of them: the caller then calls without."""
        if self._streams_by[peer_id] >= _STREAMS_PER_PEER_MAX or len(self._streams) >= self._calls_max or self._server is None:
            raise _Busy
        self._streams.add(stream)
        self._streams_by[peer_id] += 1
        try:
            await stream.run()
        finally:
            self._streams.discard(stream)
            self._streams_by[peer_id] -= 1
            if not self._streams_by[peer_id]:
                del self._streams_by[peer_id]

    def enter(self, peer_id: PeerId) -> str | None:
        """Count a call in; a reason when there are too many."""
        if self._calls[peer_id] >= self._calls_per_peer_max:
            return f"you have {self._calls_per_peer_max} calls open here already"
        if self._open_calls >= self._calls_max:
            return f"busy: {self._calls_max} calls open already"
        self._calls[peer_id] += 1
        self._open_calls += 1
        return None

    def leave(self, peer_id: PeerId) -> None:
        """Count a call out."""
        self._open_calls -= 1
        self._calls[peer_id] -= 1
        if not self._calls[peer_id]:
            del self._calls[peer_id]


class _Dispatch(grpc.GenericRpcHandler):  # type: ignore[misc, unused-ignore]
    """Finds the handler, names the caller, maps what the handler raises. Together with the supervisor the only place that catches
    everything.
    """

    def __init__(self, server: Server, handlers: Handlers) -> None:
        self._server = server
        self._handlers = handlers
        self._caller = CallerCheck()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        if handler_call_details.method == CALLS_NAME:
            return grpc.stream_stream_rpc_method_handler(self._share)
        handler = self._handlers.find(handler_call_details.method)
        if handler is None:
            return None  # gRPC answers UNIMPLEMENTED
        if isinstance(handler, UnaryHandler):
            unary = handler

            async def answer(raw: bytes, context: aio.ServicerContext[Any, Any]) -> bytes:
                return await self._guarded(unary.method.name, context, lambda peer_id: _answer(unary, peer_id, raw))

            return grpc.unary_unary_rpc_method_handler(answer)
        streaming = handler

        async def serve(_: Any, context: aio.ServicerContext[Any, Any]) -> None:
            await self._guarded(streaming.method.name, context, lambda peer_id: _serve(streaming, peer_id, context))

        return grpc.stream_stream_rpc_method_handler(serve)

    async def _share(self, _: Any, context: aio.ServicerContext[Any, Any]) -> None:
        """A stream of shared calls."""
        peer_id = await self._identified(context)

        async def handle(name: str, raw: bytes) -> Outcome:
            handler = self._handlers.find(name)
            if not isinstance(handler, UnaryHandler):
                return grpc.StatusCode.UNIMPLEMENTED, "", b""
            return await self._outcome(name, peer_id, _answer(handler, peer_id, raw))

        stream = ServedCalls(context, handle, functools.partial(self._server.enter, peer_id), functools.partial(self._server.leave, peer_id))
        try:
            await self._server.share(peer_id, stream)
        except PeerError as error:
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except _Busy:
            await _refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "no more streams of shared calls")

    async def _identified(self, context: aio.ServicerContext[Any, Any]) -> PeerId:
        try:
            return self._caller(_certificate_of(context))
        except PeerError as error:
            await _refuse(context, grpc.StatusCode.UNAUTHENTICATED, str(error))

    async def _guarded(self, name: str, context: aio.ServicerContext[Any, Any], work: Callable[[PeerId], Awaitable[bytes]]) -> bytes:
        peer_id = await self._identified(context)
        refusal = self._server.enter(peer_id)
        if refusal is not None:
            await _refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, refusal)
        try:
            code, text, reply = await self._outcome(name, peer_id, work(peer_id))
        finally:
            self._server.leave(peer_id)
        if code is not grpc.StatusCode.OK:
            await _refuse(context, code, text)
        return reply

    async def _outcome(self, name: str, peer_id: PeerId, work: Awaitable[bytes]) -> Outcome:
        """What a handler's end means to its caller."""
        try:
            return grpc.StatusCode.OK, "", await work
        except (PeerError, UsageError) as error:
            return grpc.StatusCode.FAILED_PRECONDITION, _told(str(error) or type(error).__name__), b""
        except _Ended:
            return grpc.StatusCode.CANCELLED, "the stream was ended by its handler", b""
        except SwarmError as error:  # the network's: of this stream, or of a call that the handler made
            _logger.debug("%s from %s: %s", name, peer_id.short, error)
            return grpc.StatusCode.ABORTED, _told(str(error)), b""
        except Exception:  # the boundary: whatever a handler raises ends its call only
            _logger.exception("%s, called by %s, failed", name, peer_id)
            return grpc.StatusCode.INTERNAL, "internal error", b""


class _Busy(Exception):
    """Too many streams of shared calls."""


class _Ended(Exception):
    """A handler cancelled its own stream."""


class _HandlerStream:
    """The handler's end of a stream."""

    def __init__(self, method: StreamMethod, peer_id: PeerId, context: aio.ServicerContext[Any, Any]) -> None:
        self.peer_id = peer_id
        self._method = method
        self._context = context
        self._task = asyncio.current_task()
        self._finished = False
        self.ended = False

    async def send(self, message: bytes) -> None:
        check_outgoing(self._method, message)
        try:
            await self._context.write(message)
        except aio.BaseError as error:
            raise NetworkError(f"the stream {self._method.name} from {self.peer_id} broke: {error}") from None

    async def receive(self) -> bytes | None:
        if self._finished:
            return None
        try:
            message = await self._context.read()
        except aio.BaseError as error:
            raise NetworkError(f"the stream {self._method.name} from {self.peer_id} broke: {error}") from None
        if message is aio.EOF:
            raise NetworkError(f"the stream {self._method.name} from {self.peer_id} broke off before its end")
        if message == END_OF_STREAM:
            self._finished = True
            return None
        check_incoming(self._method, message)
        return message  # type: ignore[no-any-return, unused-ignore]

    async def finish(self) -> None:
        return None

    def cancel(self) -> None:
        self.ended = True
        if self._task is not None:
            self._task.cancel()


async def _answer(handler: UnaryHandler, peer_id: PeerId, raw: bytes) -> bytes:
    method = handler.method
    if len(raw) > method.request_bytes_max:
        raise PeerError(f"{method.name} takes requests of at most {method.request_bytes_max} bytes; this one has {len(raw)}")
    request = method.request()
    try:
        request.ParseFromString(raw)
    except DecodeError:
        raise PeerError(f"the request of {method.name} is not a {method.request.DESCRIPTOR.full_name}") from None
    reply = (await handler.function(peer_id, request)).SerializeToString()
    if len(reply) > method.reply_bytes_max:
        raise RuntimeError(f"our reply has {len(reply)} bytes, more than {method.name} allows ({method.reply_bytes_max})")
    return reply


async def _serve(handler: StreamHandler, peer_id: PeerId, context: aio.ServicerContext[Any, Any]) -> bytes:
    stream = _HandlerStream(handler.method, peer_id, context)
    try:
        await handler.function(stream)
        return b""
    except asyncio.CancelledError:
        if stream.ended:
            raise _Ended from None
        raise  # the caller went away, or the server stops


def check_outgoing(method: StreamMethod, message: bytes) -> None:
    """UsageError when this end may not send that."""
    if not message:
        raise UsageError("a stream carries no empty messages")
    if len(message) > method.message_bytes_max:
        raise UsageError(f"{method.name} takes messages of at most {method.message_bytes_max} bytes; this one has {len(message)}")


def check_incoming(method: StreamMethod, message: bytes) -> None:
    """PeerError when the other end should not have sent that."""
    if not 0 < len(message) <= method.message_bytes_max:
        raise PeerError(f"{method.name} takes messages of 1 to {method.message_bytes_max} bytes; this one has {len(message)}")


async def _refuse(context: aio.ServicerContext[Any, Any], code: grpc.StatusCode, text: str) -> NoReturn:
    await context.abort(code, _told(text))
    raise AssertionError("abort raises")


def _told(text: str) -> str:
    return text[:_REFUSAL_CHARACTERS_MAX]


def _certificate_of(context: aio.ServicerContext[Any, Any]) -> bytes:
    certificates = context.auth_context().get("x509_pem_cert")
    if not certificates:  # the handshake demands one, so this is not reached
        raise PeerError("a caller must show a certificate")
    certificate: bytes = next(iter(certificates))
    return certificate


def _check_method(name: str, bytes_max: int) -> None:
    if name.count("/") != 2 or not name.startswith("/"):
        raise UsageError(f"a method is called like /swarm.Service/Name, not {name!r}")
    if bytes_max > MESSAGE_BYTES_MAX:
        raise UsageError(f"{name}: the transport takes messages of at most {MESSAGE_BYTES_MAX} bytes")
