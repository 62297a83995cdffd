"""`swarm.RemoteSequential`: a deep model whose stages are hosted by other peers, several per stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from moe.client.pipeline.passes import STAGES_MAX, PipelineOptions, PipelinePass, PipelineReport, Trail
from moe.client.replicas.autograd_bridge import Remote, check_batch, crossed, to_host_checked
from moe.protocol.calls import UNCOMPRESSED, WireCodecs
from moe.protocol.names import ExpertGrid
from swarm.core.errors import UsageError

if TYPE_CHECKING:
    from swarm.node import Node

__all__ = ["PipelineConfig", "PipelineReport", "RemoteSequential"]

_MICRO_BATCHES = 4  # that a batch is cut into when nothing is said


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """Settings of pipelines that rarely need a change."""

    # of one attempt at one stage with one micro-batch; then another peer is asked
    stage_timeout_s: float = 10.0
    # micro-batches on their way at a time; more hide more of the links' delay, and keep more stages busy
    in_flight_max: int = 8
    travel: WireCodecs = UNCOMPRESSED  # codecs for activations and gradients


class RemoteSequential(nn.Module):
    """Stages one after the other, as torch.nn.Sequential: `blocks` names them, such as "block.[0:12]", in the
    order of their numbers.

    What one stage returns, a tensor or several, goes to the next. The batch goes in micro-batches of
    `micro_batch_size` samples (None: a quarter of it), several of them on their way at a time; each takes at
    every stage one of the peers that hold it, drawn by how quick they are. A peer that fails is replaced by
    another of its stage, in the backward pass too: there the stage is computed again at the other from what
    it was given. Each micro-batch is one optimizer step for a stage that learns (or part of one: servers join
    what waits).

    NotEnoughPeers: a stage that nobody could do within `forward_timeout_s` or `backward_timeout_s`.
    UsageError: wrong arguments, inputs that are not what the first stage takes.
    """

    def __init__(
        self,
        node: Node,
        blocks: str,
        *,
        micro_batch_size: int | None = None,
        forward_timeout_s: float = 60.0,
        backward_timeout_s: float = 60.0,
        config: PipelineConfig | None = None,
    ) -> None:
        super().__init__()
        self.grid, self.config = ExpertGrid.parse(blocks), config or PipelineConfig()
        if self.grid.count > STAGES_MAX:
            raise UsageError(
                f"a pipeline has at most {STAGES_MAX} stages, and {blocks} are {self.grid.count:,}"
            )
        self.micro_batch_size = micro_batch_size
        self._forward_timeout_s, self._backward_timeout_s = forward_timeout_s, backward_timeout_s
        self.terms(1, forward_timeout_s)  # says now what is wrong with the arguments
        self.terms(1, backward_timeout_s)
        self._remote = Remote(node)
        self.last_forward: PipelineReport | None = None  # what became of the last pass
        self.last_backward: PipelineReport | None = None

    def __len__(self) -> int:
        return self.grid.count

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if not inputs:
            raise UsageError("a pipeline takes at least one tensor")
        check_batch(inputs)
        trails = self._ahead(inputs)

        def back(
            _: list[torch.Tensor], gradients: list[torch.Tensor | None], again: bool
        ) -> Sequence[torch.Tensor | None]:
            return self._back(trails, gradients, again)

        outputs = crossed(
            inputs,
            [torch.cat(parts) for parts in zip(*(trail.outputs for trail in trails), strict=True)],
            back,
        )
        return outputs[0] if len(outputs) == 1 else outputs

    def terms(self, batch: int, timeout_s: float) -> PipelineOptions:
        """For a batch of so many samples."""
        size = self.micro_batch_size
        return PipelineOptions(
            stages=tuple(self.grid.names()),
            timeout_s=timeout_s,
            stage_timeout_s=self.config.stage_timeout_s,
            micro_batch_size=-(-batch // _MICRO_BATCHES) if size is None else size,
            in_flight_max=self.config.in_flight_max,
            travel=self.config.travel,
        )

    def extra_repr(self) -> str:
        return str(self.grid)

    def _ahead(self, inputs: Sequence[torch.Tensor]) -> list[Trail]:
        here, keep = to_host_checked(inputs, "pipeline"), torch.is_grad_enabled()
        terms = self.terms(len(here[0]), self._forward_timeout_s)

        async def work() -> tuple[list[Trail], PipelineReport]:
            passing = PipelinePass(self._remote.calls, terms)
            return await passing.forward(here, keep=keep), passing.report

        trails, self.last_forward = self._remote.run(work(), terms.timeout_s)
        return trails

    def _back(
        self, trails: list[Trail], gradients: list[torch.Tensor | None], again: bool
    ) -> list[torch.Tensor | None]:
        terms = self.terms(len(trails[0].outputs[0]), self._backward_timeout_s)

        async def work() -> tuple[list[torch.Tensor | None], PipelineReport]:
            passing = PipelinePass(self._remote.calls, terms)
            return await passing.backward(trails, gradients, again=again), passing.report

        found, self.last_backward = self._remote.run(work(), terms.timeout_s)
        return found
