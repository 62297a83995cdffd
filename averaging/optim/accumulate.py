"""Gradients of many small batches, added up until the swarm's batch is full (DeDLOC, arXiv 2106.10207,
section 3.2).

`zero_grad` may clear `.grad` whenever it likes: what counts is kept here. All work is in place, in
`torch._foreach` calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from averaging.optim.memory import room_beside
from swarm.core.errors import UsageError

_NAMED_MAX = 3  # parameters in a message


class GradientAccumulator:
    """Σ samples·gradient per parameter, in float32, on the parameters' devices.

    Between `average_()` and the next `add` the buffers hold the mean over this peer's samples instead of the
    sum: that is what peers average, weighted by samples. Going back to sums costs one rounding and happens
    only after a failed round.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        *,
        names: Sequence[str] = (),
        home: torch.device | None = None,
    ) -> None:
        """`parameters`: the floating-point leaf tensors that will be trained, any shape, dtype and device,
        without repetition.

        `names`: what messages call them. `home`: where the sums lie, None for each parameter's own device; on
        the host they are pinned for parameters on CUDA.
        """
        if not parameters:
            raise UsageError(
                "there is nothing to train: no parameter of the optimizer is a floating-point tensor that requires a gradient"
            )
        self.parameters, self.names, self.home = tuple(parameters), tuple(names), home
        self.buffers = [room_beside(p, home) for p in self.parameters]
        self.samples = 0
        # had a gradient since the reset: torch steps no others, decay included
        self.touched = [False] * len(self.parameters)
        self._is_mean = False
        self._is_blank = True  # all zeros: nobody was given the buffers to write into

    def add(self, samples: int) -> str | None:
        """Add every parameter's `.grad` × `samples`; returns why nothing was added, or None. `.grad` is left
        as it is.
        """
        flaw = flaw_of_gradients(self.parameters, self.names)
        if flaw is not None:
            return flaw
        places = [place for place, p in enumerate(self.parameters) if p.grad is not None]
        gradients = [self.parameters[place].grad for place in places]
        self._to_sums()
        self._is_blank = False
        with torch.no_grad():
            pairs = [
                (self.buffers[place], gradient.to(self.buffers[place].device))
                for place, gradient in zip(places, gradients, strict=True)
                if gradient is not None
            ]
            for buffer, gradient in pairs:
                if gradient.is_sparse:
                    buffer.add_(gradient, alpha=samples)
            plain = [(buffer, gradient) for buffer, gradient in pairs if not gradient.is_sparse]
            if plain:
                torch._foreach_add_(
                    [buffer for buffer, _ in plain], [gradient for _, gradient in plain], alpha=samples
                )
        for place in places:
            self.touched[place] = True
        self.samples += samples
        return None

    def average_(self) -> list[torch.Tensor]:
        """Turn sums into means over this peer's samples, in place, and return the buffers; without samples
        they are zeros.
        """
        self._is_blank = False  # the round writes its average into them
        if not self._is_mean and self.samples:
            torch._foreach_div_(self.buffers, float(self.samples))
            self._is_mean = True
        return self.buffers

    def put_back(self, means: Sequence[torch.Tensor], samples: int, touched: Sequence[bool]) -> None:
        """Add what was taken out as means over `samples` samples: their round did not come about."""
        self._to_sums()
        self._is_blank = False
        torch._foreach_add_(self.buffers, list(means), alpha=samples)
        self.samples += samples
        self.touched = [one or other for one, other in zip(self.touched, touched, strict=True)]

    def finite(self) -> bool:
        """False when sums of finite gradients ran over: such a contribution must not be sent."""
        return all_finite(self.buffers)

    def reset(self) -> None:
        """Back to zero samples."""
        if not self._is_blank:
            torch._foreach_zero_(self.buffers)
        self._is_blank = True
        self.samples, self._is_mean = 0, False
        self.touched = [False] * len(self.parameters)

    def touched_bytes(self) -> bytes:
        """`touched` as a bit field, least significant bit first: what peers tell one another before a round."""
        field = sum(1 << place for place, touched in enumerate(self.touched) if touched)
        return field.to_bytes((len(self.touched) + 7) // 8, "little")

    def merge_touched(self, fields: Sequence[bytes]) -> list[bool]:
        """Which parameters have a gradient on any peer; a field of a wrong length counts as "all": no lie can
        freeze a parameter.
        """
        everything = (1 << len(self.touched)) - 1
        union = 0
        for field in fields:
            union |= (
                int.from_bytes(field, "little") if len(field) == (len(self.touched) + 7) // 8 else everything
            )
        return [bool(union >> place & 1) for place in range(len(self.touched))]

    def state_dict(self) -> dict[str, Any]:
        """What resuming in the middle of an epoch needs; tensors are references, as in torch."""
        self._to_sums()
        self._is_blank = False
        return {"samples": self.samples, "touched": list(self.touched), "sums": list(self.buffers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; UsageError when it belongs to other parameters."""
        sums = state["sums"]
        if [tuple(t.shape) for t in sums] != [tuple(t.shape) for t in self.buffers]:
            raise UsageError("the saved gradients have other shapes than this optimizer's parameters")
        self._is_blank = False
        for buffer, saved in zip(self.buffers, sums, strict=True):
            buffer.copy_(saved)
        self.samples, self._is_mean = int(state["samples"]), False
        self.touched = [bool(touched) for touched in state["touched"]]

    def _to_sums(self) -> None:
        if self._is_mean:
            torch._foreach_mul_(self.buffers, float(self.samples))
            self._is_mean = False


def names_of(parameters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> list[str]:
    """What messages call these parameters: by their names if the optimizer was given `named_parameters()`,
    else by their numbers in it.
    """
    every = dict.fromkeys(id(p) for group in optimizer.param_groups for p in group["params"])
    known = {one: f"parameter {place}" for place, one in enumerate(every)}
    for group in optimizer.param_groups:
        known |= {
            id(p): str(name) for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }
    return [known[id(p)] for p in parameters]


def flaw_of_gradients(parameters: Sequence[torch.Tensor], names: Sequence[str] = ()) -> str | None:
    """Why the gradients in `.grad` are of no use; None when they are. `names`: what messages call the
    parameters.
    """
    gradients = [
        p.grad.coalesce().values() if p.grad is not None and p.grad.is_sparse else p.grad for p in parameters
    ]
    there = [g for g in gradients if g is not None]
    if not there:
        return "no parameter has a gradient"
    if all_finite(there):
        return None
    names = names or [f"parameter {place}" for place in range(len(parameters))]
    bad = [
        name
        for name, g in zip(names, gradients, strict=True)
        if g is not None and not bool(g.isfinite().all())
    ]
    return f"non-finite gradients: {', '.join(bad[:_NAMED_MAX] + ['and others'] * (len(bad) > _NAMED_MAX))}"


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """A sum is finite only if all terms are: one fast pass, and a second look when it is not, since sums of
    large values run over, too.
    """
    sums: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        sums.setdefault((tensor.device, wide), []).append(tensor.detach().sum(dtype=wide))
    if all(bool(torch.stack(values).sum().isfinite()) for values in sums.values()):
        return True
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
