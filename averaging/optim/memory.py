"""Placement of what a mode keeps in addition to the model: on the parameters' devices, or offloaded to the
host.
"""

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


def fragments_between(numels: Sequence[int], edges: Sequence[int]) -> list[list[Fragment]]:
    """Lay parameters of these sizes end to end, and return the fragments between each two neighbouring
    edges.
    """
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
    """Yield views that cover a tensor of any strides in order: blocks of whole rows with at most
    `elements_max` elements, but at least one row.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    step = max(1, elements_max * rows // max(tensor.numel(), 1))
    if step >= rows:
        yield tensor
        return
    for start in range(0, rows, step):
        yield tensor[start : start + step]


def storage_for(parameters: Sequence[torch.Tensor], offload: bool) -> torch.device | None:
    """Return the device of all that a mode keeps: the host, or None for each parameter's own device."""
    return torch.device("cpu") if offload and parameters else None


def zeros_for(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return zeros in float32, contiguous.

    On the host this memory is not pinned: copies to and from a device go through pinned blocks
    (`averaging.optim.offload`).
    """
    return torch.zeros(tuple(shape), dtype=torch.float32, device=device)


def zeros_beside(p: torch.Tensor, storage: torch.device | None) -> torch.Tensor:
    """Return float32 zeros in the shape of a parameter, on its device or on `storage`.

    The result is contiguous for any strides of the parameter: rounds average contiguous float32 tensors in
    place, and would keep a copy of others for the life of the averager. `gradient_for` restores the strides
    for the one step that needs them.
    """
    return zeros_for(p.shape, storage or p.device)


def zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return float32 zeros in the shape and on the device of `tensor`."""
    return zeros_for(tensor.shape, tensor.device)


def gradient_for(p: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return `values` as torch would store them in `p.grad`: with the parameter's dtype, device and
    strides.

    Fused optimizers walk through the memory of parameter and gradient in parallel: with other strides they
    raise on CUDA, and on the CPU they mix up elements. Returns `values` itself where nothing has to change,
    else a copy.
    """
    if values.dtype == p.dtype and values.device == p.device and values.stride() == p.stride():
        return values
    return torch.empty_like(p, requires_grad=False).copy_(values)
