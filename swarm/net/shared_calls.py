"""The streams of shared calls to one peer: one on its gRPC connection, and one on the bulk path while the
peer is called often. There a message takes less processor time at both ends (docs/decisions/0012).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc

from swarm.net.bulk_calls import BulkCall
from swarm.net.calls import CALLS_NAME, CallStream, ClosedLocally, Outcome, SharedCallsUnavailable
from swarm.net.dial import Connection
from swarm.runtime.supervise import Supervisor

# Calls between two reviews (30 s, `swarm.node`) from which on the bulk path is used. Making a bulk connection
# costs as much as about ten calls save. With 64, most calls among the 16 peers of a busy DHT used gRPC.
BULK_CALLS_MIN = 16
# Calls in a row that time out while no other is answered, after which the bulk path is left: packets on that
# connection may be lost, which TCP tells only after minutes.
_UNANSWERED_MAX = 3


class SharedCalls:
    """Makes the shared calls of one gRPC connection. It belongs to the network thread."""

    def __init__(
        self,
        connection: Connection,
        streams: Supervisor,
        begin_bulk: Callable[[], Awaitable[BulkCall | None]],
        end_bulk: Callable[[BulkCall], None],
    ) -> None:
        """`begin_bulk` begins a stream of shared calls on the bulk path, or returns None where there is none
        now; `end_bulk` ends it.
        """
        self._connection, self._streams = connection, streams
        self._begin_bulk, self._end_bulk = begin_bulk, end_bulk
        self._grpc: CallStream | None = None
        self._bulk: CallStream | None = None
        self._count = 0  # calls since the last review
        self._unanswered = 0  # calls in a row on the bulk path
        self._has_bulk_task = False  # its stream begins, or has not ended
        self._is_closed = False
        self._bulk_is_refused = False
        self.is_refused = False  # the peer takes no shared calls on this connection

    @property
    def is_bulk(self) -> bool:
        """Return whether calls use the bulk path now."""
        return self._bulk is not None and not self._bulk.ended and not self._bulk.is_retired

    async def call(self, method: str, request: bytes, deadline_s: float) -> Outcome:
        """Make a call, as `CallStream.call`, until a time of the event loop. Raises ClosedLocally and
        SharedCallsUnavailable.
        """
        loop = asyncio.get_running_loop()
        if self._is_closed:
            raise ClosedLocally
        self._count += 1
        if self._bulk is not None and self.is_bulk:
            try:
                return await self._call_bulk(self._bulk, method, request, deadline_s - loop.time())
            except SharedCallsUnavailable:  # an older version, or too many of them; nothing was handled
                self._bulk_is_refused = True
                if self._is_closed:
                    raise ClosedLocally from None
        elif self._count >= BULK_CALLS_MIN and not self._has_bulk_task and not self._bulk_is_refused:
            self._has_bulk_task = True
            self._streams.spawn("shared calls on the bulk path", self._run_bulk)
        if self._grpc is None or self._grpc.ended:
            self._grpc = CallStream(self._connection.channel.stream_stream(CALLS_NAME)())
            self._streams.spawn("shared calls", self._grpc.run)
        try:
            return await self._grpc.call(method, request, deadline_s - loop.time())
        except SharedCallsUnavailable:
            self.is_refused = True
            raise

    def review(self) -> None:
        """Leave the bulk path if only a few calls were made since the last review."""
        if self._count < BULK_CALLS_MIN and self._bulk is not None:
            self._bulk.retire()
        self._count = 0

    def close(self) -> None:
        """End all streams; calls in progress raise ClosedLocally."""
        self._is_closed = True
        for stream in (self._grpc, self._bulk):
            if stream is not None:
                stream.close()

    async def _call_bulk(self, stream: CallStream, method: str, request: bytes, timeout_s: float) -> Outcome:
        answers = stream.answers
        outcome = await stream.call(method, request, timeout_s)
        is_answered = outcome[0] is not grpc.StatusCode.DEADLINE_EXCEEDED or stream.answers > answers
        self._unanswered = 0 if is_answered else self._unanswered + 1
        if self._unanswered >= _UNANSWERED_MAX:
            stream.retire()
            self._count = 0  # so that it is tried again later
        return outcome

    async def _run_bulk(self) -> None:
        """Begin a stream on the bulk path, and run it to its end."""
        bulk = None
        try:
            bulk = await self._begin_bulk()
            if bulk is None:
                self._count = 0  # so that it is tried again later
            elif not self._is_closed:
                self._unanswered = 0
                self._bulk = CallStream(bulk)
                await self._bulk.run()
        finally:
            self._bulk, self._has_bulk_task = None, False
            if bulk is not None:
                self._end_bulk(bulk)
