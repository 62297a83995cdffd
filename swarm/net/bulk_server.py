"""The callee's side of the bulk path: a second TCP port, whose connections begin with a token.

A token is given to a peer over gRPC, where both ends are authenticated (`BULK`), together with the secret of
the connection. While no token is in use, connections are closed at once. With one, only a few may be without
their token, each for a short time and with a few dozen bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc

from swarm.core.ids import PeerId
from swarm.core.standing import PeerStanding
from swarm.net.bulk_calls import BULK, IS_SUPPORTED, MAGIC, encode_status
from swarm.net.bulk_socket import BulkLost, BulkSocket, configure
from swarm.net.callers import OpenCalls, RemoteCaller, caller_host
from swarm.net.calls import ANSWER_S_MAX, Outcome
from swarm.net.incoming import BulkContext
from swarm.net.logic.sealing import SECRET_BYTES, TOKEN_BYTES, BulkSecret, FrameKind
from swarm.net.rpc import Handlers
from swarm.net.scope import prefix_of
from swarm.net.throttle import Throttle
from swarm.runtime.supervise import Supervisor
from swarm.wire import peer_pb2

_logger = logging.getLogger(__name__)

CONNECTIONS_MAX = 512  # with tokens that were given; strangers share half, as for calls
CONNECTIONS_PER_PEER_MAX = 8
TOKEN_S = 10.0  # a token is valid for this long
UNPROVEN_MAX = 64  # connections that have not sent a valid token yet
PROOF_S_MAX = 5.0  # for the token and the first frame
IDLE_S_MAX = 300.0  # between two streams; longer than callers keep an unused connection
_DRAIN_S_MAX = 5.0  # for the last frame of a caller whose stream has ended
DRAIN_BYTES_MAX = 16 << 20  # that it sends before it has noticed that
_METHOD_BYTES_MAX = 200
_PORT_MAX = 65535
PORTS_APART = 10_000  # nearer ports are those of libp2p, and of other peers on the same machine
_ACCEPTS_MAX = 16  # per turn of the event loop
_QUEUE = 128  # connections that wait to be accepted
_LAST_S_MAX = 0.2  # in which streams that are ended at close send their last frames
_REFUSED = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.PERMISSION_DENIED)
_CLOSING: Outcome = (grpc.StatusCode.CANCELLED, "the peer is closing", b"")
Serve = Callable[[RemoteCaller, str, str, "BulkContext"], Coroutine[Any, Any, Outcome]]


@dataclass(frozen=True, slots=True)
class _Ticket:
    """The right to make one connection."""

    caller: RemoteCaller
    secret: BulkSecret
    expiry: asyncio.TimerHandle


class BulkServer:
    """The bulk port of one node. It belongs to the network thread."""

    def __init__(
        self,
        own: PeerId,
        standing: PeerStanding,
        throttle: Throttle,
        serve: Serve,
        per_peer_max: int = CONNECTIONS_PER_PEER_MAX,
    ) -> None:
        """`serve(caller, host, method, context)` serves a stream to its end, and must not raise."""
        self._own, self._throttle, self._serve = own, throttle, serve
        self.connections = OpenCalls(standing, "bulk connections", CONNECTIONS_MAX, per_peer_max)
        self._tickets: dict[bytes, _Ticket] = {}
        self._unproven: dict[asyncio.Task[None], str] = {}  # with their address prefixes, the oldest first
        self._handling: set[asyncio.Task[Outcome]] = set()
        self._unanswered: set[asyncio.Future[None]] = set()  # of streams whose last frame is not sent
        self._tasks = Supervisor()
        self._listening: socket.socket | None = None
        self._grpc_port = 0
        self.port = 0  # 0: it does not listen

    def start(self, host: str, grpc_port: int, *, is_chosen: bool, handlers: Handlers) -> None:
        """Listen beside the gRPC server, and give tokens to callers. `is_chosen`: the user has set the gRPC
        port. The bulk port is then 10,000 above it, if that is free, so that it can be forwarded, too.
        Without any port, peers use gRPC.
        """
        if not IS_SUPPORTED:
            return
        above = grpc_port + PORTS_APART
        listening = _listen(host, above if is_chosen and above <= _PORT_MAX else 0)
        if listening is None:
            return
        if is_chosen and listening.getsockname()[1] != above:
            lost = f"port {above}, where large transfers would arrive, is not available"
            advice = "Free it, or listen"
            if above > _PORT_MAX:
                lost = f"large transfers would arrive {PORTS_APART:,} ports above, and there is no such port"
                advice = "Listen"
            _logger.warning(
                "%s: peers beyond a router send everything to port %d, which takes more processor time. "
                "%s on a port up to %d",
                lost,
                grpc_port,
                advice,
                _PORT_MAX - PORTS_APART,
            )
        self._listening, self.port, self._grpc_port = listening, listening.getsockname()[1], grpc_port
        asyncio.get_running_loop().add_reader(listening, self._accept)
        handlers.remove(BULK.name)
        handlers.direct(BULK, self.give)

    def give(self, caller: PeerId, request: peer_pb2.BulkRequest) -> peer_pb2.BulkReply:
        """Give the caller a token for one connection; none if there are too many (`BULK`)."""
        remote = RemoteCaller(caller, prefix_of(caller_host()))
        if self._listening is None or self.connections.enter(remote) is not None:
            return peer_pb2.BulkReply()
        secret = BulkSecret(secrets.token_bytes(SECRET_BYTES), caller, self._own)
        token = secret.token
        expiry = asyncio.get_running_loop().call_later(TOKEN_S, self._expire, token)
        self._tickets[token] = _Ticket(remote, secret, expiry)
        return peer_pb2.BulkReply(port=self.port, grpc_port=self._grpc_port, secret=secret.secret)

    async def stop(self, grace_s: float) -> None:
        """Take no more connections; streams in progress have `grace_s` to end. Idempotent."""
        listening, self._listening, self.port = self._listening, None, 0
        if listening is None:
            return
        asyncio.get_running_loop().remove_reader(listening)
        listening.close()
        for token in list(self._tickets):
            self._expire(token)
        if self._handling:
            await asyncio.wait(self._handling, timeout=grace_s)
        for handling in self._handling:
            handling.cancel()
        if self._unanswered:
            await asyncio.wait(self._unanswered, timeout=_LAST_S_MAX)
        await self._tasks.close()

    def _expire(self, token: bytes) -> None:
        ticket = self._tickets.pop(token)
        ticket.expiry.cancel()
        self.connections.leave(ticket.caller)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_MAX):
            if self._listening is None:
                return
            try:
                connected, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors or no memory: the others wait in the queue
                _logger.warning("no bulk connection was accepted: %s", error)
                self._pause(self._listening)
                return
            if not self._tickets:
                connected.close()
                continue
            host = str(address[0]).removeprefix("::ffff:")
            if len(self._unproven) >= UNPROVEN_MAX:
                self._drop_one()
            task = self._tasks.spawn("a bulk connection", functools.partial(self._run, connected, host))
            self._unproven[task] = prefix_of(host)
            task.add_done_callback(functools.partial(self._closed, connected))

    def _pause(self, listening: socket.socket) -> None:
        """Accept no connections for a second."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)

        def again() -> None:
            if self._listening is listening:
                loop.add_reader(listening, self._accept)

        loop.call_later(1.0, again)

    def _drop_one(self) -> None:
        """Close the oldest connection without a token, of the address prefix that has the most of them."""
        prefix, _ = Counter(self._unproven.values()).most_common(1)[0]
        task = next(task for task, other in self._unproven.items() if other == prefix)
        del self._unproven[task]
        task.cancel()

    def _closed(self, connected: socket.socket, task: asyncio.Task[None]) -> None:
        self._unproven.pop(task, None)
        connected.close()

    async def _run(self, connected: socket.socket, host: str) -> None:
        """Serve a connection to its end."""
        try:
            configure(connected, small_buffer=self._throttle.bandwidth.down_bytes_per_s is not None)
            async with asyncio.timeout(PROOF_S_MAX):
                ticket = await self._ticket_of(connected)
        except OSError:  # a timeout is one
            return
        if ticket is None:
            return
        caller = ticket.caller
        connection = BulkSocket(connected, ticket.secret, is_caller=False)
        try:
            async with asyncio.timeout(PROOF_S_MAX):
                if await connection.receive(body_bytes_max=0) != (FrameKind.PROOF, b""):
                    return
                await connection.send(FrameKind.PROOF, b"")
            self._unproven.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
            connection.next_stream()
            while await self._serve_stream(connection, caller, host):
                connection.next_stream()
        except (BulkLost, TimeoutError) as error:
            _logger.debug("a bulk connection of peer %s ended: %s", caller.peer_id.short, error)
        finally:
            connection.close()
            self.connections.leave(caller)

    async def _ticket_of(self, connected: socket.socket) -> _Ticket | None:
        """Return the ticket whose token the connection begins with, and make it invalid."""
        loop, first = asyncio.get_running_loop(), b""
        while len(first) < len(MAGIC) + TOKEN_BYTES:
            more = await loop.sock_recv(connected, len(MAGIC) + TOKEN_BYTES - len(first))
            first += more
            if not more or not first.startswith(MAGIC[: len(first)]):
                return None
        ticket = self._tickets.pop(first[len(MAGIC) :], None)
        if ticket is not None:
            ticket.expiry.cancel()
        return ticket

    async def _serve_stream(self, connection: BulkSocket, caller: RemoteCaller, host: str) -> bool:
        """Serve the next stream of a connection. Return whether another one may follow."""
        async with asyncio.timeout(IDLE_S_MAX):
            kind, body = await connection.receive(_METHOD_BYTES_MAX)
        if kind is not FrameKind.OPEN or self._listening is None:
            return False
        handling = asyncio.get_running_loop().create_task(
            self._serve(caller, host, bytes(body).decode(errors="replace"), BulkContext(connection))
        )
        answered = asyncio.get_running_loop().create_future()
        self._handling.add(handling)
        self._unanswered.add(answered)
        connection.on_lost = handling.cancel
        try:
            try:
                await asyncio.wait({handling})
            finally:
                connection.on_lost = None
                handling.cancel()
                self._handling.discard(handling)
            outcome = _CLOSING if handling.cancelled() else handling.result()
            async with asyncio.timeout(ANSWER_S_MAX):
                await connection.send(FrameKind.END, encode_status(*outcome[:2]))
        finally:
            self._unanswered.discard(answered)
            answered.set_result(None)
        # Closing the connection at once would reset it if the caller still sends, which would then not learn
        # the status. Another stream after a refusal needs another token.
        async with asyncio.timeout(_DRAIN_S_MAX):
            return await connection.discard(DRAIN_BYTES_MAX) and outcome[0] not in _REFUSED


def _listen(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens on this port, or on any free one if it is taken; None if there is none."""
    for one in dict.fromkeys((port, 0)):
        with contextlib.suppress(OSError):
            family, kind, protocol, _, where = socket.getaddrinfo(host, one, type=socket.SOCK_STREAM)[0]
            listening = socket.socket(family, kind, protocol)
            try:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                listening.bind(where)
                listening.listen(_QUEUE)
                listening.setblocking(False)
            except BaseException:
                listening.close()
                raise
            return listening
    return None
