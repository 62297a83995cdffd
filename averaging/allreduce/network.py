"""The network as a round uses it: calls, and streams that are cut into frames and timed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from averaging.allreduce.config import EXCHANGE, Dialer
from averaging.allreduce.frames import FramedStream
from averaging.reduction.speed import Speed
from swarm.core.clock import Clock
from swarm.core.ids import Contact
from swarm.net.rpc import Method, ReplyT, RequestT, Stream

# A stream with at most this many bytes shares the connection of calls. In a large group with many small
# shards, another handshake with every reducer would cost more than the values. Larger: heartbeats wait behind
# values on slow links.
SHARED_STREAM_BYTES_MAX = 64 << 10


class RoundNetwork:
    """The network of one node. `speed` measures its link."""

    def __init__(self, dialer: Dialer, clock: Clock) -> None:
        self.speed = Speed()
        self._dialer, self._clock = dialer, clock

    @property
    def now_s(self) -> float:
        """Return the time on the clock of all rounds."""
        return self._clock.monotonic_s()

    async def call(
        self, contact: Contact, method: Method[RequestT, ReplyT], request: RequestT, *, timeout_s: float
    ) -> ReplyT:
        """Make a unary call; see `Caller`."""
        return await self._dialer.call(contact, method, request, timeout_s=timeout_s)

    def framed(self, stream: Stream, came: Callable[[int], None], went: Callable[[], None]) -> FramedStream:
        """Return the stream with its large messages in frames. `came` is called with the size of everything
        that arrives, `went` whenever something was sent.
        """
        return FramedStream(stream, self._clock, self.speed, came, went)

    def open_stream(self, contact: Contact, size_bytes: int) -> AbstractAsyncContextManager[Stream]:
        """Open a stream to a reducer for `size_bytes` of values; `framed` cuts its messages."""
        # a connection of its own, so that heartbeats and votes do not wait behind megabytes
        connection = 1 if size_bytes > SHARED_STREAM_BYTES_MAX else 0
        return self._dialer.open_stream(contact, EXCHANGE, timeout_s=None, connection=connection)
