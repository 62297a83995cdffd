"""Both ends of a simulated stream: ordered, reliable and bounded; a crash breaks it, a partition stalls
it.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from typing import TYPE_CHECKING

from swarm.core.errors import NetworkError, SwarmError, UsageError
from swarm.core.ids import PeerId
from swarm.core.notify import wait_until_set
from swarm.net.rpc import StreamMethod, check_outgoing, copy_into

if TYPE_CHECKING:
    from swarm.testing.network import SimulatedPeer

_QUEUED_MAX = 16  # messages on their way in one direction; then the sender waits, as with flow control
_STALL_POLL_S = 0.05  # virtual seconds between two checks whether a cut has healed


class _Pipe:
    """One direction of a stream."""

    def __init__(self) -> None:
        self.messages: deque[tuple[float, bytes | None]] = deque()  # (arrival, message); None: finished
        self.changed = asyncio.Event()
        self.error: SwarmError | None = None
        self.last_arrival_s = 0.0
        self.leaving = 0  # messages that wait for a slow uplink

    def arrive(self, at_s: float, message: bytes | None) -> None:
        self.last_arrival_s = max(self.last_arrival_s, at_s)
        self.messages.append((self.last_arrival_s, message))
        self.wake()

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class SimulatedStream:
    """One end of a stream, with the interface of `swarm.net.rpc.Stream`."""

    def __init__(
        self,
        own: SimulatedPeer,
        other: SimulatedPeer,
        method: StreamMethod,
        pipes: tuple[_Pipe, _Pipe],
        *,
        opened: bool,
    ) -> None:
        """Create one end. `opened`: this is the end of the peer that opened the stream; the other end
        finishes when its handler returns.
        """
        self.own = own
        self.peer_id: PeerId = other.peer_id
        self.method = method
        self._other = other
        self._out, self._in = pipes
        self._opened = opened
        self._finished = False

    async def send(self, message: bytes) -> None:
        """Send one message; wait while the other end is behind. Raise NetworkError when the stream is broken
        or cancelled.
        """
        check_outgoing(self.method, message)
        if self._finished:
            raise UsageError("this stream was finished; it takes no more messages")
        while len(self._out.messages) + self._out.leaving >= _QUEUED_MAX and self._out.error is None:
            await self._wait(self._out, None)
        self._put(bytes(message))

    async def finish(self) -> None:
        """Finish sending from the end that opened the stream. May be called again; does nothing at the other
        end.
        """
        if self._opened:
            self.end()

    def end(self) -> None:
        """Finish sending from this end."""
        if not self._finished and self._out.error is None:
            self._finished = True
            self._put(None)

    def _put(self, message: bytes | None) -> None:
        self._check(self._out)
        network = self.own.network
        size_bytes = len(message or b"")
        self.own.messages_sent += 1
        self.own.bytes_sent += size_bytes
        delay_s = network.delay_s(self.own, self._other, size_bytes)
        network.note(self.own, self._other, self.method.name, f"stream {size_bytes}")
        if self.own.uplink is None:
            self._out.arrive(asyncio.get_running_loop().time() + delay_s, message)
        else:
            self._out.leaving += 1
            self.own.uplink.push(self._out, size_bytes, functools.partial(self._left, delay_s, message))

    def _left(self, delay_s: float, message: bytes | None) -> None:
        """Deliver a message that has passed the uplink, unless the stream has ended meanwhile."""
        self._out.leaving -= 1
        if self._out.error is None and self.own.up:
            self._out.arrive(asyncio.get_running_loop().time() + delay_s, message)

    async def receive(self) -> bytes | None:
        """Return the next message, or None when the other end finished. Raise NetworkError when the stream
        broke, and PeerError when the handler refused.
        """
        while True:
            now_s = asyncio.get_running_loop().time()
            if not self._in.messages:
                self._check(self._in)
                await self._wait(self._in, None)
            elif self._in.messages[0][0] > now_s:
                await self._wait(self._in, self._in.messages[0][0] - now_s)
            elif self.own.network.silent_between(self._other, self.own):
                await self._wait(self._in, _STALL_POLL_S)
            else:
                self._check(self._in, broken_only=True)
                if self._in.messages[0][1] is None:  # stays: every later receive returns the same
                    return None
                message = self._in.messages.popleft()[1]
                self._in.wake()
                return message

    def cancel(self) -> None:
        self.fail(NetworkError(f"the stream {self.method.name} was cancelled"))

    def fail(self, error: SwarmError) -> None:
        """Break both directions; messages that were already sent are still received."""
        for pipe in (self._out, self._in):
            if pipe.error is None:
                pipe.error = error
            pipe.wake()

    def _check(self, pipe: _Pipe, *, broken_only: bool = False) -> None:
        if not (self.own.up and self._other.up):
            raise NetworkError(
                f"the stream {self.method.name} with peer {self.peer_id.short} broke:"
                " crashed in the simulation"
            )
        if pipe.error is not None and not broken_only:
            raise pipe.error

    async def receive_into(self, buffer: memoryview) -> int | None:
        """Receive the next message into the start of a buffer, and return its size."""
        return copy_into(await self.receive(), buffer)

    async def _wait(self, pipe: _Pipe, timeout_s: float | None) -> None:
        """Wait for a change of the pipe, at most one virtual second, so that a crash is noticed without a
        notification.
        """
        if not await wait_until_set(pipe.changed, 1.0 if timeout_s is None else timeout_s):
            self._check(pipe, broken_only=True)


def stream_pair(
    caller: SimulatedPeer, target: SimulatedPeer, method: StreamMethod
) -> tuple[SimulatedStream, SimulatedStream]:
    """Return the caller's end and the handler's end of a new stream."""
    forth, back = _Pipe(), _Pipe()
    return (
        SimulatedStream(caller, target, method, (forth, back), opened=True),
        SimulatedStream(target, caller, method, (back, forth), opened=False),
    )
