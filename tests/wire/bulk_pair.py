"""A caller and a server with a bulk port, and somebody between them who changes what passes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from swarm.core.errors import SwarmError
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact, PeerId
from swarm.net.bulk_calls import BULK, MAGIC
from swarm.net.bulk_server import BulkServer
from swarm.net.bulk_socket import BulkSocket
from swarm.net.channels import IDLE_S, Channels, ConnectionLimits
from swarm.net.logic.sealing import HEADER_BYTES, TOKEN_BYTES, BulkSecret, FrameKind, sealed_bytes
from swarm.net.rpc import Handlers, Stream, StreamMethod
from swarm.net.server import CallLimits, Server
from swarm.net.throttle import Bandwidth, Throttle
from swarm.wire import peer_pb2

TALK = StreamMethod(name="/swarm.Test/Talk", message_bytes_max=1 << 20)
Direction = Literal["to callee", "to caller"]
Change = Callable[[Direction, int, bytes], list[bytes]]  # direction, number of the frame, frame -> frames


@dataclass
class BulkPair:
    """A caller, a server whose handler echoes, and the messages that the handler received."""

    channels: Channels
    caller: Identity
    server: Server
    handlers: Handlers
    contact: Contact
    throttles: tuple[Throttle, Throttle]  # of the caller, and of the server
    received: list[bytes] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)  # that ended the handler
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def bulk(self) -> BulkServer:
        assert self.server.bulk is not None
        return self.server.bulk

    def open(
        self, timeout_s: float | None = 10.0, method: StreamMethod = TALK
    ) -> AbstractAsyncContextManager[Stream]:
        return self.channels.open_stream(self.contact, method, timeout_s=timeout_s, connection=1)

    async def talk(self, *messages: bytes) -> list[bytes]:
        """Send messages, and return the answers."""
        answers = []
        async with self.open() as stream:
            for message in messages:
                await stream.send(message)
            await stream.finish()
            while (answer := await stream.receive()) is not None:
                answers.append(answer)
        return answers

    async def echo(self, stream: Stream) -> None:
        """The handler."""
        self.ended.clear()
        try:
            while (message := await stream.receive()) is not None:
                self.received.append(message)
                await stream.send(message)
        except BaseException as error:
            self.errors.append(error)
            raise
        finally:
            self.ended.set()

    def answer_with(self, change: Callable[[peer_pb2.BulkReply], None]) -> None:
        """Change the server's answers to requests for a token."""

        def give(caller: PeerId, request: peer_pb2.BulkRequest) -> peer_pb2.BulkReply:
            reply = self.bulk.give(caller, request)
            change(reply)
            return reply

        self.handlers.remove(BULK.name)
        self.handlers.direct(BULK, give)

    def ticket(self, caller: PeerId | None = None) -> peer_pb2.BulkReply:
        """Return a token and its secret, as `caller` would get them."""
        return self.bulk.give(caller or self.caller.peer_id, peer_pb2.BulkRequest())

    async def connected(self, reply: peer_pb2.BulkReply, source: str = "127.0.0.1") -> socket.socket:
        """Return a connection to the bulk port, on which the token was sent, as an attacker makes it."""
        one = await self.bare(source)
        token = BulkSecret(reply.secret, self.caller.peer_id, self.contact.peer_id).token
        await asyncio.get_running_loop().sock_sendall(one, MAGIC + token)
        return one

    async def bare(self, source: str = "127.0.0.1") -> socket.socket:
        """Return a connection to the bulk port on which nothing was sent."""
        one = socket.socket()
        one.setblocking(False)
        one.bind((source, 0))
        await asyncio.get_running_loop().sock_connect(one, ("127.0.0.1", self.bulk.port))
        return one

    async def proven(self, reply: peer_pb2.BulkReply) -> BulkSocket:
        """Return the caller's end of a connection, used without a `BulkCall`."""
        secret = BulkSecret(reply.secret, self.caller.peer_id, self.contact.peer_id)
        connection = BulkSocket(await self.connected(reply), secret, is_caller=True)
        await connection.send(FrameKind.PROOF, b"")
        assert await connection.receive() == (FrameKind.PROOF, b"")
        connection.next_stream()
        return connection


async def is_closed(one: socket.socket, within_s: float = 5.0) -> bool:
    """Return whether the other end closes this connection, whatever it sends before; close this end, too."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(within_s):
            while await loop.sock_recv(one, 4096):
                pass
    except TimeoutError:
        return False
    except OSError:
        return True
    finally:
        one.close()
    return True


@asynccontextmanager
async def bulk_pair(
    *,
    limits: CallLimits | None = None,
    bandwidth: Bandwidth | None = None,
    idle_s: float = IDLE_S,
) -> AsyncIterator[BulkPair]:
    """`bandwidth` and `idle_s` are those of the caller."""
    identity, caller, handlers = Identity.generate(), Identity.generate(), Handlers()
    throttles = Throttle(bandwidth or Bandwidth()), Throttle(Bandwidth())
    server = Server(limits=limits, throttle=throttles[1])
    port = await server.start(identity, handlers, "127.0.0.1", 0)
    channels = Channels(caller, throttle=throttles[0], limits=ConnectionLimits(idle_s=idle_s))
    contact = Contact(identity.peer_id, (Address("127.0.0.1", port),))
    pair = BulkPair(channels, caller, server, handlers, contact, throttles)
    handlers.stream(TALK, pair.echo)
    try:
        yield pair
    finally:
        await channels.close()
        await server.stop(0)


@asynccontextmanager
async def changed_on_the_way(pair: BulkPair, change: Change) -> AsyncIterator[None]:
    """Put somebody between caller and callee, who replaces each frame by those that `change` returns; none:
    it closes both connections. The frames of a direction are counted over all of its connections.
    """
    port = pair.bulk.port
    counts: dict[Direction, int] = {"to callee": 0, "to caller": 0}

    async def forward(
        direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            if direction == "to callee":
                writer.write(await reader.readexactly(len(MAGIC) + TOKEN_BYTES))
            while True:
                header = await reader.readexactly(HEADER_BYTES)
                frame = header + await reader.readexactly(sealed_bytes(header))
                frames = change(direction, counts[direction], frame)
                counts[direction] += 1
                if not frames:
                    return
                writer.write(b"".join(frames))
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            return
        finally:
            writer.close()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        callee_reader, callee_writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(forward("to callee", reader, callee_writer))
            tasks.create_task(forward("to caller", callee_reader, writer))

    listening = await asyncio.start_server(between, "127.0.0.1", 0)
    changed_port = listening.sockets[0].getsockname()[1]

    def divert(reply: peer_pb2.BulkReply) -> None:
        reply.port = changed_port

    pair.answer_with(divert)
    try:
        yield
    finally:
        listening.close()


async def outcome(work: Awaitable[object]) -> object:
    """Return what `work` returns, or the SwarmError that it raises."""
    try:
        return await work
    except SwarmError as error:
        return error


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds that no event announces. Raise TimeoutError after 10 s."""
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
