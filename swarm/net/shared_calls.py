"""The streams of shared calls to one peer: one on its gRPC connection, and one on the bulk path while the
peer is called often. There a message takes less processor time at both ends (docs/decisions/0012).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from swarm.net.bulk_calls import BulkCall
from swarm.net.calls import CALLS_NAME, CallStream, ClosedLocally, Outcome, SharedCallsUnavailable
from swarm.net.dial import Connection
from swarm.runtime.supervise import Supervisor

# Calls between two reviews (`swarm.node` makes one every few seconds) from which on the bulk path is used.
# Making a bulk connection costs as much as about ten calls save.
OFTEN = 64


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
        self._is_beginning = False
        self._is_closed = False
        self._bulk_is_refused = False
        self.is_refused = False  # the peer takes no shared calls on this connection

    @property
    def is_bulk(self) -> bool:
        """Return whether calls use the bulk path now."""
        return self._bulk is not None and not self._bulk.ended

    async def call(self, method: str, request: bytes, timeout_s: float) -> Outcome:
        """Make a call, as `CallStream.call`. Raises ClosedLocally and SharedCallsUnavailable."""
        self._count += 1
        if self._bulk is not None and not self._bulk.ended:
            try:
                return await self._bulk.call(method, request, timeout_s)
            except SharedCallsUnavailable:  # an older version, or too many of them; nothing was handled
                self._bulk_is_refused = True
        elif self._count >= OFTEN and not self._is_beginning and not self._bulk_is_refused:
            self._is_beginning = True
            self._streams.spawn("shared calls on the bulk path", self._run_bulk)
        if self._is_closed:
            raise ClosedLocally
        if self._grpc is None or self._grpc.ended:
            self._grpc = CallStream(self._connection.channel.stream_stream(CALLS_NAME)())
            self._streams.spawn("shared calls", self._grpc.run)
        try:
            return await self._grpc.call(method, request, timeout_s)
        except SharedCallsUnavailable:
            self.is_refused = True
            raise

    def review(self) -> None:
        """Leave the bulk path if only a few calls were made since the last review."""
        if self._count < OFTEN and self._bulk is not None:
            self._bulk.retire()
            self._bulk = None
        self._count = 0

    def close(self) -> None:
        """End all streams; calls in progress raise ClosedLocally."""
        self._is_closed = True
        for stream in (self._grpc, self._bulk):
            if stream is not None:
                stream.close()

    async def _run_bulk(self) -> None:
        """Begin a stream on the bulk path, and run it to its end."""
        try:
            bulk = await self._begin_bulk()
        finally:
            self._is_beginning, self._count = False, 0
        if bulk is None:
            return
        try:
            if self._is_closed:
                return
            stream = self._bulk = CallStream(bulk)
            await stream.run()
        finally:
            self._end_bulk(bulk)
