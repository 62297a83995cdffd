"""One of the four peers of the convergence section, for one training after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import swarm
from benchmarks.conversation import Conversation
from benchmarks.fourpeers import Begun, Data, Peer, RoundsFailed
from benchmarks.ways import WAYS, Scale


def main() -> None:
    talk = Conversation()
    settings = talk.configuration
    torch.set_num_threads(1)
    scale = Scale(**settings["scale"])
    data = Data(scale, None if settings["text"] is None else Path(settings["text"]))
    bootstrap = [] if settings["rank"] == 0 else [talk.published("address")]
    with swarm.Node(bootstrap=bootstrap, listen="127.0.0.1:0") as node:
        if settings["rank"] == 0:
            talk.publish("address", node.addresses[0])
        talk.say("ready")
        while True:  # until the command ends this process
            order = talk.hear()
            begun: dict[str, Any] = torch.load(order["begun"], weights_only=True)
            way = next(way for way in WAYS if way.name == order["way"])

            def ready() -> None:
                talk.say("open")
                talk.hear()

            try:
                course = Peer(node, settings["rank"], way, order["run"]).train(
                    data, Begun(**begun), scale, order["seed"], ready
                )
            except RoundsFailed as failure:
                talk.say("trained", failed=str(failure))
            else:
                talk.say(
                    "trained", failed="", rounds=course.rounds, missing=course.missing, curve=course.curve
                )


if __name__ == "__main__":
    main()
