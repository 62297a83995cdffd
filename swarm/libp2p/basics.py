"""The two protocols that every peer of libp2p speaks: identify and ping."""

from __future__ import annotations

import asyncio
import os
import time

from swarm.core.errors import NetworkError, PeerError
from swarm.libp2p.connection import MuxedStream, PeerConnection
from swarm.libp2p.host import Host
from swarm.libp2p.logic.messages import (
    IDENTIFY_BYTES_MAX,
    IDENTIFY_PROTOCOL,
    PING_PROTOCOL,
    Identify,
    decode_identify,
    encode_address,
    encode_identify,
)

_ANSWER_S = 10.0
_PING_BYTES = 32
_PING_IDLE_S = 60.0  # idle time after which a stream for pings is closed
# libp2p's protobuf PublicKey: type Ed25519, 32 bytes of data
_PUBLIC_KEY_PREFIX = bytes.fromhex("08011220")


def serve_basics(host: Host, agent: str) -> None:
    """Answer identify and ping. `agent`: this software and its version."""

    async def identify(stream: MuxedStream) -> None:
        connection = stream.connection
        seen = b""
        if connection.remote is not None:
            seen = encode_address(connection.remote)
        message = Identify(
            agent,
            tuple(sorted(host.protocols(connection))),
            tuple(encode_address(one) for one in host.announced),
            observed=seen,
            public_key=_PUBLIC_KEY_PREFIX + host.peer_id.public_key,
        )
        await stream.write_message(encode_identify(message))

    host.handle(IDENTIFY_PROTOCOL, identify)
    host.handle(PING_PROTOCOL, _answer_pings)


async def _answer_pings(stream: MuxedStream) -> None:
    while True:
        async with asyncio.timeout(_PING_IDLE_S):
            first = await stream.read(_PING_BYTES)
            if not first:
                return
            rest = await stream.read_exactly(_PING_BYTES - len(first)) if len(first) < _PING_BYTES else b""
            await stream.write(first + rest)


async def identify(connection: PeerConnection) -> Identify:
    """Ask a peer for its description of itself. Raises NetworkError when it does not answer within 10 s,
    PeerError when its answer is malformed.
    """
    stream = await connection.open(IDENTIFY_PROTOCOL)
    try:
        async with asyncio.timeout(_ANSWER_S):
            return decode_identify(await stream.read_message(IDENTIFY_BYTES_MAX))
    except TimeoutError:
        raise NetworkError(f"{connection.peer_id.short} did not say who it is") from None
    finally:
        stream.close()


async def ping(connection: PeerConnection) -> float:
    """Return a peer's round-trip time in seconds. Raises NetworkError when it does not answer within 10 s,
    PeerError when it answers something else.
    """
    stream = await connection.open(PING_PROTOCOL)
    try:
        async with asyncio.timeout(_ANSWER_S):
            sent, sent_s = os.urandom(_PING_BYTES), time.monotonic()
            await stream.write(sent)
            if await stream.read_exactly(_PING_BYTES) != sent:
                raise PeerError(f"{connection.peer_id.short} answered a ping with other bytes")
            return time.monotonic() - sent_s
    except TimeoutError:
        raise NetworkError(f"{connection.peer_id.short} did not answer a ping") from None
    finally:
        stream.close()
