"""Memory of training, on the device and pinned: it stays within the estimate in every mode, and does not grow
from round to round.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from averaging.averager import Averager
from averaging.optim.optimizer import Diloco, Gossip, Gradients, Local, Optimizer
from averaging.reduction.lowrank import PowerSgd
from benchmarks.cuda.device import Figure, allocated_bytes, finish, forget_peak, peak_bytes, pinned_bytes
from benchmarks.cuda.peers import at_once, step_all
from swarm.node import Node

TENSORS = 8
EPOCHS = 3
MODES: dict[str, dict[str, Any]] = {
    "gradients": {"mode": Gradients()},
    "gradients, error feedback": {"mode": Gradients(), "codec": "int8", "error_feedback": True},
    "gradients, powersgd": {"mode": Gradients(), "strategy": PowerSgd(rank=4)},
    "gradients, offload": {"mode": Gradients(), "offload": True},
    "delayed": {"mode": Gradients(delayed=True)},
    "local": {"mode": Local()},
    "diloco": {"mode": Diloco()},
    "diloco, error feedback": {"mode": Diloco(), "codec": "int8", "error_feedback": True},
    "diloco, offload": {"mode": Diloco(), "offload": True},
    "streaming diloco": {"mode": Diloco(streaming=2)},
    "gossip": {"mode": Gossip()},
}
SLACK_BYTES = 64 << 20  # buffers of a fixed size, such as those that copies to and from the host pass through


def train(node: Node, device: torch.device, rows: int, options: dict[str, Any]) -> None:
    """A few epochs of AdamW over tensors of `rows` times 1000 elements, with constant gradients."""
    parameters = [torch.nn.Parameter(torch.zeros(rows, 1000, device=device)) for _ in range(TENSORS)]
    inner = torch.optim.AdamW(parameters, lr=1e-3)
    settings = {
        "target_batch_size": 4,
        "batch_size_per_step": 1,
        "codec": "float16",
        "state_sync_epochs": 2,
    }
    with Optimizer(inner, node=node, run="memory", **{**settings, **options}) as optimizer:
        while optimizer.epoch < EPOCHS:
            for p in parameters:
                p.grad = torch.full_like(p, 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    finish(device)


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_a_mode_takes_at_most_what_the_estimate_says(
    options: dict[str, Any], nodes: list[Node], device: torch.device, figure: Figure, small: bool
) -> None:
    """The other peer's tensors are on the host, so that what the device holds is one peer's."""
    estimate = pytest.importorskip(
        "averaging.optim.memory_estimate", reason="this version has no estimate by mode"
    )
    rows = 20 if small else 4000
    numel = 1000 * rows * TENSORS
    forget_peak(device)
    before, pinned = allocated_bytes(device), pinned_bytes()
    at_once(
        [
            lambda: train(nodes[0], device, rows, options),
            lambda: train(nodes[1], torch.device("cpu"), rows, options),
        ],
        120.0,
    )
    taken, pinned_taken = peak_bytes(device) - before, pinned_bytes() - pinned
    said = estimate.bytes_per_parameter(
        options["mode"],
        optimizer_statistics=2,
        error_feedback=options.get("error_feedback", False),
        strategy="strategy" in options,
        offload=options.get("offload", False),
    )
    # in addition to the model itself and one tensor of its size that torch's foreach AdamW takes while it
    # steps
    allowed = numel * (4 + 4 + said.device) + SLACK_BYTES
    figure("device memory over the estimate", taken / allowed, "×", at_most=1.0)
    figure("bytes a parameter on the device", taken / numel, "bytes")
    figure(
        "pinned bytes over host estimate and vector",
        pinned_taken / (numel * (1.2 * 4 + said.host) + SLACK_BYTES),
        "×",
        at_most=1.0,
    )


@pytest.mark.parametrize(
    "settings", [{"codec": "int8", "error_feedback": True}, {"codec": "float16"}], ids=str
)
def test_memory_is_flat_over_fifty_rounds(
    settings: dict[str, Any], nodes: list[Node], device: torch.device, figure: Figure, small: bool
) -> None:
    elements, rounds = (50_000, 4) if small else (16_000_000, 50)
    with ExitStack() as stack:
        mine = [torch.randn(elements, device=device), torch.randn(elements)]
        before = allocated_bytes(device)
        pinned = pinned_bytes()
        averagers = [
            stack.enter_context(Averager(node, [one], name="flat", **settings))
            for node, one in zip(nodes, mine, strict=True)
        ]
        held: list[tuple[int, int]] = []
        for number in range(rounds):
            results = step_all(averagers)
            assert not any(result.failed for result in results), results
            if number == 1:
                forget_peak(device)
            if number >= 1:
                finish(device)
                held.append((allocated_bytes(device), pinned_bytes()))
        figure(
            "device memory of a round, over the vector", (peak_bytes(device) - before) / (4 * elements), "×"
        )
    figure(
        "growth on the device from the 2nd round to the last",
        (held[-1][0] - held[0][0]) / 1e6,
        "MB",
        at_most=1.0,
    )
    figure(
        "growth of pinned memory from the 2nd round to the last",
        (held[-1][1] - held[0][1]) / 1e6,
        "MB",
        at_most=1.0,
    )
    figure("pinned memory over the vector", (held[-1][1] - pinned) / (4 * elements), "×", at_most=1.2)
