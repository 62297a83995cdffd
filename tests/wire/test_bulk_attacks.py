"""Attacks on the bulk path, over sockets: by somebody on the way, by strangers at the port, and by peers that
have a token.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

import pytest

from swarm.core.errors import NetworkError
from swarm.core.identity import Identity
from swarm.net import bulk_calls, bulk_server, room
from swarm.net.bulk_calls import MAGIC
from swarm.net.bulk_socket import BulkLost, BulkSocket
from swarm.net.logic.sealing import HEADER_BYTES, BulkSecret, FrameKey, FrameKind, frame_bytes
from swarm.wire import peer_pb2
from tests.wire.bulk_pair import (
    TALK,
    Direction,
    bulk_pair,
    changed_on_the_way,
    is_closed,
    outcome,
)
from tests.wire.event_loop import run_on_loop

# Frames to the callee are a proof, an opening and messages; those to the caller a proof and messages.
MESSAGES = [b"first" * 100, b"second" * 100, b"third" * 100]
PLACES = [("to callee", 2), ("to callee", 3), ("to caller", 1), ("to caller", 2)]


class Attack:
    """Changes one frame of one direction."""

    def __init__(self, kind: str, where: tuple[str, int]) -> None:
        self._kind, self._where = kind, where
        self._seen: dict[str, list[bytes]] = {"to callee": [], "to caller": []}
        self._held = b""

    def __call__(self, direction: Direction, number: int, frame: bytes) -> list[bytes]:
        seen = self._seen[direction]
        seen.append(frame)
        if self._held:
            held, self._held = self._held, b""
            return [frame, held]
        if (direction, number) != self._where:
            return [frame]
        other = self._seen["to caller" if direction == "to callee" else "to callee"]
        match self._kind:
            case "a bit of the header":
                return [_flipped(frame, 0)]
            case "a bit of the size":
                return [_flipped(frame, 5)]
            case "a bit of the body":
                return [_flipped(frame, HEADER_BYTES + 7)]
            case "a bit of the tag":
                return [_flipped(frame, len(frame) - 1)]
            case "repeated":
                return [frame, frame]
            case "replayed":
                return [seen[-2], frame]
            case "left out":
                return [b""]
            case "reordered":
                self._held = frame
                return [b""]
            case "reflected":
                return [other[-1]]
            case "invented":
                return [FrameKind.DATA.to_bytes(4, "little") + (32).to_bytes(4, "little") + bytes(32)]
            case "in plain text":
                return [
                    FrameKind.DATA.to_bytes(4, "little") + (16).to_bytes(4, "little") + b"sixteen bytes..."
                ]
            case _:
                return []  # the connection is closed


def _flipped(frame: bytes, place: int) -> bytes:
    altered = bytearray(frame)
    altered[place] ^= 1
    return bytes(altered)


@pytest.mark.parametrize("where", PLACES, ids=lambda where: f"{where[0]} {where[1]}")
@pytest.mark.parametrize(
    "kind",
    [
        "a bit of the header",
        "a bit of the size",
        "a bit of the body",
        "a bit of the tag",
        "repeated",
        "replayed",
        "left out",
        "reordered",
        "reflected",
        "invented",
        "in plain text",
        "truncated",
    ],
)
def test_changed_frames_end_the_stream(
    kind: str, where: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with bulk_pair() as pair, changed_on_the_way(pair, Attack(kind, where)):
            error = await outcome(pair.talk(*MESSAGES))
            assert isinstance(error, NetworkError), error
            assert str(pair.contact.peer_id) in str(error)
            assert pair.received == MESSAGES[: len(pair.received)], "nothing else is passed on"
            if kind != "truncated":
                named = {pair.contact.peer_id, pair.caller.peer_id}
                assert any(str(one) in caplog.text for one in named), "the peer is named"
            assert await pair.talk(b"again") == [b"again"], "on another connection"

    run_on_loop(scenario())


def test_frames_of_one_connection_do_not_fit_into_another() -> None:
    first: list[bytes] = []

    def splice(direction: Direction, number: int, frame: bytes) -> list[bytes]:
        if direction == "to callee" and number < 4:
            first.append(frame)
        if direction == "to callee" and number == 4 + 2:  # proof and opening are genuine
            return [first[2]]
        return [frame]

    async def scenario() -> None:
        async with bulk_pair() as pair, changed_on_the_way(pair, splice), pair.open() as stream:
            await stream.send(b"one")
            assert await stream.receive() == b"one"
            await stream.send(b"two")
            assert await stream.receive() == b"two"
            error = await outcome(pair.talk(b"three"))  # needs another connection
            assert isinstance(error, NetworkError)
            assert pair.received == [b"one", b"two"]

    run_on_loop(scenario())


def test_frames_of_one_stream_do_not_fit_into_the_next_one() -> None:
    first: list[bytes] = []

    def splice(direction: Direction, number: int, frame: bytes) -> list[bytes]:
        if direction == "to callee":
            first.append(frame)
            if number == 6:  # proof; opening, message, two ends; opening, message
                return [first[2]]
        return [frame]

    async def scenario() -> None:
        async with bulk_pair() as pair, changed_on_the_way(pair, splice):
            assert await pair.talk(b"one") == [b"one"]
            error = await outcome(pair.talk(b"two"))
            assert isinstance(error, NetworkError)
            assert pair.bulk.connections.total <= 1
            assert pair.received == [b"one"]

    run_on_loop(scenario())


@pytest.mark.parametrize("number", [0, 1])
def test_who_answers_at_the_port_without_the_secret_gets_nothing(number: int) -> None:
    """Somebody else listens there, or changes the proof: the stream uses gRPC."""

    def change(direction: Direction, nth: int, frame: bytes) -> list[bytes]:
        is_changed = direction == ("to callee", "to caller")[number] and nth == 0
        return [_flipped(frame, len(frame) - 1)] if is_changed else [frame]

    async def scenario() -> None:
        async with bulk_pair() as pair, changed_on_the_way(pair, change):
            assert await pair.talk(*MESSAGES) == MESSAGES
            assert pair.channels.connection_to(pair.contact.peer_id, 1) is not None

    run_on_loop(scenario())


def test_unknown_late_and_used_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with bulk_pair() as pair:
            reply = pair.ticket()
            unknown = peer_pb2.BulkReply(secret=bytes(32))
            assert await is_closed(await pair.connected(unknown))
            connection = await pair.proven(reply)
            assert await is_closed(await pair.connected(reply)), "it was used"
            assert not connection.lost
            connection.close()
            monkeypatch.setattr(bulk_server, "TOKEN_S", 0.01)
            late = pair.ticket()
            await asyncio.sleep(0.1)
            assert await is_closed(await pair.connected(late))

    run_on_loop(scenario())


def test_token_without_its_secret_is_worth_nothing() -> None:
    """The token travels in the clear. A thief that sends it first ends the attempt, and cannot do more."""

    async def scenario() -> None:
        async with bulk_pair() as pair:
            reply = pair.ticket()
            secret = BulkSecret(bytes(32), pair.caller.peer_id, pair.contact.peer_id)
            thief = BulkSocket(await pair.connected(reply), secret, is_caller=True)
            await thief.send(FrameKind.PROOF, b"")
            with pytest.raises(BulkLost):
                await thief.receive()
            assert await is_closed(await pair.connected(reply))

    run_on_loop(scenario())


def test_secret_is_bound_to_the_peer_that_asked() -> None:
    """A peer that passes its token on makes nobody else a caller, and itself none with another name."""

    async def scenario() -> None:
        async with bulk_pair() as pair:
            reply = pair.ticket()
            secret = BulkSecret(reply.secret, Identity.generate().peer_id, pair.contact.peer_id)
            other = BulkSocket(await pair.connected(reply), secret, is_caller=True)
            await other.send(FrameKind.PROOF, b"")
            with pytest.raises(BulkLost):
                await other.receive()

    run_on_loop(scenario())


def test_port_closes_every_connection_while_no_token_is_out() -> None:
    async def scenario() -> None:
        async with bulk_pair() as pair:
            for _ in range(40):
                assert await is_closed(await pair.bare())

    run_on_loop(scenario())


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", MAGIC[:-1] + b"2", bytes(1 << 16)])
def test_anything_but_a_token_is_closed_at_its_first_byte(first: bytes) -> None:
    async def scenario() -> None:
        async with bulk_pair() as pair:
            pair.ticket()
            one = await pair.bare()
            await asyncio.get_running_loop().sock_sendall(one, first)
            assert await is_closed(one, 1.0)

    run_on_loop(scenario())


def test_silent_connections_are_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_server, "PROOF_S_MAX", 0.1)

    async def scenario() -> None:
        async with bulk_pair() as pair:
            reply = pair.ticket()
            silent, partial, unproven = await pair.bare(), await pair.bare(), await pair.connected(reply)
            await asyncio.get_running_loop().sock_sendall(partial, MAGIC)
            for one in (silent, partial, unproven):
                assert await is_closed(one, 2.0)
            assert pair.bulk.connections.total == 0

    run_on_loop(scenario())


def test_honest_caller_connects_during_a_flood_of_silent_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_calls, "CONNECT_S_MIN", 10.0)
    monkeypatch.setattr(bulk_calls, "CONNECT_S_MAX", 10.0)

    async def scenario() -> None:
        async with bulk_pair() as pair:
            pair.ticket()
            with ExitStack() as stack:
                flood = [
                    stack.enter_context(await pair.bare("127.9.9.1"))
                    for _ in range(3 * bulk_server.UNPROVEN_MAX)
                ]
                assert await pair.talk(b"x") == [b"x"]
                assert pair.channels.connection_to(pair.contact.peer_id, 1) is None, "it needed no gRPC"
                closed = [await is_closed(one, 0.01) for one in flood]
                assert sum(closed) >= 2 * bulk_server.UNPROVEN_MAX
                assert not closed[-1], "the oldest are closed first"

    run_on_loop(scenario())


def test_tokens_of_a_peer_are_limited() -> None:
    async def scenario() -> None:
        async with bulk_pair() as pair:
            given = [pair.ticket() for _ in range(100)]
            assert sum(bool(reply.port) for reply in given) == bulk_server.CONNECTIONS_PER_PEER_MAX
            assert pair.ticket(Identity.generate().peer_id).port, "others get theirs"
            assert await pair.talk(b"x") == [b"x"], "over gRPC"

    run_on_loop(scenario())


def test_connection_without_streams_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_server, "IDLE_S_MAX", 0.1)

    async def scenario() -> None:
        async with bulk_pair() as pair:
            connection = await pair.proven(pair.ticket())
            with pytest.raises(BulkLost):
                await connection.receive()

    run_on_loop(scenario())


@pytest.mark.parametrize("kind", [FrameKind.PROOF, FrameKind.OPEN])
def test_large_frame_where_only_a_small_one_is_due_is_refused_by_its_header(kind: FrameKind) -> None:
    """Regression: 8 bytes made the callee keep 4 MiB for as long as a connection may be without a stream."""

    async def scenario() -> None:
        async with bulk_pair() as pair:
            reply = pair.ticket()
            secret = BulkSecret(reply.secret, pair.caller.peer_id, pair.contact.peer_id)
            loop, raw = asyncio.get_running_loop(), await pair.connected(reply)
            if kind is FrameKind.OPEN:
                proof = secret.key(0, from_caller=True).seal(FrameKind.PROOF, b"", bytearray(frame_bytes(0)))
                await loop.sock_sendall(raw, bytes(proof))
                assert len(await loop.sock_recv(raw, frame_bytes(0))) == frame_bytes(0)
            await loop.sock_sendall(raw, kind.to_bytes(4, "little") + (4 << 20).to_bytes(4, "little"))
            assert await is_closed(raw, within_s=2.0)

    run_on_loop(scenario())


def test_announced_message_that_does_not_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "READ_S_MAX", 0.1)

    async def scenario() -> None:
        async with bulk_pair() as pair:
            reply = pair.ticket()
            secret = BulkSecret(reply.secret, pair.caller.peer_id, pair.contact.peer_id)
            loop, raw = asyncio.get_running_loop(), await pair.connected(reply)
            out, into = secret.key(1, from_caller=True), secret.key(1, from_caller=False)
            proof = secret.key(0, from_caller=True).seal(FrameKind.PROOF, b"", bytearray(frame_bytes(0)))
            name = TALK.name.encode()
            opening = out.seal(FrameKind.OPEN, name, bytearray(frame_bytes(len(name))))
            await loop.sock_sendall(raw, bytes(proof) + bytes(opening))
            await loop.sock_sendall(
                raw, FrameKind.DATA.to_bytes(4, "little") + (4 << 20).to_bytes(4, "little")
            )
            await loop.sock_sendall(raw, bytes(1000))
            assert len(await loop.sock_recv(raw, frame_bytes(0))) == frame_bytes(0)
            last = await loop.sock_recv(raw, 1000)
            kind, body = into.open(last[:HEADER_BYTES], memoryview(last)[HEADER_BYTES:])
            assert kind is FrameKind.END
            assert b"the first message did not arrive in time" in body
            raw.close()

    run_on_loop(scenario())


def test_messages_after_the_end_of_a_stream_are_neither_kept_nor_opened() -> None:
    """A partial message of 4 MiB would be kept for as long as the caller may take to end its stream."""

    async def scenario() -> None:
        async with bulk_pair() as pair:
            reply = pair.ticket()
            secret = BulkSecret(reply.secret, pair.caller.peer_id, pair.contact.peer_id)
            raw, loop = await pair.connected(reply), asyncio.get_running_loop()

            def sealed(key: FrameKey, kind: FrameKind, body: bytes = b"") -> bytes:
                return bytes(key.seal(kind, body, bytearray(frame_bytes(len(body)))))

            for stream in range(3):
                key = secret.key(stream, from_caller=True)
                if not stream:
                    await loop.sock_sendall(raw, sealed(key, FrameKind.PROOF))
                    await loop.sock_recv(raw, frame_bytes(0))
                    continue
                await loop.sock_sendall(raw, sealed(key, FrameKind.OPEN, b"/swarm.Test/Nothing"))
                assert await loop.sock_recv(raw, 1000), "the stream has ended: there is no such method"
                message = sealed(key, FrameKind.DATA, bytes(3 << 20))
                await loop.sock_sendall(raw, message[:HEADER_BYTES] + bytes(len(message) - HEADER_BYTES))
                await loop.sock_sendall(raw, sealed(key, FrameKind.END))
            raw.close()

    run_on_loop(scenario())


def test_caller_that_never_ends_its_stream_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_server, "DRAIN_BYTES_MAX", 1 << 20)

    async def scenario() -> None:
        async with bulk_pair() as pair:
            connection = await pair.proven(pair.ticket())
            await connection.send(FrameKind.OPEN, b"/swarm.Test/Nothing")

            async def push() -> None:
                while True:
                    await connection.send(FrameKind.DATA, bytes(1 << 20))

            with pytest.raises(BulkLost):
                await push()

    run_on_loop(scenario())


@pytest.mark.parametrize("kind", [FrameKind.OPEN, FrameKind.PROOF, FrameKind.END])
def test_frames_out_of_turn_end_the_connection(kind: FrameKind) -> None:
    async def scenario() -> None:
        async with bulk_pair() as pair:
            connection = await pair.proven(pair.ticket())
            await connection.send(FrameKind.OPEN, TALK.name.encode())
            await connection.send(kind, b"")

            async def read_all() -> None:
                while True:
                    await connection.receive()

            with pytest.raises(BulkLost):
                await read_all()
            await pair.ended.wait()
            assert isinstance(pair.errors[0], NetworkError | asyncio.CancelledError)

    run_on_loop(scenario())


def test_port_whose_packets_are_dropped_costs_a_moment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_calls, "CONNECT_S_MIN", 0.05)
    monkeypatch.setattr(bulk_calls, "CONNECT_S_MAX", 0.05)

    async def scenario() -> None:
        full = socket.create_server(("127.0.0.1", 0), backlog=0)
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:  # the queue is full, and the system drops further first packets
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        try:
            async with bulk_pair() as pair:
                asked = 0

                def blocked(reply: peer_pb2.BulkReply) -> None:
                    nonlocal asked
                    asked += 1
                    reply.port = full.getsockname()[1]

                pair.answer_with(blocked)
                for _ in range(3):
                    assert await pair.talk(*MESSAGES) == MESSAGES
                assert asked == 1
        finally:
            for one in (full, *waiting):
                one.close()

    run_on_loop(scenario())


def test_many_tiny_frames_leave_turns_to_other_tasks() -> None:
    frames = 4000

    async def scenario() -> None:
        async with bulk_pair() as pair:
            turns = 0

            async def count_turns() -> None:
                nonlocal turns
                while True:
                    await asyncio.sleep(0)
                    turns += 1

            reply = pair.ticket()
            secret = BulkSecret(reply.secret, pair.caller.peer_id, pair.contact.peer_id)
            key, name = secret.key(1, from_caller=True), TALK.name.encode()
            proof = secret.key(0, from_caller=True).seal(FrameKind.PROOF, b"", bytearray(frame_bytes(0)))
            flood = [bytes(proof), bytes(key.seal(FrameKind.OPEN, name, bytearray(frame_bytes(len(name)))))]
            flood += [bytes(key.seal(FrameKind.DATA, b"x", bytearray(frame_bytes(1)))) for _ in range(frames)]
            raw = await pair.connected(reply)
            await asyncio.get_running_loop().sock_sendall(raw, b"".join(flood))
            counting = asyncio.create_task(count_turns())
            while len(pair.received) < frames:  # noqa: ASYNC110
                await asyncio.sleep(0)
            counting.cancel()
            assert turns > frames / 20
            raw.close()

    run_on_loop(scenario())
