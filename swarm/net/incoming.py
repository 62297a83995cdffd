"""The handler's end of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from grpc import aio

from swarm.core.errors import NetworkError, PeerError
from swarm.core.ids import PeerId
from swarm.net.bulk_socket import BulkLost, BulkSocket
from swarm.net.logic.sealing import BODY_BYTES_MAX, FrameKind
from swarm.net.room import RequestReads
from swarm.net.rpc import (
    END_OF_STREAM,
    StreamHandler,
    StreamMethod,
    check_incoming,
    check_outgoing,
    copy_into,
)
from swarm.net.throttle import Throttle


class Context(Protocol):
    """The transport of a stream at its callee: gRPC's `ServicerContext`, or `BulkContext`. Reading and
    writing raise aio.BaseError when the connection broke.
    """

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Accept the stream."""
        ...

    async def read(self) -> Any:
        """Return the next message, or EOF."""
        ...

    async def write(self, message: bytes) -> None:
        """Send a message."""
        ...


class _Broke(aio.BaseError):  # type: ignore[misc, unused-ignore]
    """The connection broke."""


class BulkContext:
    """A stream on a bulk connection at its callee, with those methods of gRPC's context that handlers'
    streams use. Frames with a body of more than `body_bytes_max` end the connection before they are read.
    """

    def __init__(self, connection: BulkSocket) -> None:
        self._connection = connection
        self.body_bytes_max = BODY_BYTES_MAX

    async def send_initial_metadata(self, metadata: object) -> None:
        """Do nothing: only gRPC needs it."""

    async def read(self, buffer: memoryview | None = None) -> Any:
        """Return the next message. One that fits into the buffer is written there, and is a view of it.
        Raises aio.BaseError when the connection broke.
        """
        try:
            kind, body = await self._connection.receive(self.body_bytes_max, buffer)
        except BulkLost as lost:
            raise _Broke(str(lost)) from None
        if kind is not FrameKind.DATA:
            self._connection.close()
            raise _Broke("it ended the stream before its callee")
        return body

    async def write(self, message: bytes) -> None:
        """Send a message. Raises aio.BaseError when the connection broke."""
        try:
            await self._connection.send(FrameKind.DATA, message)
        except BulkLost as lost:
            raise _Broke(str(lost)) from None

    def begin_to_write(self, message: bytes) -> Coroutine[Any, Any, None] | None:
        """Send a message, as `BulkSocket.begin_to_send`, with the errors of `write`."""
        try:
            return self._connection.begin_to_send(FrameKind.DATA, message)
        except BulkLost as lost:
            raise _Broke(str(lost)) from None


class StreamCancelled(Exception):
    """A handler cancelled its own stream."""


class _HandlerStream:
    """The handler's end of a stream."""

    def __init__(
        self,
        method: StreamMethod,
        peer_id: PeerId,
        context: Context,
        reads: RequestReads,
    ) -> None:
        self.peer_id = peer_id
        self._reads: RequestReads | None = reads  # limits the first message; None once it has arrived
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
        return await self._next(self._context.read)  # type: ignore[no-any-return, unused-ignore]

    async def receive_into(self, buffer: memoryview) -> int | None:
        context = self._context
        read = partial(context.read, buffer) if isinstance(context, BulkContext) else context.read
        return copy_into(await self._next(read), buffer)

    async def _next(self, read: Callable[[], Awaitable[Any]]) -> Any:
        """Return the next message, which `read` returns; None when the caller sends no more."""
        if self._finished:
            return None
        try:
            message = await self._first(read) if self._reads is not None else await read()
        except aio.BaseError as error:
            raise NetworkError(f"the stream {self._method.name} from {self.peer_id} broke: {error}") from None
        if message is aio.EOF:
            raise NetworkError(f"the stream {self._method.name} from {self.peer_id} broke off before its end")
        if message == END_OF_STREAM:
            self._finished = True
            return None
        check_incoming(self._method, message)
        return message

    async def _first(self, read: Callable[[], Awaitable[Any]]) -> Any:
        reads, self._reads = self._reads, None
        assert reads is not None
        try:
            # the first message shows that the handler accepted its caller
            async with reads.place(self.peer_id):
                return await read()
        except TimeoutError:
            raise PeerError("the first message did not arrive in time") from None

    async def finish(self) -> None:
        return None

    def cancel(self) -> None:
        self.ended = True
        if self._task is not None:
            self._task.cancel()


async def serve_stream(
    handler: StreamHandler,
    peer_id: PeerId,
    context: Context,
    throttle: Throttle,
    reads: RequestReads,
) -> bytes:
    """Serve a stream. Raises what its handler raises, and StreamCancelled if the handler cancelled it."""
    stream = _HandlerStream(handler.method, peer_id, context, reads)
    # grpcio sends metadata with the first message or with a refusal. If both are in progress at once it
    # fails, and the caller waits until its deadline.
    await context.send_initial_metadata(())
    try:
        await handler.function(throttle.stream(stream))
        return b""
    except asyncio.CancelledError:
        if stream.ended:
            raise StreamCancelled from None
        raise  # the caller has left, or the server stops
