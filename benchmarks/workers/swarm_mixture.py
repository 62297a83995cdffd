"""Servers of experts of swarm (ranks 0 to 3), and a trainer with a mixture layer over them."""

from __future__ import annotations

import torch

import swarm
from benchmarks.mixture_load import (
    COLUMNS,
    K_BEST,
    ROWS,
    SERVERS,
    TIMEOUT_S,
    WIDTH,
    module_of,
    perform,
    set_gate,
    zero_rate_sgd,
)
from benchmarks.worker_channel import WorkerChannel


def main() -> None:
    channel = WorkerChannel()
    torch.set_num_threads(1)
    rank = channel.configuration["rank"]
    bootstrap = [] if rank == 0 else [channel.published("address")]
    with swarm.Node(bootstrap=bootstrap, listen="127.0.0.1:0") as node:
        if rank == 0:
            channel.publish("address", node.addresses[0])
        if rank < SERVERS:
            serve(channel, node, rank)
        else:
            train(channel, node)


def serve(channel: WorkerChannel, node: swarm.Node, row: int) -> None:
    """Serve until the command has ended."""
    sample = (torch.zeros(1, WIDTH),)
    experts = {
        f"ffn.{row}.{column}": swarm.Expert(module_of(row, column), sample, zero_rate_sgd)
        for column in range(COLUMNS)
    }
    with swarm.ExpertServer(node, experts):
        channel.send("ready")
        while True:
            channel.receive()


def train(channel: WorkerChannel, node: swarm.Node) -> None:
    """Make steps as the command orders."""
    layer = swarm.RemoteMixtureOfExperts(
        node,
        WIDTH,
        grid=f"ffn.[0:{ROWS}].[0:{COLUMNS}]",
        k_best=K_BEST,
        k_min=K_BEST,
        backward_k_min=K_BEST,
        forward_timeout_s=TIMEOUT_S,
    )
    set_gate(layer.gate.projection)
    channel.send("ready")
    while True:
        order = channel.receive()
        if order["do"] == "steps":
            channel.send("done", **perform(layer, layer.gate.projection, order))


if __name__ == "__main__":
    main()
