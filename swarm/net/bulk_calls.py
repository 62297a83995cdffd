"""The caller's side of the bulk path: connections to peers that have such a path, and streams on them.

A peer is asked for a token over gRPC (`BULK`) when there is no unused connection to it. Whatever prevents a
bulk connection, such as an older version, a tunnel, a forwarded or a blocked port, or somebody else at that
port, only means that the stream uses gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc
from grpc import aio

from swarm.core.errors import NetworkError, PeerError
from swarm.core.ids import PeerId
from swarm.net.bulk_socket import BulkLost, BulkSocket, configure
from swarm.net.dial import Connection
from swarm.net.logic.sealing import SECRET_BYTES, BulkSecret, FrameKind
from swarm.net.rpc import END_OF_STREAM, Method
from swarm.net.throttle import Throttle
from swarm.runtime.sockets import Endpoint
from swarm.wire import peer_pb2

_logger = logging.getLogger(__name__)

IS_SUPPORTED = sys.platform != "win32"  # event loops there do not watch sockets
MAGIC = b"swarmbk1"  # the first bytes of a connection, before the token
# Time for connecting: at least this, and twice the time that the gRPC connection took, which needs more round
# trips. The first stream to a peer whose port is blocked waits for it.
CONNECT_S_MIN = 1.0
CONNECT_S_MAX = 2.0
RETRY_S = 600.0  # a peer to which no connection could be made is not tried for this long
_BUSY_S = 1.0  # the same after it refused one more connection
_REMEMBERED_MAX = 4096
_SETTLE_S = 0.1
BULK = Method(
    name="/swarm.Node/Bulk",
    request=peer_pb2.BulkRequest,
    reply=peer_pb2.BulkReply,
    request_bytes_max=64,
    reply_bytes_max=128,
)
CODES = {code.value[0]: code for code in grpc.StatusCode}


def encode_status(code: grpc.StatusCode, text: str) -> bytes:
    """Return the body of the callee's last frame."""
    return bytes([code.value[0]]) + text.encode()


def decode_status(body: bytes) -> tuple[grpc.StatusCode, str]:
    """Return the status and reason in the callee's last frame; of anything else, an unknown status."""
    code = CODES.get(body[0]) if body else None
    return code or grpc.StatusCode.UNKNOWN, body[1:].decode(errors="replace")


class BulkCall:
    """A stream on a bulk connection, with those methods of a gRPC call that `CallerStream` uses. However it
    ends, it has a status.
    """

    def __init__(self, connection: BulkSocket, deadline_s: float | None) -> None:
        self.connection = connection
        self._status: tuple[grpc.StatusCode, str] | None = None
        self._ahead: bytes | memoryview | None = None  # a message that arrived while no task received
        self._is_receiving = False
        self._has_sent_all = False
        self._has_ended = False  # the callee has sent its last frame
        self._then: Callable[[], None] | None = None  # what follows when the stream has ended
        connection.on_data = self._look
        connection.on_lost = lambda: self._end(grpc.StatusCode.UNAVAILABLE, connection.lost)
        connection.watch()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(deadline_s, self._expire) if deadline_s is not None else None

    async def wait_for_connection(self) -> None:
        """Do nothing, because the connection was made before the stream."""

    def done(self) -> bool:
        """Return whether the stream has ended."""
        return self._status is not None

    async def code(self) -> grpc.StatusCode:
        """Return the status of an ended stream."""
        assert self._status is not None
        return self._status[0]

    async def details(self) -> str:
        """Return the reason for the status."""
        assert self._status is not None
        return self._status[1]

    async def read(self, buffer: memoryview | None = None) -> Any:
        """Return the next message, or EOF when the stream has ended. A message that fits into the buffer may
        be written there, and is a view of it then.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self.connection.watch()
            return ahead
        if self._status is not None:
            return aio.EOF
        self._is_receiving = True
        try:
            message = self._take(await self.connection.receive(buffer=buffer))
        except BulkLost as lost:
            message = None
            self._end(grpc.StatusCode.UNAVAILABLE, str(lost))
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            self._is_receiving = False
        return aio.EOF if message is None else message

    async def write(self, message: bytes) -> None:
        """Send a message. Raises aio.InternalError when the stream has ended."""
        try:
            await self.connection.send(FrameKind.DATA, message)
        except BulkLost as lost:
            self._end(grpc.StatusCode.UNAVAILABLE, str(lost))
            raise aio.InternalError(str(lost)) from None
        self._has_sent_all = message == END_OF_STREAM

    def begin_to_write(self, message: bytes) -> Coroutine[Any, Any, None] | None:
        """Send a message that is not the last one, as `BulkSocket.begin_to_send`, with the errors of
        `write`.
        """
        try:
            return self.connection.begin_to_send(FrameKind.DATA, message)
        except BulkLost as lost:
            self._end(grpc.StatusCode.UNAVAILABLE, str(lost))
            raise aio.InternalError(str(lost)) from None

    def cancel(self) -> None:
        """End the stream now. The connection is lost with it, unless the callee has ended the stream."""
        self._end(grpc.StatusCode.CANCELLED, "it was cancelled here")
        if not self._has_ended:
            self.connection.close(reset=True)

    def settle(self, then: Callable[[], None]) -> None:
        """End the stream, and call `then`. The last frame of a callee that has got everything may still be on
        its way; it is waited for, because the connection can be used again after it.
        """
        if self._status is not None or self._ahead is not None or not self._has_sent_all:
            self.cancel()
            then()
            return
        self._then = then
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_SETTLE_S, self.cancel)
        self.connection.watch()

    def release(self) -> bool:
        """Return whether the connection of an ended stream can be used again, and prepare it; else close
        it.
        """
        connection = self.connection
        connection.on_data = connection.on_lost = None
        if not self._has_ended or not connection.send_at_once(FrameKind.END, b""):
            connection.close()
            return False
        connection.next_stream()
        return True

    def _look(self) -> None:
        """Take what arrived while no task receives: a sender that waits must learn that the stream ended."""
        if self._is_receiving or self._ahead is not None:
            return
        try:
            frame = self.connection.receive_now()
        except BulkLost as lost:
            self._end(grpc.StatusCode.UNAVAILABLE, str(lost))
            return
        if frame is not None:
            self._ahead = self._take(frame)
        if self._ahead is None:
            self.connection.watch()
        elif self._then is not None:
            self.cancel()

    def _take(self, frame: tuple[FrameKind, bytes | memoryview]) -> bytes | memoryview | None:
        """Return the message of a frame; None if it was the last one."""
        kind, body = frame
        if kind is FrameKind.DATA:
            return body
        if kind is FrameKind.END:
            self._has_ended = True
            self._end(*decode_status(bytes(body)))
        else:
            self._end(grpc.StatusCode.UNAVAILABLE, "it sent a frame that only callers send")
            self.connection.close()
        return None

    def _end(self, code: grpc.StatusCode, text: str) -> None:
        if self._status is not None:
            return
        self._status = code, text
        self.connection.stop_sending("the stream has ended")
        if self._timer is not None:
            self._timer.cancel()
        if self._then is not None:
            # not here, because the connection is in the middle of a frame
            asyncio.get_running_loop().call_soon(self._then)

    def _expire(self) -> None:
        self._end(grpc.StatusCode.DEADLINE_EXCEEDED, "")
        self.connection.close(reset=True)


class BulkConnections:
    """The bulk connections of one node to other peers. They belong to the network thread."""

    def __init__(
        self,
        own: PeerId,
        throttle: Throttle,
        on_dialed: Callable[[Endpoint], None],
        *,
        connections_max: int,
        idle_s: float,
    ) -> None:
        """`on_dialed` is called with every endpoint to which a connection may be under way."""
        self._own, self._throttle, self._on_dialed = own, throttle, on_dialed
        self._connections_max, self._idle_s = connections_max, idle_s
        self._is_on = IS_SUPPORTED
        self._open: dict[BulkSocket, Endpoint] = {}
        # unused ones with the time of their last use, the latest last
        self._idle: dict[PeerId, list[tuple[BulkSocket, float]]] = {}
        self._retry_s: OrderedDict[PeerId, float] = OrderedDict()  # when a peer may be asked again

    @property
    def endpoints(self) -> frozenset[Endpoint]:
        """Return the (IP, port) pairs that are connected."""
        return frozenset(self._open.values())

    def is_possible(self, peer_id: PeerId) -> bool:
        """Return whether it makes sense to begin a stream here: there is an unused connection, or no attempt
        has failed recently.
        """
        return self._is_on and (peer_id in self._idle or self._may_connect(peer_id))

    def _may_connect(self, peer_id: PeerId) -> bool:
        retry_s = self._retry_s.get(peer_id)
        return retry_s is None or retry_s <= asyncio.get_running_loop().time()

    async def begin(
        self,
        peer_id: PeerId,
        control: Connection,
        method: str,
        ask: Callable[[], Awaitable[peer_pb2.BulkReply]],
        deadline_s: float | None,
        *,
        is_new: bool = False,
    ) -> BulkCall | None:
        """Begin a stream that ends at `deadline_s` (None: without a limit); None if it must use gRPC. `ask`
        calls `BULK` on `control`, the gRPC connection to the peer. `is_new`: on a new connection,
        even if an unused one is kept.
        """
        while not is_new and (unused := self._idle.get(peer_id)) is not None:
            connection, _ = unused.pop()
            if not unused:
                del self._idle[peer_id]
            call = await self._call_on(connection, method, deadline_s)
            if call is not None:
                return call
        if not self._may_connect(peer_id):
            return None
        made = await self._connect(peer_id, control, ask, deadline_s)
        return None if made is None else await self._call_on(made, method, deadline_s)

    def end(self, call: BulkCall) -> None:
        """End a stream, and keep its connection for the next one if it can be used again."""
        call.settle(lambda: self._ended(call))

    def drop(self, call: BulkCall) -> None:
        """End a stream, and close its connection."""
        call.cancel()
        self._forget(call.connection)

    def _ended(self, call: BulkCall) -> None:
        connection = call.connection
        if not call.release() or connection not in self._open:
            self._forget(connection)
            return
        connection.on_lost = connection.on_data = lambda: self._forget(connection)
        connection.watch()
        now_s = asyncio.get_running_loop().time()
        self._idle.setdefault(connection.other, []).append((connection, now_s))

    def forget(self, peer_id: PeerId) -> None:
        """Close all connections to a peer."""
        for connection in [one for one in self._open if one.other == peer_id]:
            self._forget(connection)

    def close_idle(self) -> None:
        """Close the connections that were not used for a while."""
        oldest_s = asyncio.get_running_loop().time() - self._idle_s
        for unused in list(self._idle.values()):
            for connection, used_s in list(unused):
                if used_s < oldest_s:
                    self._forget(connection)

    def close(self) -> None:
        """Close all connections."""
        self._is_on = False
        for connection in list(self._open):
            self._forget(connection)

    def _forget(self, connection: BulkSocket) -> None:
        connection.close()
        self._open.pop(connection, None)
        left = [one for one in self._idle.pop(connection.other, ()) if one[0] is not connection]
        if left:
            self._idle[connection.other] = left

    async def _call_on(
        self, connection: BulkSocket, method: str, deadline_s: float | None
    ) -> BulkCall | None:
        """Begin a stream on a connection; None if the connection was lost while it was not used."""
        call = BulkCall(connection, deadline_s)
        try:
            await connection.send(FrameKind.OPEN, method.encode())
        except BaseException as error:
            call.cancel()
            self._forget(connection)
            if isinstance(error, BulkLost):
                return None
            raise
        return call

    async def _connect(
        self,
        peer_id: PeerId,
        control: Connection,
        ask: Callable[[], Awaitable[peer_pb2.BulkReply]],
        deadline_s: float | None,
    ) -> BulkSocket | None:
        """Return a new connection whose other end has proven that it is the peer; None if there is none."""
        if control.address is None or not self._has_room():
            return None  # the address is None for a tunnel through a relay
        loop = asyncio.get_running_loop()
        try:
            reply = await ask()
        except NetworkError:
            return None  # gRPC will say why
        except PeerError:
            self._not_before(peer_id, RETRY_S)
            return None
        if not reply.port:
            self._not_before(peer_id, _BUSY_S)
            return None
        until_s = loop.time() + min(max(CONNECT_S_MIN, 2 * control.seconds), CONNECT_S_MAX)
        is_ended_before = deadline_s is not None and deadline_s < until_s  # by the stream's own limit
        try:
            if reply.grpc_port != control.address.port or not _is_valid(reply):
                raise BulkLost("its gRPC port is forwarded, or its answer is malformed")
            hosts = [host for host, _ in control.endpoints]
            secret = BulkSecret(reply.secret, self._own, peer_id)
            async with asyncio.timeout_at(deadline_s if is_ended_before else until_s):
                return await self._dial_one(hosts, reply.port, secret, until_s)
        except (OSError, BulkLost) as error:  # a timeout is an OSError
            _logger.debug("no bulk connection to peer %s: %s", peer_id, error)
            if not (isinstance(error, TimeoutError) and is_ended_before):
                self._not_before(peer_id, RETRY_S)
            return None

    async def _dial_one(self, hosts: list[str], port: int, secret: BulkSecret, until_s: float) -> BulkSocket:
        """Return a connection to the first host that proves to be the peer. A name may stand for several, of
        which gRPC has reached one and does not say which; the token stays valid until the peer has got it.
        """
        loop = asyncio.get_running_loop()
        for left in range(len(hosts), 1, -1):
            share_s = (until_s - loop.time()) / left
            with contextlib.suppress(OSError, BulkLost):
                async with asyncio.timeout(share_s):
                    return await self._dial((hosts[-left], port), secret)
        return await self._dial((hosts[-1], port), secret)

    async def _dial(self, endpoint: Endpoint, secret: BulkSecret) -> BulkSocket:
        loop = asyncio.get_running_loop()
        self._on_dialed(endpoint)
        family = socket.AF_INET6 if ":" in endpoint[0] else socket.AF_INET
        connected = socket.socket(family, socket.SOCK_STREAM)
        connection: BulkSocket | None = None
        try:
            configure(connected, small_buffer=self._throttle.bandwidth.down_bytes_per_s is not None)
            await loop.sock_connect(connected, endpoint)
            await loop.sock_sendall(connected, MAGIC + secret.token)
            connection = BulkSocket(connected, secret, is_caller=True)
            await connection.send(FrameKind.PROOF, b"")
            if await connection.receive() != (FrameKind.PROOF, b""):
                raise BulkLost("it did not prove that it is the peer")
            if not self._is_on:
                raise BulkLost("this node is closed")
            connection.next_stream()
        except BaseException:
            if connection is not None:
                connection.close()
            connected.close()
            raise
        self._open[connection] = endpoint
        return connection

    def _has_room(self) -> bool:
        """Return whether one more connection may be open; closes the one that is unused for the longest time
        if necessary.
        """
        if len(self._open) >= self._connections_max:
            unused = [(used_s, one) for every in self._idle.values() for one, used_s in every]
            if unused:
                self._forget(min(unused, key=lambda found: found[0])[1])
        return len(self._open) < self._connections_max

    def _not_before(self, peer_id: PeerId, pause_s: float) -> None:
        """Use gRPC for the streams to a peer for a while."""
        self._retry_s[peer_id] = asyncio.get_running_loop().time() + pause_s
        self._retry_s.move_to_end(peer_id)
        if len(self._retry_s) > _REMEMBERED_MAX:
            self._retry_s.popitem(last=False)


def _is_valid(reply: peer_pb2.BulkReply) -> bool:
    return reply.port <= 65535 and len(reply.secret) == SECRET_BYTES
