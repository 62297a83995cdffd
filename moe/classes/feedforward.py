"""Experts on vectors: a feed-forward block, and one that returns its input."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moe.classes import ExpertSettings

_EXPANSION = 4


def feedforward(settings: ExpertSettings) -> tuple[nn.Module, tuple[Any, ...]]:
    """Create a feed-forward block: (batch, hidden_dim) to the same, through 4 × hidden_dim and a GELU, as in
    a transformer, without the residual.
    """
    hidden = settings.hidden_dim
    module = nn.Sequential(
        nn.Linear(hidden, _EXPANSION * hidden, dtype=torch.float32),
        nn.GELU(),
        nn.Linear(_EXPANSION * hidden, hidden, dtype=torch.float32),
    )
    return module, (torch.zeros(1, hidden, dtype=torch.float32),)


def nop(settings: ExpertSettings) -> tuple[nn.Module, tuple[Any, ...]]:
    """Create an identity: (batch, hidden_dim) to the same. It serves to measure everything but the
    computation.
    """
    return nn.Identity(), (torch.zeros(1, settings.hidden_dim, dtype=torch.float32),)
