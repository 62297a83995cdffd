"""`swarm.RemoteMixtureOfExperts`: a mixture layer with a local gate, whose experts are hosted anywhere in the
swarm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from moe.client.downloading import DownloadedExpert, Progress
from moe.client.local import LocalMixtureOfExperts
from moe.client.local_copies import ModuleFactory, download, download_modules, ignore
from moe.client.logic.dispatch import weighted_sum
from moe.client.logic.gate import ProductKeyGate, gate_input, logits_of, softmax_over
from moe.client.logic.gathering import GatherTimeouts
from moe.client.mixture.options import MixtureOptions, PassReport
from moe.client.mixture.session import LastPasses, Session
from moe.client.replicas.autograd_bridge import NodeBridge, check_batch, uncompiled
from moe.protocol.calls import UNCOMPRESSED, WireCodecs
from moe.protocol.names import ExpertGrid
from swarm.core.errors import UsageError

if TYPE_CHECKING:
    from swarm.node import Node

__all__ = ["PassReport", "RemoteMixtureOfExperts"]


class RemoteMixtureOfExperts(nn.Module):
    """A mixture layer: each sample goes through the `k_best` experts of `grid` that the gate scores highest.

    The outputs are summed, weighted by a softmax over the scores of the experts that answered. The layer
    takes float [B, …, in_features] (and further inputs of the experts, first dimension B) and returns the
    result of an expert: a tensor [B, …], or a tuple of tensors. The gate's parameters are local and train
    with any optimizer; `backward` trains the experts' parameters where they are hosted.

    Args:
        node: This process as a peer.
        in_features: Features of the input, by which the gate scores.
        grid: Pattern of the experts' names, such as "ffn.[0:4].[0:4]". Experts that do not exist, or are
            avoided, are passed over.
        k_best: Experts for each sample.
        k_min: Answers that each sample needs. A sample that loses too many experts gets the next best ones.
        forward_timeout_s: Limit of a forward pass.
        timeout_after_k_min_s: Time for the other experts once all samples have `k_min` answers. None: about
            as long as that took.
        backward_k_min: Branches that each sample needs in the backward pass. A lost expert drops its branch.
        backward_timeout_s: Limit of a backward pass; None: that of a forward pass.
        allow_zero_outputs: Return the mixture of the experts that answered, zeros when none did, where the
            call would raise NotEnoughPeers.
        codecs: Encodings of activations and gradients on the network.

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
        k_best: int = 4,
        k_min: int = 1,
        forward_timeout_s: float = 30.0,
        timeout_after_k_min_s: float | None = None,
        backward_k_min: int = 0,
        backward_timeout_s: float | None = None,
        allow_zero_outputs: bool = False,
        codecs: WireCodecs = UNCOMPRESSED,
    ) -> None:
        super().__init__()
        self.grid, self.in_features = ExpertGrid.parse(grid), in_features
        self.options = MixtureOptions(
            grid=self.grid,
            k_best=k_best,
            k_min=k_min,
            backward_k_min=backward_k_min,
            forward_timeout_s=forward_timeout_s,
            backward_timeout_s=forward_timeout_s if backward_timeout_s is None else backward_timeout_s,
            gather_timeouts=GatherTimeouts(after_k_min_s=timeout_after_k_min_s),
            allow_zero_outputs=allow_zero_outputs,
            codecs=codecs,
        )
        self.gate = ProductKeyGate(in_features, self.grid.shape)
        self._bridge, self._last_passes = NodeBridge(node), LastPasses()

    @uncompiled
    def forward(self, inputs: torch.Tensor, *more: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        check_batch((inputs, *more))
        scores = self.gate(gate_input(inputs, self.in_features, self.gate.projection.weight))
        found = self.session().forward(scores, (inputs, *more))
        weights = softmax_over(
            logits_of(scores, found.coordinates_BSD), found.answered_BS.to(scores[0].device)
        )
        return weighted_outputs(weights, found.outputs, inputs)

    def download(self, on_progress: Progress = ignore) -> dict[str, DownloadedExpert]:
        """Return the present parameters and buffers of all experts of the grid, by name. Three replicas of
        each are compared where there are as many. `on_progress`: called with the number of experts that are
        there, the number of all, and a name. Raises NotEnoughPeers when no server gives one of them.
        """
        return download(self._bridge.node, str(self.grid), on_progress)

    def to_local(
        self, make_module: ModuleFactory | None = None, on_progress: Progress = ignore
    ) -> LocalMixtureOfExperts:
        """Return this layer with all experts of the grid as modules of this process: an ordinary torch module
        with the outputs of this one. `make_module`: returns a new module like that of the expert with a name;
        None: of the class that the servers name (those of `swarm serve` do).
        """
        experts = download_modules(self._bridge.node, str(self.grid), make_module, on_progress)
        local = LocalMixtureOfExperts(
            self.in_features, experts, grid=str(self.grid), k_best=self.options.k_best
        )
        local.gate.load_state_dict(self.gate.state_dict())
        return local.train(self.training)

    def session(self) -> Session:
        """Return the session for one pass."""
        return Session(self._bridge, self._last_passes, self.options)

    @property
    def staleness_max(self) -> int | None:
        """Return by how many versions an expert may change between the two passes; None, the default: any. It
        can be set.
        """
        return self.options.staleness_max

    @staleness_max.setter
    def staleness_max(self, versions: int | None) -> None:
        self.options = replace(self.options, staleness_max=versions)

    @property
    def last_forward(self) -> PassReport | None:
        """Return the report of the last forward pass: the experts that were asked, that answered, and that
        failed with the reasons.
        """
        return self._last_passes.forward

    @property
    def last_backward(self) -> PassReport | None:
        """Return the report of the last backward pass."""
        return self._last_passes.backward

    def extra_repr(self) -> str:
        return f"grid={self.grid}, k_best={self.options.k_best}, k_min={self.options.k_min}"


def weighted_outputs(
    weights_BS: torch.Tensor, outputs: Sequence[torch.Tensor], inputs: torch.Tensor
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return the weighted sum of every output, on the device and in the precision of `inputs`."""
    if any(not output.is_floating_point() for output in outputs):
        raise UsageError("experts of a mixture return floating-point tensors: others cannot be weighted")
    totals = [weighted_sum(weights_BS.to(inputs.device), output) for output in outputs]
    totals = [total.to(inputs.dtype) if inputs.is_floating_point() else total for total in totals]
    return totals[0] if len(totals) == 1 else tuple(totals)
