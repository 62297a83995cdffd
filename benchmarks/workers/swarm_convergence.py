"""One of the four peers of the convergence section, which trains as often as the command orders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import swarm
from benchmarks.four_peers import Data, Peer, RoundsFailed, StartingPoint
from benchmarks.training_setups import SETUPS, Scale
from benchmarks.worker_channel import WorkerChannel


def main() -> None:
    channel = WorkerChannel()
    settings = channel.configuration
    torch.set_num_threads(1)
    scale = Scale(**settings["scale"])
    data = Data(scale, None if settings["text"] is None else Path(settings["text"]))
    bootstrap = [] if settings["rank"] == 0 else [channel.published("address")]
    with swarm.Node(bootstrap=bootstrap, listen="127.0.0.1:0") as node:
        if settings["rank"] == 0:
            channel.publish("address", node.addresses[0])
        channel.send("ready")
        while True:  # until the command ends this process
            order = channel.receive()
            start: dict[str, Any] = torch.load(order["start"], weights_only=True)
            setup = next(setup for setup in SETUPS if setup.name == order["setup"])

            def ready() -> None:
                channel.send("open")
                channel.receive()

            try:
                history = Peer(node, settings["rank"], setup, order["run"]).train(
                    data, StartingPoint(**start), scale, order["seed"], ready
                )
            except RoundsFailed as failure:
                channel.send("trained", failed=str(failure))
            else:
                channel.send(
                    "trained", failed="", rounds=history.rounds, missing=history.missing, curve=history.curve
                )


if __name__ == "__main__":
    main()
