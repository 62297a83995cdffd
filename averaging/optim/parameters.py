"""The parameters of an optimizer, and which of them are trained."""

from __future__ import annotations

import torch


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters of an optimizer, each once, in the order of its groups."""
    return list({id(p): p for group in optimizer.param_groups for p in group["params"]}.values())


def is_trained(p: torch.Tensor) -> bool:
    """Return whether a parameter is trained, and not kept as it is."""
    return p.requires_grad and p.is_floating_point()
