"""The steps of a trainer with a mixture layer in a round, for any library. Imports torch alone, since
hivemind's environment runs it, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.worker_channel import wait_until

ROWS = COLUMNS = 4  # of the grid; each server hosts a row
SERVERS = ROWS
WIDTH = 256
BATCH = 64
K_BEST = 4
CLOSE = 1e-4  # tolerance for float32 sums in the other order of a larger batch
TIMEOUT_S = 60.0
SEED = 11


def module_of(row: int, column: int) -> torch.nn.Module:
    """Return the expert of a grid cell, the same in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED + ROWS * row + column)
        return torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )


def zero_rate_sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer that performs its work with rate 0, so that every result can be checked."""
    return torch.optim.SGD(parameters, lr=0.0)


def set_gate(linear: torch.nn.Linear) -> None:
    """Give the gate the same parameters for every library."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator) / WIDTH**0.5)
        linear.bias.copy_(torch.randn(linear.bias.shape, generator=generator) / 10.0)


def perform(
    layer: Callable[[torch.Tensor], torch.Tensor], linear: torch.nn.Linear, order: dict[str, Any]
) -> dict[str, Any]:
    """Make the ordered number of steps, forward and backward, from the aligned start on. The last result is
    checked after the clock has stopped.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, WIDTH, generator=generator).requires_grad_()
    gradient = torch.randn(BATCH, WIDTH, generator=generator)
    reasons: list[str] = []
    forward_s, done, y = 0.0, 0, x
    wait_until(order["at_s"])
    for _ in range(order["count"]):
        x.grad = linear.weight.grad = None
        try:
            before_s = time.monotonic()
            y = layer(x)
            forward_s += time.monotonic() - before_s
            y.backward(gradient)  # type: ignore[no-untyped-call, unused-ignore]
            done += 1
        except Exception as error:  # noqa: BLE001  errors of any library
            reasons.append(f"{type(error).__name__}: {error}"[:200])
    end_s = time.monotonic()
    if done:
        reasons += _faults(x, y.detach(), linear, gradient)
    return {"end_s": end_s, "performed": done, "reasons": sorted(set(reasons))[:3], "forward_s": forward_s}


def _faults(x: torch.Tensor, y: torch.Tensor, linear: torch.nn.Linear, gradient: torch.Tensor) -> list[str]:
    """Compare with the same mixture computed locally and return what differs."""
    inputs = x.detach().clone().requires_grad_()
    scores = torch.nn.functional.linear(inputs, linear.weight.detach(), linear.bias.detach())
    logits = (scores[:, :ROWS, None] + scores[:, None, ROWS:]).flatten(1)
    best = logits.topk(K_BEST, dim=1)
    outputs = torch.stack(
        [module_of(row, column)(inputs) for row in range(ROWS) for column in range(COLUMNS)], dim=1
    )
    chosen = outputs.gather(1, best.indices.unsqueeze(-1).expand(-1, -1, WIDTH))
    expected = (best.values.softmax(dim=1).unsqueeze(-1) * chosen).sum(dim=1)
    if not torch.allclose(y, expected, atol=CLOSE):
        return ["an output is wrong"]
    expected.backward(gradient)  # type: ignore[no-untyped-call, unused-ignore]
    if x.grad is None or inputs.grad is None or not torch.allclose(x.grad, inputs.grad, atol=CLOSE):
        return ["a gradient is wrong"]
    return []
