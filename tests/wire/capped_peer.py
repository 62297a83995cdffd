"""A peer of test_links.py, in a process and a network of its own: one round, with a bandwidth cap or without."""

from __future__ import annotations

import json
import sys

import torch

import swarm
from swarm.net.throttle import Bandwidth
from swarm.node import NodeConfig


def main() -> None:
    settings = json.loads(sys.argv[1])
    bandwidth = Bandwidth(up_bytes_per_s=settings.get("up"), down_bytes_per_s=settings.get("down"))
    tensor = torch.ones(settings["elements"])
    bootstrap = [settings["bootstrap"]] if settings["bootstrap"] else []
    with swarm.Node(bootstrap, f"{settings['host']}:0", config=NodeConfig(bandwidth=bandwidth)) as node:
        print(node.addresses[0], flush=True)
        averager = swarm.Averager(node, [tensor], name="capped", target_group_size=3, min_group_size=3, codec="float32")
        print("ready", flush=True)
        sys.stdin.readline()
        result = averager.step(timeout_s=25.0)
        seconds = result.seconds.get("exchange", 0.0)
        told = {"reason": f"{result.reason}: {result.detail}" if result.failed else "", "exchange_s": seconds}
        print(json.dumps({**told, "received": result.bytes_received, "sent": result.bytes_sent}), flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
