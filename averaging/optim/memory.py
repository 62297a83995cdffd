"""Where a mode keeps what it has beside the model: on the parameters' devices, or offloaded to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def home_of(parameters: Sequence[torch.Tensor], offload: bool) -> torch.device | None:
    """The device of everything that a mode keeps: the host, or None for each parameter's own."""
    return torch.device("cpu") if offload and parameters else None


def room_for(shape: Sequence[int], device: torch.device, *, pinned: bool = False) -> torch.Tensor:
    """Zeros in float32, contiguous."""
    return torch.zeros(
        tuple(shape), dtype=torch.float32, device=device, pin_memory=pinned and device.type == "cpu"
    )


def room_beside(p: torch.Tensor, home: torch.device | None) -> torch.Tensor:
    """Zeros in the shape of a parameter; in pinned memory if it is on CUDA and its room on the host: copies
    run beside computation.
    """
    return room_for(p.shape, home or p.device, pinned=p.is_cuda)


def room_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros where `tensor` lies, in its shape."""
    return room_for(tensor.shape, tensor.device, pinned=tensor.device.type == "cpu" and tensor.is_pinned())
