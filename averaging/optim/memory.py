"""Where a mode keeps what it has beside the model: on the parameters' devices, or offloaded to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements `start` to `stop` of parameter `place`, flattened."""

    place: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def pieces_between(numels: Sequence[int], edges: Sequence[int]) -> list[list[Fragment]]:
    """Lay parameters of these sizes end to end, and return what lies between each two neighbouring edges."""
    ends = list(accumulate(numels))
    found: list[list[Fragment]] = []
    for low, high in pairwise(edges):
        pieces = []
        for place, (numel, end) in enumerate(zip(numels, ends, strict=True)):
            begin = end - numel
            start, stop = max(low, begin) - begin, min(high, end) - begin
            if start < stop:
                pieces.append(Fragment(place, start, stop))
        found.append(pieces)
    return found


def rows_of(tensor: torch.Tensor, elements_max: int) -> Iterator[torch.Tensor]:
    """Yield views of a tensor, of any strides, that cover it in order: whole rows, as many as have
    `elements_max` elements, or one row.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    step = max(1, elements_max * rows // max(tensor.numel(), 1))
    if step >= rows:
        yield tensor
        return
    for start in range(0, rows, step):
        yield tensor[start : start + step]


def home_of(parameters: Sequence[torch.Tensor], offload: bool) -> torch.device | None:
    """The device of everything that a mode keeps: the host, or None for each parameter's own."""
    return torch.device("cpu") if offload and parameters else None


def room_for(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Zeros in float32, contiguous.

    On the host this memory is not pinned: copies to and from a device go through pinned blocks
    (`averaging.optim.offload`).
    """
    return torch.zeros(tuple(shape), dtype=torch.float32, device=device)


def room_beside(p: torch.Tensor, home: torch.device | None) -> torch.Tensor:
    """Zeros in the shape of a parameter, on its device or at `home`.

    Contiguous whatever the parameter's strides: rounds average contiguous float32 tensors where they are, and
    would copy others, for as long as the averager lives; `gradient_for` makes up for it, for the parameters
    that need it and the time of one step.
    """
    return room_for(p.shape, home or p.device)


def room_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros where `tensor` lies, in its shape."""
    return room_for(tensor.shape, tensor.device)


def gradient_for(p: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return `values` as torch itself would have them in `p.grad`: of the parameter's type, device and
    strides.

    Fused optimizers walk through the memory of parameter and gradient side by side: with other strides they
    raise on CUDA, and on the CPU they take one element's gradient for another's. Returns `values` itself
    where nothing is to be changed, else a copy.
    """
    if values.dtype == p.dtype and values.device == p.device and values.stride() == p.stride():
        return values
    return torch.empty_like(p, requires_grad=False).copy_(values)
