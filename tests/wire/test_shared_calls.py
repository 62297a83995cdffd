"""Small calls on one stream share messages, and none of them can harm another, the callee, or its count of
open calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from swarm.core.errors import NetworkError, PeerError
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact, PeerId
from swarm.core.standing import PeerStanding
from swarm.net import calls, server, shared_calls
from swarm.net.callers import CallsOf, OpenCalls, RemoteCaller
from swarm.net.calls import CALLS_NAME
from swarm.net.channels import Channels
from swarm.net.room import AnswerRoom, PeerRoom
from swarm.net.rpc import Handlers, Later, Method
from swarm.net.server import CallLimits, Server
from swarm.wire import peer_pb2
from swarm.wire.calls_pb2 import AnswerBatch, Call, CallBatch
from tests.wire.event_loop import run_on_loop

ECHO = Method(name="/swarm.Test/Echo", request=peer_pb2.Hello, reply=peer_pb2.Hello)
DIRECT = Method(name="/swarm.Test/Direct", request=peer_pb2.Hello, reply=peer_pb2.Hello)
LATER = Method(name="/swarm.Test/Later", request=peer_pb2.Hello, reply=peer_pb2.Hello)
SLOW = Method(name="/swarm.Test/Slow", request=peer_pb2.Hello, reply=peer_pb2.Hello)


class Pair:
    """A server that echoes, with or without delay, and a caller."""

    def __init__(self, server: Server, contact: Contact, channels: Channels, handlers: Handlers) -> None:
        self.server, self.contact, self.channels, self.handlers = server, contact, channels, handlers
        self.entered, self.release, self.cancelled = asyncio.Event(), asyncio.Event(), 0

    async def call(
        self, method: Method[peer_pb2.Hello, peer_pb2.Hello], agent: str, timeout_s: float = 5.0
    ) -> str:
        return (
            await self.channels.call(self.contact, method, peer_pb2.Hello(agent=agent), timeout_s=timeout_s)
        ).agent

    async def echo(self, peer_id: PeerId, request: peer_pb2.Hello) -> peer_pb2.Hello:
        return request

    async def slow(self, peer_id: PeerId, request: peer_pb2.Hello) -> peer_pb2.Hello:
        self.entered.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return request

    async def raw_stream(self) -> Any:
        """Open a stream of shared calls for messages that the test writes itself."""
        await self.call(ECHO, "connect")
        connection = self.channels.connection_to(self.contact.peer_id)
        assert connection is not None
        return connection.channel.stream_stream(CALLS_NAME)()

    @property
    def open_calls(self) -> int:
        assert self.server.calls.total == sum(self.server.calls.by_peer.values())
        return self.server.calls.total


@asynccontextmanager
async def pair(server: Server | None = None) -> AsyncIterator[Pair]:
    identity, handlers, server = Identity.generate(), Handlers(), server or Server()
    port = await server.start(identity, handlers, "127.0.0.1", 0)
    two = Pair(
        server,
        Contact(identity.peer_id, (Address("127.0.0.1", port),)),
        Channels(Identity.generate()),
        handlers,
    )
    handlers.unary(ECHO, two.echo)
    handlers.unary(SLOW, two.slow)
    try:
        yield two
    finally:
        await two.channels.close()
        await server.stop(0)


async def to_its_end(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    run_on_loop(scenario(), 30)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the server's counts have no event
        await asyncio.sleep(0.005)


def test_simultaneous_calls_share_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = calls.CallStream.next_batch

    def next_batch(stream: calls.CallStream) -> CallBatch:
        batch = original(stream)
        sizes.append(len(batch.calls))
        return batch

    monkeypatch.setattr(calls.CallStream, "next_batch", next_batch)
    monkeypatch.setattr(shared_calls, "BULK_CALLS_MIN", 1000)  # else a call asks for a token of the bulk path

    async def scenario() -> None:
        async with pair() as two:
            await two.call(ECHO, "connect")
            sizes.clear()
            async with asyncio.TaskGroup() as group:
                answers = [group.create_task(two.call(ECHO, str(number))) for number in range(250)]
            assert [answer.result() for answer in answers] == [str(number) for number in range(250)]
            assert sum(sizes) == 250
            assert len(sizes) < 25
            assert max(sizes) <= calls.BATCH_CALLS_MAX
            async with asyncio.timeout(10):
                # a call is open until the write of its answer has ended, which may be after the answer came
                while two.open_calls:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)

    run(scenario)


def test_a_slow_call_does_not_delay_others() -> None:
    async def scenario() -> None:
        async with pair() as two, asyncio.TaskGroup() as group:
            slow = group.create_task(two.call(SLOW, "slow"))
            await two.entered.wait()
            assert await two.call(ECHO, "quick") == "quick"
            # the quick call stays open until the write of its answer has ended
            await until(lambda: two.open_calls == 1)
            assert not slow.done()
            two.release.set()
            assert await slow == "slow"
            await until(lambda: two.open_calls == 0)

    run(scenario)


def test_a_large_request_is_sent_as_a_call_of_its_own() -> None:
    async def scenario() -> None:
        async with pair() as two:
            text = "x" * (calls.SHARED_REQUEST_BYTES_MAX + 1)
            assert await two.call(ECHO, text) == text

    run(scenario)


def test_a_handler_that_never_waits_is_counted_in_and_out_and_kept_to_the_limits() -> None:
    async def scenario() -> None:
        async with pair(Server(limits=CallLimits(calls_per_peer_max=20))) as two:
            seen: list[int] = []

            def direct(peer_id: PeerId, request: peer_pb2.Hello) -> peer_pb2.Hello:
                seen.append(two.open_calls)
                return request

            two.handlers.direct(DIRECT, direct)
            await two.call(DIRECT, "connect")
            calls = [two.call(DIRECT, str(number)) for number in range(30)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert answers[:20] == [str(number) for number in range(20)]
            assert all("you have 20 calls open" in str(answer) for answer in answers[20:]), (
                "open until they are answered"
            )
            assert seen == [1, *range(1, 21)]
            await until(lambda: two.open_calls == 0)

    run_on_loop(scenario())


def test_a_call_that_is_cancelled_before_it_begins_is_counted_out() -> None:
    async def scenario() -> None:
        async with pair() as two:
            stream = await two.raw_stream()
            await stream.write(
                CallBatch(calls=[Call(number=7, method=SLOW.name)], cancelled=[7, 8]).SerializeToString()
            )
            await stream.write(CallBatch(calls=[Call(number=9, method=ECHO.name)]).SerializeToString())
            answers = AnswerBatch.FromString(await stream.read()).answers
            assert [answer.number for answer in answers] == [9]
            await until(lambda: two.open_calls == 0)
            stream.cancel()

    run(scenario)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (b"\xff\xff", "is not a swarm.wire.CallBatch"),
        (
            CallBatch(calls=[Call(number=1, method=SLOW.name)] * 2).SerializeToString(),
            "call 1 is open already",
        ),
        (
            CallBatch(calls=[Call(number=number) for number in range(257)]).SerializeToString(),
            "at most 256 calls share a message",
        ),
        (CallBatch(calls=[Call(method="x" * 201)]).SerializeToString(), "at most 200 characters"),
        (
            CallBatch(calls=[Call(request=bytes(calls.SHARED_REQUEST_BYTES_MAX + 1))]).SerializeToString(),
            "request has at most",
        ),
    ],
)
def test_a_stream_that_breaks_the_protocol_is_refused_and_nothing_stays_open(
    message: bytes, text: str
) -> None:
    async def scenario() -> None:
        async with pair() as two:
            stream = await two.raw_stream()
            await stream.write(message)
            with pytest.raises(grpc.aio.AioRpcError, match=text) as caught:
                await to_its_end(stream)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            await until(lambda: two.open_calls == 0)
            assert await two.call(ECHO, "still there") == "still there"

    run(scenario)


def test_a_call_that_waits_without_a_task_is_answered_refused_or_withdrawn_and_counted_out() -> None:
    async def scenario() -> None:
        async with pair() as two:
            waiting: dict[str, asyncio.Future[str]] = {}
            withdrawn: list[str] = []

            def begin(
                peer_id: PeerId, request: peer_pb2.Hello
            ) -> peer_pb2.Hello | Later[peer_pb2.Hello] | None:
                name = request.agent
                if name in ("now", "task"):
                    return request if name == "now" else None
                waiting[name] = future = asyncio.get_running_loop().create_future()

                def reply() -> peer_pb2.Hello:
                    if future.result() == "refuse":
                        raise PeerError("not this one")
                    return peer_pb2.Hello(agent=future.result())

                return Later(future, reply, lambda: withdrawn.append(name))

            two.handlers.deferred(LATER, begin, two.echo)
            assert await two.call(LATER, "now") == "now"
            assert await two.call(LATER, "task") == "task"
            names = ("good", "bad", "left")
            good, bad, left = (asyncio.create_task(two.call(LATER, name)) for name in names)
            await until(lambda: len(waiting) == 3)
            assert two.open_calls == 3
            waiting["good"].set_result("done")
            waiting["bad"].set_result("refuse")
            assert await good == "done"
            with pytest.raises(PeerError, match="not this one"):
                await bad
            left.cancel()
            await until(lambda: two.open_calls == 0)
            assert withdrawn == ["left"]

            stream = await two.raw_stream()
            requests = {name: peer_pb2.Hello(agent=name).SerializeToString() for name in ("a", "b")}
            await stream.write(
                CallBatch(
                    calls=[
                        Call(number=number, method=LATER.name, request=raw)
                        for number, raw in enumerate(requests.values())
                    ]
                ).SerializeToString()
            )
            await until(lambda: requests.keys() <= waiting.keys())
            stream.cancel()
            await until(lambda: two.open_calls == 0)
            assert withdrawn == ["left", "a", "b"]
            assert not two.server.room.size_bytes

    run(scenario)


def test_the_calls_of_a_vanished_caller_are_cancelled() -> None:
    async def scenario() -> None:
        async with pair() as two:
            stream = await two.raw_stream()
            await stream.write(
                CallBatch(
                    calls=[Call(number=number, method=SLOW.name) for number in range(5)]
                ).SerializeToString()
            )
            await until(lambda: two.open_calls == 5)
            stream.cancel()
            await until(lambda: two.open_calls == 0)
            assert two.cancelled == 5

    run(scenario)


def test_calls_are_sent_separately_when_no_stream_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(server, "STREAMS_PER_PEER_MAX", 0)
        async with pair() as two:
            async with asyncio.TaskGroup() as group:
                answers = [group.create_task(two.call(ECHO, str(number))) for number in range(20)]
            assert [answer.result() for answer in answers] == [str(number) for number in range(20)]
            shared = two.channels.shared_calls(two.contact.peer_id)
            assert shared is not None
            assert shared.is_refused

    run(scenario)


def test_a_server_that_stops_answers_what_is_open_and_refuses_the_rest() -> None:
    async def scenario() -> None:
        async with pair() as two, asyncio.TaskGroup() as group:
            slow = group.create_task(two.call(SLOW, "slow"))
            await two.entered.wait()
            stopping = group.create_task(two.server.stop(5.0))
            await until(lambda: two.server.is_stopping)
            with pytest.raises(NetworkError):
                await two.call(ECHO, "late")
            two.release.set()
            assert await slow == "slow"
            await stopping

    run(scenario)


def test_an_idle_server_stops_at_once() -> None:
    async def scenario() -> None:
        async with pair() as two:
            await two.call(ECHO, "x")
            async with asyncio.timeout(1.0):
                await two.server.stop(10.0)

    run(scenario)


class Unread:
    """A handler's view of a caller that sends and never reads: no write ever ends."""

    def __init__(self, batches: int) -> None:
        self.batches = [
            CallBatch(calls=[Call(number=100 * batch + call) for call in range(100)])
            for batch in range(batches)
        ]

    async def read(self) -> bytes:
        await asyncio.sleep(0)
        if not self.batches:
            await asyncio.Event().wait()
        return self.batches.pop(0).SerializeToString()

    async def write(self, message: bytes) -> None:
        await asyncio.Event().wait()


def test_a_call_counts_as_open_until_its_answer_is_sent_and_callers_that_do_not_read_are_paused() -> None:
    async def scenario() -> None:
        context, caller = Unread(batches=50), RemoteCaller(Identity.generate().peer_id, "")
        open_calls = OpenCalls(PeerStanding(), "calls", 100, 50)

        async def handle(name: str, request: bytes) -> calls.Outcome:
            return grpc.StatusCode.OK, "", b"x"

        served = calls.ServedCalls(
            context,  # type: ignore[arg-type]
            handle,
            lambda name, request: 0,
            CallsOf(open_calls, caller),
            PeerRoom(AnswerRoom(PeerStanding()), caller.peer_id),
        )
        async with asyncio.TaskGroup() as group:
            task = group.create_task(served.run())
            await until(lambda: served.unsent >= calls.UNSENT_MAX)
            await asyncio.sleep(0.02)
            assert open_calls.total == 50
            assert served.unsent < calls.UNSENT_MAX + 2 * calls.BATCH_CALLS_MAX
            assert len(context.batches) > 30
            task.cancel()
        assert open_calls.total == 0

    run(scenario)


def test_invalid_messages_from_the_callee_fail_the_calls_as_its_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with pair() as two:
            monkeypatch.setattr(AnswerBatch, "SerializeToString", lambda self: b"\xff\xff", raising=False)
            with pytest.raises(PeerError, match=r"not a swarm\.wire\.AnswerBatch"):
                await two.call(ECHO, "x")

    run(scenario)
