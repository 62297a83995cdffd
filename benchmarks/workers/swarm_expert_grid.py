"""Servers of many experts or of the stages of a pipeline, and the trainers that call them.

A server's experts compute nothing ("nop"), a feed-forward layer ("ffn"), or are stages that take time but no
processor, like one on a GPU ("stage").
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import swarm
from benchmarks.mixture_load import zero_rate_sgd
from benchmarks.worker_channel import WorkerChannel, wait_until
from swarm.runtime.collector import keep_present_objects

WIDTH = 256
TIMEOUT_S = 60.0


class Stage(torch.nn.Module):
    """Returns its input after a fixed time for each sample. A backward pass computes it again, so it takes as
    long.
    """

    def __init__(self, sample_s: float) -> None:
        super().__init__()
        self.sample_s, self.weight = sample_s, torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.sample_s * len(x))
        return x * self.weight


def main() -> None:
    channel = WorkerChannel()
    torch.set_num_threads(1)
    configuration = channel.configuration
    rank = configuration["rank"]
    bootstrap = [] if rank == 0 else [channel.published("address")]
    with swarm.Node(bootstrap=bootstrap, listen="127.0.0.1:0") as node:
        if rank == 0:
            channel.publish("address", node.addresses[0])
        keep_present_objects()  # as `swarm serve` does, and as docs/concepts/experts.md tells trainers to do
        if "experts" in configuration:
            with swarm.ExpertServer(node, hosted(configuration)):
                channel.send("ready")
                while True:
                    channel.receive()
        channel.send("ready")
        orders: dict[str, Callable[[swarm.Node, dict[str, Any]], dict[str, Any]]] = {
            "mixture": mixture_steps,
            "pipeline": pipeline_batches,
            "calls": calls,
        }
        while True:
            order = channel.receive()
            channel.send("done", **orders[order["do"]](node, order))


def hosted(configuration: dict[str, Any]) -> dict[str, swarm.Expert]:
    """Return the experts of a server."""
    kind, sample = configuration["kind"], (torch.zeros(1, WIDTH),)
    experts = {}
    for name in configuration["experts"]:
        if kind == "stage":
            experts[name] = swarm.Expert(Stage(configuration["sample_s"]), sample, zero_rate_sgd)
        elif kind == "ffn":
            layers = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
            experts[name] = swarm.Expert(torch.nn.Sequential(*layers), sample, zero_rate_sgd)
        else:
            experts[name] = swarm.Expert(torch.nn.Identity(), sample)
    return experts


def mixture_steps(node: swarm.Node, order: dict[str, Any]) -> dict[str, Any]:
    """Make steps, forward and backward, through a mixture; return how long each took."""
    layer = swarm.RemoteMixtureOfExperts(
        node,
        WIDTH,
        grid=order["grid"],
        k_best=order["k_best"],
        k_min=order["k_best"],
        backward_k_min=order["k_best"],
        forward_timeout_s=TIMEOUT_S,
    )
    generator = torch.Generator().manual_seed(1)
    seconds, calls_made = [], 0
    for _ in range(order["count"]):
        x = torch.randn(order["batch"], WIDTH, generator=generator).requires_grad_()
        begun_s = time.monotonic()
        y = layer(x)
        y.sum().backward()
        seconds.append(time.monotonic() - begun_s)
        assert layer.last_forward is not None
        calls_made = len(layer.last_forward.answered)
        # the weights add up to 1, so the output must be the input
        if order["kind"] == "nop" and not torch.allclose(y, x, atol=1e-4):
            raise AssertionError("the output of experts that return their input is wrong")
    return {"seconds": seconds, "calls": calls_made}


def pipeline_batches(node: swarm.Node, order: dict[str, Any]) -> dict[str, Any]:
    """Train with a pipeline; return how long the batches took, and the bubbles."""
    samples = order["micro_batches"] * order["micro_batch_size"]
    pipeline = swarm.RemoteSequential(
        node,
        order["blocks"],
        micro_batch_size=order["micro_batch_size"],
        forward_timeout_s=TIMEOUT_S,
        backward_timeout_s=TIMEOUT_S,
        config=swarm.PipelineConfig(in_flight_max=order["in_flight_max"]),
    )
    batch = (torch.zeros(samples, WIDTH), torch.ones(samples, WIDTH))
    pipeline.train_batches([batch], torch.nn.functional.mse_loss)  # after this, schemas and servers are known
    wait_until(order["at_s"])
    begun_s = time.monotonic()
    losses = pipeline.train_batches([batch] * order["count"], torch.nn.functional.mse_loss)
    seconds = time.monotonic() - begun_s
    assert pipeline.last_training is not None
    if losses != [1.0] * order["count"]:
        raise AssertionError(f"the losses of a pipeline that returns zeros are wrong: {losses}")
    return {"seconds": seconds, "bubbles": pipeline.last_training.bubbles}


def calls(node: swarm.Node, order: dict[str, Any]) -> dict[str, Any]:
    """Make forward and backward passes of one expert, one after the other."""
    expert = swarm.RemoteExpert(node, order["expert"])
    x = torch.zeros(order["batch"], WIDTH, requires_grad=True)
    for _ in range(order["count"]):
        expert(x).sum().backward()
    return {}


if __name__ == "__main__":
    main()
