"""The bulk port of a server: made bytes of strangers, and made frames of a peer that has a token. After each
case an honest caller is served. Its frames are decoded, too.
"""

from __future__ import annotations

import asyncio
import logging
import socket

import grpc
from grpc import aio

from swarm.core.errors import PeerError
from swarm.core.standing import PeerStanding
from swarm.net.bulk_calls import MAGIC, decode_status, encode_status
from swarm.net.bulk_server import BulkServer
from swarm.net.bulk_socket import BulkSocket
from swarm.net.callers import RemoteCaller
from swarm.net.calls import Outcome
from swarm.net.incoming import BulkContext
from swarm.net.logic.sealing import (
    HEADER_BYTES,
    TOKEN_BYTES,
    BulkSecret,
    FrameError,
    FrameKey,
    FrameKind,
    frame_bytes,
    sealed_bytes,
)
from swarm.net.rpc import Handlers
from swarm.net.throttle import Bandwidth, Throttle
from swarm.wire.peer_pb2 import BulkRequest
from tests.averaging.history.peers import PEERS
from tests.fuzz.making import Maker

_CALLER, _CALLEE = PEERS[:2]
_SECRET = BulkSecret(bytes(range(32)), _CALLER, _CALLEE)
_METHOD = b"/swarm.Test/Echo"
_HANGS_S = 5.0


def _sealed(key: FrameKey, kind: FrameKind, body: bytes) -> bytes:
    return bytes(key.seal(kind, body, bytearray(frame_bytes(len(body)))))


FRAMES = [_sealed(_SECRET.key(1, from_caller=True), kind, _METHOD) for kind in FrameKind]
STATUSES = [encode_status(code, "reason") for code in grpc.StatusCode]


def read_frame(raw: bytes) -> object:
    """Decode a frame as its receiver does. A frame that opens must be one that was sealed."""
    header = raw[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
    try:
        size = sealed_bytes(header)
        found = _SECRET.key(1, from_caller=True).open(header, memoryview(raw)[HEADER_BYTES:][:size])
    except FrameError as error:
        raise PeerError(str(error)) from None
    assert raw[: HEADER_BYTES + size] in FRAMES, "a frame opens that was not sealed"
    return found


def read_status(raw: bytes) -> object:
    """Decode the status of a stream as its caller does."""
    return decode_status(raw)


async def _echo(caller: RemoteCaller, host: str, method: str, context: BulkContext) -> Outcome:
    try:
        while message := await context.read():
            await context.write(message)
    except aio.BaseError as error:
        return grpc.StatusCode.ABORTED, str(error), b""
    return grpc.StatusCode.OK, "", b""


class _Errors(logging.Handler):
    """Collects the errors that a case logs: an exception in a task of the server is one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


def attack_port(maker: Maker) -> None:
    """Run one case."""
    errors, root = _Errors(), logging.getLogger()
    root.addHandler(errors)
    try:
        asyncio.run(asyncio.wait_for(_attack(maker), _HANGS_S))
    finally:
        root.removeHandler(errors)
    assert not errors.texts, errors.texts[0]


async def _attack(maker: Maker) -> None:
    server = BulkServer(_CALLEE, PeerStanding(), Throttle(Bandwidth()), _echo)
    server.start("127.0.0.1", 1, is_chosen=False, handlers=Handlers())
    try:
        reply = server.give(_CALLER, BulkRequest())
        secret = BulkSecret(reply.secret, _CALLER, _CALLEE)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(_made(maker, secret))
        writer.write_eof()
        while await reader.read(1 << 16):
            pass
        writer.close()
        await _be_served(server)
        assert server.connections.by_peer.get(_CALLER, 0) <= 1
    except ConnectionError:  # reset, because the server does not read nonsense to its end
        await _be_served(server)
    finally:
        await server.stop(0)


def _made(maker: Maker, secret: BulkSecret) -> bytes:
    """Return the bytes of a connection: mutated ones, or frames in any order that the keys allow."""
    opening = secret.key(0, from_caller=True)
    frames = [_sealed(opening, FrameKind.PROOF, b"")]
    kinds = list(FrameKind)
    for stream in range(1, maker.rng.choice((1, 2, 3)) + 1):
        key = secret.key(stream, from_caller=True)
        is_right = maker.rng.random() < 0.7
        frames.append(_sealed(key, FrameKind.OPEN if is_right else maker.rng.choice(kinds), _METHOD))
        for _ in range(maker.rng.choice((0, 1, 2, 5))):
            kind = FrameKind.DATA if is_right else maker.rng.choice(kinds)
            frames.append(_sealed(key, kind, maker.raw([_METHOD, bytes(1000)])))
        frames.append(_sealed(key, FrameKind.DATA, b""))
        frames.append(_sealed(key, FrameKind.END, b""))
    whole = MAGIC + secret.token + b"".join(frames)
    match maker.rng.randrange(4):
        case 0:
            return maker.raw([MAGIC + bytes(TOKEN_BYTES), b"GET / HTTP/1.1\r\n\r\n"])
        case 1:
            return MAGIC + secret.token + maker.raw([b"".join(frames)])
        case 2:
            return whole[: maker.rng.randrange(len(whole) + 1)]
        case _:
            return whole


async def _be_served(server: BulkServer) -> None:
    """Call as an honest peer does."""
    reply = server.give(PEERS[2], BulkRequest())
    secret = BulkSecret(reply.secret, PEERS[2], _CALLEE)
    loop, own = asyncio.get_running_loop(), socket.socket()
    own.setblocking(False)
    await loop.sock_connect(own, ("127.0.0.1", server.port))
    await loop.sock_sendall(own, MAGIC + secret.token)
    connection = BulkSocket(own, secret, is_caller=True)
    await connection.send(FrameKind.PROOF, b"")
    assert await connection.receive() == (FrameKind.PROOF, b"")
    connection.next_stream()
    await connection.send(FrameKind.OPEN, _METHOD)
    await connection.send(FrameKind.DATA, b"hello")
    assert await connection.receive() == (FrameKind.DATA, b"hello")
    connection.close()
