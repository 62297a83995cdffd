"""A connection to a peer: streams over yamux over Noise over a pipe."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from swarm.core.errors import NetworkError, PeerError
from swarm.core.ids import Address, PeerId
from swarm.core.notify import ChangeEvent
from swarm.libp2p.agreement import confirm, propose, read_prefix
from swarm.libp2p.logic import yamux
from swarm.libp2p.logic.admission import through
from swarm.libp2p.logic.messages import read_varint, varint
from swarm.libp2p.noise import PLAINTEXT_BYTES_MAX, SecureChannel

NEGOTIATION_S = 10.0  # to agree on a stream's protocol; too short: a busy machine does not answer in time
PING_INTERVAL_S = 15.0
PING_TIMEOUT_S = 10.0
# steps into which the ping timeout is divided: while this process is stopped, only one of them passes
_PING_STEPS = 4
_PENDING_BYTES_MAX = 256 << 10  # writers wait while more than this is still to be sent
_READS_IN_A_ROW = 16  # messages read before other tasks run: the peer may have sent many


class MuxedStream:
    """A stream: bytes in both directions, each of which can be finished separately. Another connection can
    run over it, so it is a `Pipe`.
    """

    def __init__(self, connection: PeerConnection, number: int) -> None:
        self.connection = connection
        self.number = number
        self.protocol = ""
        # what reads the peer's answers that come before the stream's bytes, the last one first
        self._expected: list[Callable[[], Awaitable[None]]] = []
        self._unread = bytearray()
        self._changed = ChangeEvent()
        self._writable = asyncio.Event()
        self._ended = False  # the peer sends no more
        self.lost = ""  # why the stream is gone in both directions
        # its window may grow; a relay's must not, because a relay holds the windows of many streams
        self.grows = True

    @property
    def peer_id(self) -> PeerId:
        """Return the peer at the other end."""
        return self.connection.peer_id

    async def read(self, bytes_max: int = yamux.PIECE_BYTES) -> bytes:
        """Return the next bytes, at most `bytes_max`; none when the peer has finished. Raises NetworkError
        when the stream is gone. The first read of a stream that this side opened also raises PeerError when
        the peer does not speak the protocol, and NetworkError when an expected answer does not come in time
        (10 s for a protocol; `expect` sets others).
        """
        if self._expected:
            await self.confirm()
        while not self._unread:
            if self.lost:
                raise NetworkError(self.lost)
            if self._ended:
                return b""
            await self._changed.wait()
        return self.take(bytes_max)

    def take(self, bytes_max: int) -> bytes:
        """Return bytes that have arrived, at most `bytes_max`, without a wait; possibly none."""
        with memoryview(self._unread) as view:
            data = bytes(view[:bytes_max])
        del self._unread[:bytes_max]
        self.connection.consumed(self, len(data))
        return data

    def expect(self, read_answer: Callable[[], Awaitable[None]]) -> None:
        """Let the first read call `read_answer`, which reads what the peer sends before the stream's bytes.
        So this side can write at once.
        """
        self._expected.append(read_answer)

    async def propose(self, protocol: str) -> None:
        """Propose the stream's protocol. Writing may continue at once; the first read takes the peer's
        answer. Raises NetworkError when the stream is gone.
        """
        self.protocol = protocol
        self.expect(functools.partial(self._agree, protocol))
        await propose(self, protocol)

    async def confirm(self) -> None:
        """Wait for the peer's answers, first that it speaks the protocol; without this the first read does.
        Raises PeerError when the peer does not speak it, NetworkError when an answer does not come in time
        or the stream is gone. The stream is closed when this fails or is cancelled.
        """
        if self._expected:  # the last one, whose own read waits for those before it
            await self._expected.pop()()

    async def _agree(self, protocol: str) -> None:
        async with answered(self, NEGOTIATION_S, f"it did not agree on {protocol}"):
            await confirm(self, protocol)

    async def read_exactly(self, size: int) -> bytes:
        """Return `size` bytes. Raises NetworkError when the peer has finished after fewer bytes, or the
        stream is gone.
        """
        parts, missing = [], size
        while missing:
            part = await self.read(missing)
            if not part:
                raise NetworkError("the peer has ended the stream in the middle")
            parts.append(part)
            missing -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def read_message(self, bytes_max: int) -> bytes:
        """Return a message, which its length precedes. Raises PeerError when it is longer than `bytes_max`,
        NetworkError when the stream ends.
        """
        size, _ = read_varint(await read_prefix(self, bytes_max), 0)
        if size > bytes_max:
            raise PeerError(f"it sent a message of {size} bytes; {bytes_max} are allowed")
        return await self.read_exactly(size) if size else b""

    async def write(self, data: bytes) -> None:
        """Send bytes. Waits while the peer reads nothing, without a timeout: the connection's pings find out
        whether the peer is alive. Raises NetworkError when the stream is gone.
        """
        while data:
            if self.lost:
                raise NetworkError(self.lost)
            self._writable.clear()
            sent = await self.connection.send(self, data)
            if sent == 0:
                await self._writable.wait()
            data = data[sent:]

    async def write_message(self, data: bytes) -> None:
        """Send a message with its length before it."""
        await self.write(varint(len(data)) + data)

    def finish(self) -> None:
        """Send nothing more. The peer may still send."""
        self.connection.finish(self)

    def close(self) -> None:
        """End both directions at once; what was sent may be lost. Idempotent."""
        self.connection.reset(self)

    def receive(self, event: yamux.Event) -> None:
        """Take an event of this stream from its connection."""
        match event:
            case yamux.Received():
                self._unread += event.data
            case yamux.Ended():
                self._ended = True
            case yamux.WasReset():
                self.lose("the peer has reset the stream")
            case _:
                self._writable.set()
        self._changed.notify()

    def lose(self, reason: str) -> None:
        """Mark the stream as gone. What has arrived can be read."""
        self.lost = self.lost or reason
        self._changed.notify()
        self._writable.set()


@asynccontextmanager
async def answered(stream: MuxedStream, seconds: float, failure: str) -> AsyncIterator[None]:
    """Close the stream when the block under this context fails. Raise NetworkError with `failure` when the
    block takes longer than this.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        stream.close()
        raise NetworkError(f"{failure} within {seconds:.0f} s") from None
    except BaseException:
        stream.close()
        raise


class Events(Protocol):
    """The events that a connection reports to its host. The methods return at once."""

    def opened(self, stream: MuxedStream, /) -> None:
        """The peer has opened a stream."""
        ...

    def received(self, connection: PeerConnection, /) -> None:
        """Bytes have arrived; `held` may have grown."""
        ...


class PeerConnection:
    """A secured connection. `run` works until it ends; `close` ends it.

    `relay`: the peer through which it runs; None: a direct one, whose other end is `remote`. `host`: the name
    under which limits count it.
    """

    def __init__(
        self,
        channel: SecureChannel,
        *,
        is_client: bool,
        remote: Address | None,
        relay: PeerId | None,
        events: Events,
    ) -> None:
        self._channel = channel
        self.peer_id = channel.peer_id
        self.is_client, self.remote, self.relay = is_client, remote, relay
        self.host = remote.host if remote is not None else through(relay)
        self._events = events
        self._session = yamux.YamuxSession(is_client=is_client)
        self._streams: dict[int, MuxedStream] = {}
        self._to_send = ChangeEvent()
        self._room = asyncio.Event()
        self._room.set()
        self._interval_changed = ChangeEvent()
        self._ping_interval_s, self._ping_timeout_s = PING_INTERVAL_S, PING_TIMEOUT_S
        self._ping = (0, 0.0)  # value of the last ping, and when it was sent
        self._heard_s = self.idle_since_s = time.monotonic()
        self.round_trip_s: float | None = None
        self.is_confirmed = False  # the peer has sent something, so it has taken the connection
        self.kept = 0  # how many users need the connection although it has no streams
        self.counted = 0  # value of `held` when the host last added up what all connections hold
        self.ended = ""  # why the connection has ended; "" until then
        self._has_ended = asyncio.Event()

    @property
    def held(self) -> int:
        """Return how many bytes this connection holds: those that nobody has read, and those still to be
        sent.
        """
        return self._session.unread + self._session.pending

    def take_refused(self) -> int:
        """Return how many streams beyond the limit the peer has opened since the last call."""
        refused, self._session.refused = self._session.refused, 0
        return refused

    @property
    def streams(self) -> int:
        """Return the number of open streams."""
        return len(self._streams)

    async def run(self) -> None:
        """Work until the connection ends; `ended` says why. Its streams are gone then."""
        reason = "it was closed"
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._run_reading())
                group.create_task(self._run_writing())
                group.create_task(self._run_pings())
        except* (NetworkError, PeerError) as errors:
            reason = str(errors.exceptions[0])
        finally:
            self.close(reason)

    def close(self, reason: str = "it was closed") -> None:
        """End the connection and its streams. Idempotent."""
        self.ended = self.ended or reason
        for stream in list(self._streams.values()):
            stream.lose(f"the connection to {self.peer_id.short} has ended: {self.ended}")
        self._streams.clear()
        self._room.set()
        self._has_ended.set()
        self._channel.close()

    async def wait_ended(self) -> None:
        """Wait until the connection has ended."""
        await self._has_ended.wait()

    def watch(self, interval_s: float, timeout_s: float) -> None:
        """Ping in this interval: the connection ends if nothing arrives for `timeout_s` after a ping."""
        if (interval_s, timeout_s) == (self._ping_interval_s, self._ping_timeout_s):
            return  # a change ends a step of the ping that is under way
        self._ping_interval_s, self._ping_timeout_s = interval_s, timeout_s
        self._interval_changed.notify()

    async def open(self, protocol: str) -> MuxedStream:
        """Open a stream for a protocol, and return it without a wait for the peer: the first read says
        whether it speaks the protocol. Raises NetworkError when the connection has ended or 64 streams are
        open.
        """
        if self.ended:
            raise NetworkError(f"the connection to {self.peer_id.short} has ended: {self.ended}")
        stream = MuxedStream(self, self._session.open())
        self._streams[stream.number] = stream
        async with answered(stream, NEGOTIATION_S, f"the proposal of {protocol} could not be sent"):
            await stream.propose(protocol)
        return stream

    async def send(self, stream: MuxedStream, data: bytes) -> int:
        """Send the beginning of `data`, and return how much of it the peer's window took."""
        if not self._has(stream):
            raise NetworkError(stream.lost or "the stream was finished")
        sent = self._session.send(stream.number, data)
        await self._sent()
        return sent

    def consumed(self, stream: MuxedStream, size: int) -> None:
        """Note that bytes of a stream were read."""
        if self._has(stream):
            self._session.consumed(stream.number, size, grows=stream.grows)
            self._to_send.notify()

    def finish(self, stream: MuxedStream) -> None:
        """Finish this side of a stream."""
        if self._has(stream):
            self._session.finish(stream.number)
            self._to_send.notify()
            self._forget(stream.number)

    def reset(self, stream: MuxedStream) -> None:
        """End a stream at once."""
        if self._has(stream):
            self._session.reset(stream.number)
            self._to_send.notify()
            self._forget(stream.number)
        stream.lose("the stream was closed")

    def _has(self, stream: MuxedStream) -> bool:
        # A peer that has ended a stream may use its number for another one.
        return self._streams.get(stream.number) is stream

    async def _sent(self) -> None:
        """Wait until there is room for more to send."""
        self._to_send.notify()
        if self._session.pending > _PENDING_BYTES_MAX:
            self._room.clear()
            await self._room.wait()

    def _forget(self, number: int) -> None:
        if not self._session.has(number) and self._streams.pop(number, None) is not None:
            self.idle_since_s = time.monotonic()

    async def _run_reading(self) -> None:
        for count in itertools.count(1):
            data = await self._channel.read()
            self._heard_s = time.monotonic()
            self.is_confirmed = True
            for event in self._session.receive(data):
                self._dispatch(event)
            self._to_send.notify()  # acknowledgements, answers to pings
            # An error rather than a wait: two ends that both wait for the other to read would wait forever.
            # Writers of this side add one piece each beyond the limit.
            if self._session.pending > _PENDING_BYTES_MAX + (self._session.streams + 1) * yamux.PIECE_BYTES:
                raise PeerError("it reads no answers to what it asks for")
            self._events.received(self)
            # reading what has arrived never waits, so other tasks would not run
            if count % _READS_IN_A_ROW == 0:
                await asyncio.sleep(0)

    def _dispatch(self, event: yamux.Event) -> None:
        match event:
            case yamux.Opened():
                stream = self._streams[event.stream] = MuxedStream(self, event.stream)
                self._events.opened(stream)
            case yamux.Answered():
                value, sent_s = self._ping
                if event.value == value:
                    self.round_trip_s = time.monotonic() - sent_s
            case yamux.GoneAway():
                raise NetworkError("the peer has closed the connection")
            case _:
                known = self._streams.get(event.stream)
                if known is not None:
                    known.receive(event)
                if isinstance(event, yamux.Ended | yamux.WasReset):  # its last event, if the session has none
                    self._forget(event.stream)

    async def _run_writing(self) -> None:
        # Only this task writes, and nothing cancels it while the connection is open: half a message would
        # break the encryption of all streams.
        while True:
            await self._to_send.wait()
            while data := self._session.output(PLAINTEXT_BYTES_MAX):
                await self._channel.write(data)
                if self._session.pending <= _PENDING_BYTES_MAX:
                    self._room.set()

    async def _run_pings(self) -> None:
        """Ping the peer. Any data from the peer counts as a sign of life, because on a slow link the answer
        may be queued behind much data.
        """
        while True:
            sent_s = time.monotonic()
            self._ping = (self._ping[0] + 1 & 0xFFFFFFFF, sent_s)
            self._session.ping(self._ping[0])
            self._to_send.notify()
            for _ in range(_PING_STEPS):
                await self._interval_changed.wait(self._ping_timeout_s / _PING_STEPS)
                if self._heard_s >= sent_s:
                    break
            else:
                raise NetworkError(f"the peer has sent nothing for {self._ping_timeout_s:.1f} s")
            await self._interval_changed.wait(max(self._ping_interval_s, 0.0))
