"""The gate of a mixture: it scores every expert of a grid for each sample.

Product keys (Lample et al., "Large Memory Layers with Product Keys", 2019): one linear layer gives a score
for every coordinate of every dimension, and the score of expert (i, j, …) is the sum of its coordinates'
scores. A grid of 256 × 256 experts therefore needs 512 scores.

Shapes: B samples, N_d coordinates of dimension d, S slots for experts per sample, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from swarm.core.errors import UsageError

# weight of the earlier utilization when a batch is added. Smaller: the shares follow single batches; larger:
# an expert that is not used any more still looks used for a long time
UTILIZATION_ALPHA = 0.9


class ProductKeyGate(nn.Module):
    """Maps float [B, in_features] to one float [B, N_d] for each dimension."""

    def __init__(self, in_features: int, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.projection = nn.Linear(in_features, sum(shape))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.projection(inputs).split(self.shape, dim=-1))


def gate_input(inputs: torch.Tensor, in_features: int, like: torch.Tensor) -> torch.Tensor:
    """Return one vector per sample, in the dtype and on the device of `like`: [B, in_features] as it is, [B,
    …, in_features] averaged over the dimensions between. Raises UsageError for another shape.
    """
    if inputs.ndim < 2 or inputs.shape[-1] != in_features:
        raise UsageError(
            f"this layer takes inputs of shape (batch, …, {in_features}), not {tuple(inputs.shape)}"
        )
    if inputs.ndim > 2:
        inputs = inputs.flatten(1, -2).mean(dim=1)
    return inputs.to(device=like.device, dtype=like.dtype)


def logits_of(scores: Sequence[torch.Tensor], coordinates_BSD: torch.Tensor) -> torch.Tensor:
    """Return the scores of the experts at these coordinates, [B, S]; differentiable. Coordinates count from 0
    in each dimension.
    """
    parts = [
        score.gather(1, coordinates_BSD[:, :, dimension].to(score.device))
        for dimension, score in enumerate(scores)
    ]
    return torch.stack(parts).sum(dim=0)


def softmax_over(logits_BS: torch.Tensor, answered_BS: torch.Tensor) -> torch.Tensor:
    """Return the softmax over the experts that answered, and zero for the others. Rows in which no expert
    answered are zero and have no gradient.
    """
    any_B1 = answered_BS.any(dim=1, keepdim=True)
    masked = logits_BS.masked_fill(~answered_BS, float("-inf")).masked_fill(~any_B1, 0.0)
    return masked.softmax(dim=1) * answered_BS


def switch_weights(
    scores: Sequence[torch.Tensor],
    coordinates_BSD: torch.Tensor,
    selected_BS: torch.Tensor,
    answered_BS: torch.Tensor,
) -> torch.Tensor:
    """Return each expert's probability in the whole grid (Fedus et al., "Switch Transformers", 2021, section
    2.1), [B, S].

    The probability of selected experts that did not answer is distributed among those that did, in
    proportion. A softmax over sums factorises: the probability of (i, j, …) is the product of its dimensions'
    probabilities.
    """
    logs = logits_of([score.log_softmax(dim=-1) for score in scores], coordinates_BSD)
    selected = logs.masked_fill(~selected_BS, float("-inf"))
    any_B1 = answered_BS.any(dim=1, keepdim=True)
    mass_B1 = selected.masked_fill(~any_B1, 0.0).logsumexp(dim=1, keepdim=True)
    return softmax_over(logs, answered_BS) * mass_B1.exp()


def balancing_loss(scores: Sequence[torch.Tensor], utilization: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum over dimensions d of N_d · Σ_i f_i · P_i, where f_i is the share of samples that went to
    coordinate i, and P_i its mean probability.

    Fedus et al., section 2.2, for each dimension of the grid. The loss is D when both are uniform, and at
    least D when f equals P, and 0 for an empty batch. Gradients flow through P.
    """
    if not len(scores[0]):  # no sample: the mean would be NaN
        return torch.stack([score.sum() for score in scores]).sum()
    parts = [
        len(share_used) * (share_used.to(score.device) * score.softmax(dim=-1).mean(dim=0)).sum()
        for score, share_used in zip(scores, utilization, strict=True)
    ]
    return torch.stack(parts).sum()


@torch.no_grad()
def update_utilization(
    utilization: Sequence[torch.Tensor], coordinates_BSD: torch.Tensor, selected_BS: torch.Tensor
) -> None:
    """Add a batch's selection to the moving averages of the shares of each dimension's coordinates."""
    if not bool(selected_BS.any()):
        return
    for dimension, share_used in enumerate(utilization):
        counts = torch.bincount(coordinates_BSD[:, :, dimension][selected_BS], minlength=len(share_used)).to(
            share_used
        )
        share_used.mul_(UTILIZATION_ALPHA).add_(counts / counts.sum(), alpha=1.0 - UTILIZATION_ALPHA)
