"""The server of experts of swarm (rank 0), and callers of it."""

from __future__ import annotations

import torch

import swarm
from benchmarks.expert_load import WIDTH, module_of, serve_orders, zero_rate_sgd
from benchmarks.worker_channel import WorkerChannel


def main() -> None:
    channel = WorkerChannel()
    if channel.configuration["rank"] == 0:
        serve(channel)
    else:
        call(channel)


def serve(channel: WorkerChannel) -> None:
    """Serve until the command has ended."""
    experts = {
        f"{kind}.0": swarm.Expert(module_of(kind), (torch.zeros(1, width),), zero_rate_sgd)
        for kind, width in WIDTH.items()
    }
    with swarm.Node(listen="127.0.0.1:0") as node, swarm.ExpertServer(node, experts):
        channel.publish("address", node.addresses[0])
        channel.send("ready")
        while True:
            channel.receive()


def call(channel: WorkerChannel) -> None:
    """Make calls as the command orders."""
    with swarm.Node(bootstrap=[channel.published("address")], listen="127.0.0.1:0") as node:
        experts = {
            kind: swarm.RemoteExpert(node, f"{kind}.0", forward_timeout_s=60.0, backward_timeout_s=60.0)
            for kind in WIDTH
        }
        serve_orders(channel, experts)


if __name__ == "__main__":
    main()
