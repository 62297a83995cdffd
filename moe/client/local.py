"""Mixtures and pipelines whose experts are local modules: what `to_local` of the layers of remote experts
returns. They are ordinary torch modules, and nothing of the network is imported with them.

Shapes: B samples, N_d coordinates of dimension d, E experts, S slots for experts per sample, D dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from moe.client.logic.dispatch import places_of, weighted_sum
from moe.client.logic.gate import (
    ProductKeyGate,
    balancing_loss,
    gate_input,
    logits_of,
    softmax_over,
    switch_weights,
    update_utilization,
)
from moe.protocol.names import ExpertGrid, ExpertUid
from swarm.core.errors import UsageError

__all__ = ["LocalMixtureOfExperts", "LocalSequential", "LocalSwitchMixtureOfExperts"]


class LocalMixtureOfExperts(nn.Module):
    """A mixture layer like RemoteMixtureOfExperts, with its experts in this process. Its outputs are those of
    the remote layer when all experts answer.

    The gate's tensors in the `state_dict` have the names that they have in the remote layer; those of the
    expert ffn.0.1 begin with "experts.ffn_0_1.".

    Args:
        in_features: Features of the input, by which the gate scores.
        experts: Modules by their names, such as "ffn.0.1".
        grid: Pattern of the experts' names, such as "ffn.[0:4].[0:4]".
        k_best: Experts for each sample.
    """

    def __init__(
        self, in_features: int, experts: Mapping[str, nn.Module], *, grid: str, k_best: int = 4
    ) -> None:
        super().__init__()
        self.grid, self.in_features = ExpertGrid.parse(grid), in_features
        uids = [ExpertUid.parse(name) for name in experts]
        if not uids or not all(uid in self.grid for uid in uids) or not k_best >= 1:
            raise UsageError(f"a mixture has k_best of at least 1, and experts of its grid {self.grid}")
        self.k_best = min(k_best, len(uids))
        self.names = list(experts)
        self.gate = ProductKeyGate(in_features, self.grid.shape)
        self.experts = nn.ModuleDict({_key(name): module for name, module in experts.items()})
        first = [dimension.start for dimension in self.grid.dimensions]
        self._places = [
            [one - start for one, start in zip(uid.coordinates, first, strict=True)] for uid in uids
        ]

    def forward(self, inputs: torch.Tensor, *more: torch.Tensor) -> Any:
        scores = self.gate(gate_input(inputs, self.in_features, self.gate.projection.weight))
        indices_BS, coordinates_BSD = self._select(scores)
        answered_BS = torch.ones_like(indices_BS, dtype=torch.bool)
        weights_BS = softmax_over(logits_of(scores, coordinates_BSD), answered_BS)
        return self._mix(weights_BS, indices_BS, (inputs, *more))

    def extra_repr(self) -> str:
        return f"grid={self.grid}, k_best={self.k_best}"

    def _select(self, scores: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers of the best experts of each sample, [B, S], and their coordinates, [B, S, D]."""
        places_ED = torch.tensor(self._places, device=scores[0].device)
        sums_BE = torch.stack([one[:, places_ED[:, d]] for d, one in enumerate(scores)]).sum(dim=0)
        indices_BS = sums_BE.topk(self.k_best, dim=1).indices
        return indices_BS, places_ED[indices_BS]

    def _mix(
        self, weights_BS: torch.Tensor, indices_BS: torch.Tensor, inputs: tuple[torch.Tensor, ...]
    ) -> Any:
        parts = places_of(indices_BS, len(self.experts))
        spread: list[torch.Tensor] = []
        for place, expert in zip(parts, self.experts.values(), strict=True):
            if not len(place.rows) and spread:
                continue
            outputs = expert(*(_cast(one[place.rows], expert) for one in inputs))
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            spread = spread or [one.new_zeros((*indices_BS.shape, *one.shape[1:])) for one in outputs]
            spread = [
                all_of.index_put((place.rows, place.columns), one)
                for all_of, one in zip(spread, outputs, strict=True)
            ]
        totals = [weighted_sum(weights_BS, one).to(inputs[0].dtype) for one in spread]
        return totals[0] if len(totals) == 1 else tuple(totals)


class LocalSwitchMixtureOfExperts(LocalMixtureOfExperts):
    """A mixture layer like RemoteSwitchMixtureOfExperts in `eval()` mode, with its experts in this process.

    It returns (output, balancing loss). There is neither jitter nor dropout of coordinates; `train()` mode
    updates the utilization.

    Args:
        in_features: Features of the input, by which the gate scores.
        experts: Modules by their names, such as "ffn.0.1".
        grid: Pattern of the experts' names, such as "ffn.[0:4].[0:4]".
        k_best: Experts for each sample.
    """

    def __init__(
        self, in_features: int, experts: Mapping[str, nn.Module], *, grid: str, k_best: int = 1
    ) -> None:
        super().__init__(in_features, experts, grid=grid, k_best=k_best)
        for dimension, size in enumerate(self.grid.shape):
            self.register_buffer(
                f"utilization_{dimension}", torch.full((size,), 1.0 / size, dtype=torch.float32)
            )

    @property
    def utilization(self) -> list[torch.Tensor]:
        """Return for each dimension the share of samples that selected each coordinate."""
        return [getattr(self, f"utilization_{dimension}") for dimension in range(len(self.grid.shape))]

    def forward(self, inputs: torch.Tensor, *more: torch.Tensor) -> Any:
        scores = self.gate(gate_input(inputs, self.in_features, self.gate.projection.weight))
        indices_BS, coordinates_BSD = self._select(scores)
        selected_BS = torch.ones_like(indices_BS, dtype=torch.bool)
        if self.training:
            update_utilization(self.utilization, coordinates_BSD, selected_BS)
        weights_BS = switch_weights(scores, coordinates_BSD, selected_BS, selected_BS)
        loss = balancing_loss(scores, [share_used.clone() for share_used in self.utilization])
        return self._mix(weights_BS, indices_BS, (inputs, *more)), loss


class LocalSequential(nn.Sequential):
    """A pipeline like RemoteSequential, with its stages in this process. Unlike torch.nn.Sequential it takes
    several tensors, and passes several outputs of a stage to the next one.
    """

    def forward(self, *inputs: torch.Tensor) -> Any:
        passed: Any = inputs
        for stage in self:
            passed = stage(*(_cast(one, stage) for one in passed))
            passed = passed if isinstance(passed, tuple) else (passed,)
        return passed[0] if len(passed) == 1 else passed


def _key(name: str) -> str:
    """Return the key of an expert: torch allows no dot in it."""
    return name.replace(".", "_")


def _cast(tensor: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Return a floating-point tensor in the dtype of a module, as servers of experts get it."""
    floating = (one.dtype for one in module.parameters() if one.is_floating_point())
    dtype = next(floating, tensor.dtype)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
