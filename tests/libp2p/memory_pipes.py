"""Two ends of a pipe in memory, for what runs over connections without sockets."""

from __future__ import annotations

import asyncio

from swarm.core.errors import NetworkError


class MemoryPipe:
    """One end (`Pipe`). `frozen`: it takes no bytes any more, and its writers wait. `delay_s`: time that the
    bytes written at this end take.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.other: MemoryPipe = self
        self.arrived = bytearray()
        self.closed = False
        self.frozen = False
        self._changed = asyncio.Condition()

    async def read_exactly(self, size: int) -> bytes:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.arrived) >= size or self.closed)
            if len(self.arrived) < size:
                raise NetworkError("the connection has ended")
            data = bytes(self.arrived[:size])
            del self.arrived[:size]
            return data

    async def write(self, data: bytes) -> None:
        other = self.other
        async with other._changed:
            await other._changed.wait_for(lambda: not other.frozen or self.closed)
            if self.closed:
                raise NetworkError("the connection has ended")
        if self.delay_s:
            loop = asyncio.get_running_loop()
            loop.call_later(self.delay_s, lambda: loop.create_task(other._arrive(data)))
        else:
            await other._arrive(data)

    async def _arrive(self, data: bytes) -> None:
        async with self._changed:
            self.arrived += data
            self._changed.notify_all()

    def close(self) -> None:
        for end in (self, self.other):
            end.closed = True
            asyncio.get_running_loop().create_task(end._wake())

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def memory_pipes(delay_s: float = 0.0) -> tuple[MemoryPipe, MemoryPipe]:
    """Return the two ends of a pipe, in which bytes take this time."""
    one, two = MemoryPipe(delay_s), MemoryPipe(delay_s)
    one.other, two.other = two, one
    return one, two
