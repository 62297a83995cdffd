"""The server of a node: finds the handler of a call, identifies its caller, bounds concurrent calls, and maps
what handlers raise.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio

from swarm.core.errors import NotInvited, PeerError, SwarmError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import PeerId
from swarm.core.standing import PeerStanding
from swarm.net.bulk_server import CONNECTIONS_MAX as BULK_CONNECTIONS_MAX
from swarm.net.bulk_server import CONNECTIONS_PER_PEER_MAX, BulkServer
from swarm.net.callers import STRANGER_CALLS, CallsOf, OpenCalls, RemoteCaller, set_caller_host
from swarm.net.calls import (
    ANSWER_S_MAX,
    BATCH_BYTES_MAX,
    CALLS_NAME,
    SHARED_REPLY_BYTES_MAX,
    Outcome,
    ServedCalls,
)
from swarm.net.certificate import CallerCheck, courtesy_ca, server_certificate
from swarm.net.connections import CONNECTIONS_MAX, Connections
from swarm.net.incoming import BulkContext, Context, StreamCancelled, serve_stream
from swarm.net.listening import why_no_listening
from swarm.net.logic.stranger_budget import StrangerBudget
from swarm.net.membership import RunMembership
from swarm.net.room import AnswerRoom, PeerRoom, RequestReads
from swarm.net.rpc import SIZE_OPTIONS, Handlers, Later, StreamHandler, UnaryHandler
from swarm.net.scope import Surroundings, endpoint_of
from swarm.net.throttle import Bandwidth, Throttle
from swarm.runtime.sockets import Endpoint

_logger = logging.getLogger(__name__)

_NOT_INVITED = grpc.StatusCode.PERMISSION_DENIED
_INTERNAL: Outcome = (grpc.StatusCode.INTERNAL, "internal error", b"")
STREAMS_PER_PEER_MAX = 4  # streams of shared calls: one per connection
# streams of shared calls on the bulk path; its other connections are for rounds, states and experts
BULK_CALL_STREAMS_PER_PEER_MAX = 1
_BULK_CALL_STREAMS_MAX = BULK_CONNECTIONS_MAX // 2
_TOO_MANY = "busy: strangers in your network make too many connections"
_REFUSAL_CHARACTERS_MAX = 1000  # gRPC sends it in a header
# A caller pings every 20 s on an idle connection (`swarm.net.dial`). Half of that leaves room for pings that
# the network delays; gRPC's own 300 s would end every stream that is idle for a minute ("too_many_pings").
_PING_INTERVAL_S_MIN = 10.0
_OPTIONS: tuple[tuple[str, int], ...] = (
    *SIZE_OPTIONS,
    ("grpc.so_reuseport", 0),  # a used port must be an error instead of being shared
    ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
    ("grpc.max_concurrent_streams", 40),  # per connection; each buffers up to 64 KiB of unread data
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether to keep a log record of gRPC. Drops the errors with a stack trace that gRPC logs when a
    caller leaves before its answer was sent.
    """
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "ExecuteBatchError"


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Limits on what callers may do at a server."""

    calls_max: int = 1024
    calls_per_peer_max: int = 256
    bulk_per_peer_max: int = CONNECTIONS_PER_PEER_MAX  # bulk connections; 0: there is no bulk port
    # the connection of a caller that pings more often while idle is closed
    ping_interval_s_min: float = _PING_INTERVAL_S_MIN


def _admit_all(peer_id: PeerId, method: str) -> str:
    return ""


class Server:
    """The gRPC server of a node. It identifies every caller by its certificate and bounds the calls that a
    caller may have open.
    """

    def __init__(
        self,
        *,
        limits: CallLimits | None = None,
        throttle: Throttle | None = None,
        standing: PeerStanding | None = None,
        membership: RunMembership | None = None,
        surroundings: Surroundings | None = None,
        tunnelled: Callable[[Endpoint], str] = lambda endpoint: "",
    ) -> None:
        """`standing`: callers that are strangers share half of every limit. `membership`: of this process in
        an invited run; decides which callers are answered. `surroundings` records the hosts of callers.
        `tunnelled` returns the relay through which calls from a local endpoint come; empty if there is none.
        """
        limits = limits or CallLimits()
        self.throttle = throttle or Throttle(Bandwidth())
        self.standing = standing or PeerStanding()
        self.room = AnswerRoom(self.standing)
        self.reads = RequestReads(self.standing)
        # (peer, method) -> why this peer may not call this method here; empty if it may
        self.refusal = membership.refusal if membership is not None else _admit_all
        self._calls_max, self._bulk_per_peer_max = limits.calls_max, limits.bulk_per_peer_max
        self._options = (
            *_OPTIONS,
            *self.throttle.options,
            ("grpc.http2.min_ping_interval_without_data_ms", round(1000 * limits.ping_interval_s_min)),
        )
        self._surroundings = surroundings or Surroundings()
        budget = StrangerBudget(STRANGER_CALLS)
        self.calls = OpenCalls(self.standing, "calls", limits.calls_max, limits.calls_per_peer_max, budget)
        self.call_streams = OpenCalls(
            self.standing, "streams of shared calls", limits.calls_max, STREAMS_PER_PEER_MAX
        )
        self.bulk_call_streams = OpenCalls(
            self.standing, "streams of shared calls", _BULK_CALL_STREAMS_MAX, BULK_CALL_STREAMS_PER_PEER_MAX
        )
        self._tunnelled = tunnelled
        self.connections = Connections(self.standing, lambda: self._port, tunnelled)
        self._port: int | None = None
        self._streams: set[ServedCalls] = set()
        self._server: aio.Server | None = None
        self._bulk: BulkServer | None = None

    @property
    def bulk(self) -> BulkServer | None:
        """Return the bulk port; None if there is none."""
        return self._bulk

    @property
    def is_stopping(self) -> bool:
        """Return whether no stream of shared calls takes more calls."""
        return all(stream.is_stopping for stream in self._streams)

    async def start(self, identity: Identity, handlers: Handlers, host: str, port: int) -> int:
        """Listen, and return the port (the system's choice for 0). Raises UsageError when it cannot listen
        there.
        """
        server = aio.server(options=self._options, maximum_concurrent_rpcs=3 * self._calls_max)
        dispatch = _Dispatch(self, handlers)
        server.add_generic_rpc_handlers((dispatch,))
        leaf = server_certificate(identity)
        credentials = grpc.ssl_server_credentials(
            [(leaf.key_pem, leaf.certificate_pem)], root_certificates=courtesy_ca(), require_client_auth=True
        )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound: int = server.add_secure_port(address, credentials)
        except RuntimeError:  # gRPC's text adds no information
            bound = 0
        if not bound:
            raise UsageError(why_no_listening(host, port))
        await server.start()
        self._server, self._port = server, bound
        if self._bulk_per_peer_max:
            self._bulk = BulkServer(
                identity.peer_id, self.standing, self.throttle, dispatch.serve_bulk, self._bulk_per_peer_max
            )
            self._bulk.start(host, bound, is_chosen=port > 0, handlers=handlers)
        return bound

    async def stop(self, grace_s: float) -> None:
        """Take no more calls; those in progress have `grace_s` to end and are then cancelled. Idempotent."""
        server, self._server, self._port = self._server, None, None
        for stream in self._streams:
            stream.stop()
        async with asyncio.TaskGroup() as group:
            if self._bulk is not None:
                group.create_task(self._bulk.stop(grace_s))
            if server is not None:
                group.create_task(server.stop(grace_s))

    async def serve_calls(self, caller: RemoteCaller, stream: ServedCalls, counts: OpenCalls) -> None:
        """Serve a stream of shared calls to its end. `counts`: the streams that are open on its transport.
        Raises _Busy when the caller has too many: it then uses gRPC's stream, or makes separate calls.
        """
        if self._server is None or counts.enter(caller) is not None:
            raise _Busy
        self._streams.add(stream)
        try:
            await stream.run()
        finally:
            self._streams.discard(stream)
            counts.leave(caller)

    def called(self, peer_id: PeerId, peer: str) -> RemoteCaller:
        """Return the caller of a connection. `peer`: gRPC's name of the other end. Called in the task that
        serves it. Raises _Busy for a stranger whose address prefix makes too many connections.
        """
        endpoint = endpoint_of(peer)
        if not self.connections.on_called(peer_id, endpoint, asyncio.get_running_loop().time()):
            raise _Busy
        # the address of a tunnel says nothing about its caller
        host = "" if self._tunnelled(endpoint) else endpoint[0]
        self._surroundings.on_called(peer_id, host)
        set_caller_host(host)
        return RemoteCaller(peer_id, self.connections.prefix_of(endpoint))


_ServeCall = Callable[[Any, PeerId, Any], Awaitable[Outcome]]


class _Dispatch(grpc.GenericRpcHandler):  # type: ignore[misc, unused-ignore]
    """Find the handler, identify the caller, and map what the handler raises. Only this class and the
    supervisor catch every exception.
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
        serve = self._serve_unary if isinstance(handler, UnaryHandler) else self._serve_stream

        # A unary call is read as a stream of one message: the caller is known before its request is read.
        async def serve_call(_: Any, context: aio.ServicerContext[Any, Any]) -> None:
            await self._guarded(handler, context, serve)

        return grpc.stream_stream_rpc_method_handler(serve_call)

    async def _share(self, _: Any, context: aio.ServicerContext[Any, Any]) -> None:
        """Serve a stream of shared calls on a gRPC connection."""
        caller = await self._identified(context)
        code, text, _ = await self._serve_calls(caller, context, self._server.call_streams)
        if code is not grpc.StatusCode.OK:
            await _refuse(context, code, text)

    async def _serve_calls(self, caller: RemoteCaller, context: Context, counts: OpenCalls) -> Outcome:
        """Serve a stream of shared calls to its end."""
        peer_id = caller.peer_id

        async def handle(name: str, raw: bytes) -> Outcome:
            not_invited = self._server.refusal(peer_id, name)
            if not_invited:
                return _NOT_INVITED, not_invited, b""
            handler = self._handlers.find(name)
            if not isinstance(handler, UnaryHandler):
                return grpc.StatusCode.UNIMPLEMENTED, "", b""
            return await self._outcome(name, peer_id, self._answer(handler, peer_id, raw))

        def handle_now(name: str, raw: bytes) -> Outcome | Later[Outcome] | int:
            handler = self._handlers.find(name)
            if not isinstance(handler, UnaryHandler) or handler.function_now is None:
                return 0
            not_invited = self._server.refusal(peer_id, name)
            if not_invited:
                return _NOT_INVITED, not_invited, b""
            try:
                reply = handler.function_now(peer_id, _decoded(handler, raw))
                if reply is None:
                    return min(handler.reply_bytes_reserved, SHARED_REPLY_BYTES_MAX)
                if isinstance(reply, Later):
                    make = functools.partial(reply_later, handler, reply, len(raw))
                    return Later(reply.ended, make, reply.withdraw)
                return sent_now(handler, reply, len(raw))
            except (SwarmError, StreamCancelled) as error:
                return _failure(name, peer_id, error)
            except Exception:  # the boundary, as in `_outcome`
                _logger.exception("%s, called by %s, failed", name, peer_id)
                return _INTERNAL

        def reply_later(handler: UnaryHandler, reply: Later[Message], received_bytes: int) -> Outcome:
            try:
                return sent_now(handler, reply.reply(), received_bytes)
            except (SwarmError, StreamCancelled) as error:
                return _failure(handler.method.name, peer_id, error)
            except Exception:  # the boundary, as in `_outcome`
                _logger.exception("%s, called by %s, failed", handler.method.name, peer_id)
                return _INTERNAL

        def sent_now(handler: UnaryHandler, reply: Message, received_bytes: int) -> Outcome:
            encoded = _encoded(handler, reply)
            self._server.throttle.count(len(encoded), received_bytes)
            return grpc.StatusCode.OK, "", encoded

        calls, room = CallsOf(self._server.calls, caller), PeerRoom(self._server.room, peer_id)
        stream = ServedCalls(context, handle, handle_now, calls, room)
        try:
            await self._server.serve_calls(caller, stream, counts)
        except PeerError as error:
            return grpc.StatusCode.FAILED_PRECONDITION, str(error), b""
        except _Busy:
            return grpc.StatusCode.RESOURCE_EXHAUSTED, "no more streams of shared calls", b""
        return grpc.StatusCode.OK, "", b""

    async def _answer(self, handler: UnaryHandler, peer_id: PeerId, raw: bytes) -> bytes:
        return await _answer(handler, peer_id, raw, self._server.throttle)

    async def _serve_unary(
        self, handler: UnaryHandler, peer_id: PeerId, context: aio.ServicerContext[Any, Any]
    ) -> Outcome:
        """Serve a unary call to its end: read the request, and send the answer."""
        name, room = handler.method.name, self._server.room
        try:
            async with self._server.reads.place(peer_id):
                raw = await context.read()
        except TimeoutError:
            return grpc.StatusCode.RESOURCE_EXHAUSTED, "the request did not arrive in time", b""
        if raw is aio.EOF:
            return grpc.StatusCode.FAILED_PRECONDITION, f"{name} needs a request", b""
        reserved_bytes = handler.reply_bytes_reserved
        await room.wait(peer_id, reserved_bytes)
        try:
            outcome = await self._outcome(name, peer_id, self._answer(handler, peer_id, raw))
            if outcome[0] is grpc.StatusCode.OK:
                room.take(peer_id, len(outcome[2]))
                room.release(peer_id, reserved_bytes)
                reserved_bytes = len(outcome[2])
                async with asyncio.timeout(ANSWER_S_MAX):
                    await context.write(outcome[2])
        except TimeoutError:
            return grpc.StatusCode.CANCELLED, f"the answer was not read for {ANSWER_S_MAX:g} s", b""
        finally:
            room.release(peer_id, reserved_bytes)
        return outcome

    async def _serve_stream(self, handler: StreamHandler, peer_id: PeerId, context: Context) -> Outcome:
        throttle = self._server.throttle
        return await self._outcome(
            handler.method.name,
            peer_id,
            serve_stream(handler, peer_id, context, throttle, self._server.reads),
        )

    async def _identified(self, context: aio.ServicerContext[Any, Any]) -> RemoteCaller:
        peer = context.peer()
        if self._server.connections.is_refused(endpoint_of(peer)):  # decided without checking its certificate
            await _refuse(context, grpc.StatusCode.UNAVAILABLE, _TOO_MANY)
        try:
            peer_id = self._caller(_certificate_of(context))
        except PeerError as error:
            await _refuse(context, grpc.StatusCode.UNAUTHENTICATED, str(error))
        try:
            return self._server.called(peer_id, peer)
        except _Busy:
            await _refuse(context, grpc.StatusCode.UNAVAILABLE, _TOO_MANY)

    async def serve_bulk(self, caller: RemoteCaller, host: str, name: str, context: BulkContext) -> Outcome:
        """Serve a stream on a bulk connection."""
        set_caller_host(host)
        if name == CALLS_NAME:
            context.body_bytes_max = BATCH_BYTES_MAX
            return await self._serve_calls(caller, context, self._server.bulk_call_streams)
        handler = self._handlers.find(name)
        if not isinstance(handler, StreamHandler):
            return grpc.StatusCode.UNIMPLEMENTED, "", b""
        return await self._limited(caller, handler, context, self._serve_stream)

    async def _guarded(self, handler: Any, context: aio.ServicerContext[Any, Any], serve: _ServeCall) -> None:
        """Serve a separate call. No byte of a request is read before its caller is known."""
        caller = await self._identified(context)
        endpoint = endpoint_of(context.peer())
        code, text, _ = await self._limited(caller, handler, context, serve, endpoint)
        if code is not grpc.StatusCode.OK:
            await _refuse(context, code, text)

    async def _limited(
        self,
        caller: RemoteCaller,
        handler: Any,
        context: Any,
        serve: _ServeCall,
        endpoint: Endpoint | None = None,
    ) -> Outcome:
        """Serve a call whose caller may make it. `endpoint`: of its gRPC connection, which is closed if it
        makes too many; a bulk connection ends with a refused stream.
        """
        method = handler.method.name
        not_invited = self._server.refusal(caller.peer_id, method)
        if not_invited:
            return _NOT_INVITED, not_invited, b""
        calls = CallsOf(self._server.calls, caller)
        refusal = calls.enter()
        if refusal is not None:
            # a refusal costs as much as a call
            if endpoint is not None and not calls.may_begin(method):
                self._server.connections.refuse(endpoint)
            return grpc.StatusCode.RESOURCE_EXHAUSTED, refusal, b""
        try:
            await calls.wait_to_begin(method)
            return await serve(handler, caller.peer_id, context)
        finally:
            calls.leave()

    async def _outcome(self, name: str, peer_id: PeerId, work: Awaitable[bytes]) -> Outcome:
        """Return the outcome of a handler for its caller."""
        try:
            return grpc.StatusCode.OK, "", await work
        except (SwarmError, StreamCancelled) as error:
            return _failure(name, peer_id, error)
        except Exception:  # the boundary: any exception of a handler ends its call only
            _logger.exception("%s, called by %s, failed", name, peer_id)
            return _INTERNAL


def _failure(name: str, peer_id: PeerId, error: SwarmError | StreamCancelled) -> Outcome:
    """Return the outcome that the caller gets for an exception of its handler."""
    if isinstance(error, NotInvited):
        return _NOT_INVITED, _shortened(str(error)), b""
    if isinstance(error, (PeerError, UsageError)):
        return grpc.StatusCode.FAILED_PRECONDITION, _shortened(str(error) or type(error).__name__), b""
    if isinstance(error, StreamCancelled):
        return grpc.StatusCode.CANCELLED, "the stream was ended by its handler", b""
    # A failure of the network: of this stream, or of a call that the handler made.
    _logger.debug("%s from %s: %s", name, peer_id.short, error)
    return grpc.StatusCode.ABORTED, _shortened(str(error)), b""


class _Busy(Exception):
    """The peer has too many streams of shared calls."""


async def _answer(handler: UnaryHandler, peer_id: PeerId, raw: bytes, throttle: Throttle) -> bytes:
    if not throttle.processes_at_once(len(raw)):
        await throttle.wait_to_process(len(raw))
    reply = _encoded(handler, await handler.function(peer_id, _decoded(handler, raw)))
    if not throttle.sends_at_once(len(reply)):
        await throttle.wait_to_send(len(reply))
    return reply


def _decoded(handler: UnaryHandler, raw: bytes) -> Message:
    method = handler.method
    if len(raw) > method.request_bytes_max:
        raise PeerError(
            f"{method.name} takes requests of at most {method.request_bytes_max} bytes; this one has "
            f"{len(raw)}"
        )
    request: Message = method.request()
    try:
        request.ParseFromString(raw)
    except DecodeError:
        raise PeerError(
            f"the request of {method.name} is not a {method.request.DESCRIPTOR.full_name}"
        ) from None
    return request


def _encoded(handler: UnaryHandler, message: Message) -> bytes:
    method = handler.method
    reply = message.SerializeToString()
    if len(reply) > method.reply_bytes_max:
        raise RuntimeError(
            f"the reply has {len(reply)} bytes, more than {method.name} allows ({method.reply_bytes_max})"
        )
    return reply


async def _refuse(context: aio.ServicerContext[Any, Any], code: grpc.StatusCode, text: str) -> NoReturn:
    await context.abort(code, _shortened(text))
    raise AssertionError("abort raises")


def _shortened(text: str) -> str:
    return text[:_REFUSAL_CHARACTERS_MAX]


def _certificate_of(context: aio.ServicerContext[Any, Any]) -> bytes:
    certificates = context.auth_context().get("x509_pem_cert")
    if not certificates:  # not reached, because the handshake requires a certificate
        raise PeerError("a caller must show a certificate")
    certificate: bytes = next(iter(certificates))
    return certificate
