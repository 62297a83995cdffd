"""The caller's end of streams and of separate calls, the last check of a dialed peer, and the mapping of
gRPC's statuses to swarm's errors.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from swarm.core.errors import DeadlineExceeded, NetworkError, NotInvited, PeerError, SwarmError, UsageError
from swarm.core.ids import PeerId
from swarm.net.bulk_calls import BulkCall
from swarm.net.dial import Connection, explain
from swarm.net.membership import ADMIT, RunMembership
from swarm.net.rpc import END_OF_STREAM, StreamMethod, check_incoming, check_outgoing, copy_into

_STATUS_S_MAX = 1.0  # time to wait for the status of a call whose write failed


class CallerStream:
    """The caller's end of a stream."""

    def __init__(
        self,
        method: StreamMethod,
        peer_id: PeerId,
        connection: Connection,
        call: aio.StreamStreamCall[Any, Any] | BulkCall,
        timeout_s: float | None,
    ) -> None:
        self.peer_id = peer_id
        self._method = method
        self._connection = connection
        self._call: Any = call
        self._send, self._read_into = sender_of(call), _reader_of(call)
        self._timeout_s = timeout_s
        self._connected = False
        self._finished = False
        self._map_errors = MapErrors(peer_id, connection, method.name, timeout_s)

    async def send(self, message: bytes) -> None:
        check_outgoing(self._method, message)
        if self._finished:
            raise UsageError("this stream was finished; it takes no more messages")
        await self._write(message)

    async def receive(self) -> bytes | None:
        return await self._checked(self._call.read())  # type: ignore[no-any-return, unused-ignore]

    async def receive_into(self, buffer: memoryview) -> int | None:
        return copy_into(await self._checked(self._read_into(buffer)), buffer)

    async def _checked(self, reading: Awaitable[Any]) -> Any:
        """Return the message that is being read; None at the end of the stream."""
        with self._map_errors:
            message = await reading
        if message is aio.EOF:
            await self._raise_unless_ok()
            return None
        check_incoming(self._method, message)
        return message

    async def finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        # gRPC's own half-close would need one more operation
        await self._write(END_OF_STREAM)

    def cancel(self) -> None:
        self._call.cancel()

    async def _write(self, message: bytes) -> None:
        with self._map_errors:
            if not self._connected:
                await self._call.wait_for_connection()
                self._connected = True
            if self._call.done():
                await self._raise_unless_ok()
                raise NetworkError(
                    f"peer {self.peer_id} finished {self._method.name} without taking all that was sent"
                )
            try:
                await self._send(message)
            except aio.InternalError:
                await self._raise_after_failed_write()
            except asyncio.CancelledError:
                self._call.cancel()
                raise

    async def _raise_after_failed_write(self) -> NoReturn:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STATUS_S_MAX):
                await self._raise_unless_ok()
        raise NetworkError(
            f"peer {self.peer_id} finished {self._method.name} without taking all that was sent"
        )

    async def _raise_unless_ok(self) -> None:
        code = await self._call.code()
        if code is not grpc.StatusCode.OK:
            raise status_error(
                self.peer_id,
                self._connection,
                self._method.name,
                code,
                await self._call.details() or "",
                self._timeout_s,
            )


def sender_of(call: aio.StreamStreamCall[Any, Any] | BulkCall) -> Callable[[bytes], Awaitable[None]]:
    """Return the function that sends a message on a stream. It replaces `call.write` of gRPC, which hides the
    status that explains a failure behind "Internal error from Core".
    """
    if isinstance(call, BulkCall):
        return call.write
    grpc_call: Any = call
    return grpc_call._cython_call.send_serialized_message  # type: ignore[no-any-return]


def _reader_of(call: aio.StreamStreamCall[Any, Any] | BulkCall) -> Callable[[memoryview], Awaitable[Any]]:
    """Return the function that reads a message, into a buffer where the transport can do that."""
    if isinstance(call, BulkCall):
        return call.read
    return lambda buffer: call.read()


class MapErrors:
    """Convert gRPC's errors inside each `with` block to swarm's errors. A class, because it costs a stream
    less per message than a generator.
    """

    __slots__ = ("_connection", "_name", "_peer_id", "_timeout_s")

    def __init__(self, peer_id: PeerId, connection: Connection, name: str, timeout_s: float | None) -> None:
        self._peer_id, self._connection, self._name, self._timeout_s = peer_id, connection, name, timeout_s

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, aio.AioRpcError):
            raise status_error(
                self._peer_id,
                self._connection,
                self._name,
                error.code(),
                error.details() or "",
                self._timeout_s,
            ) from None
        if isinstance(error, aio.BaseError):
            where = self._connection.where
            raise NetworkError(f"{self._name} to peer {self._peer_id} at {where} failed: {error}") from None
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                raise closed_locally(self._peer_id, self._name) from None


async def call_separately(
    peer_id: PeerId, connection: Connection, name: str, raw: bytes, remaining_s: float, timeout_s: float
) -> bytes:
    """Make a gRPC call of its own. Raises as `Channels.call` does."""
    with MapErrors(peer_id, connection, name, timeout_s):
        reply: bytes = await connection.channel.unary_unary(name)(raw, timeout=remaining_s)
        return reply


async def admit(membership: RunMembership, peer_id: PeerId, connection: Connection, timeout_s: float) -> None:
    """Show this process's capability to a peer that was dialed, and check the peer's. Raises NotInvited when
    one of the two is not a member, and closes the connection then.
    """
    timeout_s = max(timeout_s, 0.001)
    try:
        raw = membership.request().SerializeToString()
        reply_raw = await call_separately(peer_id, connection, ADMIT.name, raw, timeout_s, timeout_s)
        try:
            reply = ADMIT.reply.FromString(reply_raw[: ADMIT.reply_bytes_max])
        except DecodeError:
            raise PeerError(f"peer {peer_id} answered {ADMIT.name} with something else") from None
        membership.check_reply(peer_id, reply)
    except BaseException:
        await connection.channel.close()
        raise


def closed_locally(peer_id: PeerId, name: str) -> NetworkError:
    return NetworkError(f"the connection to peer {peer_id} was closed here while {name} was in progress")


def status_error(
    peer_id: PeerId,
    connection: Connection,
    name: str,
    code: grpc.StatusCode,
    details: str,
    timeout_s: float | None,
) -> SwarmError:
    """Return swarm's error for the status that a call ended with."""
    status = grpc.StatusCode
    where = connection.where
    if code is status.DEADLINE_EXCEEDED:
        limit = f" within {timeout_s:.3g} s" if timeout_s is not None else ""
        return DeadlineExceeded(f"peer {peer_id} at {where} did not answer {name}{limit}")
    if code is status.UNAVAILABLE:
        return NetworkError(
            f"the connection to peer {peer_id} at {where} broke during {name}: {explain(details)}"
        )
    if code in (status.CANCELLED, status.ABORTED):
        return NetworkError(f"peer {peer_id} broke off {name}: {details or 'no reason given'}")
    if code is status.PERMISSION_DENIED:
        return NotInvited(f"peer {peer_id} at {where} refuses this one: {details}")
    if code is status.UNIMPLEMENTED:
        return PeerError(
            f"peer {peer_id} does not serve {name}: it runs another version, or not this service"
        )
    return PeerError(f"peer {peer_id} refused {name}: {details or code.name.lower()}")
