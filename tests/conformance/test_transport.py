"""Tests of what services may rely on, run on both transports: gRPC with mutual TLS over loopback, and the
simulated network in virtual time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

from swarm.core.errors import DeadlineExceeded, NetworkError, PeerError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact, PeerId
from swarm.net.channels import Channels
from swarm.net.rpc import Handlers, Method, Stream, StreamMethod
from swarm.net.server import Server
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.virtual_loop import run_virtual
from swarm.wire.peer_pb2 import Hello

ECHO = Method(
    name="/swarm.Test/Echo", request=Hello, reply=Hello, request_bytes_max=1000, reply_bytes_max=2000
)
TALK = StreamMethod(name="/swarm.Test/Talk", message_bytes_max=10_000)


class Calling(Protocol):
    """The interface of both callers."""

    async def call(
        self, contact: Contact, method: Method[Any, Any], request: Any, *, timeout_s: float
    ) -> Any: ...

    def open_stream(
        self, contact: Contact, method: StreamMethod, *, timeout_s: float | None, connection: int = 0
    ) -> AbstractAsyncContextManager[Stream]: ...


@dataclass
class Transport:
    """A peer that calls, and a peer that answers."""

    caller: Calling
    own: PeerId
    handlers: Handlers
    contact: Contact
    stop: Callable[[], Awaitable[None]]  # the answering peer dies


@asynccontextmanager
async def real() -> AsyncIterator[Transport]:
    identity, own, handlers, server = Identity.generate(), Identity.generate(), Handlers(), Server()
    port = await server.start(identity, handlers, "127.0.0.1", 0)
    channels = Channels(own)
    try:
        yield Transport(
            channels,
            own.peer_id,
            handlers,
            Contact(identity.peer_id, (Address("127.0.0.1", port),)),
            lambda: server.stop(0.0),
        )
    finally:
        await channels.close()
        await server.stop(0.0)


@asynccontextmanager
async def simulated() -> AsyncIterator[Transport]:
    network = SimulatedNetwork(seed=1, config=LinkConfig())
    one, two = network.peer(), network.peer()
    try:
        yield Transport(one.caller, one.peer_id, two.handlers, two.contact, lambda: network.crash(two))
    finally:
        await network.close()


Scenario = Callable[[Transport], Awaitable[None]]
Run = Callable[[Scenario], None]


@pytest.fixture(params=["simulated", "gRPC"])
def run(request: pytest.FixtureRequest) -> Run:
    def perform(scenario: Scenario) -> None:
        async def main() -> None:
            async with simulated() if request.param == "simulated" else real() as transport:
                await asyncio.wait_for(scenario(transport), 30)

        if request.param == "simulated":
            run_virtual(main())
        else:
            asyncio.run(main())

    return perform


async def echo(caller: PeerId, request: Hello) -> Hello:
    return Hello(agent=f"{caller} {request.agent}")


async def ask(two: Transport, timeout_s: float) -> bytes | None:
    async with two.caller.open_stream(two.contact, TALK, timeout_s=timeout_s) as stream:
        await stream.send(b"x")
        return await stream.receive()


async def talk_echo(stream: Stream) -> None:
    while (message := await stream.receive()) is not None:
        await stream.send(message)


def test_a_call_is_answered_and_its_caller_is_known(run: Run) -> None:
    async def scenario(two: Transport) -> None:
        two.handlers.unary(ECHO, echo)
        reply = await two.caller.call(two.contact, ECHO, Hello(agent="é"), timeout_s=5)
        assert reply.agent == f"{two.own} é"
        both = [
            two.caller.call(two.contact, ECHO, Hello(agent=str(number)), timeout_s=5) for number in range(20)
        ]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in both]
        assert [task.result().agent for task in tasks] == [f"{two.own} {number}" for number in range(20)]

    run(scenario)


@pytest.mark.parametrize("kind", [PeerError, UsageError])
def test_a_refusal_reaches_its_caller_word_by_word(run: Run, kind: type[Exception]) -> None:
    async def refuse(caller: PeerId, request: Hello) -> Hello:
        raise kind("the schema differs: é")

    async def scenario(two: Transport) -> None:
        two.handlers.unary(ECHO, refuse)
        with pytest.raises(
            PeerError, match=f"{two.contact.peer_id} refused {ECHO.name}: the schema differs: é"
        ):
            await two.caller.call(two.contact, ECHO, Hello(), timeout_s=5)

    run(scenario)


def test_an_exception_of_a_handler_is_not_sent_to_the_caller(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(caller: PeerId, request: Hello) -> Hello:
        if request.agent == "too much":
            return Hello(agent="x" * 3000)
        raise KeyError("secret")

    async def scenario(two: Transport) -> None:
        two.handlers.unary(ECHO, broken)
        for agent in ("", "too much"):
            with pytest.raises(PeerError, match="internal error") as caught:
                await two.caller.call(two.contact, ECHO, Hello(agent=agent), timeout_s=5)
            assert "secret" not in str(caught.value)

    with caplog.at_level(logging.CRITICAL):
        run(scenario)


def test_a_direct_handler_behaves_like_any_other(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    raised = {
        "refuse": PeerError("the schema differs"),
        "unreachable": NetworkError("the third is away"),
        "broken": KeyError("secret"),
    }
    errors = {"refuse": (PeerError, "the schema differs"), "unreachable": (NetworkError, "the third is away")}

    def direct(caller: PeerId, request: Hello) -> Hello:
        if request.agent in raised:
            raise raised[request.agent]
        return Hello(agent="x" * 3000 if request.agent == "too much" else f"{caller} {request.agent}")

    async def scenario(two: Transport) -> None:
        two.handlers.direct(ECHO, direct)
        calls = [
            two.caller.call(two.contact, ECHO, Hello(agent=str(number)), timeout_s=5) for number in range(40)
        ]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
        assert [task.result().agent for task in tasks] == [f"{two.own} {number}" for number in range(40)]
        for agent in (*raised, "too much"):
            kind, text = errors.get(agent, (PeerError, "internal error"))
            with pytest.raises(kind, match=text):
                await two.caller.call(two.contact, ECHO, Hello(agent=agent), timeout_s=5)
        assert (
            await two.caller.call(two.contact, ECHO, Hello(agent="on"), timeout_s=5)
        ).agent == f"{two.own} on"

    with caplog.at_level(logging.CRITICAL):
        run(scenario)


def test_a_network_failure_of_a_handler_is_a_network_error(run: Run) -> None:
    async def relay(caller: PeerId, request: Hello) -> Hello:
        raise NetworkError("cannot reach the third")

    async def scenario(two: Transport) -> None:
        two.handlers.unary(ECHO, relay)
        with pytest.raises(NetworkError, match="cannot reach the third"):
            await two.caller.call(two.contact, ECHO, Hello(), timeout_s=5)

    run(scenario)


def test_a_too_large_request_is_a_usage_error(run: Run) -> None:
    async def scenario(two: Transport) -> None:
        two.handlers.unary(ECHO, echo)
        with pytest.raises(UsageError, match="at most 1000 bytes; this one has"):
            await two.caller.call(two.contact, ECHO, Hello(agent="x" * 1000), timeout_s=5)

    run(scenario)


def test_an_unknown_method_is_refused(run: Run) -> None:
    async def scenario(two: Transport) -> None:
        with pytest.raises(PeerError, match=f"{two.contact.peer_id} does not serve {ECHO.name}"):
            await two.caller.call(two.contact, ECHO, Hello(), timeout_s=5)
        two.handlers.unary(ECHO, echo)
        await two.caller.call(two.contact, ECHO, Hello(), timeout_s=5)
        two.handlers.remove(ECHO.name)
        with pytest.raises(PeerError, match="does not serve"):
            await two.caller.call(two.contact, ECHO, Hello(), timeout_s=5)

    run(scenario)


def test_a_silent_handler_is_cancelled_at_the_deadline(run: Run) -> None:
    async def scenario(two: Transport) -> None:
        ended = asyncio.Event()

        async def hang(caller: PeerId, request: Hello) -> Hello:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return request

        two.handlers.unary(ECHO, hang)
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        with pytest.raises(DeadlineExceeded, match=f"did not answer {ECHO.name} within 0.2 s"):
            await two.caller.call(two.contact, ECHO, Hello(), timeout_s=0.2)
        assert 0.19 < loop.time() - started_s < 5
        await ended.wait()

    run(scenario)


def test_cancelling_a_call_cancels_its_handler(run: Run) -> None:
    async def scenario(two: Transport) -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def hang(caller: PeerId, request: Hello) -> Hello:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return request

        two.handlers.unary(ECHO, hang)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(two.caller.call(two.contact, ECHO, Hello(), timeout_s=20))
            await begun.wait()
            task.cancel()
        assert task.cancelled()
        await ended.wait()

    run(scenario)


def test_dead_and_absent_peers_cannot_be_reached(run: Run) -> None:
    async def scenario(two: Transport) -> None:
        two.handlers.unary(ECHO, echo)
        absent = Contact(Identity.generate().peer_id, two.contact.addresses)
        with pytest.raises(NetworkError):
            # Another peer listens there, as its certificate shows.
            await two.caller.call(absent, ECHO, Hello(), timeout_s=2)
        with pytest.raises(NetworkError):
            await two.caller.call(Contact(two.contact.peer_id), ECHO, Hello(), timeout_s=2)
        with pytest.raises(UsageError, match="does not call itself"):
            await two.caller.call(Contact(two.own, two.contact.addresses), ECHO, Hello(), timeout_s=2)
        await two.stop()
        with pytest.raises(NetworkError):
            await two.caller.call(two.contact, ECHO, Hello(), timeout_s=2)

    run(scenario)


def test_a_peer_that_dies_ends_its_calls(run: Run) -> None:
    async def scenario(two: Transport) -> None:
        begun = asyncio.Event()

        async def hang(caller: PeerId, request: Hello) -> Hello:
            begun.set()
            await asyncio.Event().wait()
            return request

        two.handlers.unary(ECHO, hang)
        async with asyncio.TaskGroup() as group:

            async def call() -> None:
                with pytest.raises(NetworkError):
                    await two.caller.call(two.contact, ECHO, Hello(), timeout_s=20)

            group.create_task(call())
            await begun.wait()
            await two.stop()

    run(scenario)


def test_a_stream_carries_messages_in_both_directions_and_ends(run: Run) -> None:
    async def scenario(two: Transport) -> None:
        async def handler(stream: Stream) -> None:
            assert stream.peer_id == two.own
            await talk_echo(stream)
            await stream.send(b"last")

        two.handlers.stream(TALK, handler)
        async with two.caller.open_stream(two.contact, TALK, timeout_s=10) as stream:
            assert stream.peer_id == two.contact.peer_id
            for number in range(1, 12):
                await stream.send(bytes([number]))
            await stream.finish()
            await stream.finish()
            assert [await stream.receive() for _ in range(1, 12)] == [
                bytes([number]) for number in range(1, 12)
            ]
            assert await stream.receive() == b"last"
            assert await stream.receive() is None
            assert await stream.receive() is None
            with pytest.raises(UsageError, match="finished"):
                await stream.send(b"late")

    run(scenario)


def test_a_stream_refuses_empty_and_too_large_messages(run: Run) -> None:
    async def scenario(two: Transport) -> None:
        two.handlers.stream(TALK, talk_echo)
        async with two.caller.open_stream(two.contact, TALK, timeout_s=10) as stream:
            with pytest.raises(UsageError, match="empty"):
                await stream.send(b"")
            with pytest.raises(UsageError, match="at most 10000 bytes"):
                await stream.send(bytes(10_001))
            await stream.send(bytes(10_000))
            assert await stream.receive() == bytes(10_000)

    run(scenario)


def test_a_refused_stream_reports_the_reason(run: Run) -> None:
    async def refuse(stream: Stream) -> None:
        await stream.receive()
        raise PeerError("wrong group")

    async def scenario(two: Transport) -> None:
        two.handlers.stream(TALK, refuse)
        async with two.caller.open_stream(two.contact, TALK, timeout_s=10) as stream:
            await stream.send(b"x")
            with pytest.raises(PeerError, match="wrong group"):
                await stream.receive()
        two.handlers.remove(TALK.name)
        with pytest.raises(PeerError, match=f"does not serve {TALK.name}"):
            await ask(two, 10)

    run(scenario)


def test_a_stream_that_its_caller_leaves_early_is_broken_for_its_handler(run: Run) -> None:
    async def scenario(two: Transport) -> None:
        seen: list[object] = []
        arrived, ended = asyncio.Event(), asyncio.Event()

        async def handler(stream: Stream) -> None:
            try:
                while (message := await stream.receive()) is not None:
                    seen.append(message)
                    arrived.set()
                seen.append("the end")
            finally:
                ended.set()

        two.handlers.stream(TALK, handler)
        async with two.caller.open_stream(two.contact, TALK, timeout_s=10) as stream:
            await stream.send(b"x")
            await arrived.wait()
        await ended.wait()
        assert seen == [b"x"], "a stream that its caller left is not one that it finished"

    run(scenario)


def test_a_stream_breaks_when_its_peer_dies(run: Run) -> None:
    async def scenario(two: Transport) -> None:
        two.handlers.stream(TALK, talk_echo)
        async with two.caller.open_stream(two.contact, TALK, timeout_s=20) as stream:
            await stream.send(b"x")
            assert await stream.receive() == b"x"
            await two.stop()
            with pytest.raises(NetworkError):
                await stream.receive()

    run(scenario)


def test_a_stream_ends_at_its_deadline(run: Run) -> None:
    async def silent(stream: Stream) -> None:
        await asyncio.Event().wait()

    async def scenario(two: Transport) -> None:
        two.handlers.stream(TALK, silent)
        with pytest.raises(DeadlineExceeded):
            await ask(two, 0.3)

    run(scenario)
