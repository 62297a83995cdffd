"""Floods of one connection: the peer that is flooded continues with everything else, and holds little of
it.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import msgpack
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from averaging.optim.exchange import CHUNKS, RunExchange
from swarm.core.identity import Identity, verify
from swarm.core.ids import Contact, Key, PeerId
from swarm.dht.logic.records import FORGED, Record, signed
from swarm.dht.service.overlay import FIND, STORE
from swarm.dht.service.wire import key_to_wire, record_to_wire
from swarm.net import certificate as tls
from swarm.net import connections, room
from swarm.net.calls import CALLS_NAME
from swarm.net.contacts import contact_to_wire
from swarm.node import Node
from swarm.testing import records
from swarm.wire.calls_pb2 import Call, CallBatch
from swarm.wire.dht_pb2 import DhtFindQuery, DhtFindRequest, DhtStoreReply, DhtStoreRequest
from tests.wire.event_loop import run_on_loop

# of the loop's own processor time between two turns; a whole second was taken before
TURN_CPU_S_MAX = 0.1
MEMORY_BYTES_MAX = 64 << 20
KEY = Key("public", "large")
ATTACKER = Identity.generate()
SENDER = contact_to_wire(Contact(ATTACKER.peer_id))
UNKNOWN_EXTENSION = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), b"\x05\x00")


@contextmanager
def turns_of(node: Node) -> Iterator[list[float]]:
    """Collect the processor time that the network thread takes between two turns of its event loop. Objects
    that other tests have left are kept from the garbage collector, which runs in any thread, as the commands
    do with those of their start (`swarm.runtime.collector`).
    """
    took_s: list[float] = []
    gc.collect()
    gc.freeze()

    async def watch() -> None:
        while True:
            before_s = time.thread_time()
            await asyncio.sleep(0)
            took_s.append(time.thread_time() - before_s)

    future = node.network.submit(watch())
    try:
        yield took_s
    finally:
        node.network.run(asyncio.sleep(0.01), 10.0)  # the last turn is in the list, too
        future.cancel()
        gc.unfreeze()


def memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def fill(node: Node, key: Key, entries: int, value: bytes) -> None:
    """Store records under a key as if they had been validated."""
    records.fill(node.dht.service.storage, key, entries, value, node.dht.service.overlay.now_us)


@asynccontextmanager
async def channel_to(
    node: Node, *, named: bool = True, identity: Identity = ATTACKER
) -> AsyncIterator[grpc.aio.Channel]:
    """Connect as an attacker would: with a certificate that names it, or nobody."""
    own = tls.client_certificate(identity)
    if not named:
        key = ec.generate_private_key(ec.SECP256R1())
        own = tls.as_pem(key, tls.courtesy_signed(key.public_key(), UNKNOWN_EXTENSION))
    credentials = grpc.ssl_channel_credentials(
        tls.trust_anchor(node.peer_id), own.key_pem, own.certificate_pem
    )
    options = [
        ("grpc.ssl_target_name_override", tls.tls_name(node.peer_id)),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    address = node.contact.addresses[0]
    async with grpc.aio.secure_channel(f"127.0.0.1:{address.port}", credentials, options=options) as channel:
        await channel.channel_ready()
        yield channel


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    run_on_loop(scenario(), 60)


@pytest.fixture
def node() -> Iterator[Node]:
    with Node(listen="127.0.0.1:0") as one:
        one.service(RunExchange.from_node)
        yield one


async def is_served(node: Node) -> None:
    """Make an honest call while the flood continues."""

    def call() -> None:
        with Node(listen=None, bootstrap=node.addresses) as honest:
            assert honest.wait_joined(20.0)

    await asyncio.get_running_loop().run_in_executor(None, call)


def test_a_message_of_256_finds_for_a_large_key_neither_freezes_a_peer_nor_fills_its_memory(
    node: Node,
) -> None:
    node.network.run(fill(node, KEY, 15, bytes(64 << 10)), 10)
    find = DhtFindRequest(sender=SENDER, queries=[DhtFindQuery(key=key_to_wire(KEY))]).SerializeToString()
    calls = [Call(number=number, method=FIND.name, request=find) for number in range(256)]

    async def scenario() -> None:
        async with channel_to(node) as channel:
            before_bytes = memory_bytes()
            with turns_of(node) as took_s:
                stream = channel.stream_stream(CALLS_NAME)()
                await stream.write(CallBatch(calls=calls).SerializeToString())
                await asyncio.sleep(1.0)  # nothing is read
                await is_served(node)
            # what the caller's own transport takes without being read is counted, too
            assert memory_bytes() - before_bytes < MEMORY_BYTES_MAX
            assert max(took_s) < TURN_CPU_S_MAX
            stream.cancel()

    run(scenario)


def test_finds_for_a_key_of_many_entries_do_not_freeze_a_peer(node: Node) -> None:
    node.network.run(fill(node, KEY, 4096, b""), 10)
    queries = [DhtFindQuery(key=key_to_wire(KEY))] + [
        DhtFindQuery(key=key_to_wire(Key("public", str(number)))) for number in range(63)
    ]
    find = DhtFindRequest(sender=SENDER, queries=queries).SerializeToString()
    twice = DhtFindRequest(sender=SENDER, queries=[queries[0]] * 2).SerializeToString()

    async def scenario() -> None:
        async with channel_to(node) as channel:
            with turns_of(node) as took_s:
                calls = [channel.unary_unary(FIND.name)(find, timeout=30) for _ in range(8)]
                await is_served(node)
                for call in calls:
                    await call
            assert max(took_s) < TURN_CPU_S_MAX
            with pytest.raises(grpc.aio.AioRpcError, match="the same query twice"):
                await channel.unary_unary(FIND.name)(twice, timeout=10)

    run(scenario)


@pytest.mark.parametrize("is_signed", [False, True], ids=["forged", "signed"])
def test_records_with_expensive_values_do_not_freeze_a_peer(node: Node, is_signed: bool) -> None:
    now_us = int(time.time() * 1e6)
    value = msgpack.packb([[]] * 65_000)

    def record_of(number: int) -> Record:
        key = Key("public", str(number))
        record = records.made_record(key, value, ATTACKER.peer_id, now_us, ttl_s=60.0)
        return signed(record, ATTACKER) if is_signed else record

    request = DhtStoreRequest(sender=SENDER, records=[record_to_wire(record_of(n)) for n in range(10)])

    async def scenario() -> None:
        async with channel_to(node) as channel:
            with turns_of(node) as took_s:
                raw = await channel.unary_unary(STORE.name)(request.SerializeToString(), timeout=30)
            assert max(took_s) < TURN_CPU_S_MAX
        refusals = DhtStoreReply.FromString(raw).refusals
        if is_signed:
            assert set(refusals) == {""}
        else:
            assert list(refusals) == [FORGED] * 8 + ["its sender forges records"] * 2

    run(scenario)


def test_a_caller_without_a_name_is_refused_before_its_request_is_read(node: Node) -> None:
    async def scenario() -> None:
        async with channel_to(node, named=False) as channel:
            for method in (STORE.name, CHUNKS.name, CALLS_NAME):
                call = channel.stream_stream(method)()  # sends nothing
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED

    run(scenario)


def test_a_request_that_does_not_arrive_ends_when_others_wait(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "READ_S_WHEN_OTHERS_WAIT", 0.2)

    async def scenario() -> None:
        async with channel_to(node) as channel:
            waiting = [channel.stream_stream(STORE.name)() for _ in range(room.READS_MAX)]
            await waiting[-1].wait_for_connection()
            request = DhtStoreRequest(sender=SENDER).SerializeToString()
            await channel.unary_unary(STORE.name)(request, timeout=30)
            assert await waiting[0].code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(scenario)


def test_connections_without_a_call_take_little_memory_and_lose_it_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "UNKNOWN_GRACE_S", 0.1)
    idle_max = connections.UNKNOWN_PER_PREFIX_MAX

    async def scenario() -> None:
        address, before_bytes = node.contact.addresses[0], memory_bytes()
        held = [await asyncio.open_connection("127.0.0.1", address.port) for _ in range(4 * idle_max)]
        try:
            ends = [asyncio.create_task(reader.read()) for reader, _ in held]
            ended = 0
            async with asyncio.timeout(12):  # gRPC itself gives up a handshake after 20 s
                while ended < 3 * idle_max:  # the node closes them
                    await asyncio.wait(
                        [end for end in ends if not end.done()], return_when=asyncio.FIRST_COMPLETED
                    )
                    ended = sum(end.done() for end in ends)
            assert memory_bytes() - before_bytes < len(held) * (64 << 10)
            await is_served(node)
            assert not all(end.done() for end in ends)
        finally:
            for _, writer in held:
                writer.transport.abort()
            await asyncio.gather(*ends, return_exceptions=True)

    run(scenario)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many connections of strangers a node answers that is created after this."""
    monkeypatch.setattr(connections, "ARRIVALS_MAX", 4)
    monkeypatch.setattr(connections, "ARRIVALS_PER_S", 0.0)
    return 4


def test_connections_beyond_what_a_network_may_make_cost_one_check_each_and_are_closed(
    answered: int, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members of the same network are served meanwhile, each as often as it connects."""
    refused = 2 * answered
    member = Identity.generate()
    node.standing.add_members("run", [member.peer_id])
    checks: list[object] = []
    reads: list[object] = []
    place = room.RequestReads.place

    def checked(*of: Any) -> bool:
        checks.append(of)
        return verify(*of)

    def placed(places: room.RequestReads, peer: PeerId) -> AbstractAsyncContextManager[None]:
        reads.append(peer)
        return place(places, peer)

    monkeypatch.setattr(tls, "verify", checked)
    monkeypatch.setattr(room.RequestReads, "place", placed)
    request = DhtStoreRequest(sender=SENDER).SerializeToString()

    async def codes(identity: Identity, calls: int) -> list[grpc.StatusCode]:
        """Make calls on a connection, and wait until it is closed if they were refused."""
        async with channel_to(node, identity=identity) as channel:
            made = [channel.unary_unary(STORE.name)(request, timeout=10) for _ in range(calls)]
            found = [await one.code() for one in made]
            if grpc.StatusCode.UNAVAILABLE in found:
                async with asyncio.timeout(10):
                    await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
            return found

    async def scenario() -> None:
        strangers = [Identity.generate() for _ in range(answered + refused)]
        found = [await codes(one, 3) for one in strangers]
        served = [one for one in found if grpc.StatusCode.UNAVAILABLE not in one]
        assert len(served) == answered
        assert found == [*served, *[[grpc.StatusCode.UNAVAILABLE] * 3] * refused]
        assert (len(checks), len(reads)) == (answered + refused, 3 * answered)
        for _ in range(answered + 1):
            assert grpc.StatusCode.UNAVAILABLE not in await codes(member, 1)

    run(scenario)
