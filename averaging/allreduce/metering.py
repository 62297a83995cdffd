"""The network as a round uses it, with a measurement of how long messages take to leave."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from averaging.allreduce.config import Dialer
from averaging.reduction.speed import Speed
from swarm.core.clock import Clock
from swarm.core.ids import Contact, PeerId
from swarm.net.rpc import Method, ReplyT, RequestT, Stream, StreamMethod


class MeteredStream:
    """A stream, its sending timed. Satisfies `Stream`."""

    def __init__(self, stream: Stream, speed: Speed, clock: Clock) -> None:
        self._stream, self._speed, self._clock = stream, speed, clock

    @property
    def peer_id(self) -> PeerId:
        return self._stream.peer_id

    async def send(self, message: bytes) -> None:
        self._speed.begin(self._clock.monotonic_s())
        try:
            await self._stream.send(message)
        finally:
            self._speed.end(len(message), self._clock.monotonic_s())

    async def receive(self) -> bytes | None:
        return await self._stream.receive()

    async def finish(self) -> None:
        await self._stream.finish()

    def cancel(self) -> None:
        self._stream.cancel()


class MeteredDialer:
    """A dialer whose streams are timed. Satisfies `Dialer`."""

    def __init__(self, dialer: Dialer, speed: Speed, clock: Clock) -> None:
        self.speed = speed
        self._dialer, self._clock = dialer, clock

    async def call(
        self, contact: Contact, method: Method[RequestT, ReplyT], request: RequestT, *, timeout_s: float
    ) -> ReplyT:
        return await self._dialer.call(contact, method, request, timeout_s=timeout_s)

    @asynccontextmanager
    async def open_stream(
        self, contact: Contact, method: StreamMethod, *, timeout_s: float | None, connection: int = 0
    ) -> AsyncIterator[Stream]:
        async with self._dialer.open_stream(
            contact, method, timeout_s=timeout_s, connection=connection
        ) as stream:
            yield MeteredStream(stream, self.speed, self._clock)
