"""The parameters of an optimizer, which of them are trained, and the options of its groups."""

from __future__ import annotations

from typing import Any

import torch


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters of an optimizer, each once, in the order of its groups."""
    return list({id(p): p for group in optimizer.param_groups for p in group["params"]}.values())


def is_trained(p: torch.Tensor) -> bool:
    """Return whether a parameter is trained, and not kept as it is."""
    return p.requires_grad and p.is_floating_point()


def set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an option of a parameter group. A tensor keeps its place in memory, where a captured graph reads
    it.
    """
    present = group.get(key)
    if not isinstance(present, torch.Tensor):
        group[key] = value
        return
    with torch.no_grad():
        if isinstance(value, torch.Tensor):
            present.copy_(value)
        else:
            present.fill_(value)
