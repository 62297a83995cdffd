"""The calls of experts in a round, for the remote experts of any library. Imports torch alone, since
hivemind's environment runs it, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.worker_channel import WorkerChannel, wait_until

WIDTH = {"nop": 1024, "ffn": 256}
BATCH = {"small": 1, "large": 2048, "train": 32}
EXPERT = {"small": "nop", "large": "nop", "train": "ffn"}
CLOSE = 1e-4  # tolerance for float32 sums in the other order of a larger batch
SEED = 7


def module_of(kind: str) -> torch.nn.Module:
    """Return a module that is the same in every process. The no-op has an empty parameter, because hivemind's
    backward pass needs an optimizer.
    """
    if kind == "nop":
        return Nop()
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        width = WIDTH[kind]
        return torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )


class Nop(torch.nn.Module):
    """Returns a copy of its input, as hivemind's no-op does."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = torch.nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


def zero_rate_sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer that performs its work with rate 0, so that every result can be checked."""
    return torch.optim.SGD(parameters, lr=0.0)


def serve_orders(
    channel: WorkerChannel, experts: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]
) -> None:
    """Call `experts` (by kind) as the command orders, until it ends."""
    channel.send("ready")
    while True:
        order = channel.receive()
        if order["do"] == "calls":
            channel.send(
                "done", **perform(experts[EXPERT[order["what"]]], order, channel.configuration["rank"])
            )
        elif order["do"] == "first":
            with torch.no_grad():
                experts["ffn"](torch.zeros(1, WIDTH["ffn"]))
            channel.send("answered", at_s=time.monotonic())


def perform(
    expert: Callable[[torch.Tensor], torch.Tensor], order: dict[str, Any], rank: int
) -> dict[str, Any]:
    """Make the ordered number of calls one after the other from the aligned start on. Results are checked
    after the clock has stopped.
    """
    what = order["what"]
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(BATCH[what], WIDTH[EXPERT[what]], generator=generator)
    x.requires_grad_(what == "train")
    gradient = torch.randn(x.shape, generator=generator)
    reasons: list[str] = []
    longest_s, y = 0.0, x
    wait_until(order["at_s"])
    done = 0
    for _ in range(order["count"]):
        before_s = time.monotonic()
        try:
            y = _call(expert, x, gradient, train=what == "train")
            done += 1
        except Exception as error:  # noqa: BLE001  errors of any library
            reasons.append(f"{type(error).__name__}: {error}"[:200])
        longest_s = max(longest_s, time.monotonic() - before_s)
    end_s = time.monotonic()
    if done:
        reasons += _faults(what, x, y, gradient)
    return {"end_s": end_s, "performed": done, "reasons": sorted(set(reasons))[:3], "longest_s": longest_s}


def _call(
    expert: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, gradient: torch.Tensor, *, train: bool
) -> torch.Tensor:
    if not train:
        with torch.no_grad():
            return expert(x)
    x.grad = None
    y = expert(x)
    y.backward(gradient)  # type: ignore[no-untyped-call, unused-ignore]
    return y.detach()


def _faults(what: str, x: torch.Tensor, y: torch.Tensor, gradient: torch.Tensor) -> list[str]:
    local = module_of(EXPERT[what])
    inputs = x.detach().clone().requires_grad_()
    expected = local(inputs)
    if not torch.allclose(y, expected, atol=CLOSE):
        return ["an output is wrong"]
    if what == "train":
        expected.backward(gradient)
        if x.grad is None or inputs.grad is None or not torch.allclose(x.grad, inputs.grad, atol=CLOSE):
            return ["a gradient is wrong"]
    return []
