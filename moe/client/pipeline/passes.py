"""One batch through the stages of a deep model on other peers' machines, forward and later backward, a few
micro-batches at a time. On the network loop.

After SWARM parallelism (Ryabinin et al., 2023, section 3): every stage is held by several peers, each
micro-batch goes to one of them, drawn by how quick they are, and goes on at another when that one dies. What
a stage was given stays here until its backward pass, so that it can be computed again elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from moe.client.replicas.calling import ForwardCall, ForwardResult, ReplicaCalls, with_new_request_id
from moe.protocol.calls import UNCOMPRESSED, GradientPass, WireCodecs
from moe.protocol.errors import ExpertRefused
from moe.protocol.names import ExpertUid
from swarm.core.backoff import Backoff
from swarm.core.errors import NetworkError, NotEnoughPeers, PeerError, SwarmError, UsageError

T = TypeVar("T")

STAGES_MAX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """What a pass may take."""

    stages: tuple[ExpertUid, ...]
    timeout_s: float  # of a whole pass, forward or backward
    # of one attempt at one stage; then another peer is asked. Too small: a slow peer's work is thrown away
    stage_timeout_s: float
    # samples; too small: round trips cost more than the work, too large: stages wait for one another
    micro_batch_size: int
    in_flight_max: int  # micro-batches on their way at a time
    pause_first_s: float = 0.05  # before a stage that nobody could do is tried again; doubles
    pause_s_max: float = 1.0
    travel: WireCodecs = UNCOMPRESSED

    def __post_init__(self) -> None:
        if not 1 <= len(self.stages) <= STAGES_MAX:
            raise UsageError(f"a pipeline has 1 to {STAGES_MAX} stages, not {len(self.stages)}")
        if not (0.0 < self.stage_timeout_s < float("inf") and 0.0 < self.timeout_s < float("inf")):
            raise UsageError("timeout_s and stage_timeout_s are positive numbers of seconds")
        if self.micro_batch_size < 1 or self.in_flight_max < 1:
            raise UsageError("micro_batch_size and in_flight_max are at least 1")


@dataclass(slots=True)
class PipelineReport:
    """What came of a pass."""

    micro_batches: int = 0
    rerouted: list[str] = field(default_factory=list)  # "block.3: why", for each attempt that failed
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Step:
    """One stage of one micro-batch: what it was given, and who answered."""

    made: ForwardResult
    inputs: Sequence[torch.Tensor]


@dataclass(slots=True, eq=False, repr=False)
class Trail:
    """A micro-batch's way through all stages."""

    steps: list[Step] = field(default_factory=list)
    outputs: Sequence[torch.Tensor] = ()


class PipelinePass:
    """Forward and backward; use one object for each."""

    def __init__(self, calls: ReplicaCalls, terms: PipelineOptions) -> None:
        self._calls, self._terms = calls, terms
        self._begun_s = calls.clock.monotonic_s()
        self._deadline_s = self._begun_s + terms.timeout_s
        self._room = asyncio.Semaphore(terms.in_flight_max)
        self.report = PipelineReport()

    async def forward(self, inputs: Sequence[torch.Tensor], *, keep: bool) -> list[Trail]:
        """A trail for each micro-batch, in order. NotEnoughPeers when a stage has nobody who can do it in
        time.
        """

        async def travel(parts: Sequence[torch.Tensor]) -> Trail:
            trail = Trail(outputs=parts)
            for uid in self._terms.stages:
                made = await self._ahead(uid, trail.outputs, keep)
                trail.steps.append(Step(made, trail.outputs if keep else ()))
                trail.outputs = made.forwarded.outputs
            return trail

        parts = zip(*(torch.split(tensor, self._terms.micro_batch_size) for tensor in inputs), strict=True)
        return await self._together([travel(part) for part in parts])

    async def backward(
        self, trails: Sequence[Trail], gradients: Sequence[torch.Tensor | None], *, again: bool
    ) -> list[torch.Tensor | None]:
        """`gradients`: of the floating outputs of the whole batch. Those of the floating inputs; every stage
        learns on the way.
        """

        async def travel(
            trail: Trail, flowing: Sequence[torch.Tensor | None]
        ) -> Sequence[torch.Tensor | None]:
            for step in reversed(trail.steps):
                if all(one is None for one in flowing):
                    return [None for tensor in trail.steps[0].inputs if tensor.is_floating_point()]
                flowing = await self._back(step, flowing, again)
            return flowing

        sizes = [len(trail.outputs[0]) for trail in trails]
        columns = [(None,) * len(trails) if one is None else torch.split(one, sizes) for one in gradients]
        flows = [[column[number] for column in columns] for number in range(len(trails))]
        found = await self._together([travel(trail, flow) for trail, flow in zip(trails, flows, strict=True)])
        return [_joined(parts, trails, number) for number, parts in enumerate(zip(*found, strict=True))]

    async def _together(self, journeys: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """All of them, as many at a time as may be; the first error ends the others."""
        self.report.micro_batches = len(journeys)

        async def admitted(journey: Coroutine[Any, Any, T]) -> T:
            async with self._room:
                return await journey

        # raised below: what `except*` raises comes in a group on early versions of Python 3.11
        failed: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(admitted(journey)) for journey in journeys]
        except* SwarmError as errors:
            failed = _first(errors)
        finally:
            for journey in journeys:
                journey.close()  # those that never began
        if failed is not None:
            raise failed
        self.report.seconds = self._calls.clock.monotonic_s() - self._begun_s
        return [task.result() for task in running]

    async def _ahead(self, uid: ExpertUid, inputs: Sequence[torch.Tensor], keep: bool) -> ForwardResult:
        """One stage of one micro-batch, at whoever can do it."""
        clock, terms = self._calls.clock, self._terms
        backoff = Backoff(terms.pause_first_s, terms.pause_s_max)
        error = SwarmError("there was no time to ask anybody")
        anew, desperate_since_s = False, None
        while (now_s := clock.monotonic_s()) < self._deadline_s:
            limit_s = min(now_s + terms.stage_timeout_s, self._deadline_s)
            try:
                replicas = await self._calls.atlas.replicas(uid, timeout_s=limit_s - now_s, anew=anew)
                call = ForwardCall(uid, replicas, inputs, keep, desperate_since_s)
                return await self._calls.forward(call, deadline_s=limit_s, travel=terms.travel)
            except (NotEnoughPeers, PeerError, NetworkError) as failure:
                error = failure
                self.report.rerouted.append(f"{uid}: {failure}")
            anew, desperate_since_s = True, clock.monotonic_s()
            await asyncio.sleep(min(backoff.next_s(), max(self._deadline_s - desperate_since_s, 0.0)))
        raise NotEnoughPeers(
            f"stage {uid} was not done within {terms.timeout_s:g} s; the last attempt: {error}; "
            "let more servers hold it, or allow more time"
        )

    async def _back(
        self, step: Step, gradients: Sequence[torch.Tensor | None], again: bool
    ) -> Sequence[torch.Tensor | None]:
        """The backward pass of a stage where it was answered; should that peer be gone, forward and backward
        at another.
        """
        clock, terms, made = self._calls.clock, self._terms, step.made
        if again:
            made = with_new_request_id(made)
        tensors = GradientPass(step.inputs, gradients)
        while True:
            limit_s = min(clock.monotonic_s() + terms.stage_timeout_s, self._deadline_s)
            try:
                return (
                    await self._calls.backward(made, tensors, deadline_s=limit_s, travel=terms.travel)
                ).gradients
            except (PeerError, NetworkError) as failure:
                if isinstance(failure, ExpertRefused) or clock.monotonic_s() >= self._deadline_s:
                    raise
                self.report.rerouted.append(f"{made.uid}, backward: {failure}")
            made = await self._ahead(made.uid, step.inputs, keep=True)


def _joined(
    parts: Sequence[torch.Tensor | None], trails: Sequence[Trail], number: int
) -> torch.Tensor | None:
    """One input's gradient over all micro-batches."""
    if all(part is None for part in parts):
        return None
    floating = [
        [tensor for tensor in trail.steps[0].inputs if tensor.is_floating_point()][number] for trail in trails
    ]
    return torch.cat(
        [
            torch.zeros_like(like) if part is None else part.to(like.dtype)
            for part, like in zip(parts, floating, strict=True)
        ]
    )


def _first(errors: BaseExceptionGroup[SwarmError]) -> SwarmError:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, SwarmError)
    return error
