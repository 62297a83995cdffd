"""Tests of streams on real sockets: both ends behave the same, flow control works, and a broken stream is
never mistaken for a finished one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from swarm.core.errors import DeadlineExceeded, NetworkError, PeerError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact
from swarm.net.certificate import client_certificate
from swarm.net.channels import IDLE_S, Channels, ConnectionLimits
from swarm.net.dial import dial
from swarm.net.rpc import Handlers, Stream, StreamMethod
from swarm.net.server import CallLimits, Server
from tests.wire.event_loop import run_on_loop

TALK = StreamMethod(name="/swarm.Test/Talk", message_bytes_max=1 << 20)


@dataclass
class Line:
    """A caller, a server, and the messages that its handler received."""

    channels: Channels
    handlers: Handlers
    server: Server
    contact: Contact
    caller: Identity
    number: int  # of the connection that streams use
    seen: list[object] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self, method: StreamMethod, timeout_s: float) -> AbstractAsyncContextManager[Stream]:
        return self.channels.open_stream(self.contact, method, timeout_s=timeout_s, connection=self.number)

    def serve(self, handler: Callable[[Stream], Awaitable[None]], method: StreamMethod = TALK) -> None:
        async def watched(stream: Stream) -> None:
            try:
                await handler(stream)
                self.seen.append("returned")
            except BaseException as error:
                self.seen.append(error)
                raise
            finally:
                self.ended.set()

        self.handlers.stream(method, watched)


@pytest.fixture(params=[0, 1], ids=["grpc", "bulk"])
def number(request: pytest.FixtureRequest) -> int:
    """Return the number of a connection: streams on connection 0 are gRPC's, those on others bulk streams."""
    value: int = request.param
    return value


@asynccontextmanager
async def line(
    number: int, limits: ConnectionLimits | None = None, calls: CallLimits | None = None
) -> AsyncIterator[Line]:
    identity, caller, handlers = Identity.generate(), Identity.generate(), Handlers()
    server = Server(limits=calls)
    port = await server.start(identity, handlers, "127.0.0.1", 0)
    channels = Channels(caller, limits=limits or ConnectionLimits())
    try:
        yield Line(
            channels,
            handlers,
            server,
            Contact(identity.peer_id, (Address("127.0.0.1", port),)),
            caller,
            number,
        )
    finally:
        await channels.close()
        await server.stop(0)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    run_on_loop(scenario(), 30)


async def read_all(stream: Stream) -> None:
    while await stream.receive() is not None:
        pass


async def push(stream: Stream) -> None:
    while True:
        await stream.send(bytes(1000))


async def echo(stream: Stream) -> None:
    while (message := await stream.receive()) is not None:
        await stream.send(message)


def test_messages_are_received_into_buffers_at_both_ends(number: int) -> None:
    async def scenario() -> None:
        async def reversed_echo(stream: Stream) -> None:
            buffer = memoryview(bytearray(1 << 20))
            while (size := await stream.receive_into(buffer)) is not None:
                await stream.send(bytes(buffer[:size])[::-1])

        async with line(number) as one:
            one.serve(reversed_echo)
            async with one.open(TALK, timeout_s=10) as stream:
                for size in (1, 1000, 1 << 20):
                    message, buffer = os.urandom(size), bytearray(size + 3)
                    await stream.send(message)
                    assert await stream.receive_into(memoryview(buffer)) == size
                    assert buffer == message[::-1] + bytes(3)
                await stream.send(b"larger")
                assert await stream.receive_into(memoryview(small := bytearray(5))) == 6
                assert small == bytes(5)
                await stream.send(b"ahead")
                await asyncio.sleep(0.1)  # it may be taken from the connection before it is asked for
                assert await stream.receive_into(memoryview(small)) == 5
                assert small == b"daeha"
                await stream.finish()
                assert await stream.receive_into(memoryview(small)) is None
        assert one.seen == ["returned"]

    run(scenario)


def test_messages_travel_in_both_directions_until_both_ends_finish(number: int) -> None:
    async def scenario() -> None:
        async with line(number) as one:
            one.serve(echo)
            async with one.open(TALK, timeout_s=10) as stream:
                assert stream.peer_id == one.contact.peer_id
                for nth in range(100):
                    await stream.send(b"%d" % nth)
                await stream.finish()
                await stream.finish()
                assert [await stream.receive() for _ in range(100)] == [b"%d" % nth for nth in range(100)]
                assert await stream.receive() is None
                assert await stream.receive() is None
                with pytest.raises(UsageError, match="finished"):
                    await stream.send(b"late")
            assert one.seen == ["returned"]

    run(scenario)


def test_the_handler_knows_its_caller_and_may_send_first_and_last(number: int) -> None:
    async def scenario() -> None:
        async with line(number) as one:

            async def handler(stream: Stream) -> None:
                assert stream.peer_id == one.caller.peer_id
                await stream.send(b"first")
                assert await stream.receive() == b"answer"
                assert await stream.receive() is None
                assert await stream.receive() is None
                await stream.finish()
                await stream.send(b"last")

            one.serve(handler)
            async with one.open(TALK, timeout_s=10) as stream:
                assert await stream.receive() == b"first"
                await stream.send(b"answer")
                await stream.finish()
                assert await stream.receive() == b"last"
                assert await stream.receive() is None

    run(scenario)


def test_a_refusal_reaches_a_sending_and_a_receiving_caller(number: int) -> None:
    async def scenario() -> None:
        async with line(number) as one:

            async def refuse(stream: Stream) -> None:
                await stream.receive()
                raise PeerError("not of this group")

            one.serve(refuse)
            async with one.open(TALK, timeout_s=10) as stream:
                await stream.send(b"x")
                with pytest.raises(
                    PeerError, match=f"{one.contact.peer_id} refused {TALK.name}: not of this group"
                ):
                    await stream.receive()
            async with one.open(TALK, timeout_s=10) as stream:
                with pytest.raises(PeerError, match="not of this group"):
                    await push(stream)

    run(scenario)


def test_a_stream_without_a_handler_is_refused(number: int) -> None:
    async def scenario() -> None:
        async with line(number) as one, one.open(TALK, timeout_s=10) as stream:
            with pytest.raises(PeerError, match="does not serve"):
                await stream.receive()

    run(scenario)


def test_size_limits_hold_at_both_ends(number: int) -> None:
    async def scenario() -> None:
        loose = StreamMethod(name=TALK.name)
        async with line(number) as one:
            one.serve(echo)
            async with one.open(TALK, timeout_s=10) as stream:
                for wrong in (b"", bytes((1 << 20) + 1)):
                    with pytest.raises(UsageError, match="message"):
                        await stream.send(wrong)
                await stream.send(bytes(1 << 20))
                message = await stream.receive()
                assert message is not None
                assert len(message) == 1 << 20
            async with one.open(loose, timeout_s=10) as stream:
                await stream.send(bytes((1 << 20) + 1))
                with pytest.raises(PeerError, match="messages of 1 to 1048576 bytes; this one has 1048577"):
                    await stream.receive()
            one.handlers.remove(TALK.name)

            async def too_much(stream: Stream) -> None:
                await stream.send(bytes((1 << 20) + 1))

            one.handlers.stream(loose, too_much)
            async with one.open(TALK, timeout_s=10) as stream:
                with pytest.raises(PeerError, match="this one has 1048577"):
                    await stream.receive()

    run(scenario)


def test_a_caller_that_breaks_off_is_not_mistaken_for_finished(number: int) -> None:
    async def scenario() -> None:
        async with line(number) as one:
            first = asyncio.Event()

            async def handler(stream: Stream) -> None:
                assert await stream.receive() == b"x"
                first.set()
                await stream.receive()

            one.serve(handler)
            async with one.open(TALK, timeout_s=10) as stream:
                await stream.send(b"x")
                await first.wait()
            await one.ended.wait()
            assert isinstance(one.seen[0], NetworkError | asyncio.CancelledError), one.seen

    run(scenario)


def test_a_handler_that_cancels_its_stream_is_a_network_error_for_the_caller(number: int) -> None:
    async def scenario() -> None:
        async with line(number) as one:

            async def handler(stream: Stream) -> None:
                await stream.send(b"x")
                stream.cancel()
                await asyncio.Event().wait()

            one.serve(handler)
            async with one.open(TALK, timeout_s=10) as stream:
                assert await stream.receive() == b"x"
                with pytest.raises(NetworkError, match="broke off"):
                    await stream.receive()

    run(scenario)


def test_a_sender_notices_a_handler_that_returns_early(number: int) -> None:
    async def scenario() -> None:
        async with line(number) as one:

            async def handler(stream: Stream) -> None:
                await stream.receive()

            one.serve(handler)
            async with one.open(TALK, timeout_s=10) as stream:
                with pytest.raises(NetworkError, match="without taking all that was sent"):
                    await push(stream)

    run(scenario)


def test_a_server_that_dies_ends_the_stream(number: int) -> None:
    async def scenario() -> None:
        async with line(number) as one:

            async def handler(stream: Stream) -> None:
                await stream.send(b"x")
                await asyncio.Event().wait()

            one.serve(handler)
            async with one.open(TALK, timeout_s=10) as stream:
                assert await stream.receive() == b"x"
                await one.server.stop(0)
                with pytest.raises(NetworkError):
                    await stream.receive()

    run(scenario)


def test_a_stream_fails_at_its_deadline_although_a_message_arrived(number: int) -> None:
    async def scenario() -> None:
        async with line(number) as one:
            one.serve(echo)
            async with one.open(TALK, timeout_s=0.3) as stream:
                await stream.send(b"x")
                assert await stream.receive() == b"x"
                with pytest.raises(DeadlineExceeded, match=r"within 0\.3 s"):
                    await stream.receive()

    run(scenario)


def test_a_sender_waits_for_a_slow_reader(number: int) -> None:
    async def scenario() -> None:
        async with line(number) as one:
            go = asyncio.Event()
            count = 64

            async def slow(stream: Stream) -> None:
                await go.wait()
                total = 0
                while (message := await stream.receive()) is not None:
                    total += len(message)
                await stream.send(str(total).encode())

            one.serve(slow)
            sent = 0
            async with one.open(TALK, timeout_s=20) as stream:

                async def push() -> None:
                    nonlocal sent
                    for _ in range(count):
                        await stream.send(bytes(1 << 20))
                        sent += 1
                    await stream.finish()

                async with asyncio.TaskGroup() as group:
                    group.create_task(push())
                    before = -1
                    while before != sent:  # until no more bytes move
                        before = sent
                        await asyncio.sleep(0.2)
                    assert sent < count // 2, "flow control holds the sender back"
                    go.set()
                assert await stream.receive() == str(count << 20).encode()

    run(scenario)


def test_each_number_has_its_own_grpc_connection_to_a_peer_without_a_bulk_port() -> None:
    async def scenario() -> None:
        async with line(0, calls=CallLimits(bulk_per_peer_max=0)) as one:
            one.serve(echo)
            payload = os.urandom(1 << 20)

            async def talk(connection: int) -> None:
                async with one.channels.open_stream(
                    one.contact, TALK, timeout_s=20, connection=connection
                ) as stream:
                    for _ in range(4):
                        await stream.send(payload)
                        assert await stream.receive() == payload
                    await stream.finish()
                    assert await stream.receive() is None

            async with asyncio.TaskGroup() as group:
                for connection in (0, 0, 1, 2, 3):
                    group.create_task(talk(connection))
            found = [one.channels.connection_to(one.contact.peer_id, number) for number in range(5)]
            assert [connection is not None for connection in found] == [True] * 4 + [False]
            assert len({id(connection.channel) for connection in found if connection is not None}) == 4
            import psutil

            port = one.contact.addresses[0].port
            mine = [
                c
                for c in psutil.Process().net_connections("tcp")
                if c.raddr and c.raddr.port == port and c.status == "ESTABLISHED"
            ]
            assert len(mine) == 4, "each number has its own TCP connection"

    run(scenario)


def test_idle_stream_lives_while_its_caller_pings_no_more_often_than_the_server_allows() -> None:
    """The times are a twentieth of the real ones: a ping every second, the shortest time that gRPC allows."""

    async def scenario() -> None:
        identity, caller, handlers = Identity.generate(), Identity.generate(), Handlers()
        handlers.stream(TALK, echo)
        server = Server(limits=CallLimits(ping_interval_s_min=0.5))
        port = await server.start(identity, handlers, "127.0.0.1", 0)
        connection = await dial(
            Contact(identity.peer_id, (Address("127.0.0.1", port),)),
            client_certificate(caller),
            timeout_s=10,
            options=(("grpc.keepalive_time_ms", 1_000),),
        )
        try:
            call = connection.channel.stream_stream(TALK.name)()
            await call.write(b"before")
            assert await call.read() == b"before"
            await asyncio.sleep(8)  # without the option, the third early ping ends the connection
            assert not call.done(), f"{await call.code()}: {await call.details()}"
            await call.write(b"after")
            assert await call.read() == b"after"
            call.cancel()
        finally:
            await connection.channel.close()
            await server.stop(0)

    run(scenario)


@pytest.mark.parametrize("idle_s", [0.2, pytest.param(600.0, marks=pytest.mark.slow)])
def test_idle_stream_lives_beside_the_closing_of_unused_connections(idle_s: float) -> None:
    """With the settings of a node; the pool of connections closes those that are not used for two minutes."""

    async def scenario() -> None:
        async with line(0, ConnectionLimits(idle_s=min(IDLE_S, idle_s / 2))) as one:
            one.serve(echo)
            async with one.open(TALK, timeout_s=idle_s + 20.0) as stream:
                await stream.send(b"before")
                assert await stream.receive() == b"before"
                end_s = asyncio.get_running_loop().time() + idle_s
                while asyncio.get_running_loop().time() < end_s:
                    await asyncio.sleep(min(10.0, idle_s / 4))
                    await one.channels.close_idle()
                    assert one.channels.connection_to(one.contact.peer_id) is not None
                await stream.send(b"after")
                assert await stream.receive() == b"after"
                await stream.finish()

    run_on_loop(scenario(), idle_s + 30.0)


def test_a_refusal_while_the_first_message_is_on_its_way_ends_the_call(
    number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression test, found by `make fuzz`: the server's library cannot send a status at that moment."""
    tasks: list[asyncio.Task[None]] = []

    async def refuse(stream: Stream) -> None:
        tasks.append(asyncio.get_running_loop().create_task(stream.send(bytes(1 << 20))))
        await asyncio.sleep(0)
        raise PeerError("enough")

    async def scenario() -> None:
        async with line(number) as one:
            one.serve(refuse)
            async with one.open(TALK, timeout_s=20.0) as stream:
                with pytest.raises(PeerError, match="enough"):
                    await read_all(stream)
            await asyncio.gather(*tasks, return_exceptions=True)

    run(scenario)
    assert "ExecuteBatchError" not in caplog.text
