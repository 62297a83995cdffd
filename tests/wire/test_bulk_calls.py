"""Small calls to a peer that is called often use the bulk path, and lose nothing by it: where there is none,
where it breaks, or where it is refused, they use gRPC.
"""

from __future__ import annotations

import asyncio
import socket

import pytest

from swarm.core.errors import DeadlineExceeded, NetworkError, PeerError
from swarm.core.ids import PeerId
from swarm.net import server, shared_calls
from swarm.net.bulk_socket import BulkLost, BulkSocket
from swarm.net.calls import BATCH_BYTES_MAX, CALLS_NAME
from swarm.net.channels import Channels
from swarm.net.logic.sealing import TAG_BYTES, BulkSecret, FrameKind, frame_bytes
from swarm.net.rpc import Later, Method
from swarm.net.server import CallLimits
from swarm.testing.identities import SeededIdentity
from swarm.wire import peer_pb2
from tests.wire.bulk_pair import BulkPair, bulk_pair, is_closed, until
from tests.wire.event_loop import run_on_loop

ECHO = Method(name="/swarm.Test/Echo", request=peer_pb2.Hello, reply=peer_pb2.Hello)
SLOW = Method(name="/swarm.Test/Slow", request=peer_pb2.Hello, reply=peer_pb2.Hello)
REFUSED = Method(name="/swarm.Test/Refused", request=peer_pb2.Hello, reply=peer_pb2.Hello)


async def echo(peer_id: PeerId, request: peer_pb2.Hello) -> peer_pb2.Hello:
    return request


async def refuse(peer_id: PeerId, request: peer_pb2.Hello) -> peer_pb2.Hello:
    raise PeerError("not today")


async def call(
    pair: BulkPair,
    agent: str,
    method: Method[peer_pb2.Hello, peer_pb2.Hello] = ECHO,
    channels: Channels | None = None,
    timeout_s: float = 10.0,
) -> str:
    request = peer_pb2.Hello(agent=agent)
    caller = channels or pair.channels
    return (await caller.call(pair.contact, method, request, timeout_s=timeout_s)).agent


async def often(pair: BulkPair) -> None:
    """Make as many calls as it takes."""
    for number in range(shared_calls.BULK_CALLS_MIN + 1):
        assert await call(pair, str(number)) == str(number)


def uses_bulk(pair: BulkPair, channels: Channels | None = None) -> bool:
    shared = (channels or pair.channels).shared_calls(pair.contact.peer_id)
    return shared is not None and shared.is_bulk and not shared.is_refused


def uses_grpc_stream(pair: BulkPair, channels: Channels | None = None) -> bool:
    shared = (channels or pair.channels).shared_calls(pair.contact.peer_id)
    return shared is not None and not shared.is_bulk and not shared.is_refused


def test_calls_of_a_peer_that_is_called_often_use_the_bulk_path_with_all_their_properties() -> None:
    async def scenario() -> None:
        cancelled = asyncio.Event()

        async def slow(peer_id: PeerId, request: peer_pb2.Hello) -> peer_pb2.Hello:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            return request

        async with bulk_pair() as pair:
            for method, handler in ((ECHO, echo), (SLOW, slow), (REFUSED, refuse)):
                pair.handlers.unary(method, handler)
            await call(pair, "seldom")
            assert pair.bulk.connections.total == 0
            await often(pair)
            await until(lambda: uses_bulk(pair))
            await often(pair)
            assert pair.bulk.connections.total == 1
            assert pair.server.bulk_call_streams.total == 1
            assert await asyncio.gather(*(call(pair, str(n)) for n in range(200))) == [
                str(n) for n in range(200)
            ]
            with pytest.raises(PeerError, match="not today"):
                await call(pair, "x", REFUSED)
            with pytest.raises(DeadlineExceeded):
                await call(pair, "x", SLOW, timeout_s=0.05)
            await cancelled.wait()
            await until(lambda: pair.server.calls.total == 0)
            assert await pair.talk(b"stream") == [b"stream"]  # on a connection of its own
            assert pair.bulk.connections.total == 2

    run_on_loop(scenario())


def test_calls_leave_the_connection_of_tensors_to_the_next_stream_of_tensors() -> None:
    async def scenario() -> None:
        async with bulk_pair() as pair:
            pair.handlers.unary(ECHO, echo)
            assert await pair.talk(b"tensors") == [b"tensors"]
            await often(pair)
            await until(lambda: uses_bulk(pair))
            assert pair.bulk.connections.total == 2
            assert await pair.talk(b"more tensors") == [b"more tensors"]
            assert pair.bulk.connections.total == 2
            await pair.channels.close_idle()  # reviews the calls that were made until now
            await pair.channels.close_idle()  # there were none since, so that calls leave the bulk path
            await until(lambda: not uses_bulk(pair) and pair.bulk.connections.total == 1)
            assert await pair.talk(b"the last ones") == [b"the last ones"]
            assert pair.bulk.connections.total == 1

    run_on_loop(scenario())


def test_seldom_called_peer_loses_its_stream_on_the_bulk_path_and_gets_it_again() -> None:
    async def scenario() -> None:
        async with bulk_pair() as pair:
            pair.handlers.unary(ECHO, echo)
            await often(pair)
            await until(lambda: uses_bulk(pair))
            await pair.channels.close_idle()  # reviews the calls that were made until now
            await call(pair, "seldom")
            await pair.channels.close_idle()
            assert uses_grpc_stream(pair)
            await until(lambda: pair.bulk.connections.total == 0)
            await often(pair)
            await until(lambda: uses_bulk(pair))

    run_on_loop(scenario())


def test_peer_that_is_called_just_often_enough_keeps_its_stream_on_the_bulk_path() -> None:
    """Regression: the calls until the stream had begun did not count, so each review ended it again."""

    async def scenario() -> None:
        async with bulk_pair() as pair:
            pair.handlers.unary(ECHO, echo)
            await often(pair)
            await until(lambda: uses_bulk(pair))
            await pair.channels.close_idle()
            assert uses_bulk(pair)

    run_on_loop(scenario())


def test_bulk_path_that_answers_no_more_calls_is_left() -> None:
    """TCP would tell only after minutes that what it sends is lost."""

    async def scenario() -> None:
        async def silent(peer_id: PeerId, request: peer_pb2.Hello) -> peer_pb2.Hello:
            await asyncio.Event().wait()
            return request

        async with bulk_pair() as pair:
            pair.handlers.unary(ECHO, echo)
            pair.handlers.unary(SLOW, silent)
            await often(pair)
            await until(lambda: uses_bulk(pair))
            for number in range(3):
                assert uses_bulk(pair), number
                with pytest.raises(DeadlineExceeded):
                    await call(pair, "x", SLOW, timeout_s=0.05)
            assert uses_grpc_stream(pair)
            await until(lambda: pair.bulk.connections.total == 0)
            for number in range(shared_calls.BULK_CALLS_MIN // 2):
                assert await call(pair, str(number)) == str(number)
            assert pair.bulk.connections.total == 0, "its packets are likely to be lost still"
            await often(pair)
            await until(lambda: uses_bulk(pair))

    run_on_loop(scenario())


def test_call_in_progress_survives_the_return_to_grpc() -> None:
    async def scenario() -> None:
        entered, release = asyncio.Event(), asyncio.Event()

        async def slow(peer_id: PeerId, request: peer_pb2.Hello) -> peer_pb2.Hello:
            entered.set()
            await release.wait()
            return request

        async with bulk_pair() as pair, asyncio.TaskGroup() as tasks:
            pair.handlers.unary(ECHO, echo)
            pair.handlers.unary(SLOW, slow)
            await often(pair)
            await until(lambda: uses_bulk(pair))
            waiting = tasks.create_task(call(pair, "slow", SLOW))
            await entered.wait()
            await pair.channels.close_idle()
            await pair.channels.close_idle()
            assert uses_grpc_stream(pair)
            assert await call(pair, "quick") == "quick"
            await often(pair)  # the peer takes no second stream before the first has ended
            assert uses_grpc_stream(pair)
            release.set()
            assert await waiting == "slow"
            await until(lambda: pair.bulk.connections.total == 0)
            await often(pair)
            await until(lambda: uses_bulk(pair))

    run_on_loop(scenario())


def test_broken_bulk_connection_fails_the_calls_in_progress_and_no_later_ones() -> None:
    async def scenario() -> None:
        entered = asyncio.Event()

        async def slow(peer_id: PeerId, request: peer_pb2.Hello) -> peer_pb2.Hello:
            entered.set()
            await asyncio.Event().wait()
            return request

        async with bulk_pair() as pair:
            pair.handlers.unary(ECHO, echo)
            pair.handlers.unary(SLOW, slow)
            await often(pair)
            await until(lambda: uses_bulk(pair))
            waiting = asyncio.create_task(call(pair, "slow", SLOW))
            await entered.wait()
            await pair.bulk.stop(0)
            with pytest.raises(NetworkError):
                await waiting
            assert await call(pair, "later") == "later"
            assert pair.channels.connected(pair.contact.peer_id)

    run_on_loop(scenario())


@pytest.mark.parametrize("what", ["no room", "no bulk port"])
def test_calls_stay_on_grpc_where_the_peer_takes_none_on_the_bulk_path(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "no room":
        monkeypatch.setattr(server, "BULK_CALL_STREAMS_PER_PEER_MAX", 0)

    async def scenario() -> None:
        limits = CallLimits(bulk_per_peer_max=0 if what == "no bulk port" else 8)
        async with bulk_pair(limits=limits) as pair:
            pair.handlers.unary(ECHO, echo)
            for _ in range(4):
                await often(pair)
                assert await asyncio.gather(*(call(pair, str(n)) for n in range(100))) == [
                    str(n) for n in range(100)
                ]
            assert uses_grpc_stream(pair)

    run_on_loop(scenario())


def test_peer_has_one_stream_of_calls_on_the_bulk_path_and_the_rest_for_other_streams() -> None:
    async def scenario() -> None:
        async with bulk_pair() as pair:
            pair.handlers.unary(ECHO, echo)
            await often(pair)
            await until(lambda: uses_bulk(pair))
            second = Channels(pair.caller)
            try:
                for number in range(3 * shared_calls.BULK_CALLS_MIN):
                    assert await call(pair, str(number), channels=second) == str(number)
                assert uses_grpc_stream(pair, second)
            finally:
                await second.close()
            assert uses_bulk(pair)

    run_on_loop(scenario())


def test_too_large_message_of_calls_ends_its_connection_by_its_header() -> None:
    async def scenario() -> None:
        async with bulk_pair() as pair:
            reply = pair.ticket()
            secret = BulkSecret(reply.secret, pair.caller.peer_id, pair.contact.peer_id)
            loop, raw = asyncio.get_running_loop(), await pair.connected(reply)
            name = CALLS_NAME.encode()
            for stream, kind, body in ((0, FrameKind.PROOF, b""), (1, FrameKind.OPEN, name)):
                key = secret.key(stream, from_caller=True)
                await loop.sock_sendall(raw, bytes(key.seal(kind, body, bytearray(frame_bytes(len(body))))))
            await until(lambda: pair.server.bulk_call_streams.total == 1)
            assert len(await loop.sock_recv(raw, frame_bytes(0))) == frame_bytes(0)
            size = BATCH_BYTES_MAX + 1 + TAG_BYTES
            await loop.sock_sendall(raw, FrameKind.DATA.to_bytes(4, "little") + size.to_bytes(4, "little"))
            assert await is_closed(raw, within_s=2.0)
            raw.close()

    run_on_loop(scenario())


def test_large_answer_without_a_task_is_sent_whole_and_counted_out() -> None:
    large = Method(
        name="/swarm.Test/Large", request=peer_pb2.Hello, reply=peer_pb2.Hello, reply_bytes_max=2 << 20
    )

    async def scenario() -> None:
        def begin(peer_id: PeerId, request: peer_pb2.Hello) -> Later[peer_pb2.Hello]:
            ended = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(ended.set_result, None)
            return Later(ended, lambda: peer_pb2.Hello(agent=request.agent * (1 << 20)), lambda: None)

        async with bulk_pair() as pair:
            pair.handlers.unary(ECHO, echo)
            pair.handlers.deferred(large, begin, echo)
            await often(pair)
            await until(lambda: uses_bulk(pair))
            for letter in "abc":
                assert await call(pair, letter, large) == letter * (1 << 20)
                assert await call(pair, "small") == "small"
            await until(lambda: pair.server.calls.total == 0)
            assert not pair.server.room.size_bytes

    run_on_loop(scenario())


def test_frame_that_the_system_takes_in_part_is_sent_whole_before_the_next_one() -> None:
    async def scenario() -> None:
        ends = socket.socketpair()
        secret = BulkSecret(bytes(32), SeededIdentity("a").peer_id, SeededIdentity("b").peer_id)
        for one in ends:
            one.setblocking(False)
        sender, receiver = (BulkSocket(one, secret, is_caller=n == 0) for n, one in enumerate(ends))
        messages = [bytes([number]) * (1 << 20) for number in range(4)]
        rest = None
        for sent, message in enumerate(messages, start=1):  # noqa: B007  used below
            rest = sender.begin_to_send(FrameKind.DATA, message)
            if rest is not None:
                break
        assert rest is not None
        sending = asyncio.create_task(rest)
        for message in messages[:sent]:
            assert await receiver.receive() == (FrameKind.DATA, message)
        await sending
        assert sender.begin_to_send(FrameKind.DATA, b"small") is None
        assert await receiver.receive() == (FrameKind.DATA, b"small")

        while (rest := sender.begin_to_send(FrameKind.DATA, messages[0])) is None:
            pass
        with pytest.raises(BulkLost, match="sent in part"):
            sender.begin_to_send(FrameKind.DATA, b"too early")
        rest.close()
        receiver.close()

    run_on_loop(scenario())
