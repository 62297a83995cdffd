"""`swarm.RemoteSwitchMixtureOfExperts`: switch routing (Fedus et al., "Switch Transformers", 2021) over
experts on other peers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from moe.client.downloading import DownloadedExpert, Progress
from moe.client.local import LocalSwitchMixtureOfExperts
from moe.client.local_copies import ModuleFactory, ignore
from moe.client.logic.gate import (
    ProductKeyGate,
    balancing_loss,
    gate_input,
    switch_weights,
    update_utilization,
)
from moe.client.mixture.layer import RemoteMixtureOfExperts, weighted_outputs
from moe.client.mixture.options import PassReport
from moe.client.replicas.autograd_bridge import check_batch, uncompiled
from moe.protocol.calls import UNCOMPRESSED, WireCodecs
from swarm.core.errors import UsageError

if TYPE_CHECKING:
    from swarm.node import Node

# subtracted from the scores of dropped coordinates: they are selected only when nothing else is alive
_DROPOUT_PENALTY = 1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchConfig:
    """Settings for exploration and balancing. In `eval()` mode only the loss remains."""

    grid_dropout: float = 1.0  # probability with which each coordinate is kept; 1: all are
    # the gate's input (not the experts') is multiplied by 1 - this to 1 + this, per element
    jitter_eps: float = 1e-2
    codecs: WireCodecs = UNCOMPRESSED  # codecs of activations and gradients on the network

    def __post_init__(self) -> None:
        if not (0.0 < self.grid_dropout <= 1.0 and 0.0 <= self.jitter_eps < 1.0):
            raise UsageError(
                "a switch layer needs jitter_eps from 0 to below 1, grid_dropout above 0 and at most 1"
            )


class RemoteSwitchMixtureOfExperts(nn.Module):
    """A mixture layer in which each sample goes to the `k_best` (usually one) most probable experts of
    `grid`.

    The outputs are weighted by the probabilities themselves. The layer returns (output, balancing loss): add
    the loss, times a small factor, to your own, so that experts are used evenly. The probability of selected
    experts that did not answer is distributed among the experts of the same sample that did.
    `utilization_0`, `utilization_1`, … are buffers: the share of samples that selected each coordinate of a
    dimension, as a moving average.

    Args:
        node: This process as a peer.
        in_features: Features of the input, by which the gate scores.
        grid: Pattern of the experts' names, such as "ffn.[0:4].[0:4]".
        k_best: Experts for each sample.
        k_min: Answers that each sample needs.
        forward_timeout_s: Limit of a forward pass.
        timeout_after_k_min_s: Time for the other experts once all samples have `k_min` answers. None: about
            as long as that took.
        backward_k_min: Branches that each sample needs in the backward pass.
        backward_timeout_s: Limit of a backward pass; None: that of a forward pass.
        allow_zero_outputs: Return zeros for samples without an answer, where the call would raise
            NotEnoughPeers.
        config: Dropout of coordinates, jitter of the gate's input, and codecs; None: the defaults.

    Raises:
        UsageError: For wrong arguments, or inputs that the experts do not take.
        NotEnoughPeers: When a sample has fewer than `k_min` answers, or `backward_k_min` gradients, in time.
    """

    def __init__(
        self,
        node: Node,
        in_features: int,
        *,
        grid: str,
        k_best: int = 1,
        k_min: int = 0,
        forward_timeout_s: float = 30.0,
        timeout_after_k_min_s: float | None = None,
        backward_k_min: int = 0,
        backward_timeout_s: float | None = None,
        allow_zero_outputs: bool = True,
        config: SwitchConfig | None = None,
    ) -> None:
        super().__init__()
        self.config = config or SwitchConfig()
        self._mixture = RemoteMixtureOfExperts(
            node,
            in_features,
            grid=grid,
            k_best=k_best,
            k_min=k_min,
            forward_timeout_s=forward_timeout_s,
            timeout_after_k_min_s=timeout_after_k_min_s,
            backward_k_min=backward_k_min,
            backward_timeout_s=backward_timeout_s,
            allow_zero_outputs=allow_zero_outputs,
            codecs=self.config.codecs,
        )
        self.grid, self.in_features, self.options = self._mixture.grid, in_features, self._mixture.options
        for dimension, size in enumerate(self.grid.shape):
            self.register_buffer(
                f"utilization_{dimension}", torch.full((size,), 1.0 / size, dtype=torch.float32)
            )

    @property
    def gate(self) -> ProductKeyGate:
        return self._mixture.gate

    @property
    def utilization(self) -> list[torch.Tensor]:
        """Return for each dimension the share of samples that selected each coordinate; the shares of a
        dimension sum to 1.
        """
        return [getattr(self, f"utilization_{dimension}") for dimension in range(len(self.grid.shape))]

    @property
    def staleness_max(self) -> int | None:
        """Return the limit, as of `RemoteMixtureOfExperts`. It can be set."""
        return self._mixture.staleness_max

    @staleness_max.setter
    def staleness_max(self, versions: int | None) -> None:
        self._mixture.staleness_max = versions

    @property
    def last_forward(self) -> PassReport | None:
        return self._mixture.last_forward

    @property
    def last_backward(self) -> PassReport | None:
        return self._mixture.last_backward

    def download(self, on_progress: Progress = ignore) -> dict[str, DownloadedExpert]:
        """Return the experts' parameters, as `RemoteMixtureOfExperts.download` does."""
        return self._mixture.download(on_progress)

    def to_local(
        self, make_module: ModuleFactory | None = None, on_progress: Progress = ignore
    ) -> LocalSwitchMixtureOfExperts:
        """Return this layer with all experts as modules of this process, as `RemoteMixtureOfExperts.to_local`
        does. The utilization is copied.
        """
        mixture = self._mixture.to_local(make_module, on_progress)
        experts = dict(zip(mixture.names, mixture.experts.values(), strict=True))
        local = LocalSwitchMixtureOfExperts(
            self.in_features, experts, grid=str(self.grid), k_best=self.options.k_best
        )
        local.gate.load_state_dict(self.gate.state_dict())
        for own, share_used in zip(local.utilization, self.utilization, strict=True):
            own.copy_(share_used)
        return local.train(self.training)

    @uncompiled
    def forward(
        self, inputs: torch.Tensor, *more: torch.Tensor
    ) -> tuple[torch.Tensor | tuple[torch.Tensor, ...], torch.Tensor]:
        check_batch((inputs, *more))
        gate_inputs = gate_input(inputs, self.in_features, self.gate.projection.weight)
        if self.training and self.config.jitter_eps:
            gate_inputs = gate_inputs * torch.empty_like(gate_inputs).uniform_(
                1.0 - self.config.jitter_eps, 1.0 + self.config.jitter_eps
            )
        scores = self.gate(gate_inputs)
        found = self._mixture.session().forward(
            [score - self._dropout_penalty(score) for score in scores], (inputs, *more)
        )
        device = scores[0].device
        weights = switch_weights(
            scores, found.coordinates_BSD, found.selected_BS.to(device), found.answered_BS.to(device)
        )
        if self.training:
            update_utilization(self.utilization, found.coordinates_BSD, found.selected_BS)
        # clones: the next batch may change the buffers before this loss is differentiated
        loss = balancing_loss(scores, [share_used.clone() for share_used in self.utilization])
        return weighted_outputs(weights, found.outputs, inputs), loss

    def _dropout_penalty(self, score: torch.Tensor) -> torch.Tensor:
        """Return the penalty that is subtracted from each score of one dimension."""
        if not self.training or self.config.grid_dropout >= 1.0:
            return score.new_zeros(score.shape[1])
        return _DROPOUT_PENALTY * (
            torch.rand(score.shape[1], dtype=torch.float32, device=score.device) >= self.config.grid_dropout
        ).to(score.dtype)
