"""Passes of one batch through the stages of a remote pipeline, forward and later backward, a few
micro-batches at a time. Runs on the network loop.

After SWARM parallelism (Ryabinin et al., 2023, section 3): every stage is hosted by several peers. Each
micro-batch goes to one of them, drawn by how quick they are, and continues at another when that one dies. The
inputs of a stage are kept here until its backward pass, so that it can be computed again elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from moe.client.replicas.calling import ForwardCall, ForwardResult, ReplicaCalls
from moe.client.replicas.together import run_together
from moe.protocol.calls import UNCOMPRESSED, GradientPass, WireCodecs, check_staleness_max
from moe.protocol.errors import ExpertRefused
from moe.protocol.names import ExpertUid
from swarm.core.backoff import Backoff
from swarm.core.clock import Clock
from swarm.core.errors import NetworkError, NotEnoughPeers, PeerError, SwarmError, UsageError

T = TypeVar("T")

STAGES_MAX = 1024
_RETRY_PAUSE_FIRST_S = 0.05  # pause before a stage that no peer completed is tried again; doubles
_RETRY_PAUSE_S_MAX = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The stages and limits of a pass."""

    stages: tuple[ExpertUid, ...]
    timeout_s: float  # limit for a whole pass, forward or backward
    # timeout of one attempt at one stage; then another peer is asked. Too small: work of slow peers is wasted
    stage_timeout_s: float
    # in samples. Too small: round trips cost more than the work; too large: stages wait for one another
    micro_batch_size: int
    in_flight_max: int  # micro-batches that are processed at a time
    codecs: WireCodecs = UNCOMPRESSED
    # above this difference of versions, a stage is computed again before its backward pass
    staleness_max: int | None = None

    def __post_init__(self) -> None:
        check_staleness_max(self.staleness_max)
        if not 1 <= len(self.stages) <= STAGES_MAX:
            raise UsageError(f"a pipeline has 1 to {STAGES_MAX} stages, not {len(self.stages)}")
        if not (0.0 < self.stage_timeout_s < float("inf") and 0.0 < self.timeout_s < float("inf")):
            raise UsageError("timeout_s and stage_timeout_s are positive numbers of seconds")
        if self.micro_batch_size < 1 or self.in_flight_max < 1:
            raise UsageError("micro_batch_size and in_flight_max are at least 1")


@dataclass(slots=True)
class PipelineReport:
    """The outcome of a pass."""

    micro_batches: int = 0
    rerouted: list[str] = field(default_factory=list)  # "block.3: reason", for each attempt that failed
    seconds: float = 0.0
    # fraction of the time in which no micro-batch was at a stage or on its way there, the mean over stages
    bubbles: float = 0.0


class StageOccupancy:
    """Measures for how long each stage has micro-batches. Those under way on the network count, too: this is
    what the caller sees.
    """

    def __init__(self, stages: int, clock: Clock) -> None:
        self._clock, self._begun_s = clock, clock.monotonic_s()
        self._calls, self._since_s, self._busy_s = [0] * stages, [0.0] * stages, [0.0] * stages

    @contextlib.contextmanager
    def at(self, stage: int) -> Iterator[None]:
        """Count a micro-batch at a stage."""
        if not self._calls[stage]:
            self._since_s[stage] = self._clock.monotonic_s()
        self._calls[stage] += 1
        try:
            yield
        finally:
            self._calls[stage] -= 1
            if not self._calls[stage]:
                self._busy_s[stage] += self._clock.monotonic_s() - self._since_s[stage]

    @property
    def seconds(self) -> float:
        """Return the time since the beginning."""
        return self._clock.monotonic_s() - self._begun_s

    def bubbles(self) -> float:
        """Return the fraction of the time so far in which stages had nothing."""
        total_s = self.seconds * len(self._busy_s)
        return max(1.0 - sum(self._busy_s) / total_s, 0.0) if total_s > 0 else 0.0


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StageCall:
    """One stage of one micro-batch: its inputs, and the replica's answer."""

    result: ForwardResult
    inputs: Sequence[torch.Tensor]


@dataclass(slots=True, eq=False, repr=False)
class MicroBatch:
    """A micro-batch and its calls, stage by stage."""

    stage_calls: list[StageCall] = field(default_factory=list)
    outputs: Sequence[torch.Tensor] = ()


class PipelinePass:
    """A forward or a backward pass. Use one object for each pass."""

    def __init__(
        self, calls: ReplicaCalls, options: PipelineOptions, occupancy: StageOccupancy | None = None
    ) -> None:
        self._calls, self._options = calls, options
        self._occupancy = occupancy or StageOccupancy(len(options.stages), calls.clock)
        self._begun_s = calls.clock.monotonic_s()
        self._deadline_s = self._begun_s + options.timeout_s
        self.report = PipelineReport()

    async def forward(self, inputs: Sequence[torch.Tensor], *, keep: bool) -> list[MicroBatch]:
        """Return the micro-batches with their outputs, in order. Raises NotEnoughPeers when no peer completes
        a stage in time.
        """

        async def run_forward(parts: Sequence[torch.Tensor]) -> MicroBatch:
            micro_batch = MicroBatch(outputs=parts)
            for stage, uid in enumerate(self._options.stages):
                with self._occupancy.at(stage):
                    result = await self._forward_stage(uid, micro_batch.outputs, keep)
                micro_batch.stage_calls.append(StageCall(result, micro_batch.outputs if keep else ()))
                micro_batch.outputs = result.forward_reply.take_outputs()
            return micro_batch

        parts = zip(*(torch.split(tensor, self._options.micro_batch_size) for tensor in inputs), strict=True)
        return await self._run_all([run_forward(part) for part in parts])

    async def backward(
        self, micro_batches: Sequence[MicroBatch], gradients: Sequence[torch.Tensor | None], pass_number: int
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the floating-point inputs. `gradients` are those of the floating-point
        outputs of the whole batch. Every stage makes its optimizer step on the way. `pass_number` is that of
        this backward pass among those of one forward pass, from 0 on; a repeated one has the number it had.
        """

        async def run_backward(
            micro_batch: MicroBatch, gradients: Sequence[torch.Tensor | None]
        ) -> Sequence[torch.Tensor | None]:
            for stage in reversed(range(len(micro_batch.stage_calls))):
                if all(one is None for one in gradients):
                    return [
                        None for tensor in micro_batch.stage_calls[0].inputs if tensor.is_floating_point()
                    ]
                with self._occupancy.at(stage):
                    gradients = await self._backward_stage(micro_batch, stage, gradients, pass_number)
            return gradients

        sizes = [len(micro_batch.outputs[0]) for micro_batch in micro_batches]
        columns = [
            (None,) * len(micro_batches) if one is None else torch.split(one, sizes) for one in gradients
        ]
        flows = [[column[number] for column in columns] for number in range(len(micro_batches))]
        found = await self._run_all(
            [run_backward(micro_batch, flow) for micro_batch, flow in zip(micro_batches, flows, strict=True)]
        )
        return [
            _join_gradients(parts, micro_batches, number)
            for number, parts in enumerate(zip(*found, strict=True))
        ]

    async def _run_all(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Run all coroutines, as many at a time as the options allow; the first error ends the others."""
        self.report.micro_batches = len(work)
        found = await run_together(work, self._options.in_flight_max)
        self.report.seconds = self._calls.clock.monotonic_s() - self._begun_s
        self.report.bubbles = self._occupancy.bubbles()
        return found

    async def _forward_stage(
        self, uid: ExpertUid, inputs: Sequence[torch.Tensor], keep: bool
    ) -> ForwardResult:
        """Compute one stage of one micro-batch at any replica that can do it."""
        clock, options = self._calls.clock, self._options
        backoff = Backoff(_RETRY_PAUSE_FIRST_S, _RETRY_PAUSE_S_MAX)
        error = SwarmError("there was no time to ask any peer")
        refresh, include_avoided_since_s = False, None
        while (now_s := clock.monotonic_s()) < self._deadline_s:
            limit_s = min(now_s + options.stage_timeout_s, self._deadline_s)
            try:
                replicas = await self._calls.directory.replicas(
                    uid, timeout_s=limit_s - now_s, refresh=refresh
                )
                call = ForwardCall(uid, replicas, inputs, keep, include_avoided_since_s)
                return await self._calls.forward(call, deadline_s=limit_s, codecs=options.codecs)
            except (NotEnoughPeers, PeerError, NetworkError) as failure:
                error = failure
                self.report.rerouted.append(f"{uid}: {failure}")
            refresh, include_avoided_since_s = True, clock.monotonic_s()
            await asyncio.sleep(min(backoff.next_s(), max(self._deadline_s - include_avoided_since_s, 0.0)))
        raise NotEnoughPeers(
            f"stage {uid} was not computed within {options.timeout_s:g} s; the last attempt: {error}; "
            "let more servers host it, or allow more time"
        )

    async def _backward_stage(
        self,
        micro_batch: MicroBatch,
        stage: int,
        gradients: Sequence[torch.Tensor | None],
        pass_number: int,
    ) -> Sequence[torch.Tensor | None]:
        """Run the backward pass of a stage where forward was answered. When that peer has failed, run forward
        and backward at another one, which a repeated backward pass then asks first.
        """
        clock, options, call = self._calls.clock, self._options, micro_batch.stage_calls[stage]
        result = call.result.for_pass(pass_number)
        tensors = GradientPass(call.inputs, gradients, options.staleness_max)
        while True:
            limit_s = min(clock.monotonic_s() + options.stage_timeout_s, self._deadline_s)
            try:
                return (
                    await self._calls.backward(result, tensors, deadline_s=limit_s, codecs=options.codecs)
                ).gradients
            except (PeerError, NetworkError) as failure:
                if isinstance(failure, ExpertRefused) or clock.monotonic_s() >= self._deadline_s:
                    raise
                self.report.rerouted.append(f"{result.uid}, backward: {failure}")
            found = await self._forward_stage(result.uid, call.inputs, keep=True)
            found.forward_reply.take_outputs()  # a backward pass does not need them
            micro_batch.stage_calls[stage] = StageCall(found, call.inputs)
            result = found.for_pass(pass_number)


def _join_gradients(
    parts: Sequence[torch.Tensor | None], micro_batches: Sequence[MicroBatch], number: int
) -> torch.Tensor | None:
    """Return one input's gradient over all micro-batches."""
    if all(part is None for part in parts):
        return None
    floating = [
        [tensor for tensor in micro_batch.stage_calls[0].inputs if tensor.is_floating_point()][number]
        for micro_batch in micro_batches
    ]
    return torch.cat(
        [
            torch.zeros_like(like) if part is None else part.to(like.dtype)
            for part, like in zip(parts, floating, strict=True)
        ]
    )
