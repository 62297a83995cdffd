"""Our servers of experts (ranks 0 to 3), and a trainer with a mixture layer over them."""

from __future__ import annotations

import torch

import swarm
from benchmarks.conversation import Conversation
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
    still,
)


def main() -> None:
    talk = Conversation()
    torch.set_num_threads(1)
    rank = talk.configuration["rank"]
    bootstrap = [] if rank == 0 else [talk.published("address")]
    with swarm.Node(bootstrap=bootstrap, listen="127.0.0.1:0") as node:
        if rank == 0:
            talk.publish("address", node.addresses[0])
        if rank < SERVERS:
            serve(talk, node, rank)
        else:
            train(talk, node)


def serve(talk: Conversation, node: swarm.Node, row: int) -> None:
    """Until the command is gone."""
    sample = (torch.zeros(1, WIDTH),)
    experts = {
        f"ffn.{row}.{column}": swarm.Expert(module_of(row, column), sample, still)
        for column in range(COLUMNS)
    }
    with swarm.ExpertServer(node, experts):
        talk.say("ready")
        while True:
            talk.hear()


def train(talk: Conversation, node: swarm.Node) -> None:
    """As told."""
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
    talk.say("ready")
    while True:
        order = talk.hear()
        if order["do"] == "steps":
            talk.say("done", **perform(layer, layer.gate.projection, order))


if __name__ == "__main__":
    main()
