"""gRPC calls to a node that takes them through a relay only, with TLS from end to end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest

from swarm.core.clock import SystemClock
from swarm.core.errors import NetworkError
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact
from swarm.core.standing import PeerStanding
from swarm.libp2p.circuits import Circuits
from swarm.libp2p.connection import PeerConnection
from swarm.libp2p.host import Host
from swarm.libp2p.logic.admission import HANDSHAKES_PER_PREFIX_MAX
from swarm.libp2p.logic.relaying import RelayLimits
from swarm.libp2p.relay import RelayService
from swarm.libp2p.tunnel import GRPC_PROTOCOL, PER_PEER_MAX, Tunnels
from swarm.net.hello import HELLO
from swarm.node import Node
from swarm.runtime.thread import NetworkThread
from swarm.wire.peer_pb2 import Hello
from tests.wire.libp2p_hosts import HERE, Hidden, run, tcp_server, until
from tests.wire.libp2p_hosts import Scene as HostScene

TIMEOUT_S = 20.0


@dataclass
class Scene:
    """A node that is reached through its tunnels, one that calls it, and relays on a thread of their own."""

    thread: NetworkThread
    callee: Node
    caller: Node
    hidden: Hidden
    tunnels: Tunnels  # of the callee
    calling: Tunnels
    relays: list[RelayService]

    def relay(self) -> Contact:
        """Start another relay."""

        async def start() -> RelayService:
            host = Host(Identity.generate())
            service = RelayService(host, RelayLimits(bytes_per_s=1e9), PeerStanding(), SystemClock())
            await host.start(HERE)
            return service

        self.relays.append(self.thread.run(start(), TIMEOUT_S))
        host = self.relays[-1].host
        return Contact(host.peer_id, tuple(host.announced))

    def offer(self, *relays: Contact) -> None:
        """Let the callee reserve at these relays, and wait until it has."""

        async def reserve() -> None:
            self.hidden.circuits.offer(relays)
            await self.hidden.until_held(len(relays))

        self.callee.network.run(reserve(), TIMEOUT_S)

    def endpoint(self, *relays: Contact) -> Address:
        """Return where the caller reaches the callee."""
        return self.caller.network.run(self.calling.endpoint(self.callee.peer_id, relays), TIMEOUT_S)

    def call(self, contact: Contact) -> None:
        """Make the caller introduce itself to this contact."""
        request = Hello(contact={"peer_id": self.caller.peer_id.to_bytes()})
        call = self.caller.channels.call(contact, HELLO, request, timeout_s=TIMEOUT_S)
        self.caller.network.run(call, TIMEOUT_S + 1.0)


@pytest.fixture
def scene() -> Iterator[Scene]:
    thread = NetworkThread()
    with Node(listen=f"{HERE}:0") as callee, Node(listen=None) as caller:

        async def join(node: Node) -> tuple[Hidden, Tunnels]:
            host = Host(node.identity)
            await host.start()
            hidden = Hidden(host)
            host.supervisor.spawn("reservations", hidden.circuits.run)
            return hidden, Tunnels(host, hidden.circuits)

        hidden, tunnels = callee.network.run(join(callee), TIMEOUT_S)
        calling_host, calling = caller.network.run(join(caller), TIMEOUT_S)
        tunnels.serve(callee.contact.addresses[0])
        made = Scene(thread, callee, caller, hidden, tunnels, calling, [])
        yield made
        for service in made.relays:
            thread.run(service.host.close(), TIMEOUT_S)
        callee.network.run(tunnels.close(), TIMEOUT_S)
        callee.network.run(hidden.host.close(), TIMEOUT_S)
        caller.network.run(calling.close(), TIMEOUT_S)
        caller.network.run(calling_host.host.close(), TIMEOUT_S)
    thread.stop()


def test_a_call_goes_through_the_relay_and_tls_holds_from_end_to_end(scene: Scene) -> None:
    relay = scene.relay()
    scene.offer(relay)
    address = scene.endpoint(relay)
    scene.call(Contact(scene.callee.peer_id, (address,)))
    assert scene.relays[0].relay.carried_bytes > 1000
    assert scene.caller.peer_id in {one.peer_id for one in scene.callee.peers()}
    assert {one.peer_id for one in scene.tunnels.served.values()} == {scene.caller.peer_id}
    somebody = Identity.generate().peer_id
    with pytest.raises(NetworkError):
        scene.call(Contact(somebody, (address,)))


def test_a_relay_that_dies_is_replaced_by_the_next_behind_the_same_port(scene: Scene) -> None:
    first, second = scene.relay(), scene.relay()
    scene.offer(first, second)
    contact = Contact(scene.callee.peer_id, (scene.endpoint(first, second),))
    scene.call(contact)
    scene.thread.run(scene.relays[0].host.close(), TIMEOUT_S)
    begun_s = time.monotonic()
    for _ in range(3):  # gRPC may see the end of the old connection in the first call
        try:
            scene.call(contact)
            break
        except NetworkError:
            continue
    else:
        pytest.fail(f"no call got through: {scene.calling.failure(scene.callee.peer_id)}")
    assert time.monotonic() - begun_s < 10.0
    assert scene.relays[1].relay.carried_bytes > 1000


async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


@contextlib.asynccontextmanager
async def served(hosts: HostScene) -> AsyncIterator[tuple[Tunnels, PeerConnection]]:
    """Serve tunnels to a server that says nothing, and connect another host to them."""
    callee, caller = await hosts.host(), await hosts.host()
    tunnels = Tunnels(callee, Circuits(callee, SystemClock()))
    async with tcp_server(say_nothing) as port:
        tunnels.serve(Address(HERE, port))
        yield tunnels, await caller.connect(callee.peer_id, callee.announced)


def test_tunnels_of_one_peer_beyond_the_limit_are_refused_and_it_is_named() -> None:
    async def test(hosts: HostScene) -> None:
        async with served(hosts) as (tunnels, connection):
            streams = [await connection.open(GRPC_PROTOCOL) for _ in range(PER_PEER_MAX + 1)]
            with pytest.raises(NetworkError, match="reset"):
                await streams[-1].read()
            assert "tunnels of a peer" in hosts.hosts[0].faults[-1].what
            assert len(tunnels.served) == PER_PEER_MAX

    run(test)


def test_tunnels_that_are_opened_at_once_are_limited_as_well() -> None:
    async def test(hosts: HostScene) -> None:
        async with served(hosts) as (tunnels, connection):
            count = PER_PEER_MAX + 4
            streams = await asyncio.gather(*[connection.open(GRPC_PROTOCOL) for _ in range(count)])
            reading = [asyncio.create_task(one.read()) for one in streams]
            await until(lambda: len(tunnels.served) + sum(one.done() for one in reading) == count)
            assert len(tunnels.served) == PER_PEER_MAX
            for stream in streams:  # their places are free again
                stream.close()
            ends = list(tunnels.served)
            await until(lambda: not tunnels.served)
            # gRPC may come to a call after its tunnel has ended. Tunnels over a direct connection count under
            # its network, as calls without a tunnel do
            assert {tunnels.place(end) for end in ends} == {"127.0.0.0/24"}
            await connection.open(GRPC_PROTOCOL)
            await until(lambda: len(tunnels.served) == 1)
            await asyncio.gather(*reading, return_exceptions=True)

    run(test)


def test_a_peer_has_one_port_and_close_ends_it_and_what_was_dialed_there() -> None:
    async def test(hosts: HostScene) -> None:
        host = await hosts.host(listens=False)
        tunnels = Tunnels(host, Circuits(host, SystemClock()))
        target, silent = Identity.generate().peer_id, Identity.generate().peer_id
        async with tcp_server(say_nothing) as port:
            relays = [Contact(silent, (Address(HERE, port),))]
            one, two = await asyncio.gather(*[tunnels.endpoint(target, relays) for _ in range(2)])
            assert one == two
            dialed = await asyncio.open_connection(one.host, one.port)
            await until(lambda: any(name.startswith("tunnel") for name in host.supervisor.running))
            await tunnels.close()
            await ended(*dialed)
            with pytest.raises(OSError):
                await asyncio.open_connection(one.host, one.port)
            again = await tunnels.endpoint(target, relays)
            await host.close()  # nothing that is dialed now is carried
            dialed = await asyncio.open_connection(again.host, again.port)
            await asyncio.sleep(0.1)
            await tunnels.close()
            await ended(*dialed)

    async def ended(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(5.0):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.transport.abort()

    run(test)


def test_a_peer_that_no_relay_reaches_is_a_network_error_with_a_reason(scene: Scene) -> None:
    relay = scene.relay()
    address = scene.endpoint(relay)
    with pytest.raises(NetworkError):
        scene.call(Contact(scene.callee.peer_id, (address,)))
    assert "NO_RESERVATION" in scene.calling.failure(scene.callee.peer_id)


def test_places_are_free_again_when_no_task_could_begin() -> None:
    """The supervisor refuses tasks beyond 10,000: what was counted for them is counted out."""

    async def test(hosts: HostScene) -> None:
        callee, caller = await hosts.host(), await hosts.host()
        connection = await caller.connect(callee.peer_id, callee.announced)
        await until(lambda: not any("handshake" in name for name in callee.supervisor.running))
        over = asyncio.Event()

        async def wait() -> None:
            await over.wait()

        for _ in range(10_000):
            callee.supervisor.spawn("busy", wait)
        async with asyncio.timeout(5.0):
            stream = await connection.open("/echo")
            with pytest.raises(NetworkError):
                await stream.read()
        for _ in range(HANDSHAKES_PER_PREFIX_MAX + 1):
            with pytest.raises(NetworkError):
                await (await hosts.host(listens=False)).connect(callee.peer_id, callee.announced)
        over.set()
        await until(lambda: len(callee.supervisor.running) < 10)
        late = await (await hosts.host(listens=False)).connect(callee.peer_id, callee.announced)
        stream = await late.open("/echo")
        await stream.write(b"hello")
        assert await stream.read() == b"hello"

    run(test)
