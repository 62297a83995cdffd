"""A peer of test_links.py, in a process and a network of its own: rounds and streams, with a bandwidth cap or
without.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import swarm
from swarm.core.ids import Contact
from swarm.net.rpc import Stream, StreamMethod
from swarm.net.throttle import Bandwidth
from swarm.node import Node, NodeConfig

POUR = StreamMethod(name="/test.Capped/Pour")
# some thirty a second at the lowest cap: a window of two seconds counts them to a few per cent
MESSAGE_BYTES = 16_000


async def take(stream: Stream) -> None:
    """Takes what comes, as fast as it may."""
    while await stream.receive() is not None:
        continue


async def pour(node: Node, target: str) -> None:
    """Sends as fast as it may, until cancelled."""
    async with node.channels.open_stream(Contact.parse(target), POUR, timeout_s=None, connection=1) as stream:
        while True:
            await stream.send(bytes(MESSAGE_BYTES))


def main() -> None:
    settings = json.loads(sys.argv[1])
    bandwidth = Bandwidth(up_bytes_per_s=settings.get("up"), down_bytes_per_s=settings.get("down"))
    tensor = torch.ones(settings["elements"])
    bootstrap = [settings["bootstrap"]] if settings["bootstrap"] else []
    with swarm.Node(bootstrap, f"{settings['host']}:0", config=NodeConfig(bandwidth=bandwidth)) as node:
        node.handlers.stream(POUR, take)
        print(node.addresses[0], flush=True)
        averager = swarm.Averager(
            node, [tensor], name="capped", target_group_size=3, min_group_size=3, codec="float32"
        )
        print("ready", flush=True)
        pouring: list[Any] = []
        for line in sys.stdin:
            if line == "round\n":
                result = averager.step(timeout_s=25.0)
                told = {
                    "reason": f"{result.reason}: {result.detail}" if result.failed else "",
                    "exchange_s": result.seconds.get("exchange", 0.0),
                    "received": result.bytes_received,
                    "sent": result.bytes_sent,
                }
                print(json.dumps(told), flush=True)
            elif line == "stop\n":
                for future in pouring:
                    future.cancel()
                pouring = []
            else:
                pouring = [node.network.submit(pour(node, target)) for target in line.split()]


if __name__ == "__main__":
    main()
