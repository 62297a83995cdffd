"""The client side of remote calls: pooled, bounded, authenticated connections to peers.

There is one control connection (number 0) per peer, and one more TCP connection for every other number that
is requested: the streams of one connection share one TCP window, and a long link needs several. A connection
that broke is dropped, so that the next call dials again instead of waiting for gRPC's backoff.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from swarm.core.errors import DeadlineExceeded, NetworkError, PeerError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact, PeerId
from swarm.core.presets import WAN
from swarm.net.bulk_calls import BULK, BulkCall, BulkConnections
from swarm.net.calls import (
    CALLS_NAME,
    SHARED_REPLY_BYTES_MAX,
    SHARED_REQUEST_BYTES_MAX,
    ClosedLocally,
    SharedCallsUnavailable,
)
from swarm.net.certificate import client_certificate
from swarm.net.dial import Connection, Routes, dial
from swarm.net.membership import RunMembership
from swarm.net.outgoing import CallerStream, admit, call_separately, closed_locally, status_error
from swarm.net.rpc import BULK_OPTIONS, Method, ReplyT, RequestT, Stream, StreamMethod
from swarm.net.shared_calls import SharedCalls
from swarm.net.throttle import Bandwidth, Throttle
from swarm.runtime.supervise import Supervisor
from swarm.wire.peer_pb2 import BulkRequest

_STREAMS_END_S_MAX = 0.2
# The call of `reaches`. Without a request it is refused, after its caller was identified.
_KNOCK = "/swarm.Node/Hello"
# 150 kB each; a new one replaces the one unused for the longest time. Too small: peers are dialed repeatedly.
CONNECTIONS_MAX = 512
IDLE_S = 120.0  # an unused connection is closed after this time: the peers of a round meet again within it


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of the pool of connections."""

    connections_max: int = CONNECTIONS_MAX
    idle_s: float = IDLE_S
    dial_timeout_s: float = WAN.dial_timeout_s


@dataclass(slots=True)
class _Link:
    """The pool's slot for one connection. `lock`: one caller dials, the others wait for it."""

    peer_id: PeerId
    number: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    connection: Connection | None = None
    failed_s: float = -1.0
    failure: NetworkError | None = None
    used_s: float = 0.0


@dataclass(slots=True)
class _PooledConnection:
    """A connection and its number of calls; a dropped one is closed by the last of them."""

    connection: Connection
    shared: SharedCalls
    calls: int = 0
    dropped: bool = False


class Channels:
    """Call peers by contact. It belongs to one event loop. `on_connected(contact, address, seconds)` is
    called for every new connection; the address is None for a tunnel.
    """

    def __init__(
        self,
        identity: Identity,
        on_connected: Callable[[Contact, Address | None, float], None] | None = None,
        throttle: Throttle | None = None,
        *,
        membership: RunMembership | None = None,
        routes: Routes | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        """`routes` say which addresses of a peer are dialed; None: all."""
        limits = limits or ConnectionLimits()
        self._dial_timeout_s = limits.dial_timeout_s
        self._connections_max, self._idle_s = limits.connections_max, limits.idle_s
        self._own = identity.peer_id
        self._certificate = client_certificate(identity)
        self._on_connected = on_connected
        self._throttle = throttle or Throttle(Bandwidth())
        # membership of this process in an invited run; shown to every dialed peer
        self._membership = membership
        self._routes = routes or Routes()
        self._links: dict[tuple[PeerId, int], _Link] = {}
        self._pooled: dict[int, _PooledConnection] = {}  # connections by their id()
        self._last_working: dict[PeerId, Address] = {}  # the address that worked last
        self._bulk = BulkConnections(
            identity.peer_id,
            self._throttle,
            self._routes.dialed.append,
            connections_max=limits.connections_max,
            idle_s=limits.idle_s,
        )
        self._closed = False
        self._streams = Supervisor()

    async def call(
        self, contact: Contact, method: Method[RequestT, ReplyT], request: RequestT, *, timeout_s: float
    ) -> ReplyT:
        """Make a unary call, connecting first when needed, all within `timeout_s`.

        Raises NetworkError when the peer cannot be reached or the connection broke (the call may or may not
        have been handled), DeadlineExceeded, PeerError with the reason when the peer refused, and UsageError
        when the request is larger than the method allows.
        """
        raw = request.SerializeToString()
        if len(raw) > method.request_bytes_max:
            raise UsageError(
                f"{method.name} takes requests of at most {method.request_bytes_max} bytes; this one has "
                f"{len(raw)}"
            )
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        link, pooled = await self._enter(contact, 0, timeout_s, method.name)
        try:
            if not self._throttle.sends_at_once(len(raw)):
                await self._throttle.wait_to_send(len(raw))
            remaining_s = max(deadline_s - loop.time(), 0.001)
            if (
                not pooled.shared.is_refused
                and len(raw) <= SHARED_REQUEST_BYTES_MAX
                and method.reply_bytes_max <= SHARED_REPLY_BYTES_MAX
            ):
                reply_raw = await self._call_shared(
                    contact.peer_id, pooled, method.name, raw, loop.time() + remaining_s, timeout_s
                )
            else:
                reply_raw = await call_separately(
                    contact.peer_id, pooled.connection, method.name, raw, remaining_s, timeout_s
                )
        except NetworkError as error:
            self._failed(link, pooled, error)
            raise
        finally:
            if self._leave(link, pooled):
                await self._discard(pooled.connection)
        if len(reply_raw) > method.reply_bytes_max:
            raise PeerError(
                f"peer {contact.peer_id} answered {method.name} with {len(reply_raw)} bytes; at most "
                f"{method.reply_bytes_max} are taken"
            )
        if not self._throttle.processes_at_once(len(reply_raw)):
            await self._throttle.wait_to_process(len(reply_raw))
        reply = method.reply()
        try:
            reply.ParseFromString(reply_raw)
        except DecodeError:
            raise PeerError(
                f"peer {contact.peer_id} answered {method.name} with something that is not a "
                f"{method.reply.DESCRIPTOR.full_name}"
            ) from None
        return reply

    @contextlib.asynccontextmanager
    async def open_stream(
        self, contact: Contact, method: StreamMethod, *, timeout_s: float | None, connection: int = 0
    ) -> AsyncIterator[Stream]:
        """Open a stream for the length of an `async with`; leaving it before the other end has finished
        cancels it.

        `timeout_s` limits the whole stream, connecting included (None: no limit). A `connection` above 0 uses
        a TCP connection of its own: a bulk connection, or that gRPC connection.
        """
        loop, peer_id = asyncio.get_running_loop(), contact.peer_id
        deadline_s = None if timeout_s is None else loop.time() + timeout_s
        if connection > 0 and self._bulk.is_possible(peer_id):
            async with self._calling(contact, 0, timeout_s, method.name) as control:
                bulk = await self._begin_bulk(contact, control, method.name, deadline_s)
                if bulk is not None:
                    try:
                        yield self._throttle.stream(CallerStream(method, peer_id, control, bulk, timeout_s))
                    except BaseException:
                        bulk.cancel()
                        raise
                    finally:
                        self._bulk.end(bulk)
                    return
        remaining_s = None if deadline_s is None else max(deadline_s - loop.time(), 0.001)
        async with self._calling(contact, connection, remaining_s, method.name) as used:
            remaining_s = None if deadline_s is None else max(deadline_s - loop.time(), 0.001)
            call = used.channel.stream_stream(method.name)(timeout=remaining_s)
            try:
                yield self._throttle.stream(CallerStream(method, peer_id, used, call, timeout_s))
            finally:
                call.cancel()

    async def reaches(self, contact: Contact, timeout_s: float) -> bool:
        """Return whether a new connection to these addresses, opened only for this test, reaches the peer. A
        call on it identifies this process to the peer, whatever the answer is. The addresses are IP addresses
        at which the peer was met.
        """
        for address in contact.addresses:
            self.on_dialed(address)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        try:
            connection = await dial(contact, self._certificate, timeout_s=timeout_s)
        except NetworkError:
            return False
        try:
            await connection.channel.unary_unary(_KNOCK)(b"", timeout=max(deadline_s - loop.time(), 0.001))
        except aio.AioRpcError:
            return True  # the handshake has proven the PeerID
        finally:
            await connection.channel.close()
        return True

    def on_dialed(self, address: Address) -> None:
        """Note that a connection to this IP address may be under way (`endpoints`)."""
        self._routes.dialed.append((address.host, address.port))

    async def forget(self, peer_id: PeerId) -> None:
        """Close every connection to this peer; its calls fail."""
        self._bulk.forget(peer_id)
        for key in [key for key in self._links if key[0] == peer_id]:
            await self._close(self._links.pop(key))

    async def retire(self, peer_id: PeerId) -> None:
        """Make new calls to a peer that was reached through a tunnel dial again, because a better route
        exists. Calls in progress end on the old connection.
        """
        for link in [link for key, link in self._links.items() if key[0] == peer_id]:
            async with link.lock:  # a dial in progress takes the old route
                connection = link.connection
                if connection is not None and connection.address is None:
                    link.connection = None
                    await self._drop(connection)

    async def close(self) -> None:
        """Close everything; calls in progress fail, later ones raise UsageError."""
        self._closed = True
        self._bulk.close()
        links = list(self._links.values())
        self._links.clear()
        for link in links:
            await self._close(link)
        await self._streams.close(_STREAMS_END_S_MAX)

    async def close_idle(self) -> None:
        """Close connections that were not used for `idle_s`. The node calls this periodically."""
        for pooled in self._pooled.values():
            pooled.shared.review()
        self._bulk.close_idle()
        oldest_s = asyncio.get_running_loop().time() - self._idle_s
        for key, link in list(self._links.items()):
            if link.used_s < oldest_s and not link.lock.locked() and not self._busy(link):
                self._links.pop(key, None)
                await self._close(link)

    @property
    def endpoints(self) -> frozenset[tuple[str, int]]:
        """Return every (IP, port) that is connected or may be connecting: a forked child recognises this
        node's sockets by them.
        """
        return self._bulk.endpoints.union(
            self._routes.dialed,
            *(pooled.connection.endpoints for pooled in self._pooled.values()),
        )

    def connection_to(self, peer_id: PeerId, number: int = 0) -> Connection | None:
        """Return the gRPC connection to a peer of this number, for diagnosis; None when there is none."""
        link = self._links.get((peer_id, number))
        return link.connection if link is not None else None

    def shared_calls(self, peer_id: PeerId) -> SharedCalls | None:
        """Return the shared calls to a peer, for diagnosis; None when there is no connection."""
        connection = self.connection_to(peer_id)
        pooled = self._pooled.get(id(connection)) if connection is not None else None
        return pooled.shared if pooled is not None else None

    def connected(self, peer_id: PeerId) -> bool:
        """Return whether there is an open control connection."""
        link = self._links.get((peer_id, 0))
        return link is not None and link.connection is not None and link.connection.is_alive

    async def _call_shared(
        self,
        peer_id: PeerId,
        pooled: _PooledConnection,
        name: str,
        raw: bytes,
        deadline_s: float,
        timeout_s: float,
    ) -> bytes:
        """Make the call on a stream of shared calls, until `deadline_s`."""
        try:
            code, details, reply = await pooled.shared.call(name, raw, deadline_s)
        except ClosedLocally:
            raise closed_locally(peer_id, name) from None
        except SharedCallsUnavailable:
            remaining_s = max(deadline_s - asyncio.get_running_loop().time(), 0.001)
            return await call_separately(peer_id, pooled.connection, name, raw, remaining_s, timeout_s)
        if code is not grpc.StatusCode.OK:
            raise status_error(peer_id, pooled.connection, name, code, details, timeout_s)
        return reply

    async def _begin_bulk(
        self, contact: Contact, control: Connection, method: str, deadline_s: float | None
    ) -> BulkCall | None:
        """Begin a stream on the bulk path; None if it must use gRPC."""
        left_s = self._dial_timeout_s
        if deadline_s is not None:
            left_s = min(left_s, max(deadline_s - asyncio.get_running_loop().time(), 0.001))
        ask = functools.partial(self.call, contact, BULK, BulkRequest(), timeout_s=left_s)
        # Shared calls leave a kept connection to the next stream of tensors: its congestion window has grown,
        # and a new connection takes four round trips.
        is_new = method == CALLS_NAME
        return await self._bulk.begin(contact.peer_id, control, method, ask, deadline_s, is_new=is_new)

    async def _begin_bulk_calls(self, contact: Contact, control: Connection) -> BulkCall | None:
        """Begin a stream of shared calls on the bulk path. Return None if the peer has no bulk path now, or
        calls use half of the allowed connections already.
        """
        count = sum(pooled.shared.is_bulk for pooled in self._pooled.values())
        if count >= self._connections_max // 2 or not self._bulk.is_possible(contact.peer_id):
            return None
        return await self._begin_bulk(contact, control, CALLS_NAME, None)

    async def _enter(
        self, contact: Contact, number: int, timeout_s: float | None, method: str
    ) -> tuple[_Link, _PooledConnection]:
        """Return a connection and count a call on it, since a connection without calls may be closed. Raises
        NotInvited for a peer that may not be called, or not with this method.
        """
        membership = self._membership
        is_checked = membership is None or membership.may_call(contact.peer_id, method)
        if membership is not None and not is_checked:
            membership.check_callee(contact.peer_id)
        link = self._links.get((contact.peer_id, number))
        if link is None or link.connection is None or self._closed or not link.connection.is_alive:
            link = await self._connect(contact, number, timeout_s)
            is_checked = False  # the peer may have been admitted or revoked meanwhile
        assert link.connection is not None
        if membership is not None and not is_checked:
            membership.check_role(contact.peer_id, method)
        pooled = self._pooled[id(link.connection)]
        pooled.calls += 1
        return link, pooled

    @contextlib.asynccontextmanager
    async def _calling(
        self, contact: Contact, number: int, timeout_s: float | None, method: str
    ) -> AsyncIterator[Connection]:
        """Use a connection for a stream."""
        link, pooled = await self._enter(contact, number, timeout_s, method)
        try:
            yield pooled.connection
        except NetworkError as error:
            self._failed(link, pooled, error)
            raise
        finally:
            if self._leave(link, pooled):
                await self._discard(pooled.connection)

    def _failed(self, link: _Link, pooled: _PooledConnection, error: NetworkError) -> None:
        """Drop a connection that broke; keep one on which only a call was too slow."""
        if (
            not isinstance(error, DeadlineExceeded)
            and link.connection is pooled.connection
            and not pooled.connection.is_alive
        ):
            link.connection = None
            pooled.dropped = True

    def _leave(self, link: _Link, pooled: _PooledConnection) -> bool:
        """Count the end of a call. Return whether its connection must be closed now."""
        link.used_s = asyncio.get_running_loop().time()
        pooled.calls -= 1
        return pooled.dropped and not pooled.calls

    async def _connect(self, contact: Contact, number: int, timeout_s: float | None) -> _Link:
        if self._closed:
            raise UsageError("this node is closed")
        if contact.peer_id == self._own:
            raise UsageError("a peer does not call itself")
        loop = asyncio.get_running_loop()
        started_s, asked_s = loop.time(), time.monotonic()  # uvloop's clock counts whole milliseconds
        link = self._links.get((contact.peer_id, number))
        if link is None:
            await self._make_room()
            link = self._links.setdefault(
                (contact.peer_id, number), _Link(contact.peer_id, number, used_s=started_s)
            )
        if link.connection is not None and link.connection.is_alive:
            return link
        dial_s = self._dial_timeout_s if timeout_s is None else min(timeout_s, self._dial_timeout_s)
        try:
            async with asyncio.timeout(dial_s):
                await link.lock.acquire()
        except TimeoutError:
            raise DeadlineExceeded(
                f"cannot reach peer {contact.peer_id} within {dial_s:.3g} s: another call is still connecting"
            ) from None
        try:
            await self._dial(link, contact, asked_s, started_s + dial_s - loop.time())
            return link
        finally:
            link.lock.release()

    async def _dial(self, link: _Link, contact: Contact, asked_s: float, dial_s: float) -> Connection:
        """Dial the peer. The caller holds the link's lock."""
        if link.connection is not None and link.connection.is_alive:
            return link.connection
        # The dial failed while this caller was waiting for the lock.
        if link.failure is not None and link.failed_s > asked_s:
            raise type(link.failure)(str(link.failure))
        stale, link.connection = link.connection, None
        if stale is not None:
            await self._drop(stale)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + dial_s
        try:
            connection = await dial(
                contact,
                self._certificate,
                timeout_s=max(dial_s, 0.001),
                first=self._last_working.get(contact.peer_id),
                options=self._throttle.options + (BULK_OPTIONS if link.number > 0 else ()),
                routes=self._routes,
            )
            if self._membership is not None:
                await admit(self._membership, contact.peer_id, connection, deadline_s - loop.time())
        except NetworkError as error:
            link.failure, link.failed_s = error, time.monotonic()
            raise
        if self._closed:
            await connection.channel.close()
            raise UsageError("this node is closed")
        link.connection, link.failure = connection, None
        link.used_s = loop.time()
        begin = functools.partial(self._begin_bulk_calls, contact, connection)
        shared = SharedCalls(connection, self._streams, begin, self._bulk.drop)
        self._pooled[id(connection)] = _PooledConnection(connection, shared)
        if connection.address is not None:
            self._last_working[contact.peer_id] = connection.address
        if self._on_connected is not None:
            self._on_connected(contact, connection.address, connection.seconds)
        return connection

    async def _make_room(self) -> None:
        while len(self._links) >= self._connections_max:
            idle = [
                (link.used_s, key)
                for key, link in self._links.items()
                if not self._busy(link) and not link.lock.locked()
            ]
            if not idle:
                raise NetworkError(
                    f"{len(self._links)} connections are open and all of them are in use; no more are allowed"
                )
            await self._close(self._links.pop(min(idle)[1]))

    def _busy(self, link: _Link) -> bool:
        return link.connection is not None and self._pooled[id(link.connection)].calls > 0

    async def _close(self, link: _Link) -> None:
        connection, link.connection = link.connection, None
        if connection is not None:
            await self._discard(connection)

    async def _drop(self, connection: Connection) -> None:
        """Close the connection once it has no calls."""
        pooled = self._pooled.get(id(connection))
        if pooled is not None and pooled.calls:
            pooled.dropped = True
        else:
            await self._discard(connection)

    async def _discard(self, connection: Connection) -> None:
        pooled = self._pooled.pop(id(connection), None)
        if pooled is not None:
            pooled.shared.close()
        if len(self._last_working) > 8 * self._connections_max:
            self._last_working.clear()
        await connection.channel.close()
