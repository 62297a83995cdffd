"""Experts on a GPU: busy with many callers, answering when memory runs out, gone from the swarm when their
device is lost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import swarm
from benchmarks.cuda.device import Figure, limited_memory
from benchmarks.cuda.model import Size
from benchmarks.cuda.peers import at_once
from benchmarks.cuda.serving import experts
from swarm.node import Node

UID = "ffn.0"
ROOT = Path(__file__).parents[2]


def test_sixty_four_callers_keep_the_device_computing(
    size: Size, device: torch.device, figure: Figure
) -> None:
    called = experts(size, device)
    assert not called.failed, called.failures
    figure("forward and backward passes", called.calls_per_s, "calls/s")
    figure("samples a batch", called.samples_per_batch, "samples")
    figure("share of the time in which the server computes", 100 * called.busy, "%", at_least=60.0)


class Hungry(torch.nn.Module):
    """Takes 64 MiB on the device for each sample."""

    def __init__(self, floats: int) -> None:
        super().__init__()
        self.floats = floats
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken = torch.ones(len(x), self.floats, device=x.device)
        return x * 2 * taken[:, :1] * self.weight


@pytest.mark.parametrize("learns", [False, True])
def test_every_caller_is_answered_when_a_batch_does_not_fit(
    learns: bool, nodes: list[Node], device: torch.device, small: bool
) -> None:
    """Eight callers of two samples each make batches of up to 1 GiB, and there is room for some 300 MiB."""
    samples, floats = 2, 1000 if small else 1 << 24
    module = Hungry(floats)
    optimizer = (lambda parameters: torch.optim.SGD(parameters, lr=1e-8)) if learns else None
    expert = swarm.Expert(module, (torch.zeros(1, 4),), optimizer, device=device)

    def call(number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = torch.full((samples, 4), float(number), requires_grad=learns)
        y = swarm.RemoteExpert(nodes[1], UID)(x)
        if learns:
            y.sum().backward()
        return y.detach(), x.grad

    with swarm.ExpertServer(nodes[0], {UID: expert}) as server:
        call(1)
        with limited_memory(device, 300 << 20) as scarce:
            for _ in range(3):
                for number, (y, gradient) in enumerate(
                    at_once([lambda number=number: call(number) for number in range(8)], 60.0)
                ):  # type: ignore[misc]
                    assert torch.allclose(y, torch.full((samples, 4), 2.0 * number), rtol=1e-3, atol=1e-6)
                    assert (gradient is not None) == learns
        counts = server.statistics().experts[UID].counts
    assert not counts.failed_requests
    assert counts.forward_requests >= 25
    assert scarce == (device.type == "cuda")


def test_an_index_out_of_range_withdraws_the_server_and_says_why(device: torch.device) -> None:
    """In a process of its own: its CUDA context is lost."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("broken_index.py")), str(device)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-2000:]
    said = json.loads(lines[-1])
    assert said["good"] == ""
    assert said["bad"], "a call with an index out of range was answered"
    if device.type == "cuda":
        assert said["ended"] == "True"
        assert str(device) in said["failed"], said
        assert said["after"] in ("NotEnoughPeers", "NetworkError", "ExpertMissing", "DeadlineExceeded"), said
    else:  # on the host it is the caller's mistake, and nothing else
        assert said["after"] == ""
