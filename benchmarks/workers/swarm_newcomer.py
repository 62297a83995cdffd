"""A peer of a run that many newcomers join at once: a trainer that has reached epoch 8, or a newcomer."""

from __future__ import annotations

import select
import sys
import time
from collections import Counter
from typing import Any

import torch

import swarm
from benchmarks.worker_channel import WorkerChannel
from swarm.net import channels

LOAD_TIMEOUT_S = 120.0
FOUNDED_EPOCHS = 8
PARAMETERS = 1 << 18
TENSORS = 8
STEP_S = 0.05  # stands for forward and backward; most of the processor is left to the protocol


def main() -> None:
    channel = WorkerChannel()
    settings = channel.configuration
    torch.set_num_threads(1)
    torch.manual_seed(settings["rank"])
    parameters = [torch.nn.Parameter(torch.randn(PARAMETERS // TENSORS)) for _ in range(TENSORS)]
    inner = torch.optim.SGD(parameters, lr=1e-3)  # imports more of torch
    node_class, optimizer_class = swarm.Node, swarm.Optimizer  # imported when they are first used
    channel.send("imported")
    channel.receive()
    counted = _count()
    began_s, began_processor_s = time.monotonic(), time.process_time()
    bootstrap = [] if settings["rank"] == 0 else [channel.published("address")]
    with (
        node_class(bootstrap=bootstrap, listen="127.0.0.1:0") as node,
        optimizer_class(
            inner,
            node=node,
            run="benchmark",
            target_batch_size=settings["target"],
            batch_size_per_step=1,
        ) as optimizer,
    ):
        if settings["trains"]:
            while optimizer.epoch < FOUNDED_EPOCHS:
                _step(optimizer, parameters)
            channel.publish("address", node.addresses[0])
            channel.send("founded")
        else:
            loaded = optimizer.load_state_from_peers(timeout_s=LOAD_TIMEOUT_S)
            channel.send(
                "loaded",
                ok=loaded.loaded,
                reason=loaded.reason,
                seconds=time.monotonic() - began_s,
                donors=len(loaded.donors),
            )
        contributed = False
        while not select.select([sys.stdin], [], [], STEP_S)[0]:
            report = _step(optimizer, parameters)
            counted["failed rounds"] += report.rounds_failed
            if report.contributed and not contributed:
                contributed = True
                channel.send(
                    "contributed",
                    seconds=time.monotonic() - began_s,
                    processor_s=time.process_time() - began_processor_s,
                    counted=dict(counted),
                )
    channel.send("stopped")


def _count() -> Counter[str]:
    """Count the connections and calls that this process begins from now on."""
    counted: Counter[str] = Counter()
    for owner, name, kind in ((channels, "dial", "connections"), (channels.Channels, "call", "calls")):
        begin = getattr(owner, name)

        def counting(*given: Any, begin: Any = begin, kind: str = kind, **named: Any) -> Any:
            counted[kind] += 1
            return begin(*given, **named)

        setattr(owner, name, counting)
    return counted


def _step(optimizer: Any, parameters: list[torch.nn.Parameter]) -> Any:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return optimizer.step()


if __name__ == "__main__":
    main()
