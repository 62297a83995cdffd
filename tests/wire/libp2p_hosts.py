"""Hosts of libp2p on loopback, for tests: relays, hidden peers and callers on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from swarm.core.clock import SystemClock
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact
from swarm.core.standing import PeerStanding
from swarm.libp2p.basics import serve_basics
from swarm.libp2p.circuits import Circuits
from swarm.libp2p.connection import MuxedStream, PeerConnection
from swarm.libp2p.host import Host
from swarm.libp2p.logic.relaying import RelayLimits
from swarm.libp2p.relay import RelayService
from tests.wire.event_loop import run_on_loop

HERE = "127.0.0.1"
TEST_S_MAX = 60.0


def run(test: Callable[[Scene], Awaitable[None]]) -> None:
    """Run a test on an event loop of its own, and close its hosts."""

    async def bounded() -> None:
        scene = Scene()
        async with asyncio.timeout(TEST_S_MAX):
            try:
                await test(scene)
            finally:
                for host in scene.hosts:
                    await host.close()

    run_on_loop(bounded())


async def echo(stream: MuxedStream) -> None:
    """Send back what arrives, until the peer has finished."""
    while data := await stream.read():
        await stream.write(data)


async def echoed(connection: PeerConnection, data: bytes) -> bytes:
    """Send bytes to `/echo` of a peer, and return what comes back."""
    stream = await connection.open("/echo")
    back = bytearray()

    async def read() -> None:
        while part := await stream.read():
            back.extend(part)

    async with asyncio.TaskGroup() as group:
        group.create_task(read())
        await stream.write(data)
        stream.finish()
    return bytes(back)


class Hidden:
    """A peer that listens nowhere and keeps reservations. It echoes `/echo`."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.peer_id = host.peer_id
        self.ended: list[PeerConnection] = []  # that have ended
        host.at_ended.append(self.ended.append)
        self.changed = asyncio.Event()
        self.circuits = Circuits(host, SystemClock(), self.changed.set)

    async def until_held(self, count: int) -> None:
        """Wait until it has this many reservations."""
        while len(self.circuits.held) != count:
            self.changed.clear()
            await self.changed.wait()


class Scene:
    """The hosts of a test."""

    def __init__(self) -> None:
        self.hosts: list[Host] = []

    async def host(self, *, listens: bool = True) -> Host:
        """Return a host that answers identify and ping, and echoes `/echo`."""
        host = Host(Identity.generate())
        self.hosts.append(host)
        serve_basics(host, "test/1")
        host.handle("/echo", echo)
        await host.start(HERE if listens else None)
        return host

    async def relay(self, **limits: float) -> tuple[Contact, RelayService]:
        """Return a relay, and how to reach it."""
        host = await self.host()
        service = RelayService(host, RelayLimits(**limits), PeerStanding(), SystemClock())
        return contact_of(host), service

    async def hidden(self, *relays: Contact) -> Hidden:
        """Return a hidden peer that has a reservation at each of these relays."""
        peer = Hidden(await self.host(listens=False))
        peer.host.supervisor.spawn("reservations", peer.circuits.run)
        peer.circuits.offer(relays)
        await peer.until_held(min(len(relays), 2))
        return peer

    async def caller(self) -> Circuits:
        """Return the circuits of a peer that listens nowhere."""
        return Circuits(await self.host(listens=False), SystemClock())


async def until(holds: Callable[[], bool]) -> None:
    """Wait until this holds. Raises AssertionError when it does not within 10 s."""
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("what was waited for has not come")


def contact_of(host: Host) -> Contact:
    """Return how to reach a host that listens."""
    assert host.listening is not None
    return Contact(host.peer_id, (host.listening,))


@asynccontextmanager
async def tcp_server(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """Listen with bare sockets, and yield the port."""
    writers: list[asyncio.StreamWriter] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not server.is_serving():
            writer.transport.abort()  # it was accepted at the end
            return
        writers.append(writer)
        await talk(reader, writer)

    server = await asyncio.start_server(connected, HERE, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await server.wait_closed()


@asynccontextmanager
async def frozen_on(relay: Contact) -> AsyncIterator[tuple[Contact, asyncio.Event]]:
    """Yield another way to a relay, and an event that stops all bytes on it: its connections stay open."""
    freeze = asyncio.Event()
    forever = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            if freeze.is_set():
                await forever.wait()
            writer.write(data)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_there = await asyncio.open_connection(relay.addresses[0].host, relay.addresses[0].port)
        writers.append(to_there)
        with contextlib.suppress(OSError):
            async with asyncio.TaskGroup() as group:
                group.create_task(forward(reader, to_there))
                group.create_task(forward(there, writer))

    async with tcp_server(talk) as port:
        yield Contact(relay.peer_id, (Address(HERE, port),)), freeze
    forever.set()
    for writer in writers:
        writer.transport.abort()
