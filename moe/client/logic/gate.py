"""The gate of a mixture: how much each sample wants each expert of a grid.

Product keys (Lample et al., "Large Memory Layers with Product Keys", 2019): one linear layer gives a score
for every coordinate of every dimension, the score of expert (i, j, …) is the sum of theirs, so that a grid of
256 × 256 experts needs 512 scores.

Shapes: B samples, N_d coordinates of dimension d, S places for experts per sample, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from swarm.core.errors import UsageError


class ProductKeyGate(nn.Module):
    """float [B, in_features] -> for each dimension float [B, N_d]."""

    def __init__(self, in_features: int, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.projection = nn.Linear(in_features, sum(shape))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.projection(inputs).split(self.shape, dim=-1))


def gate_input(inputs: torch.Tensor, in_features: int, like: torch.Tensor) -> torch.Tensor:
    """One vector per sample: [B, in_features], or [B, …, in_features] averaged over what lies between; where
    and as the gate is.
    """
    if inputs.ndim < 2 or inputs.shape[-1] != in_features:
        raise UsageError(
            f"this layer takes inputs of shape (batch, …, {in_features}), not {tuple(inputs.shape)}"
        )
    if inputs.ndim > 2:
        inputs = inputs.flatten(1, -2).mean(dim=1)
    return inputs.to(device=like.device, dtype=like.dtype)


def logits_of(scores: Sequence[torch.Tensor], coordinates_BSD: torch.Tensor) -> torch.Tensor:
    """The scores of experts at given places of the grid, [B, S]; differentiable. Places count from 0 in each
    dimension.
    """
    parts = [
        score.gather(1, coordinates_BSD[:, :, dimension].to(score.device))
        for dimension, score in enumerate(scores)
    ]
    return torch.stack(parts).sum(dim=0)


def softmax_over(logits_BS: torch.Tensor, there_BS: torch.Tensor) -> torch.Tensor:
    """Softmax over those that are there, zero for the others; rows where nobody is are zero, and have no
    gradient.
    """
    somebody_B1 = there_BS.any(dim=1, keepdim=True)
    masked = logits_BS.masked_fill(~there_BS, float("-inf")).masked_fill(~somebody_B1, 0.0)
    return masked.softmax(dim=1) * there_BS


def switch_weights(
    scores: Sequence[torch.Tensor],
    coordinates_BSD: torch.Tensor,
    chosen_BS: torch.Tensor,
    there_BS: torch.Tensor,
) -> torch.Tensor:
    """Each expert's probability in the whole grid (Fedus et al., "Switch Transformers", 2021, section 2.1),
    [B, S].

    What was chosen and did not answer hands its probability on to those who did, in proportion. A softmax
    over sums factorises: the probability of (i, j, …) is the product of the dimensions' own.
    """
    logs = logits_of([score.log_softmax(dim=-1) for score in scores], coordinates_BSD)
    chosen = logs.masked_fill(~chosen_BS, float("-inf"))
    some_B1 = there_BS.any(dim=1, keepdim=True)
    mass_B1 = chosen.masked_fill(~some_B1, 0.0).logsumexp(dim=1, keepdim=True)
    return softmax_over(logs, there_BS) * mass_B1.exp()


def balancing_loss(scores: Sequence[torch.Tensor], utilization: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum over dimensions d of N_d · Σ_i f_i · P_i: f_i is the share of samples that went to coordinate i,
    P_i the mean probability of it.

    Fedus et al., section 2.2, for each dimension of the grid. It is D when both are even, and at least that
    when f is P. Gradients flow through P.
    """
    parts = [
        len(used) * (used.to(score.device) * score.softmax(dim=-1).mean(dim=0)).sum()
        for score, used in zip(scores, utilization, strict=True)
    ]
    return torch.stack(parts).sum()
