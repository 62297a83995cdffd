"""Tests of the bulk path over sockets: when it is used, when its connections are used again, and that its
bytes are counted and capped like all others. How its streams behave is tested with those of gRPC
(`test_rpc_streams`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from typing import Any

import pytest

from swarm.core.errors import DeadlineExceeded, NetworkError, NotInvited, UsageError
from swarm.core.ids import Address, Contact, PeerId
from swarm.net import bulk_calls
from swarm.net.bulk_calls import BULK
from swarm.net.bulk_server import PORTS_APART
from swarm.net.rpc import Stream, StreamMethod
from swarm.net.server import CallLimits
from swarm.net.throttle import WIRE_PER_BYTE, Bandwidth
from swarm.node import Node
from swarm.runtime.sockets import open_sockets
from swarm.wire import peer_pb2
from tests.wire.bulk_pair import BulkPair, bulk_pair, outcome, until
from tests.wire.event_loop import run_on_loop

PUSH = StreamMethod(name="/swarm.Test/Push")


def uses_grpc(pair: BulkPair) -> bool:
    """Return whether a stream has used a gRPC connection of its own."""
    return pair.channels.connection_to(pair.contact.peer_id, 1) is not None


async def unused(pair: BulkPair) -> None:
    """Wait until the server has noticed that its last bulk connection is closed."""
    await until(lambda: not pair.bulk.connections.total)


def test_one_connection_carries_one_stream_after_another() -> None:
    async def scenario() -> None:
        async with bulk_pair() as pair:
            asked = 0

            def count(reply: peer_pb2.BulkReply) -> None:
                nonlocal asked
                asked += 1

            pair.answer_with(count)
            for size in (1, 1000, 1 << 20, 17):
                message = os.urandom(size)
                assert await pair.talk(message, message) == [message, message]
            assert asked == 1
            assert pair.bulk.connections.total == 1
            assert not uses_grpc(pair)

    run_on_loop(scenario())


def test_streams_at_the_same_time_have_connections_of_their_own() -> None:
    async def scenario() -> None:
        async with bulk_pair() as pair:
            async with asyncio.TaskGroup() as tasks:
                talks = [tasks.create_task(pair.talk(b"%d" % nth, bytes(1 << 20))) for nth in range(4)]
            assert [talk.result()[0] for talk in talks] == [b"0", b"1", b"2", b"3"]
            assert pair.bulk.connections.total == 4
            await pair.talk(b"again")
            assert pair.bulk.connections.total == 4

    run_on_loop(scenario())


def test_stream_without_a_free_connection_uses_grpc() -> None:
    async def scenario() -> None:
        async with bulk_pair(limits=CallLimits(bulk_per_peer_max=1)) as pair:
            async with pair.open() as stream:
                await stream.send(b"bulk")
                assert await stream.receive() == b"bulk"
                assert await pair.talk(b"grpc") == [b"grpc"]
                assert uses_grpc(pair)
                await stream.finish()
                assert await stream.receive() is None
            assert pair.bulk.connections.total == 1

    run_on_loop(scenario())


def test_unused_connection_is_used_although_another_one_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    class Counted(bulk_calls.BulkCall):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            begun.append(self)

    monkeypatch.setattr(bulk_calls, "BulkCall", Counted)

    async def scenario() -> None:
        async with bulk_pair(limits=CallLimits(bulk_per_peer_max=1)) as pair:
            async with pair.open() as stream:
                assert await pair.talk(b"refused, so it uses grpc") == [b"refused, so it uses grpc"]
                await stream.finish()
                assert await stream.receive() is None
            assert len(begun) == 1
            assert await pair.talk(b"x") == [b"x"]
            assert len(begun) == 2

    run_on_loop(scenario())


def test_each_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC does not say which address of a name it has reached."""

    async def scenario() -> None:
        async with bulk_pair() as pair:
            [address] = pair.contact.addresses

            async def resolve(name: str, port: int, **options: Any) -> list[Any]:
                # uvloop also resolves the addresses that it connects to
                hosts = ("127.0.0.2", "127.0.0.3", "127.0.0.1") if name == "peer.example" else (name,)
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]

            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
            pair.contact = Contact(pair.contact.peer_id, (Address("peer.example", address.port),))
            assert await pair.talk(b"x") == [b"x"]
            assert pair.bulk.connections.total == 1
            assert not uses_grpc(pair)

    run_on_loop(scenario())


def test_caller_that_has_got_everything_may_leave_before_the_end() -> None:
    """As callers of experts do: the connection is used again."""

    async def scenario() -> None:
        async with bulk_pair() as pair:
            for _ in range(3):
                async with pair.open() as stream:
                    await stream.send(b"x")
                    await stream.finish()
                    assert await stream.receive() == b"x"
                await pair.ended.wait()
                await asyncio.sleep(0.02)
            assert pair.bulk.connections.total == 1
            assert pair.errors == []

    run_on_loop(scenario())


@pytest.mark.parametrize("finished", [True, False])
def test_caller_that_leaves_ends_its_handler(finished: bool) -> None:
    async def scenario() -> None:
        async with bulk_pair() as pair:
            error: list[BaseException] = []
            ended = asyncio.Event()

            async def wait(stream: Stream) -> None:
                try:
                    await stream.receive()
                    await asyncio.Event().wait()
                except BaseException as raised:
                    error.append(raised)
                    ended.set()
                    raise

            pair.handlers.stream(PUSH, wait)
            async with pair.open(method=PUSH) as stream:
                await stream.send(b"x")
                if finished:
                    await stream.finish()
            async with asyncio.timeout(2.0):
                await ended.wait()
            assert isinstance(error[0], asyncio.CancelledError)
            await unused(pair)

    run_on_loop(scenario())


def test_cancelled_send_and_receive_end_the_stream() -> None:
    async def scenario() -> None:
        async with bulk_pair() as pair:

            async def sleep(stream: Stream) -> None:
                await asyncio.Event().wait()

            pair.handlers.stream(PUSH, sleep)

            async def push(stream: Stream) -> None:
                while True:
                    await stream.send(bytes(1 << 20))

            async def read(stream: Stream) -> None:
                await stream.receive()

            for work in (push, read):
                async with pair.open(method=PUSH) as stream:
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(work(stream), 0.1)
                    with pytest.raises(NetworkError):
                        await stream.receive()
                await unused(pair)
            assert await pair.talk(b"x") == [b"x"]

    run_on_loop(scenario())


@pytest.mark.parametrize("case", ["an older peer", "a forwarded port", "a closed port", "a malformed answer"])
def test_stream_uses_grpc_where_there_is_no_bulk_path(case: str) -> None:
    async def scenario() -> None:
        async with bulk_pair() as pair:
            asked = 0

            def change(reply: peer_pb2.BulkReply) -> None:
                nonlocal asked
                asked += 1
                if case == "a forwarded port":
                    reply.grpc_port += 1
                elif case == "a closed port":
                    with socket.create_server(("127.0.0.1", 0)) as closed:
                        reply.port = closed.getsockname()[1]
                else:
                    reply.secret = reply.secret[:16]

            pair.answer_with(change)
            if case == "an older peer":
                pair.handlers.remove(BULK.name)
            for _ in range(3):
                assert await pair.talk(b"x", b"y") == [b"x", b"y"]
            assert uses_grpc(pair)
            assert asked <= 1, "it is not tried again soon"

    run_on_loop(scenario())


def test_peer_without_a_bulk_path_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_calls, "RETRY_S", 0.05)

    async def scenario() -> None:
        async with bulk_pair() as pair:
            pair.handlers.remove(BULK.name)
            assert await pair.talk(b"x") == [b"x"]
            pair.handlers.direct(BULK, pair.bulk.give)
            await asyncio.sleep(0.06)
            assert await pair.talk(b"x") == [b"x"]
            assert pair.bulk.connections.total == 1

    run_on_loop(scenario())


def test_peers_that_may_not_call_a_method_are_refused_with_the_same_error() -> None:
    async def scenario() -> None:
        async with bulk_pair() as pair:
            pair.server.refusal = lambda peer_id, method: "" if method == BULK.name else "you are not invited"
            error = await outcome(pair.talk(b"x"))
            assert isinstance(error, NotInvited)
            assert "you are not invited" in str(error)
            assert pair.received == []

    run_on_loop(scenario())


def test_streams_count_among_the_calls_of_a_caller() -> None:
    async def scenario() -> None:
        async with bulk_pair(limits=CallLimits(calls_per_peer_max=2)) as pair:
            async with pair.open() as one, pair.open() as two:
                for stream in (one, two):
                    await stream.send(b"x")
                    assert await stream.receive() == b"x"
                assert pair.server.calls.by_peer == {pair.caller.peer_id: 2}
            await pair.talk(b"x")
            await until(lambda: not pair.server.calls.by_peer)  # counted until its last frame is sent

    run_on_loop(scenario())


def test_bytes_are_counted_at_both_ends() -> None:
    async def scenario() -> None:
        async with bulk_pair() as pair:
            before = [throttle.passed for throttle in pair.throttles]
            await pair.talk(bytes(1 << 20), bytes(1000))
            passed = [
                (sent - first[0], received - first[1])
                for (sent, received), first in zip(
                    (throttle.passed for throttle in pair.throttles), before, strict=True
                )
            ]
            for sent, received in passed:  # with a few bytes of the call for the token
                assert 0 <= sent - (1 << 20) - 1000 < 200
                assert 0 <= received - (1 << 20) - 1000 < 200

    run_on_loop(scenario())


@pytest.mark.parametrize("way", ["up", "down"])
def test_caps_hold_for_bulk_bytes(way: str) -> None:
    bytes_per_s = 4e6
    size_bytes, pieces = 200_000, 10

    async def scenario() -> None:
        cap = Bandwidth(
            up_bytes_per_s=bytes_per_s if way == "up" else None,
            down_bytes_per_s=bytes_per_s if way == "down" else None,
        )
        async with bulk_pair(bandwidth=cap) as pair:

            async def give(stream: Stream) -> None:
                await stream.receive()
                for _ in range(pieces):
                    await stream.send(bytes(size_bytes))

            pair.handlers.stream(PUSH, give)
            began_s = time.monotonic()
            if way == "up":
                await pair.talk(*[bytes(size_bytes)] * pieces)
            else:
                async with pair.open(method=PUSH) as stream:
                    await stream.send(b"x")
                    while await stream.receive() is not None:
                        pass
            took_s = time.monotonic() - began_s
            assert took_s > 0.9 * (pieces * size_bytes * WIRE_PER_BYTE / bytes_per_s - 0.05)

    run_on_loop(scenario())


def test_stream_fails_at_its_deadline() -> None:
    async def scenario() -> None:
        async with bulk_pair() as pair:
            async with pair.open(timeout_s=0.3) as stream:
                with pytest.raises(DeadlineExceeded, match=r"within 0\.3 s"):
                    await stream.receive()
            await unused(pair)

    run_on_loop(scenario())


@pytest.mark.timing
def test_deadline_includes_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_calls, "CONNECT_S_MIN", 30.0)
    monkeypatch.setattr(bulk_calls, "CONNECT_S_MAX", 30.0)

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with bulk_pair() as pair:

                def divert(reply: peer_pb2.BulkReply) -> None:
                    reply.port = silent.getsockname()[1]

                pair.answer_with(divert)
                began_s = time.monotonic()
                with pytest.raises(DeadlineExceeded):
                    async with pair.open(timeout_s=0.3) as stream:
                        await stream.receive()
                assert time.monotonic() - began_s < 5.0

    run_on_loop(scenario())


@pytest.mark.timing
def test_deadline_includes_asking_for_a_token() -> None:
    """Regression: a stream with 0.3 s waited 5 s for a peer that did not answer."""

    async def scenario() -> None:
        async with bulk_pair() as pair:

            async def never(caller: PeerId, request: peer_pb2.BulkRequest) -> peer_pb2.BulkReply:
                await asyncio.sleep(60.0)
                return peer_pb2.BulkReply()

            pair.handlers.remove(BULK.name)
            pair.handlers.unary(BULK, never)
            began_s = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                async with pair.open(timeout_s=0.3) as stream:
                    await stream.receive()
            assert time.monotonic() - began_s < 3.0

    run_on_loop(scenario())


def test_unused_connections_are_closed() -> None:
    async def scenario() -> None:
        async with bulk_pair(idle_s=0.0) as pair:
            await pair.talk(b"x")
            assert pair.bulk.connections.total == 1
            await asyncio.sleep(0.01)
            await pair.channels.close_idle()
            await unused(pair)

    run_on_loop(scenario())


def test_forgotten_peer_has_no_connection_left() -> None:
    async def scenario() -> None:
        async with bulk_pair() as pair:
            await pair.talk(b"x")
            async with pair.open() as stream:
                await stream.send(b"x")
                assert await stream.receive() == b"x"
                await pair.channels.forget(pair.contact.peer_id)
                with pytest.raises(NetworkError):
                    await stream.receive()
            await unused(pair)

    run_on_loop(scenario())


def test_caller_notices_that_an_unused_connection_was_closed() -> None:
    async def scenario() -> None:
        async with bulk_pair() as pair:
            await pair.talk(b"x")
            await pair.bulk.stop(0)
            assert await pair.talk(b"y") == [b"y"]
            assert uses_grpc(pair)

    run_on_loop(scenario())


def test_stopping_server_ends_its_bulk_streams() -> None:
    async def scenario() -> None:
        async with bulk_pair() as pair, pair.open() as stream:
            await stream.send(b"x")
            assert await stream.receive() == b"x"
            await pair.server.stop(0)
            with pytest.raises(NetworkError, match="closing"):
                await stream.receive()

    run_on_loop(scenario())


@pytest.mark.timing
def test_streams_of_both_transports_have_the_same_time_to_end() -> None:
    async def scenario() -> None:
        async with bulk_pair() as pair:

            async def wait(stream: Stream) -> None:
                await stream.send(b"x")
                await asyncio.Event().wait()

            pair.handlers.stream(PUSH, wait)
            async with pair.open(method=PUSH) as bulk:
                on_grpc = pair.channels.open_stream(pair.contact, PUSH, timeout_s=10.0)
                async with on_grpc as grpc:
                    assert await bulk.receive() == await grpc.receive() == b"x"
                    began_s = time.monotonic()
                    await pair.server.stop(1.0)
                    assert time.monotonic() - began_s < 1.9

    run_on_loop(scenario())


def test_bulk_port_is_10000_above_the_port_that_the_user_sets_if_it_is_free() -> None:
    for _ in range(200):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port, above = probe.getsockname()[1], probe.getsockname()[1] + PORTS_APART
        if above > 65535:
            continue
        try:
            before = listening_ports()
            with socket.create_server(("127.0.0.1", above)), Node(listen=f"127.0.0.1:{port}"):
                assert len(listening_ports() - before - {port, above}) == 1, "another program has it"
            with Node(listen=f"127.0.0.1:{port}"):
                assert listening_ports() - before == {port, above}
            return
        except (OSError, UsageError):  # somebody else took the port meanwhile
            continue
    pytest.fail("no two such ports are free")


def listening_ports() -> set[int]:
    return {one.local[1] for one in open_sockets() if one.remote is None}


def test_user_of_a_port_with_none_10000_above_it_is_told_to_choose_a_lower_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for port in range(65535, 65535 - PORTS_APART, -7):
        caplog.clear()
        with contextlib.suppress(UsageError), Node(listen=f"127.0.0.1:{port}"):  # another program may have it
            (said,) = (one.message for one in caplog.records if "large transfers" in one.message)
            assert said.endswith("processor time. Listen on a port up to 55535")
            return
    pytest.fail("no such port is free")
