"""Our server of experts (rank 0), and callers of it."""

from __future__ import annotations

import torch

import swarm
from benchmarks.conversation import Conversation
from benchmarks.expert_load import WIDTH, answer, module_of, still


def main() -> None:
    talk = Conversation()
    if talk.configuration["rank"] == 0:
        serve(talk)
    else:
        call(talk)


def serve(talk: Conversation) -> None:
    """Until the command is gone."""
    experts = {
        f"{kind}.0": swarm.Expert(module_of(kind), (torch.zeros(1, width),), still)
        for kind, width in WIDTH.items()
    }
    with swarm.Node(listen="127.0.0.1:0") as node, swarm.ExpertServer(node, experts):
        talk.publish("address", node.addresses[0])
        talk.say("ready")
        while True:
            talk.hear()


def call(talk: Conversation) -> None:
    """As told."""
    with swarm.Node(bootstrap=[talk.published("address")], listen="127.0.0.1:0") as node:
        experts = {
            kind: swarm.RemoteExpert(node, f"{kind}.0", forward_timeout_s=60.0, backward_timeout_s=60.0)
            for kind in WIDTH
        }
        answer(talk, experts)


if __name__ == "__main__":
    main()
