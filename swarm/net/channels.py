"""The client side of remote calls: pooled, bounded, authenticated connections to peers.

There is one control connection (number 0) per peer, and one more TCP connection for every other number that is
requested: the streams of one connection share one TCP window, and a long link needs several. A connection that
broke is dropped, so that the next call dials afresh instead of waiting for gRPC's backoff.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import grpc
from google.protobuf.message import DecodeError

from swarm.core.errors import DeadlineExceeded, NetworkError, PeerError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact, PeerId
from swarm.net.calls import (
    SHARED_REPLY_BYTES_MAX,
    SHARED_REQUEST_BYTES_MAX,
    CallStream,
    ClosedHere,
    NotServed,
)
from swarm.net.certificate import client_certificate
from swarm.net.dial import Connection, dial
from swarm.net.outgoing import CallerStream, closed_here, mapped, status_error
from swarm.net.rpc import BULK_OPTIONS, Method, ReplyT, RequestT, Stream, StreamMethod
from swarm.net.throttle import SMALL_BYTES, Bandwidth, Throttle
from swarm.runtime.supervise import Supervisor

_DIALED_MAX = 256
_STREAMS_END_S_MAX = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelsConfig:
    """Limits of the connection pool."""

    # 150 kB each; the one unused for longest makes room. Too small: peers are dialed again and again
    connections_max: int = 512
    idle_s: float = 120.0  # an unused connection is closed after this long
    dial_timeout_s: float = 10.0  # for connecting, also when the call itself may take longer


@dataclass(slots=True)
class _Link:
    """The place of one connection in the pool. `lock`: one caller dials, the others wait for it."""

    peer_id: PeerId
    number: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    connection: Connection | None = None
    failed_s: float = -1.0
    failure: NetworkError | None = None
    used_s: float = 0.0


@dataclass(slots=True)
class _Use:
    """A connection and how many calls are on it; a dropped one is closed by the last of them."""

    connection: Connection
    calls: int = 0
    dropped: bool = False
    stream: CallStream | None = None  # of shared calls
    shares: bool = True  # False: the peer takes no shared calls here


class Channels:
    """Calls peers by contact. Lives on one event loop. `on_connected(contact, address, seconds)` is told of
    every new connection.
    """

    def __init__(
        self,
        identity: Identity,
        config: ChannelsConfig | None = None,
        on_connected: Callable[[Contact, Address, float], None] | None = None,
        throttle: Throttle | None = None,
    ) -> None:
        self._config = config or ChannelsConfig()
        self._own = identity.peer_id
        self._certificate = client_certificate(identity)
        self._on_connected = on_connected
        self._throttle = throttle or Throttle(Bandwidth())
        self._links: dict[tuple[PeerId, int], _Link] = {}
        self._uses: dict[int, _Use] = {}  # by id() of the connection
        self._good: dict[PeerId, Address] = {}  # the address that worked last
        self._closed = False
        self._streams = Supervisor()
        self._dialed: deque[tuple[str, int]] = deque(maxlen=_DIALED_MAX)

    async def call(
        self, contact: Contact, method: Method[RequestT, ReplyT], request: RequestT, *, timeout_s: float
    ) -> ReplyT:
        """One unary call; connects first when needed, all within `timeout_s`.

        NetworkError: the peer cannot be reached, or the connection broke (the call may or may not have been
        handled). DeadlineExceeded. PeerError: it refused, and why. UsageError: the request is larger than the
        method allows.
        """
        raw = request.SerializeToString()
        if len(raw) > method.request_bytes_max:
            raise UsageError(
                f"{method.name} takes requests of at most {method.request_bytes_max} bytes; this one has {len(raw)}"
            )
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        link, use = await self._enter(contact, 0, timeout_s)
        try:
            if len(raw) > SMALL_BYTES:
                await self._throttle.sends(len(raw))
            remaining_s = max(deadline_s - loop.time(), 0.001)
            if (
                use.shares
                and len(raw) <= SHARED_REQUEST_BYTES_MAX
                and method.reply_bytes_max <= SHARED_REPLY_BYTES_MAX
            ):
                reply_raw = await self._call_shared(
                    contact.peer_id, use, method.name, raw, remaining_s, timeout_s
                )
            else:
                reply_raw = await _call_alone(
                    contact.peer_id, use.connection, method.name, raw, remaining_s, timeout_s
                )
        except NetworkError as error:
            self._failed(link, use, error)
            raise
        finally:
            await self._leave(link, use)
        if len(reply_raw) > method.reply_bytes_max:
            raise PeerError(
                f"peer {contact.peer_id} answered {method.name} with {len(reply_raw)} bytes; at most {method.reply_bytes_max} are taken"
            )
        if len(reply_raw) > SMALL_BYTES:
            await self._throttle.accepts(len(reply_raw))
        reply = method.reply()
        try:
            reply.ParseFromString(reply_raw)
        except DecodeError:
            raise PeerError(
                f"peer {contact.peer_id} answered {method.name} with something that is not a {method.reply.DESCRIPTOR.full_name}"
            ) from None
        return reply

    def open_stream(
        self, contact: Contact, method: StreamMethod, *, timeout_s: float | None, connection: int = 0
    ) -> AbstractAsyncContextManager[Stream]:
        """A stream for the length of an `async with`; leaving it before the other end has finished cancels
        it.

        `timeout_s` is for the whole stream, connecting included (None: as long as it takes). A `connection` above 0
        is the number of a separate TCP connection.
        """
        return self._open_stream(contact, method, timeout_s, connection)

    @contextlib.asynccontextmanager
    async def _open_stream(
        self, contact: Contact, method: StreamMethod, timeout_s: float | None, number: int
    ) -> AsyncIterator[Stream]:
        loop = asyncio.get_running_loop()
        deadline_s = None if timeout_s is None else loop.time() + timeout_s
        async with self._using(contact, number, timeout_s) as connection:
            remaining_s = None if deadline_s is None else max(deadline_s - loop.time(), 0.001)
            call = connection.channel.stream_stream(method.name)(timeout=remaining_s)
            stream = CallerStream(method, contact.peer_id, connection, call, timeout_s)
            try:
                yield self._throttle.stream(stream)
            finally:
                stream.cancel()

    async def forget(self, peer_id: PeerId) -> None:
        """Close every connection to this peer; calls on them fail."""
        for key in [key for key in self._links if key[0] == peer_id]:
            await self._close(self._links.pop(key))

    async def close(self) -> None:
        """Close everything; calls in progress fail, later ones raise UsageError."""
        self._closed = True
        links = list(self._links.values())
        self._links.clear()
        for link in links:
            await self._close(link)
        await self._streams.close(_STREAMS_END_S_MAX)

    async def close_idle(self) -> None:
        """Close what was not used for `idle_s`. The node calls it now and then."""
        oldest_s = asyncio.get_running_loop().time() - self._config.idle_s
        for key, link in list(self._links.items()):
            if link.used_s < oldest_s and not link.lock.locked() and not self._busy(link):
                self._links.pop(key, None)
                await self._close(link)

    @property
    def endpoints(self) -> frozenset[tuple[str, int]]:
        """Every (IP, port) that is connected or may be connecting: by them a forked child knows this node's
        sockets.
        """
        return frozenset(self._dialed).union(*(use.connection.endpoints for use in self._uses.values()))

    def connected(self, peer_id: PeerId) -> bool:
        """Is there an open control connection?"""
        link = self._links.get((peer_id, 0))
        return link is not None and link.connection is not None and _alive(link.connection)

    async def _call_shared(
        self, peer_id: PeerId, use: _Use, name: str, raw: bytes, remaining_s: float, timeout_s: float
    ) -> bytes:
        """Together with others on the connection's stream of shared calls."""
        if use.stream is None or use.stream.ended:
            use.stream = CallStream(use.connection.channel)
            self._streams.spawn(f"calls of {peer_id.short}", use.stream.run)
        try:
            code, details, reply = await use.stream.call(name, raw, remaining_s)
        except ClosedHere:
            raise closed_here(peer_id, name) from None
        except NotServed:
            use.shares = False
            return await _call_alone(peer_id, use.connection, name, raw, remaining_s, timeout_s)
        if code is not grpc.StatusCode.OK:
            raise status_error(peer_id, use.connection, name, code, details, timeout_s)
        return reply

    @contextlib.asynccontextmanager
    async def _using(
        self, contact: Contact, number: int, timeout_s: float | None
    ) -> AsyncIterator[Connection]:
        link, use = await self._enter(contact, number, timeout_s)
        try:
            yield use.connection
        except NetworkError as error:
            self._failed(link, use, error)
            raise
        finally:
            await self._leave(link, use)

    async def _enter(self, contact: Contact, number: int, timeout_s: float | None) -> tuple[_Link, _Use]:
        """Every call enters, and leaves: what nobody is in may be closed."""
        link = self._links.get((contact.peer_id, number))
        if link is None or link.connection is None or self._closed or not _alive(link.connection):
            link = await self._connect(contact, number, timeout_s)
        assert link.connection is not None
        use = self._uses[id(link.connection)]
        use.calls += 1
        return link, use

    def _failed(self, link: _Link, use: _Use, error: NetworkError) -> None:
        """A connection that broke is dropped; one whose call was merely too slow is not."""
        if (
            not isinstance(error, DeadlineExceeded)
            and link.connection is use.connection
            and not _alive(use.connection)
        ):
            link.connection = None
            use.dropped = True

    async def _leave(self, link: _Link, use: _Use) -> None:
        link.used_s = asyncio.get_running_loop().time()
        use.calls -= 1
        if use.dropped and not use.calls:
            await self._discard(use.connection)

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
        if link.connection is not None and _alive(link.connection):
            return link
        dial_s = (
            self._config.dial_timeout_s if timeout_s is None else min(timeout_s, self._config.dial_timeout_s)
        )
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
        """With the link's lock held."""
        if link.connection is not None and _alive(link.connection):
            return link.connection
        # it failed while this caller was waiting for it
        if link.failure is not None and link.failed_s > asked_s:
            raise type(link.failure)(str(link.failure))
        stale, link.connection = link.connection, None
        if stale is not None:
            await self._drop(stale)
        loop = asyncio.get_running_loop()
        try:
            connection = await dial(
                contact,
                self._certificate,
                timeout_s=max(dial_s, 0.001),
                first=self._good.get(contact.peer_id),
                options=self._throttle.options + (BULK_OPTIONS if link.number > 0 else ()),
                on_dial=self._dialed.extend,
            )
        except NetworkError as error:
            link.failure, link.failed_s = error, time.monotonic()
            raise
        if self._closed:
            await connection.channel.close()
            raise UsageError("this node is closed")
        link.connection, link.failure = connection, None
        link.used_s = loop.time()
        self._uses[id(connection)] = _Use(connection)
        self._good[contact.peer_id] = connection.address
        if self._on_connected is not None:
            self._on_connected(contact, connection.address, connection.seconds)
        return connection

    async def _make_room(self) -> None:
        while len(self._links) >= self._config.connections_max:
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
        return link.connection is not None and self._uses[id(link.connection)].calls > 0

    async def _close(self, link: _Link) -> None:
        connection, link.connection = link.connection, None
        if connection is not None:
            await self._discard(connection)

    async def _drop(self, connection: Connection) -> None:
        """Close it once nobody uses it."""
        use = self._uses.get(id(connection))
        if use is not None and use.calls:
            use.dropped = True
        else:
            await self._discard(connection)

    async def _discard(self, connection: Connection) -> None:
        use = self._uses.pop(id(connection), None)
        if use is not None and use.stream is not None:
            use.stream.close()
        if len(self._good) > 8 * self._config.connections_max:
            self._good.clear()
        await connection.channel.close()


async def _call_alone(
    peer_id: PeerId, connection: Connection, name: str, raw: bytes, remaining_s: float, timeout_s: float
) -> bytes:
    with mapped(peer_id, connection, name, timeout_s):
        reply: bytes = await connection.channel.unary_unary(name)(raw, timeout=remaining_s)
        return reply


def _alive(connection: Connection) -> bool:
    """A channel that fell back from READY has lost its connection; gRPC would dial it again with a backoff of
    its own.
    """
    return connection.channel.get_state() is grpc.ChannelConnectivity.READY
