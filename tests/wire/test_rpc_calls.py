"""Tests of unary calls on real sockets: the error for each kind of failure, and that none of them harms the
next call.
"""

from __future__ import annotations

import asyncio
import logging

import pytest

from swarm.core.errors import DeadlineExceeded, NetworkError, PeerError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import PeerId
from swarm.net.rpc import Handlers, Method
from swarm.net.server import CallLimits, Server
from swarm.wire import peer_pb2
from tests.wire.call_pair import ECHO, echo, pair, run


def test_handlers_come_and_go_while_the_server_serves() -> None:
    async def scenario() -> None:
        async with pair() as two:
            with pytest.raises(PeerError, match=f"{two.contact.peer_id} does not serve /swarm.Test/Echo"):
                await two.echo("x")
            two.handlers.unary(ECHO, echo)
            assert await two.echo("x") == "x"
            with pytest.raises(UsageError, match="has a handler already"):
                two.handlers.unary(ECHO, echo)
            two.handlers.remove(ECHO.name)
            with pytest.raises(PeerError, match="does not serve"):
                await two.echo("x")

    run(scenario)


def test_a_refusal_reaches_the_caller_with_its_reason() -> None:
    async def scenario() -> None:
        async with pair() as two:

            async def refuse(peer_id: PeerId, request: peer_pb2.Hello) -> peer_pb2.Hello:
                raise (UsageError if request.agent == "usage" else PeerError)("the schema differs: é")

            two.handlers.unary(ECHO, refuse)
            for kind in ("usage", "peer"):
                with pytest.raises(
                    PeerError, match=f"{two.contact.peer_id} refused {ECHO.name}: the schema differs: é"
                ):
                    await two.echo(kind)

    run(scenario)


def test_an_exception_in_a_handler_is_logged_and_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with pair() as two:

            async def broken(peer_id: PeerId, request: peer_pb2.Hello) -> peer_pb2.Hello:
                raise KeyError("secret")

            two.handlers.unary(ECHO, broken)
            with pytest.raises(PeerError, match="internal error") as caught:
                await two.echo("x")
            assert "secret" not in str(caught.value)
            two.handlers.remove(ECHO.name)
            two.handlers.unary(ECHO, echo)
            assert await two.echo("still there") == "still there"

    with caplog.at_level(logging.ERROR):
        run(scenario)
    assert "secret" in caplog.text


def test_a_network_failure_inside_a_handler_is_a_network_error() -> None:
    async def scenario() -> None:
        async with pair() as two:

            async def relay(peer_id: PeerId, request: peer_pb2.Hello) -> peer_pb2.Hello:
                raise NetworkError("cannot reach the third")

            two.handlers.unary(ECHO, relay)
            with pytest.raises(NetworkError, match="cannot reach the third"):
                await two.echo("x")

    run(scenario)


def test_size_limits_hold_at_both_ends() -> None:
    async def scenario() -> None:
        loose = Method(name=ECHO.name, request=peer_pb2.Hello, reply=peer_pb2.Hello)
        async with pair() as two:
            two.handlers.unary(ECHO, echo)
            with pytest.raises(UsageError, match="at most 1000 bytes"):
                await two.echo("x" * 1001)
            with pytest.raises(PeerError, match="at most 1000 bytes; this one has"):
                await two.echo("x" * 1001, loose)
            two.handlers.remove(ECHO.name)

            async def long_answer(peer_id: PeerId, request: peer_pb2.Hello) -> peer_pb2.Hello:
                return peer_pb2.Hello(agent="y" * 3000)

            two.handlers.unary(loose, long_answer)
            with pytest.raises(PeerError, match=r"answered .* with .* bytes; at most 2000"):
                await two.echo("x")
            two.handlers.remove(ECHO.name)
            two.handlers.unary(ECHO, long_answer)
            with pytest.raises(PeerError, match="internal error"):
                await two.echo("x", loose)

    run(scenario)


def test_a_message_beyond_the_transports_own_limit_ends_only_its_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with pair() as two:
            two.handlers.unary(ECHO, echo)
            assert await two.echo("x") == "x"
            connection = two.channels.connection_to(two.contact.peer_id)
            assert connection is not None
            import grpc

            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await connection.channel.unary_unary(ECHO.name)(bytes(17 << 20), timeout=5)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await two.echo("x") == "x"

    run(scenario)


def test_a_malformed_message_is_refused_naming_its_sender() -> None:
    class Garbage:
        """A message that serializes to bytes that are no protobuf message."""

        def SerializeToString(self) -> bytes:
            return b"\xff\xff\xff"

    async def scenario() -> None:
        async with pair() as two:
            two.handlers.unary(ECHO, echo)
            with pytest.raises(PeerError, match=r"is not a swarm\.wire\.Hello"):
                await two.channels.call(two.contact, ECHO, Garbage(), timeout_s=5)  # type: ignore[type-var]
            two.handlers.remove(ECHO.name)

            async def garbage(peer_id: PeerId, request: peer_pb2.Hello) -> peer_pb2.Hello:
                return Garbage()  # type: ignore[return-value]

            two.handlers.unary(ECHO, garbage)
            with pytest.raises(PeerError, match=r"something that is not a swarm\.wire\.Hello"):
                await two.echo("x")

    run(scenario)


def test_a_handler_is_cancelled_when_its_caller_disconnects() -> None:
    async def scenario() -> None:
        async with pair() as two:
            entered, cancelled = asyncio.Event(), asyncio.Event()

            async def slow(peer_id: PeerId, request: peer_pb2.Hello) -> peer_pb2.Hello:
                entered.set()
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    cancelled.set()
                    raise
                return request

            two.handlers.unary(ECHO, slow)
            async with asyncio.TaskGroup() as group:
                call = group.create_task(two.echo("x"))
                await entered.wait()
                call.cancel()
            await cancelled.wait()
            entered.clear()
            cancelled.clear()
            with pytest.raises(
                DeadlineExceeded, match=f"{two.contact.peer_id} at .* did not answer {ECHO.name} within 0.2 s"
            ):
                await two.echo("x", timeout_s=0.2)
            await cancelled.wait()

    run(scenario)


def test_open_calls_per_caller_are_limited() -> None:
    async def scenario() -> None:
        async with pair(Server(limits=CallLimits(calls_per_peer_max=3))) as two:
            release = asyncio.Event()

            async def slow(peer_id: PeerId, request: peer_pb2.Hello) -> peer_pb2.Hello:
                await release.wait()
                return request

            two.handlers.unary(ECHO, slow)
            outcomes: list[str] = []

            async def one() -> None:
                try:
                    outcomes.append(await two.echo("x"))
                except PeerError as error:
                    outcomes.append(str(error))
                    release.set()

            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(one())
            assert sorted(outcome == "x" for outcome in outcomes) == [False, True, True, True]
            assert any("you have 3 calls open here already" in outcome for outcome in outcomes)
            assert await two.echo("and then room again") == "and then room again"

    run(scenario)


def test_a_port_that_is_taken_is_an_error() -> None:
    async def scenario() -> None:
        async with pair() as two:
            with pytest.raises(
                UsageError, match=r"127\.0\.0\.1:\d+: another program has this port\. Port 0 picks a free one"
            ):
                await Server().start(
                    Identity.generate(), Handlers(), "127.0.0.1", two.contact.addresses[0].port
                )
        with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1"):
            await Server().start(Identity.generate(), Handlers(), "192.0.2.1", 0)

    run(scenario)
