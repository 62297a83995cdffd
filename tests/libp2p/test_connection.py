"""Tests of a connection over memory: life and death of its peer, streams, and what it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from swarm.core.errors import NetworkError
from swarm.core.identity import Identity
from swarm.libp2p.agreement import answer
from swarm.libp2p.connection import MuxedStream, PeerConnection
from swarm.libp2p.cures import Noise
from swarm.libp2p.logic import yamux
from tests.libp2p.memory_pipes import MemoryPipe, memory_pipes


class Listening:
    """Takes the streams that a peer opens, and agrees on any of these protocols."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.group = group
        self.streams: asyncio.Queue[MuxedStream] = asyncio.Queue()

    def opened(self, stream: MuxedStream, /) -> None:
        self.group.create_task(self._agree(stream))

    async def _agree(self, stream: MuxedStream) -> None:
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


def test_what_had_arrived_before_a_reset_can_still_be_read() -> None:
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
