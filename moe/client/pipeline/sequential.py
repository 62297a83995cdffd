"""`swarm.RemoteSequential`: a deep model whose stages are hosted by other peers, several per stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from moe.client.downloading import DownloadedExpert, Progress
from moe.client.local import LocalSequential
from moe.client.local_copies import ModuleFactory, download, download_modules, ignore
from moe.client.pipeline.batch_stream import BatchStream
from moe.client.pipeline.passes import STAGES_MAX, MicroBatch, PipelineOptions, PipelinePass, PipelineReport
from moe.client.replicas.autograd_bridge import (
    NodeBridge,
    attach_backward,
    attach_empty,
    check_batch,
    to_host_checked,
    uncompiled,
)
from moe.protocol.calls import UNCOMPRESSED, WireCodecs
from moe.protocol.names import ExpertGrid
from moe.protocol.schema import ExpertSchema
from swarm.core.errors import NotEnoughPeers, UsageError

if TYPE_CHECKING:
    from swarm.node import Node

__all__ = ["PipelineConfig", "PipelineReport", "RemoteSequential"]

_DEFAULT_MICRO_BATCHES = 4  # the number of micro-batches when no size is given


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """Settings of pipelines that rarely need a change."""

    # limit for one attempt at one stage with one micro-batch; then another peer is asked
    stage_timeout_s: float = 10.0
    # micro-batches processed at a time; more of them hide the links' delay and keep more stages busy
    in_flight_max: int = 8
    codecs: WireCodecs = UNCOMPRESSED  # codecs for activations and gradients


class RemoteSequential(nn.Module):
    """Runs stages one after the other, like torch.nn.Sequential, on the peers that host them.

    The output of one stage, a tensor or several, is the input of the next. A batch is cut into micro-batches,
    several of which are processed at a time. At every stage a micro-batch goes to one of the peers that host
    it, drawn by their speed. A peer that fails is replaced by another one of its stage. In the backward pass,
    the replacement computes the stage again from its inputs. Each micro-batch is one optimizer step of a
    stage that learns, or a part of one, since servers batch waiting requests.

    Args:
        node: This process as a peer.
        blocks: Pattern of the stages' names, such as "block.[0:12]", in the order of their numbers.
        micro_batch_size: Samples of a micro-batch; None: a quarter of the batch.
        forward_timeout_s: Limit of a forward pass through all stages.
        backward_timeout_s: Limit of a backward pass through all stages.
        config: Timeout of a stage, micro-batches in flight, and codecs; None: the defaults.

    The attribute `staleness_max` (None: no limit) can be set. A stage that changed by more versions than this
    between the two passes of a micro-batch is computed again, with its current parameters, before the
    backward pass.

    Raises:
        NotEnoughPeers: When no peer completed a stage within the limit of the pass.
        UsageError: For wrong arguments, or inputs that the first stage does not take.
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
        self.staleness_max: int | None = None  # in versions; can be set
        self._forward_timeout_s, self._backward_timeout_s = forward_timeout_s, backward_timeout_s
        self.pass_options(1, forward_timeout_s)  # raises now when the arguments are wrong
        self.pass_options(1, backward_timeout_s)
        self._bridge = NodeBridge(node)
        self.last_forward: PipelineReport | None = None  # report of the last pass
        self.last_backward: PipelineReport | None = None
        self.last_training: PipelineReport | None = None  # report of the last `train_batches`

    def __len__(self) -> int:
        return self.grid.count

    @uncompiled
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if not inputs:
            raise UsageError("a pipeline takes at least one tensor")
        check_batch(inputs)
        if not len(inputs[0]):
            empty = attach_empty(inputs, self._empty_outputs(inputs))
            return empty[0] if len(empty) == 1 else empty
        micro_batches = self._run_forward(inputs)

        def run_backward(
            _: list[torch.Tensor], gradients: list[torch.Tensor | None], number: int
        ) -> Sequence[torch.Tensor | None]:
            return self._run_backward(micro_batches, gradients, number)

        outputs = attach_backward(
            inputs,
            [
                torch.cat(parts)
                for parts in zip(*(micro_batch.outputs for micro_batch in micro_batches), strict=True)
            ],
            run_backward,
        )
        return outputs[0] if len(outputs) == 1 else outputs

    def train_batches(
        self,
        batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> list[float]:
        """Run forward and backward passes of several batches, each (inputs, targets), and return the loss of
        each.

        The stages are kept full across batches: a micro-batch goes back as soon as its loss is computed (one
        forward, one backward), and the next batch follows while the one before is still under way, up to
        `in_flight_max` micro-batches in all. So a batch may see parameters from before the last steps of the
        stages. `loss` is called with the output and the targets of a micro-batch and returns the mean over
        its samples. Inputs that need a gradient get it by `backward`, which local layers before the pipeline
        learn from. `last_training` reports the passes, with the bubbles. Raises what `forward` and `backward`
        raise.
        """
        stream = BatchStream(
            self._bridge, self.pass_options, self._forward_timeout_s, self._backward_timeout_s
        )
        try:
            for inputs, targets in batches:
                check_batch((inputs, targets))
                (host_inputs,) = to_host_checked((inputs,), "pipeline")
                stream.add(inputs, host_inputs, targets, loss)
            losses = stream.finish()
        finally:
            stream.close()
        self.last_training = stream.report
        return losses

    def download(self, on_progress: Progress = ignore) -> dict[str, DownloadedExpert]:
        """Return the present parameters and buffers of all stages, by name. Three replicas of each are
        compared where there are as many. `on_progress`: called with the number of stages that are there, the
        number of all, and a name. Raises NotEnoughPeers when no server gives one of them.
        """
        return download(self._bridge.node, str(self.grid), on_progress)

    def to_local(
        self, make_module: ModuleFactory | None = None, on_progress: Progress = ignore
    ) -> LocalSequential:
        """Return the pipeline with its stages as modules of this process. `make_module`: returns a new module
        like that of the stage with a name; None: of the class that the servers name (those of `swarm serve`
        do). Raises NotEnoughPeers when nobody hosts a stage.
        """
        modules = download_modules(self._bridge.node, str(self.grid), make_module, on_progress)
        lacking = [str(uid) for uid in self.grid.names() if str(uid) not in modules]
        if lacking:
            raise NotEnoughPeers(f"nobody hosts the stage {lacking[0]} of this pipeline")
        return LocalSequential(*modules.values()).train(self.training)

    def pass_options(self, batch: int, timeout_s: float) -> PipelineOptions:
        """Return the options of a pass over `batch` samples."""
        size = self.micro_batch_size
        return PipelineOptions(
            stages=tuple(self.grid.names()),
            timeout_s=timeout_s,
            stage_timeout_s=self.config.stage_timeout_s,
            micro_batch_size=-(-batch // _DEFAULT_MICRO_BATCHES) if size is None else size,
            in_flight_max=self.config.in_flight_max,
            codecs=self.config.codecs,
            staleness_max=self.staleness_max,
        )

    def extra_repr(self) -> str:
        return str(self.grid)

    def _empty_outputs(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs of the last stage for an empty batch."""

        async def work() -> tuple[ExpertSchema, ExpertSchema]:
            calls, stages = self._bridge.calls, list(self.grid.names())
            deadline_s = calls.clock.monotonic_s() + self._forward_timeout_s
            first = await calls.schema(stages[0], deadline_s=deadline_s)
            return first, await calls.schema(stages[-1], deadline_s=deadline_s)

        first, last = self._bridge.run(work(), self._forward_timeout_s)
        schema = last.at(first.length_of(inputs)) if last.sequence_length else last
        return [
            torch.empty((0, *leaf.shape), dtype=leaf.dtype, device="cpu") for leaf in schema.output_leaves
        ]

    def _run_forward(self, inputs: Sequence[torch.Tensor]) -> list[MicroBatch]:
        host_inputs, keep = to_host_checked(inputs, "pipeline"), torch.is_grad_enabled()
        options = self.pass_options(len(host_inputs[0]), self._forward_timeout_s)

        async def work() -> tuple[list[MicroBatch], PipelineReport]:
            pipeline_pass = PipelinePass(self._bridge.calls, options)
            return await pipeline_pass.forward(host_inputs, keep=keep), pipeline_pass.report

        micro_batches, self.last_forward = self._bridge.run(work(), options.timeout_s)
        return micro_batches

    def _run_backward(
        self, micro_batches: list[MicroBatch], gradients: list[torch.Tensor | None], number: int
    ) -> list[torch.Tensor | None]:
        options = self.pass_options(len(micro_batches[0].outputs[0]), self._backward_timeout_s)

        async def work() -> tuple[list[torch.Tensor | None], PipelineReport]:
            pipeline_pass = PipelinePass(self._bridge.calls, options)
            return await pipeline_pass.backward(micro_batches, gradients, number), pipeline_pass.report

        found, self.last_backward = self._bridge.run(work(), options.timeout_s)
        return found
