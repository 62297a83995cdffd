"""A peer that sends bytes to another one on a stream of its own connection, or takes them: the bulk path, or
gRPC alone.
"""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.worker_channel import WorkerChannel
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact, PeerId
from swarm.net import bulk_calls
from swarm.net.channels import Channels
from swarm.net.rpc import Handlers, Stream, StreamMethod
from swarm.net.server import Server
from swarm.runtime.thread import new_event_loop

PUSH = StreamMethod(name="/swarm.Benchmark/Push")
_TIMEOUT_S = 60.0


def main() -> None:
    channel = WorkerChannel()
    settings = channel.configuration
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_send(channel, settings) if settings["rank"] else _take(channel))


async def _take(channel: WorkerChannel) -> None:
    """Take what the other peer sends, until the orders end."""
    identity, handlers, server = Identity.generate(), Handlers(), Server()

    async def take(stream: Stream) -> None:
        while await stream.receive() is not None:
            pass

    handlers.stream(PUSH, take)
    port = await server.start(identity, handlers, "127.0.0.1", 0)
    channel.publish("taker", f"{identity.peer_id} {port}")
    channel.send("ready")
    await asyncio.to_thread(channel.receive)  # none comes; it ends this process with the command


async def _send(channel: WorkerChannel, settings: dict[str, Any]) -> None:
    """Send the messages that each order asks for."""
    if not settings["bulk"]:
        bulk_calls.IS_SUPPORTED = False
    peer, port = channel.published("taker").split()
    contact = Contact(PeerId.parse(peer), (Address("127.0.0.1", int(port)),))
    channels = Channels(Identity.generate())
    message = bytes(settings["message_bytes"])
    channel.send("ready")
    while True:
        order = await asyncio.to_thread(channel.receive)
        async with channels.open_stream(contact, PUSH, timeout_s=_TIMEOUT_S, connection=1) as stream:
            for _ in range(order["messages"]):
                await stream.send(message)
            await stream.finish()
            while await stream.receive() is not None:
                pass
        is_bulk = channels.connection_to(contact.peer_id, 1) is None
        channel.send("sent", is_bulk=is_bulk)


if __name__ == "__main__":
    main()
