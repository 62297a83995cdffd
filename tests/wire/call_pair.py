"""A server and a caller of one method over real sockets, for tests of calls and of the connections under
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact, PeerId
from swarm.net.channels import Channels
from swarm.net.rpc import Handlers, Method
from swarm.net.server import Server
from swarm.wire import peer_pb2
from tests.wire.event_loop import run_on_loop

ECHO = Method(
    name="/swarm.Test/Echo",
    request=peer_pb2.Hello,
    reply=peer_pb2.Hello,
    request_bytes_max=1000,
    reply_bytes_max=2000,
)


@dataclass
class Pair:
    """A server and a caller."""

    handlers: Handlers
    server: Server
    channels: Channels
    contact: Contact

    async def echo(
        self, agent: str, method: Method[peer_pb2.Hello, peer_pb2.Hello] = ECHO, timeout_s: float = 5.0
    ) -> str:
        return (
            await self.channels.call(self.contact, method, peer_pb2.Hello(agent=agent), timeout_s=timeout_s)
        ).agent


@asynccontextmanager
async def pair(server: Server | None = None, **limits: Any) -> AsyncIterator[Pair]:
    identity, handlers, server = Identity.generate(), Handlers(), server or Server()
    port = await server.start(identity, handlers, "127.0.0.1", 0)
    channels = Channels(Identity.generate(), **limits)
    try:
        yield Pair(handlers, server, channels, Contact(identity.peer_id, (Address("127.0.0.1", port),)))
    finally:
        await channels.close()
        await server.stop(0)


async def echo(peer_id: PeerId, request: peer_pb2.Hello) -> peer_pb2.Hello:
    return request


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - a connection's state has no event
        await asyncio.sleep(0.01)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    run_on_loop(scenario(), 30)
