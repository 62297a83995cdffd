"""Experts on sequences: one transformer layer, with and without a causal mask. It has no dropout, since a
backward pass computes forward again. Sequences may be shorter than the settings say.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moe.classes import ExpertSettings

_HEAD_DIM = 64
_EXPANSION = 4


class CausalLayer(nn.Module):
    """A layer in which each position attends to itself and to earlier ones. Maps (batch, sequence, hidden) to
    the same.
    """

    mask: torch.Tensor
    sequence_dimension = 1

    def __init__(self, layer: nn.Module, sequence_length: int) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer(
            "mask",
            nn.Transformer.generate_square_subsequent_mask(sequence_length, dtype=torch.float32),
            persistent=False,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.mask[: x.shape[1], : x.shape[1]]
        return self.layer(x, src_mask=mask, is_causal=True)  # type: ignore[no-any-return]


def transformer(settings: ExpertSettings) -> tuple[nn.Module, tuple[Any, ...]]:
    """Create a layer in which every position attends to all: (batch, sequence_length, hidden_dim) to the
    same.
    """
    layer: Any = _layer(settings)
    layer.sequence_dimension = 1
    return layer, (_sample(settings),)


def causal_transformer(settings: ExpertSettings) -> tuple[nn.Module, tuple[Any, ...]]:
    """Create a layer in which no position attends to later ones: (batch, sequence_length, hidden_dim) to the
    same.
    """
    return CausalLayer(_layer(settings), settings.sequence_length), (_sample(settings),)


def _layer(settings: ExpertSettings) -> nn.Module:
    hidden = settings.hidden_dim
    heads = max(1, hidden // _HEAD_DIM) if hidden % _HEAD_DIM == 0 else 1
    return nn.TransformerEncoderLayer(
        hidden,
        heads,
        _EXPANSION * hidden,
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        norm_first=True,
        dtype=torch.float32,
    )


def _sample(settings: ExpertSettings) -> torch.Tensor:
    return torch.zeros(1, settings.sequence_length, settings.hidden_dim, dtype=torch.float32)
