"""Tests of a connection over memory: live and failed peers, streams, and buffers."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from swarm.core.errors import NetworkError, PeerError
from swarm.core.identity import Identity
from swarm.libp2p.agreement import answer
from swarm.libp2p.connection import MuxedStream, PeerConnection
from swarm.libp2p.host import HELD_BYTES_MAX, Host
from swarm.libp2p.logic import yamux
from swarm.libp2p.noise import Noise
from tests.libp2p.memory_pipes import MemoryPipe, memory_pipes


class Listening:
    """Takes the streams that a peer opens, and agrees on the protocol `/test`."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.group = group
        self.streams: asyncio.Queue[MuxedStream] = asyncio.Queue()

    def opened(self, stream: MuxedStream, /) -> None:
        self.group.create_task(self._agree(stream))

    async def _agree(self, stream: MuxedStream) -> None:
        with contextlib.suppress(NetworkError):  # the peer may give up before
            await answer(stream, frozenset(["/test"]))
            self.streams.put_nowait(stream)

    def received(self, connection: PeerConnection, /) -> None: ...


class Scene:
    """Two connected ends, and the pipes between them."""

    one: PeerConnection
    two: PeerConnection
    one_pipe: MemoryPipe
    two_pipe: MemoryPipe
    streams: asyncio.Queue[MuxedStream]


def run(test: Callable[[Scene], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            scene = Scene()
            scene.one_pipe, scene.two_pipe = memory_pipes()
            one, two = Noise(Identity.generate()), Noise(Identity.generate())
            client = group.create_task(one.handshake(scene.one_pipe, is_client=True, expected=None))
            server = group.create_task(two.handshake(scene.two_pipe, is_client=False, expected=None))
            listening = Listening(group)
            scene.streams = listening.streams
            scene.one = PeerConnection(
                await client, is_client=True, remote=None, relay=None, events=listening
            )
            scene.two = PeerConnection(
                await server, is_client=False, remote=None, relay=None, events=listening
            )
            running = [group.create_task(end.run()) for end in (scene.one, scene.two)]
            await test(scene)
            scene.one.close()
            scene.two.close()
            for task in running:
                await task

    asyncio.run(bounded())


def test_streams_carry_bytes_both_ways_and_end_on_their_own() -> None:
    async def test(scene: Scene) -> None:
        here = await scene.one.open("/test")
        there = await scene.streams.get()
        await here.write(b"question")
        here.finish()
        assert await there.read_exactly(8) == b"question"
        assert await there.read() == b""
        await there.write_message(b"answer")
        there.finish()
        assert await here.read_message(100) == b"answer"
        assert await here.read() == b""
        assert scene.one.streams == scene.two.streams == 0

    run(test)


def test_the_first_message_of_a_stream_does_not_wait_until_the_peer_has_confirmed_the_protocol() -> None:
    async def test(scene: Scene) -> None:
        scene.one_pipe.frozen = True  # nothing comes back
        here = await scene.one.open("/test")
        await here.write(b"question")
        there = await scene.streams.get()
        assert await there.read_exactly(8) == b"question"
        scene.one_pipe.frozen = False

    run(test)


@pytest.mark.parametrize("reads", [True, False])
def test_a_protocol_that_the_peer_does_not_speak_is_noticed_at_the_first_read(reads: bool) -> None:
    async def test(scene: Scene) -> None:
        here = await scene.one.open("/other")
        await here.write(b"question")
        with pytest.raises(PeerError, match="does not speak /other"):
            await (here.read() if reads else here.confirm())
        with pytest.raises(NetworkError, match="closed"):
            await here.write(b"more")

    run(test)


def test_a_protocol_stays_unconfirmed_when_the_connection_ends_before_the_peer_agrees() -> None:
    """Regression test: a peer that was lost before counted as a server that holds an announcement."""

    async def test(scene: Scene) -> None:
        scene.one_pipe.frozen = True
        here = await scene.one.open("/test")
        await here.write(b"question")
        here.finish()
        scene.one.close()
        with pytest.raises(NetworkError, match="has ended"):
            await here.confirm()
        scene.one_pipe.frozen = False

    run(test)


def test_a_peer_that_never_confirms_a_protocol_costs_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.libp2p.connection.NEGOTIATION_S", 0.05)

    async def test(scene: Scene) -> None:
        scene.one_pipe.frozen = True
        here = await scene.one.open("/test")
        with pytest.raises(NetworkError, match="did not agree on /test"):
            await here.read()
        with pytest.raises(NetworkError, match="closed"):
            await here.write(b"more")
        scene.one_pipe.frozen = False

    run(test)


def test_a_reader_that_pauses_holds_up_its_stream_and_no_other() -> None:
    async def test(scene: Scene) -> None:
        slow = await scene.one.open("/test")
        slow_there = await scene.streams.get()
        writing = asyncio.get_running_loop().create_task(slow.write(b"x" * 1_000_000))
        quick = await scene.one.open("/test")
        quick_there = await scene.streams.get()
        await quick.write(b"hello")
        assert await quick_there.read() == b"hello"
        assert not writing.done()
        assert scene.two.held <= yamux.WINDOW_BYTES
        size = 0
        while size < 1_000_000:
            size += len(await slow_there.read())
        await writing

    run(test)


def test_a_frozen_peer_is_noticed_in_time_and_its_streams_fail() -> None:
    async def test(scene: Scene) -> None:
        stream = await scene.one.open("/test")
        scene.one_pipe.frozen = True  # nothing arrives from the peer any more
        scene.one.watch(0.05, 0.2)
        with pytest.raises(NetworkError, match=r"sent nothing for 0\.2 s"):
            await stream.read()
        with pytest.raises(NetworkError, match="has ended"):
            await scene.one.open("/test")

    run(test)


def test_pings_are_answered_by_a_peer_that_has_nothing_else_to_send() -> None:
    async def test(scene: Scene) -> None:
        scene.one.watch(0.01, 2.0)
        scene.two.watch(60.0, 2.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3.0):
                await scene.one.wait_ended()
        assert scene.one.round_trip_s is not None

    run(test)


def test_a_peer_that_lives_is_not_given_up_however_often_it_is_asked() -> None:
    async def test(scene: Scene) -> None:
        scene.one.watch(0.0, 1.0)
        stream = await scene.one.open("/test")
        there = await scene.streams.get()
        for _ in range(50):
            await stream.write(b"x")
            await there.read()
        assert not scene.one.ended
        assert scene.one.round_trip_s is not None

    run(test)


def test_a_peer_that_reads_no_answers_to_its_pings_is_given_up() -> None:
    async def test(scene: Scene) -> None:
        scene.one_pipe.frozen = True  # it takes nothing

        async def flood() -> None:
            for _ in range(40_000):
                scene.one._session.ping(7)
                if scene.one._session.pending > 10_000:
                    await scene.one._sent()
                    await asyncio.sleep(0)

        flooding = asyncio.get_running_loop().create_task(flood())
        await scene.two.wait_ended()
        assert "reads no answers" in scene.two.ended
        assert scene.two.held < 512 << 10
        await flooding

    run(test)


def test_writers_that_are_cancelled_leave_the_connection_whole() -> None:
    async def test(scene: Scene) -> None:
        stuck = await scene.one.open("/test")
        await scene.streams.get()
        other = await scene.one.open("/test")
        there = await scene.streams.get()
        for _ in range(20):
            try:
                async with asyncio.timeout(0.005):
                    await stuck.write(b"x" * 500_000)
            except TimeoutError:
                pass
            await other.write(b"whole")
            assert await there.read_exactly(5) == b"whole"

    run(test)


def test_bytes_that_arrived_before_a_reset_can_still_be_read() -> None:
    async def test(scene: Scene) -> None:
        here = await scene.one.open("/test")
        there = await scene.streams.get()
        await there.write(b"refused, because")
        there.close()
        assert await here.read_exactly(16) == b"refused, because"
        with pytest.raises(NetworkError, match="reset"):
            await here.read()
        with pytest.raises(NetworkError, match="reset"):
            await here.write(b"x")

    run(test)


class Scripted:
    """The channel to a peer that sends what the test says (`SecureChannel`)."""

    def __init__(self) -> None:
        self.peer_id = Identity.generate().peer_id
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        self.reads = 0
        self.closed = False

    async def read(self) -> bytes:
        self.reads += 1
        data = await self.frames.get()
        if self.closed:
            raise NetworkError("the connection has ended")
        return data

    async def write(self, data: bytes) -> None: ...

    def close(self) -> None:
        self.closed = True
        self.frames.put_nowait(b"")


class Collecting:
    """Keeps the streams that a peer opens (`Events`)."""

    def __init__(self) -> None:
        self.streams: list[MuxedStream] = []

    def opened(self, stream: MuxedStream, /) -> None:
        self.streams.append(stream)

    def received(self, connection: PeerConnection, /) -> None: ...


def frame(number: int, *, data: bytes = b"", syn: bool = False, rst: bool = False) -> bytes:
    """Return a data frame of yamux."""
    return struct.pack("!BBHII", 0, 0, syn | rst << 3, number, len(data)) + data


@asynccontextmanager
async def scripted() -> AsyncIterator[tuple[PeerConnection, Scripted, list[MuxedStream]]]:
    """Yield a connection that a scripted peer has opened, the peer, and the streams that it opens."""
    channel, events = Scripted(), Collecting()
    connection = PeerConnection(channel, is_client=False, remote=None, relay=None, events=events)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(connection.run())
        yield connection, channel, events.streams
        connection.close()


async def taken(channel: Scripted) -> None:
    """Let the connection take all frames."""
    for _ in range(100):
        await asyncio.sleep(0)
    assert channel.frames.empty()


def test_a_stream_number_that_is_used_again_is_another_stream() -> None:
    async def test() -> None:
        async with scripted() as (connection, channel, streams):
            for _ in range(5):
                channel.frames.put_nowait(frame(1, syn=True))
                for size in [65_000] * 4:
                    channel.frames.put_nowait(frame(1, data=b"x" * size))
                channel.frames.put_nowait(frame(1, rst=True))
            channel.frames.put_nowait(frame(1, syn=True))
            await taken(channel)
            *old, new = streams
            assert len(old) == 5
            for stream in old:
                assert len(await stream.read_exactly(260_000)) == 260_000
                with pytest.raises(NetworkError, match="reset"):
                    await connection.send(stream, b"x")
                stream.finish()
                stream.close()
            assert connection.held >= 0
            assert connection.streams == 1
            assert await connection.send(new, b"x") == 1
            channel.frames.put_nowait(frame(1, data=b"y" * 65_000))
            await taken(channel)
            assert connection.held >= 65_000
            assert await new.read_exactly(65_000) == b"y" * 65_000
            reading = asyncio.get_running_loop().create_task(new.read())
            await asyncio.sleep(0)
            connection.close()
            with pytest.raises(NetworkError, match="has ended"):
                async with asyncio.timeout(1.0):
                    await reading

    asyncio.run(test())


def test_small_frames_are_held_as_their_bytes_and_read_together() -> None:
    async def test() -> None:
        async with scripted() as (_, channel, streams):
            channel.frames.put_nowait(frame(1, syn=True))
            channel.frames.put_nowait(b"".join(frame(1, data=b"ab") for _ in range(1000)))
            await taken(channel)
            assert await streams[0].read(5) == b"ababa"
            assert await streams[0].read() == (b"ab" * 1000)[5:]

    asyncio.run(test())


def test_a_flood_of_messages_lets_other_tasks_run() -> None:
    async def test() -> None:
        async with scripted() as (connection, channel, _):
            ping = struct.pack("!BBHII", 0, 2, 2, 0, 7)
            for _ in range(10_000):
                channel.frames.put_nowait(ping)
            for _ in range(10):
                await asyncio.sleep(0)
            assert 10 < channel.reads < 1000
            connection.close()

    asyncio.run(test())


def test_watching_a_connection_as_it_is_watched_already_cuts_no_ping_short() -> None:
    async def test() -> None:
        async with scripted() as (connection, _, _):
            for _ in range(20):  # more than the steps of a ping: each would pass at once
                connection.watch(2.0, 3.0)
                for _ in range(5):
                    await asyncio.sleep(0)
            assert not connection.ended

    asyncio.run(test())


def test_held_bytes_of_all_connections_are_summed_only_when_one_holds_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: dict[PeerConnection, int] = {}
    asked: Counter[PeerConnection] = Counter()

    def count(connection: PeerConnection) -> int:
        asked[connection] += 1
        return held.get(connection, 0)

    async def test() -> None:
        host, *others = (Host(Identity.generate()) for _ in range(3))
        for one in others:
            here, there = memory_pipes()
            await asyncio.gather(
                host.secure(here, is_client=False, expected=None),
                one.secure(there, is_client=True, expected=None),
            )
        monkeypatch.setattr(PeerConnection, "held", property(count))
        most, other = host.connections
        held.update({most: HELD_BYTES_MAX // 2, other: 300_000})
        for _ in range(1000):
            host.received(other)
            held[other] += 18
        assert asked[most] < 10
        # what was taken counts again when it comes back
        held.update({most: HELD_BYTES_MAX - 100_000, other: 0})
        host.received(other)
        while not most.ended and held[other] < 300_000:
            held[other] += 10_000
            host.received(other)
        assert most.ended
        assert held[other] <= 130_000
        assert not other.ended
        for one in (host, *others):
            await one.close()

    asyncio.run(test())
