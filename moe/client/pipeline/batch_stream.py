"""Several batches in a pipeline at the same time: one forward, one backward (1F1B).

The micro-batches of all batches share the slots of the pipeline. Each goes through all stages, its loss is
computed on the caller's thread, and it goes back at once; then its slot is free for the next one. After
PipeDream (Narayanan and others, 2019), without its copies of the parameters: stages compute a backward pass
with the parameters that they have then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moe.client.pipeline.passes import (
    MicroBatch,
    PipelineOptions,
    PipelinePass,
    PipelineReport,
    StageOccupancy,
)
from moe.client.replicas.autograd_bridge import NodeBridge, to_host
from swarm.core.errors import UsageError
from swarm.core.notify import ChangeEvent

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(slots=True, eq=False)
class _Batch:
    """One batch in progress."""

    inputs: torch.Tensor  # the caller's, which gets the gradient
    targets: Sequence[torch.Tensor]  # by micro-batch
    samples: int
    loss: float = 0.0
    gradients: dict[int, torch.Tensor | None] = field(default_factory=dict)  # by micro-batch


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A micro-batch whose forward pass is over."""

    batch: _Batch
    number: int
    micro_batch: MicroBatch
    samples: int


class BatchStream:
    """The batches of one call of `train_batches`. Its methods are called on the caller's thread, tasks run on
    the network loop. Call `close` after an error.
    """

    def __init__(
        self,
        bridge: NodeBridge,
        options: Callable[[int, float], PipelineOptions],
        forward_timeout_s: float,
        backward_timeout_s: float,
    ) -> None:
        self._bridge, self._options = bridge, options
        self._forward_timeout_s, self._backward_timeout_s = forward_timeout_s, backward_timeout_s
        self._batches: list[_Batch] = []
        self._loss: LossFunction = lambda output, target: output
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        self._arrived: list[_Part] = []
        self._failure: BaseException | None = None
        self._changed = ChangeEvent()
        self._occupancy: StageOccupancy | None = None
        self.report = PipelineReport()

    def add(
        self, inputs: torch.Tensor, host_inputs: torch.Tensor, targets: torch.Tensor, loss: LossFunction
    ) -> None:
        """Start the micro-batches of a batch, one after the other, as slots become free."""
        self._loss = loss
        options = self._options(len(inputs), self._forward_timeout_s)
        batch = _Batch(inputs, torch.split(targets, options.micro_batch_size), len(inputs))
        self._batches.append(batch)
        for number, part in enumerate(torch.split(host_inputs, options.micro_batch_size)):
            self._turn(options.in_flight_max - 1)
            self._bridge.run(self._start_forward(batch, number, part, options), 0.0)
        self.report.micro_batches += len(batch.targets)

    def finish(self) -> list[float]:
        """Wait for everything in progress, write the gradients of the inputs, and return the losses."""
        self._turn(0)
        for batch in self._batches:
            self._hand_over(batch)
        self._bridge.run(self._measure(), 0.0)
        return [batch.loss for batch in self._batches]

    def close(self) -> None:
        """Cancel everything in progress, after an error."""

        async def cancel() -> None:
            for task in self._tasks:
                task.cancel()

        if self._tasks:
            self._bridge.run(cancel(), 0.0)

    def _turn(self, in_flight_max: int) -> None:
        """Compute losses of micro-batches that have arrived, and send them back, until no more than
        `in_flight_max` are under way. Raises the first error of a task.
        """
        limit_s = self._forward_timeout_s + self._backward_timeout_s
        while True:
            parts, in_flight = self._bridge.run(self._next(in_flight_max), limit_s)
            for part in parts:
                gradients = self._differentiate(part)
                self._bridge.run(self._start_backward(part, gradients), 0.0)
            if not parts and in_flight <= in_flight_max:
                return

    async def _next(self, in_flight_max: int) -> tuple[list[_Part], int]:
        """Wait until micro-batches have arrived, or there is room."""
        while not self._arrived and self._in_flight > in_flight_max and self._failure is None:
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure
        parts, self._arrived = self._arrived, []
        return parts, self._in_flight

    def _differentiate(self, part: _Part) -> torch.Tensor:
        """Return the gradient of a micro-batch's output, by its share of the batch's mean loss."""
        if len(part.micro_batch.outputs) != 1:
            raise UsageError("train_batches takes pipelines whose last stage returns one tensor")
        targets = part.batch.targets[part.number]
        output = part.micro_batch.outputs[0].to(targets.device).requires_grad_()
        with torch.enable_grad():
            loss = self._loss(output, targets)
            if loss.numel() != 1:
                raise UsageError("loss returns one number, the mean over the samples it was given")
            (gradient,) = torch.autograd.grad(loss * (part.samples / part.batch.samples), output)
        part.batch.loss += float(loss.detach()) * part.samples / part.batch.samples
        return to_host((gradient,))[0]

    def _hand_over(self, batch: _Batch) -> None:
        found = [batch.gradients.get(number) for number in range(len(batch.targets))]
        if not batch.inputs.requires_grad or any(one is None for one in found):
            return
        gradient = torch.cat([one for one in found if one is not None])
        gradient = gradient.to(batch.inputs.device, batch.inputs.dtype)
        batch.inputs.backward(gradient)  # type: ignore[no-untyped-call]

    # --- on the network loop

    async def _measure(self) -> None:
        if self._occupancy is not None:
            self.report.seconds, self.report.bubbles = self._occupancy.seconds, self._occupancy.bubbles()

    async def _start_forward(
        self, batch: _Batch, number: int, part: torch.Tensor, options: PipelineOptions
    ) -> None:
        if self._occupancy is None:
            self._occupancy = StageOccupancy(len(options.stages), self._bridge.calls.clock)
        one = PipelinePass(self._bridge.calls, options, self._occupancy)

        async def run() -> None:
            (micro_batch,) = await one.forward((part,), keep=True)
            self.report.rerouted += one.report.rerouted
            self._arrived.append(_Part(batch, number, micro_batch, len(part)))

        self._in_flight += 1
        self._start(run())

    async def _start_backward(self, part: _Part, gradient: torch.Tensor) -> None:
        options = self._options(part.samples, self._backward_timeout_s)
        one = PipelinePass(self._bridge.calls, options, self._occupancy)

        async def run() -> None:
            (found,) = await one.backward([part.micro_batch], [gradient], 0)
            self.report.rerouted += one.report.rerouted
            part.batch.gradients[part.number] = found
            self._in_flight -= 1

        self._start(run())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
        self._changed.notify()
