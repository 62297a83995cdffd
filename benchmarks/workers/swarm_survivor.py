"""A trainer of which others may be killed: it says when each of its epochs ended."""

from __future__ import annotations

import select
import sys
import time

import torch

import swarm
from benchmarks.worker_channel import WorkerChannel

STEP_S = 0.05  # stands for forward and backward
FOUNDED_EPOCHS = 2  # of the most senior peer, alone
PARAMETERS = 1 << 12


def main() -> None:
    channel = WorkerChannel()
    settings = channel.configuration
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(PARAMETERS))
    bootstrap = [] if settings["rank"] == 0 else [channel.published("address")]
    with (
        swarm.Node(bootstrap=bootstrap, listen="127.0.0.1:0") as node,
        swarm.Optimizer(
            torch.optim.SGD([parameter], lr=1e-3),
            node=node,
            run="benchmark",
            target_batch_size=settings["target"],
            batch_size_per_step=1,
        ) as optimizer,
    ):
        while not select.select([sys.stdin], [], [], STEP_S)[0]:
            parameter.grad = torch.full_like(parameter, float(settings["rank"]))
            report = optimizer.step()
            if report.stepped or report.resynchronised is not None:
                members = len(report.round.peers) if report.round is not None else 1
                epoch, digest = optimizer.state_digest()
                channel.send("epoch", epoch=epoch, at_s=time.monotonic(), members=members, digest=digest)
            if settings["rank"] == 0 and report.stepped and optimizer.epoch == FOUNDED_EPOCHS:
                channel.publish("address", node.addresses[0])
    channel.send("stopped")


if __name__ == "__main__":
    main()
