"""`swarm.RemoteSequential`: a deep model whose stages are hosted by other peers, several per stage."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from moe.calls import AS_THEY_ARE, Travel
from moe.mixture.layer import check_batch
from moe.mixture.session import CROSSING_MARGIN_S, Remote, on_host
from moe.pipeline.passes import STAGES_MAX, PipelinePass, PipelineReport, PipelineTerms, Trail
from moe.tensors import finite
from moe.uid import Grid
from swarm.errors import UsageError

if TYPE_CHECKING:
    from swarm.node import Node

__all__ = ["PipelineConfig", "PipelineReport", "RemoteSequential"]

_MICRO_BATCHES = 4  # that a batch is cut into when nothing is said


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """Settings of pipelines that rarely need a change."""

    stage_timeout_s: float = 10.0  # of one attempt at one stage with one micro-batch; then another peer is asked
    in_flight_max: int = 8  # micro-batches on their way at a time; more hide more of the links' delay, and keep more stages busy
    travel: Travel = AS_THEY_ARE  # codecs for activations and gradients


class RemoteSequential(nn.Module):
    """Stages one after the other, as torch.nn.Sequential: `blocks` names them, such as "block.[0:12]", in the order of their numbers.

    What one stage returns, a tensor or several, goes to the next. The batch goes in micro-batches of `micro_batch_size` samples (None: a
    quarter of it), several of them on their way at a time; each takes at every stage one of the peers that hold it, drawn by how quick
    they are. A peer that fails is replaced by another of its stage, in the backward pass too: there the stage is computed again at the
    other from what it was given. Each micro-batch is one optimizer step for a stage that learns (or part of one: servers join what waits).

    NotEnoughPeers: a stage that nobody could do within `forward_timeout_s` or `backward_timeout_s`. UsageError: wrong arguments, inputs
    that are not what the first stage takes.
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
        self.grid, self.config = Grid.parse(blocks), config or PipelineConfig()
        if self.grid.count > STAGES_MAX:
            raise UsageError(f"a pipeline has at most {STAGES_MAX} stages, and {blocks} are {self.grid.count:,}")
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
        check_batch(inputs[0], inputs[1:])
        anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())
        outputs: tuple[torch.Tensor, ...] = _ThroughStages.apply(_Journey(self), anchor, *inputs)  # type: ignore[no-untyped-call]
        return outputs[0] if len(outputs) == 1 else outputs

    def terms(self, batch: int, timeout_s: float) -> PipelineTerms:
        """For a batch of so many samples."""
        size = self.micro_batch_size
        return PipelineTerms(
            stages=tuple(self.grid.names()),
            timeout_s=timeout_s,
            stage_timeout_s=self.config.stage_timeout_s,
            micro_batch_size=-(-batch // _MICRO_BATCHES) if size is None else size,
            in_flight_max=self.config.in_flight_max,
            travel=self.config.travel,
        )

    def extra_repr(self) -> str:
        return str(self.grid)


class _Journey:
    """One batch's way through all stages, and back."""

    def __init__(self, layer: RemoteSequential) -> None:
        self._layer, self._remote = layer, layer._remote
        self._lock = threading.Lock()
        self._backwards = 0
        self._trails: list[Trail] = []

    def forward(self, inputs: Sequence[torch.Tensor], *, keep: bool) -> list[torch.Tensor]:
        here = on_host(inputs)
        for number, tensor in enumerate(here):
            if not finite(tensor):
                raise UsageError(f"input {number} of the pipeline has NaN or infinity; nobody was asked")
        terms = self._layer.terms(len(here[0]), self._layer._forward_timeout_s)

        async def work() -> tuple[list[Trail], PipelineReport]:
            passing = PipelinePass(self._remote.calls, terms)
            return await passing.forward(here, keep=keep), passing.report

        found, self._layer.last_forward = self._remote.node.network.run(work(), terms.timeout_s + CROSSING_MARGIN_S)
        self._trails = found if keep else []
        return [torch.cat(parts) for parts in zip(*(trail.outputs for trail in found), strict=True)]

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        given = [None if one is None else one.detach().to("cpu") for one in gradients]
        first = [tensor for trail in self._trails[:1] for tensor in trail.steps[0].inputs if tensor.is_floating_point()]
        if not all(one is None or finite(one) for one in given):
            batch = sum(len(trail.outputs[0]) for trail in self._trails)
            return [torch.full((batch, *tensor.shape[1:]), float("nan"), dtype=tensor.dtype) for tensor in first]
        terms = self._layer.terms(len(self._trails[0].outputs[0]), self._layer._backward_timeout_s)
        with self._lock:
            again, self._backwards = self._backwards > 0, self._backwards + 1

        async def work() -> tuple[list[torch.Tensor | None], PipelineReport]:
            passing = PipelinePass(self._remote.calls, terms)
            return await passing.backward(self._trails, given, again=again), passing.report

        found, self._layer.last_backward = self._remote.node.network.run(work(), terms.timeout_s + CROSSING_MARGIN_S)
        return found


class _ThroughStages(torch.autograd.Function):
    """The outputs of the last stage as a function of the inputs of the first."""

    @staticmethod
    def forward(ctx: Any, journey: _Journey, anchor: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.journey = journey
        ctx.save_for_backward(*inputs)  # the stages' inputs are views of these: autograd notices when they are overwritten
        ctx.set_materialize_grads(False)
        outputs = tuple(one.to(inputs[0].device) for one in journey.forward(inputs, keep=anchor.requires_grad))
        ctx.floating = [output.is_floating_point() for output in outputs]
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return outputs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        inputs: Sequence[torch.Tensor] = ctx.saved_tensors
        given = [one for one, is_floating in zip(gradients, ctx.floating, strict=True) if is_floating]
        found = iter(ctx.journey.backward(given) if any(one is not None for one in given) else [])
        back: list[torch.Tensor | None] = []
        for tensor, wanted in zip(inputs, ctx.needs_input_grad[2:], strict=True):
            gradient = next(found, None) if tensor.is_floating_point() else None
            back.append(gradient.to(tensor) if wanted and gradient is not None else None)
        return (None, None, *back)
