"""The outer step of DiLoCo (arXiv 2311.08105): SGD with Nesterov momentum on the parameters that all peers
hold.

Every peer computes it from the same bytes. To get the same bytes on every processor, each product and each
sum is rounded separately: a fused multiply-add rounds once, and not every processor has it. So the outer
state never drifts.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from averaging.optim.memory import Fragment, fragments_between, zeros_like

MOMENTUM = "momentum_buffer"


# base, averaged pseudo-gradient of some of its elements, and the first of these and the one after the last
Part = tuple[torch.Tensor, torch.Tensor, int, int]


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
        bases = [base for group in self.param_groups for base in group["params"] if base.grad is not None]
        self.step_parts([(base, base.grad.clone(), 0, base.numel()) for base in bases])

    def step_parts(self, parts: Sequence[Part], when_done: Callable[[], object] | None = None) -> None:
        """Make the step of some elements of flattened, contiguous bases, and call `when_done`, which must
        not be written in Python. The pseudo-gradients are overwritten.

        Computes m = decay · m + delta, then base -= lr · (delta + decay · m), or base -= lr · m without
        Nesterov; base -= lr · delta without momentum. Equal to `torch.optim.SGD` up to the rounding of fused
        operations.

        An error, for want of memory or Ctrl-C, comes before all of it, or after it: memory is taken first,
        and Python handles no signal within the one call that does the rest.
        """
        group = self.param_groups[0]
        rate, decay, nesterov = group["lr"], group["momentum"], group["nesterov"]
        operations: list[Callable[[], object]] = []
        scratch: dict[torch.device, torch.Tensor] = {}
        if nesterov:
            for base, delta, *_ in sorted(parts, key=lambda part: -part[1].numel()):
                if MOMENTUM in self.state.get(base, ()) and base.device not in scratch:
                    scratch[base.device] = torch.empty_like(delta).view(-1)
        for base, one, start, stop in parts:
            delta, target = one.view(-1), base.detach().view(-1)[start:stop]
            momentum = self.state[base].get(MOMENTUM) if base in self.state else None
            if momentum is not None:
                momentum = momentum.view(-1)[start:stop]
                operations += [partial(momentum.mul_, decay), partial(momentum.add_, delta)]
                if nesterov:
                    product = scratch[base.device][: delta.numel()]
                    operations += [
                        partial(torch.mul, momentum, decay, out=product),
                        partial(delta.add_, product),
                    ]
                else:
                    operations.append(partial(delta.copy_, momentum))
            operations += [partial(delta.mul_, rate), partial(target.sub_, delta)]
        if when_done is not None:
            operations.append(when_done)
        # One call in C: Python handles signals between bytecodes only, so Ctrl-C comes before or after it.
        with torch.no_grad():
            deque(map(operator.call, operations), maxlen=0)


def fragments_of(numels: Sequence[int], count: int) -> list[list[Fragment]]:
    """Cut the parameters, end to end, into `count` fragments whose sizes differ by one element at most."""
    total = sum(numels)
    return fragments_between(numels, [total * number // count for number in range(count + 1)])
