"""`swarm.RemoteMixtureOfExperts`: a mixture layer whose gate is here and whose experts are anywhere in the
swarm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from moe.client.logic.beam import BeamConfig
from moe.client.logic.dispatch import mixed
from moe.client.logic.gate import ProductKeyGate, gate_input, logits_of, softmax_over
from moe.client.logic.gathering import GatherTimeouts
from moe.client.mixture.options import MixtureOptions, PassReport
from moe.client.mixture.session import LastPasses, Session
from moe.client.replicas.autograd_bridge import Remote, check_batch
from moe.protocol.calls import UNCOMPRESSED, WireCodecs
from moe.protocol.names import ExpertGrid
from swarm.core.errors import UsageError

if TYPE_CHECKING:
    from swarm.node import Node

__all__ = ["MixtureConfig", "PassReport", "RemoteMixtureOfExperts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig:
    """Settings of mixture layers that rarely need a change."""

    travel: WireCodecs = UNCOMPRESSED  # codecs for activations and gradients
    patience: GatherTimeouts = field(default_factory=GatherTimeouts)  # its `after_k_min_s` is the layer's
    # rounds of asking others for samples that lost too many experts, after the first also those avoided; 0:
    # never
    replacements_max: int = 4
    beam: BeamConfig = field(default_factory=BeamConfig)


class RemoteMixtureOfExperts(nn.Module):
    """Each sample goes through the `k_best` experts of `grid` that the gate scores highest; their outputs,
    weighted by a softmax over the scores of those that answered, are added.

    float [B, …, in_features] (and further inputs of the experts, first dimension B) -> what an expert
    returns: a tensor [B, …], or a tuple of tensors. The gate's parameters are here and train with any
    optimizer; the experts' are trained where they are, by `backward`.

    `grid`: a pattern such as "ffn.[0:4].[0:4]"; experts that do not exist or are avoided are passed over.
    `k_min`: so many must answer for each sample; once that is so for all, the others have
    `timeout_after_k_min_s` more (None: about as long as it took until then), and are dropped. A sample that
    loses too many gets the next best experts instead. Fewer than `k_min` within `forward_timeout_s`:
    NotEnoughPeers, or with `allow_zero_outputs` the mixture of those who answered, zeros when nobody did.
    Gradients flow through those who answered; an expert lost in the backward pass drops its branch, and
    NotEnoughPeers is raised only when a sample has fewer than `backward_k_min` branches left. UsageError:
    wrong arguments, or inputs that are not what experts take.
    """

    def __init__(
        self,
        node: Node,
        in_features: int,
        *,
        grid: str,
        k_best: int = 4,
        k_min: int = 1,
        forward_timeout_s: float = 30.0,
        timeout_after_k_min_s: float | None = None,
        backward_k_min: int = 0,
        backward_timeout_s: float | None = None,
        allow_zero_outputs: bool = False,
        config: MixtureConfig | None = None,
    ) -> None:
        super().__init__()
        config = config or MixtureConfig()
        self.grid, self.in_features = ExpertGrid.parse(grid), in_features
        patience = config.patience
        self.terms = MixtureOptions(
            grid=self.grid,
            k_best=k_best,
            k_min=k_min,
            backward_k_min=backward_k_min,
            forward_timeout_s=forward_timeout_s,
            backward_timeout_s=forward_timeout_s if backward_timeout_s is None else backward_timeout_s,
            patience=GatherTimeouts(
                after_k_min_s=timeout_after_k_min_s,
                share=patience.share,
                least_s=patience.least_s,
                most_s=patience.most_s,
            ),
            allow_zero_outputs=allow_zero_outputs,
            travel=config.travel,
            replacements_max=config.replacements_max,
            beam=config.beam,
        )
        self.gate = ProductKeyGate(in_features, self.grid.shape)
        self._remote, self._seen = Remote(node), LastPasses()

    def forward(self, inputs: torch.Tensor, *more: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        check_batch((inputs, *more))
        scores = self.gate(gate_input(inputs, self.in_features, self.gate.projection.weight))
        found = self.session().forward(scores, (inputs, *more))
        weights = softmax_over(
            logits_of(scores, found.coordinates_BSD), found.answered_BS.to(scores[0].device)
        )
        return combined(weights, found.outputs, inputs)

    def session(self) -> Session:
        """For one pass."""
        return Session(self._remote, self._seen, self.terms)

    @property
    def last_forward(self) -> PassReport | None:
        """What became of the last forward pass: who was asked, who answered, who failed and why."""
        return self._seen.forward

    @property
    def last_backward(self) -> PassReport | None:
        """The same of the last backward pass."""
        return self._seen.backward

    def extra_repr(self) -> str:
        return f"grid={self.grid}, k_best={self.terms.k_best}, k_min={self.terms.k_min}"


def combined(
    weights_BS: torch.Tensor, outputs: Sequence[torch.Tensor], inputs: torch.Tensor
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The mixture of every output, where and in the precision that the inputs are in."""
    if any(not output.is_floating_point() for output in outputs):
        raise UsageError("experts of a mixture return floating-point tensors: others cannot be weighted")
    totals = [mixed(weights_BS.to(inputs.device), output) for output in outputs]
    totals = [total.to(inputs.dtype) if inputs.is_floating_point() else total for total in totals]
    return totals[0] if len(totals) == 1 else tuple(totals)
