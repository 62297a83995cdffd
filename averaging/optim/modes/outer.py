"""The outer step of DiLoCo (arXiv 2311.08105): SGD with Nesterov momentum on the parameters that all peers
hold.

Every peer computes it from the same bytes. To get the same bytes on every processor, each product and each
sum is rounded separately: a fused multiply-add rounds once, and not every processor has it. So the outer
state never drifts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from averaging.optim.memory import Fragment, fragments_between, zeros_like

MOMENTUM = "momentum_buffer"


def outer_step_(
    base: torch.Tensor,
    momentum: torch.Tensor | None,
    delta: torch.Tensor,
    *,
    lr: float,
    decay: float,
    nesterov: bool = True,
) -> None:
    """Compute m = decay · m + delta, then base -= lr · (delta + decay · m), or base -= lr · m without
    Nesterov; base -= lr · delta without momentum.

    All tensors are float32 of one shape and are changed in place; `delta` is overwritten. Equal to
    `torch.optim.SGD` up to the rounding of fused operations.
    """
    if momentum is not None:
        momentum.mul_(decay).add_(delta)
        if nesterov:
            delta.add_(momentum * decay)
        else:
            delta.copy_(momentum)
    base.sub_(delta.mul_(lr))


class OuterSGD(torch.optim.Optimizer):
    """The outer optimizer as a torch optimizer, so that its parameters and momentum are served, loaded and
    saved like those of any other.

    `trained` parameters have their momentum from the start, so that a newcomer knows the structure. Others
    are kept unchanged.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        trained: Sequence[torch.Tensor],
        *,
        lr: float,
        momentum: float,
        nesterov: bool = True,
    ) -> None:
        super().__init__(list(parameters), {"lr": lr, "momentum": momentum, "nesterov": nesterov})
        if momentum:
            for base in trained:
                self.state[base][MOMENTUM] = zeros_like(base)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the whole step at once, with the averaged pseudo-gradients in `.grad`."""
        with torch.no_grad():
            for group in self.param_groups:
                for base in group["params"]:
                    if base.grad is not None:
                        self.step_part(base, base.grad.clone(), 0, base.numel())

    def step_part(self, base: torch.Tensor, delta: torch.Tensor, start: int, stop: int) -> None:
        """Make the step of elements `start` to `stop` of the flattened, contiguous `base`. `delta` has
        these elements and is overwritten.
        """
        group = self.param_groups[0]
        momentum = self.state[base].get(MOMENTUM) if base in self.state else None
        outer_step_(
            base.detach().view(-1)[start:stop],
            None if momentum is None else momentum.view(-1)[start:stop],
            delta.view(-1),
            lr=group["lr"],
            decay=group["momentum"],
            nesterov=group["nesterov"],
        )


def fragments_of(numels: Sequence[int], count: int) -> list[list[Fragment]]:
    """Cut the parameters, end to end, into `count` fragments whose sizes differ by one element at most."""
    total = sum(numels)
    return fragments_between(numels, [total * number // count for number in range(count + 1)])
