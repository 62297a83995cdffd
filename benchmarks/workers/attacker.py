"""A stranger that floods one node. Each flood is bounded in time and data."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import ssl
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path

import grpc
import msgpack

from averaging.optim.exchange import CHUNKS, OPEN, REPORT
from averaging.optim.progress.claims import claim_of
from averaging.optim.progress.logic.reports import ProgressReport
from benchmarks.worker_channel import WorkerChannel
from benchmarks.workers.attacked_node import LARGE_KEY, LONG_KEY, RUN
from benchmarks.workers.expert_flood import experts
from swarm.core.errors import SwarmError
from swarm.core.identity import Identity
from swarm.core.ids import Contact, Key, open_run_id
from swarm.dht.logic.records import signed
from swarm.dht.service.overlay import FIND, STORE
from swarm.dht.service.wire import key_to_wire, record_to_wire
from swarm.net import certificate as tls
from swarm.net.calls import BATCH_CALLS_MAX, CALLS_NAME
from swarm.net.contacts import contact_to_wire
from swarm.testing.records import made_record
from swarm.wire import state_pb2
from swarm.wire.calls_pb2 import Call, CallBatch
from swarm.wire.dht_pb2 import DhtFindQuery, DhtFindRequest, DhtStoreRequest
from swarm.wire.peer_pb2 import Contact as WireContact

CONNECTIONS = 13  # of a flood of calls
IDLE_CONNECTIONS = 500
NETWORKS = 20
_STRANGE_HOST = 2  # in each network: members call from 127.0.0.1, and are other machines
_STREAMS = 256  # per connection, as many as gRPC takes
_CALL_S = 5.0
_RECORDS, _RECORD_BYTES = 10, 60_000  # of one request to store: as much as it may hold
_HALF_MESSAGE_BYTES = 48 << 10  # of an announced megabyte: fits the first window of a stream


class Target:
    """The node that is attacked."""

    def __init__(self, address: str) -> None:
        self.contact = Contact.parse(address)
        self.host, self.port = self.contact.addresses[0].host, self.contact.addresses[0].port

    @contextlib.asynccontextmanager
    async def channel(self, identity: Identity, port: int | None = None) -> AsyncIterator[grpc.aio.Channel]:
        """Connect with the certificate of an identity. `port`: of a server of `entrances`."""
        own = tls.client_certificate(identity)
        credentials = grpc.ssl_channel_credentials(
            tls.trust_anchor(self.contact.peer_id), own.key_pem, own.certificate_pem
        )
        options = [
            ("grpc.ssl_target_name_override", tls.tls_name(self.contact.peer_id)),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        async with grpc.aio.secure_channel(
            f"{self.host}:{port or self.port}", credentials, options=options
        ) as channel:
            async with asyncio.timeout(_CALL_S):
                await channel.channel_ready()
            yield channel

    async def connect(
        self,
        identity: Identity | None = None,
        own_host: str | None = None,
        context: ssl.SSLContext | None = None,
    ) -> asyncio.StreamWriter:
        """Connect by TCP, and with an identity or a `context` by TLS as gRPC does. `own_host`: an address of
        this machine to connect from.
        """
        if identity is not None:
            context = _context(identity)
        own = (own_host, 0) if own_host is not None else None
        _, writer = await asyncio.wait_for(
            asyncio.open_connection(self.host, self.port, ssl=context, local_addr=own), _CALL_S
        )
        return writer


@contextlib.asynccontextmanager
async def entrances(target: Target, networks: int) -> AsyncIterator[list[int]]:
    """Listen on as many ports. A connection to one of them reaches the target from a /24 network of its own,
    all of them loopback, because gRPC cannot choose its source address.
    """
    pumps: set[asyncio.Task[None]] = set()

    async def enter(own_host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(
            target.host, target.port, local_addr=(own_host, 0)
        )
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            pumps.add(asyncio.create_task(_pump(source, sink)))

    async with contextlib.AsyncExitStack() as stack:
        ports = []
        for number in range(networks):
            entering = functools.partial(enter, f"127.0.{number}.{_STRANGE_HOST}")
            server = await stack.enter_async_context(await asyncio.start_server(entering, target.host, 0))
            ports.append(server.sockets[0].getsockname()[1])
        try:
            yield ports
        finally:
            for pump in pumps:
                pump.cancel()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Forward bytes until one end closes."""
    try:
        while data := await source.read(64 << 10):
            sink.write(data)
            await sink.drain()
    except OSError:
        pass
    finally:
        sink.close()


Flood = Callable[
    [Target, float], Coroutine[None, None, int]
]  # returns how many requests or connections it made


def _context(identity: Identity | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if identity is None:
        return context
    own = tls.client_certificate(identity)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "certificate"
        path.write_bytes(own.key_pem + own.certificate_pem)
        context.load_cert_chain(path)
    return context


async def _repeat(seconds: float, one: Callable[[int], Awaitable[int]], side_by_side: int) -> int:
    """Repeat `one` for a time, `side_by_side` of them at once. Return the sum of what they return."""
    deadline_s, total = time.monotonic() + seconds, 0

    async def worker(number: int) -> None:
        nonlocal total
        while time.monotonic() < deadline_s:
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + _CALL_S):
                    made = await one(number)
                    total += made  # added after the await, because others add to it meanwhile
            except (grpc.aio.AioRpcError, SwarmError, OSError, TimeoutError):
                await asyncio.sleep(0.01)  # refused; tries again

    await asyncio.gather(*(worker(number) for number in range(side_by_side)))
    return total


def _sender(identity: Identity) -> WireContact:
    return contact_to_wire(Contact(identity.peer_id))


async def nothing(target: Target, seconds: float) -> int:
    """Wait, for comparison."""
    await asyncio.sleep(seconds)
    return 0


async def shared_finds(target: Target, seconds: float) -> int:
    """Ask 256 times in one message for a key of a megabyte, and read no answer."""

    async def one(_number: int) -> int:
        identity = Identity.generate()
        find = DhtFindRequest(sender=_sender(identity), queries=[DhtFindQuery(key=key_to_wire(LARGE_KEY))])
        raw = find.SerializeToString()
        calls = [Call(number=n, method=FIND.name, request=raw) for n in range(BATCH_CALLS_MAX)]
        async with target.channel(identity) as channel:
            stream = channel.stream_stream(CALLS_NAME)()
            await stream.write(CallBatch(calls=calls).SerializeToString())
            await asyncio.sleep(1.0)
            stream.cancel()
        return BATCH_CALLS_MAX

    return await _repeat(seconds, one, CONNECTIONS)


async def long_finds(target: Target, seconds: float) -> int:
    """Ask for a key of 4,096 entries and 63 others in one call."""
    queries = [DhtFindQuery(key=key_to_wire(LONG_KEY))]
    queries += [DhtFindQuery(key=key_to_wire(Key("public", str(number)))) for number in range(63)]
    return await _finds(target, seconds, queries)


async def many_queries(target: Target, seconds: float) -> int:
    """Ask 256 queries in one call, which exceeds the limit."""
    queries = [DhtFindQuery(key=key_to_wire(Key("public", str(number)))) for number in range(256)]
    return await _finds(target, seconds, queries)


async def _finds(target: Target, seconds: float, queries: list[DhtFindQuery]) -> int:
    async with contextlib.AsyncExitStack() as stack:
        calls = []
        for _ in range(CONNECTIONS):
            identity = Identity.generate()
            channel = await stack.enter_async_context(target.channel(identity))
            find = DhtFindRequest(sender=_sender(identity), queries=queries).SerializeToString()
            calls.append((channel.unary_unary(FIND.name), find))

        async def one(number: int) -> int:
            call, find = calls[number % CONNECTIONS]
            await call(find, timeout=_CALL_S)
            return 1

        return await _repeat(seconds, one, 4 * CONNECTIONS)


async def records(target: Target, seconds: float) -> int:
    """Store as much as fits, each request as a new identity."""

    async def one(_number: int) -> int:
        identity = Identity.generate()
        request = _store(identity, is_signed=True)
        async with target.channel(identity) as channel:
            await channel.unary_unary(STORE.name)(request, timeout=_CALL_S)
        return _RECORDS

    return await _repeat(seconds, one, CONNECTIONS)


async def forged_records(target: Target, seconds: float) -> int:
    """Store records with expensive values and without a signature."""
    async with contextlib.AsyncExitStack() as stack:
        calls = []
        for _ in range(CONNECTIONS):
            identity = Identity.generate()
            channel = await stack.enter_async_context(target.channel(identity))
            calls.append((channel.unary_unary(STORE.name), _store(identity, is_signed=False)))

        async def one(number: int) -> int:
            call, request = calls[number]
            await call(request, timeout=_CALL_S)
            return _RECORDS

        return await _repeat(seconds, one, CONNECTIONS)


def _store(identity: Identity, *, is_signed: bool) -> bytes:
    now_us = int(time.time() * 1e6)
    value = msgpack.packb(os.urandom(_RECORD_BYTES)) if is_signed else msgpack.packb([[]] * _RECORD_BYTES)
    found = []
    for _ in range(_RECORDS):
        key = Key("public", str(random.getrandbits(64)))
        record = made_record(key, value, identity.peer_id, now_us)
        found.append(record_to_wire(signed(record, identity) if is_signed else record))
    return DhtStoreRequest(sender=_sender(identity), records=found).SerializeToString()


async def half_sent(target: Target, seconds: float) -> int:
    """Begin to send 256 requests of a megabyte on each connection, and never end one."""

    async def one(_number: int) -> int:
        writer = await target.connect(Identity.generate())
        try:
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
            for stream in range(1, 2 * _STREAMS, 2):
                writer.write(_frame(1, 4, stream, _headers(STORE.name, target.host)))
                message = struct.pack(">BI", 0, 1 << 20) + bytes(_HALF_MESSAGE_BYTES)
                for start in range(0, len(message), 16 << 10):
                    writer.write(_frame(0, 0, stream, message[start : start + (16 << 10)]))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(writer.drain(), 0.5)
            await asyncio.sleep(3.0)
        finally:
            writer.transport.abort()
        return _STREAMS

    return await _repeat(seconds, one, CONNECTIONS)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _headers(path: str, host: str) -> bytes:
    """Return the headers of a gRPC call, each as a literal without an index (RFC 7541, 6.2.2)."""
    fields = [(":method", "POST"), (":scheme", "https"), (":path", path), (":authority", host)]
    fields += [("te", "trailers"), ("content-type", "application/grpc")]
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields
    )


async def empty_streams(target: Target, seconds: float) -> int:
    """Open 256 streams on each connection, send nothing, and open those that end again."""

    async def one(_number: int) -> int:
        async with target.channel(Identity.generate()) as channel:
            method = channel.stream_stream(CHUNKS.name)
            streams = [method() for _ in range(_STREAMS)]
            await asyncio.sleep(3.0)
            for stream in streams:
                stream.cancel()
        return _STREAMS

    return await _repeat(seconds, one, CONNECTIONS)


async def leases(target: Target, seconds: float) -> int:
    """Take places for downloads and read a chunk now and then."""

    async def one(_number: int) -> int:
        async with target.channel(Identity.generate()) as channel:
            request = state_pb2.OpenRequest(run=open_run_id(RUN)).SerializeToString()
            raw = await channel.unary_unary(OPEN.name)(request, timeout=_CALL_S)
            lease = state_pb2.OpenReply.FromString(raw).lease
            stream = channel.stream_stream(CHUNKS.name)()
            await stream.write(
                state_pb2.ChunksRequest(run=open_run_id(RUN), lease=lease, indices=[0]).SerializeToString()
            )
            await stream.read()
            await asyncio.sleep(3.0)
            stream.cancel()
        return 1

    return await _repeat(seconds, one, CONNECTIONS)


async def crowd(target: Target, seconds: float, identities: int, networks: int) -> int:
    """Take part in the run of the node as many identities, from addresses of as many networks."""
    async with entrances(target, networks) as ports:
        return await _crowd(target, seconds, identities, ports)


async def _crowd(target: Target, seconds: float, identities: int, ports: Sequence[int]) -> int:
    """Let each identity report a later epoch, store records of progress and of a state that it does not have,
    and take a place for a download.
    """
    run_id, made, now_s = open_run_id(RUN), [Identity.generate() for _ in range(identities)], time.time()
    claim = ProgressReport(epoch=1 << 20, samples=1 << 20, rate=1e6, at_s=now_s, since_s=now_s - 1.0)
    report = state_pb2.ReportRequest(run=run_id, claim=claim_of(claim), full=True).SerializeToString()
    lease = state_pb2.OpenRequest(run=run_id, reserve=True).SerializeToString()
    at = [f"/ip4/{target.host}/tcp/{target.port}/tls/http"]
    state = {"epoch": 1 << 20, "canonical": True, "digest": bytes(32), "addresses": at, "bytes": 1}
    values = {"progress": {**claim.encode(), "addresses": at}, "donors": state}

    async def one(_number: int) -> int:
        place = random.randrange(identities)
        identity, port = made[place], ports[place % len(ports)]
        records = []
        for name, value in values.items():
            record = made_record(
                Key(f"run.{run_id}", name),
                msgpack.packb(value),
                identity.peer_id,
                int(time.time() * 1e6),
                ttl_s=60.0,
                subkey=str(identity.peer_id),
            )
            records.append(record_to_wire(signed(record, identity)))
        store = DhtStoreRequest(sender=_sender(identity), records=records).SerializeToString()
        async with target.channel(identity, port) as channel:
            for method, request in ((STORE, store), (REPORT, report), (OPEN, lease)):
                with contextlib.suppress(grpc.aio.AioRpcError):  # a refusal ends only this call
                    await channel.unary_unary(method.name)(request, timeout=_CALL_S)
            await asyncio.sleep(0.5)
        return 1

    return await _repeat(seconds, one, min(identities, CONNECTIONS))


async def garbage(target: Target, seconds: float) -> int:
    """Connect, send random bytes, and begin again."""

    async def one(_number: int) -> int:
        writer = await target.connect()
        writer.write(os.urandom(16 << 10))
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.transport.abort()
        return 1

    return await _repeat(seconds, one, 4 * CONNECTIONS)


async def unnamed_tls(target: Target, seconds: float) -> int:
    """Begin TLS without a certificate, again and again."""
    context = _context(None)

    async def one(_number: int) -> int:
        try:
            writer = await target.connect(context=context)
        except ssl.SSLError:
            return 1
        writer.transport.abort()
        return 1

    return await _repeat(seconds, one, CONNECTIONS)


async def reconnects(target: Target, seconds: float) -> int:
    """Connect as one of 64 identities, ask one question, and begin again."""
    identities = [Identity.generate() for _ in range(64)]

    async def one(_number: int) -> int:
        identity = random.choice(identities)
        find = DhtFindRequest(sender=_sender(identity), queries=[DhtFindQuery(key=key_to_wire(LONG_KEY))])
        async with target.channel(identity) as channel:
            await channel.unary_unary(FIND.name)(find.SerializeToString(), timeout=_CALL_S)
        return 1

    return await _repeat(seconds, one, CONNECTIONS)


async def _hold(target: Target, seconds: float, identity: Identity | None, networks: int = 1) -> int:
    """Hold connections from addresses of as many /24 networks, all of them loopback."""
    deadline_s, writers = time.monotonic() + seconds, []
    try:
        for number in range(IDLE_CONNECTIONS):
            if time.monotonic() > deadline_s:
                break
            with contextlib.suppress(OSError, TimeoutError):
                writers.append(await target.connect(identity, f"127.0.{number % networks}.{_STRANGE_HOST}"))
        await asyncio.sleep(max(deadline_s - time.monotonic(), 0.5))
        return len(writers)
    finally:
        for writer in writers:
            writer.transport.abort()


async def silent_tcp(target: Target, seconds: float) -> int:
    """Open 500 connections and send nothing."""
    return await _hold(target, seconds, None)


async def idle_tls(target: Target, seconds: float) -> int:
    """Open 500 TLS connections and call nothing."""
    return await _hold(target, seconds, Identity.generate())


async def scattered_tls(target: Target, seconds: float) -> int:
    """Open 500 TLS connections from 20 networks, and call nothing."""
    return await _hold(target, seconds, Identity.generate(), NETWORKS)


FLOODS: dict[str, Flood] = {
    one.__name__: one
    for one in (
        nothing,
        records,
        shared_finds,
        long_finds,
        many_queries,
        half_sent,
        leases,
        forged_records,
        garbage,
        silent_tcp,
        idle_tls,
        scattered_tls,
        empty_streams,
        unnamed_tls,
        reconnects,
        experts,
    )
}


def main() -> None:
    channel = WorkerChannel()
    os.nice(19)  # an attacker has a machine of its own: here it gets what the members leave
    channel.send("ready")
    target = Target(channel.configuration["address"])
    while True:
        order = channel.receive()
        seconds, identities = order["seconds"], order["identities"]
        flood = (
            crowd(target, seconds, identities, order["networks"])
            if identities
            else FLOODS[order["do"]](target, seconds)
        )
        count = asyncio.run(flood)
        channel.send("flooded", count=count)


if __name__ == "__main__":
    main()
