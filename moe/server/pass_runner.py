"""Running admitted requests: their tensors are decoded, their jobs queued for the computing threads, and the
outcomes awaited. A node has one instance, on its network loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, TypeAlias

import torch

from moe.protocol.tensors import check_payload, decode
from moe.server.compute import ComputeThread
from moe.server.jobs import Job, Outcome, ReceivedTensor
from moe.server.joint_steps import JointExpert
from moe.server.logic.applied import AppliedRequests
from moe.server.logic.caller_cache import CacheLimits, CallerCache
from moe.server.requests import (
    AdmittedRequest,
    HostedExpert,
    KeptInputs,
    PendingJob,
    RequestRefused,
    request_overloaded,
    request_refused,
)
from swarm.compression import Buffer
from swarm.core.errors import PeerError, SwarmError
from swarm.core.ids import PeerId
from swarm.wire import expert_pb2
from swarm.wire.expert_pb2 import ExpertRequest

_POOLED_BYTES = 256 << 10
# Answers up to this size are copied before they are kept. In the computing thread's part of the heap they
# would lie among the temporary tensors of layers, and leave gaps that are too small for those. A larger one
# would cost the network thread a long copy.
_KEPT_COPY_BYTES_MAX = 256 << 10
# How long the outcomes of requests in one message are gathered for one answer. Too small: quick experts are
# answered in many messages; too large: those of slow ones come late.
GATHER_S = 0.02
# the inputs between a forward pass and its backward pass; missing ones are sent again
INPUT_LIMITS = CacheLimits(bytes_max=256 << 20, bytes_per_caller_max=64 << 20, strangers_bytes_max=16 << 20)

Payload: TypeAlias = Buffer | torch.Tensor


class PassRunner:
    """Runs requests. `joint` has the experts that may step with replicas, by name."""

    def __init__(
        self, joint: Mapping[str, JointExpert], pool: Executor, is_stranger: Callable[[Hashable], bool]
    ) -> None:
        self._joint, self._pool, self._is_stranger = joint, pool, is_stranger
        self._applied: AppliedRequests[Outcome] = AppliedRequests(is_stranger)
        # by caller and (request id, expert)
        self.input_cache: CallerCache[KeptInputs] = CallerCache(INPUT_LIMITS, is_stranger)
        self._jobs: dict[int, PendingJob] = {}  # by number: queued or being computed
        # the backward passes among them, by pass id
        self._pending: dict[tuple[PeerId, bytes], PendingJob] = {}
        self._numbers = itertools.count(1)
        self._to_wake: set[ComputeThread] = set()  # at the end of this turn of the loop

    def on_results(self, done: Sequence[tuple[Job, Outcome]]) -> None:
        """Process the results of a computing thread. Called on the loop."""
        for job, outcome in done:
            pending = self._jobs.pop(job.number, None)
            if job.is_backward:
                self._pending.pop(job.pass_id, None)
                self.input_cache.drop(job.caller, (job.pass_id[1], job.uid))
                if not outcome.failure:
                    if outcome.size_bytes <= _KEPT_COPY_BYTES_MAX:
                        outcome = outcome.copied()  # the reply takes the copy, too
                    self._applied.note(*job.pass_id, outcome, outcome.size_bytes)
                    if job.uid in self._joint:
                        self._joint[job.uid].counted()
            for future in pending.waiting if pending is not None else ():
                if not future.done():
                    future.set_result(outcome)

    async def drain(self, hosted: Sequence[HostedExpert], timeout_s: float) -> None:
        """Wait for requests of these experts that are queued or being computed."""
        threads = {id(one.compute) for one in hosted}
        futures = [
            future
            for pending in self._jobs.values()
            if id(pending.compute) in threads
            for future in pending.waiting
        ]
        if futures:
            await asyncio.wait(futures, timeout=timeout_s)

    def drop_waiting(self, hosted: Sequence[HostedExpert], reason: str) -> None:
        """Refuse waiting requests of these experts, since their computing thread was stopped. Called on the
        loop.
        """
        threads = {id(one.compute) for one in hosted}
        self._pending = {
            name: pending for name, pending in self._pending.items() if id(pending.compute) not in threads
        }
        for number, pending in list(self._jobs.items()):
            if id(pending.compute) in threads:
                del self._jobs[number]
                for future in pending.waiting:
                    if not future.done():
                        future.set_exception(RequestRefused(expert_pb2.EXPERT_MISSING, reason))

    def is_repeated(self, caller: PeerId, request: ExpertRequest) -> bool:
        """Return whether a backward pass with this id is under way, or was applied."""
        name = (caller, request.request_id)
        return name in self._pending or self._applied.is_known(*name)

    def kept_inputs(self, caller: PeerId, request: ExpertRequest) -> KeptInputs:
        """Return the inputs of the forward pass that a backward pass follows. Raises RequestRefused."""
        kept = self.input_cache.get(caller, (request.request_id, request.uid))
        if kept is None or not kept.is_unmodified:
            raise RequestRefused(
                expert_pb2.EXPERT_FORGOTTEN, "the inputs of that forward pass are not kept here any more"
            )
        if kept.shape != (request.batch, request.sequence_length):
            raise request_refused(
                f"the forward pass of that id had {kept.shape[0]} samples, not {request.batch}, "
                "or sequences of another length"
            )
        return kept

    async def run_together(
        self,
        requests: Mapping[int, AdmittedRequest],
        payloads: Mapping[int, torch.Tensor],
        answer: Callable[[dict[int, Outcome | RequestRefused]], Awaitable[None]],
    ) -> None:
        """Run the requests of one message, by their numbers in it. They are queued in one go, without a task
        for each. `answer` is awaited with the outcomes, by number, as they come, but not for each by itself.
        """
        # raised below: early versions of Python 3.11 wrap errors raised within `except*` in a group
        failed: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._run_in_group(tasks, requests, payloads, answer)
        except* SwarmError as errors:  # the caller has gone
            failed = errors.exceptions[0]
        if failed is not None:
            raise failed

    async def _run_in_group(
        self,
        tasks: asyncio.TaskGroup,
        requests: Mapping[int, AdmittedRequest],
        payloads: Mapping[int, torch.Tensor],
        answer: Callable[[dict[int, Outcome | RequestRefused]], Awaitable[None]],
    ) -> None:
        found: dict[int, Outcome | RequestRefused] = {}
        decoded: dict[int, Sequence[ReceivedTensor | None]] = {}
        jobs: list[tuple[PendingJob, asyncio.Future[Outcome]]] = []
        waiting: dict[int, asyncio.Future[Any]] = {}
        for number, admitted in requests.items():
            own = payloads[number].clone()  # what a part keeps must not hold the payload of all
            if self._active_joint(admitted) is not None or len(own) > _POOLED_BYTES:
                waiting[number] = tasks.create_task(self._outcome_or_refusal(admitted, own))
                continue
            try:
                decoded[number] = _read(admitted, own)
            except RequestRefused as refusal:
                found[number] = refusal
        try:
            for number, tensors in decoded.items():
                try:
                    begun = self._begun(requests[number], tensors, wake=False)
                except RequestRefused as refusal:
                    found[number] = refusal
                    continue
                if isinstance(begun, Outcome):
                    found[number] = begun
                else:
                    waiting[number] = future = begun.join()
                    jobs.append((begun, future))
            for compute in {one.compute for one, _ in jobs}:
                compute.wake()
            if found:
                await answer(found)
            await _answer_as_they_come(waiting, answer)
        finally:
            for job, future in jobs:
                if not future.done():
                    self.leave(job, future)

    def begin(self, admitted: AdmittedRequest, payload: Payload) -> Outcome | PendingJob | None:
        """Begin a request, and return its job; the outcome if an earlier call with the same id has one.
        Return None for a request that `run` must wait for: it is large, or a step with replicas is due.
        Raises RequestRefused when nothing will be computed.
        """
        if len(payload) > _POOLED_BYTES or self._active_joint(admitted) is not None:
            return None
        earlier = self._earlier(admitted)
        if earlier is not None:
            return earlier
        begun = self._enqueue(admitted, _read(admitted, payload), wake=False)
        # later: this thread and the computing one would take turns at Python's lock
        if not self._to_wake:
            asyncio.get_running_loop().call_soon(self._wake)
        self._to_wake.add(begun.compute)
        return begun

    def _wake(self) -> None:
        to_wake, self._to_wake = self._to_wake, set()
        for compute in to_wake:
            compute.wake()

    async def _outcome_or_refusal(
        self, admitted: AdmittedRequest, payload: Payload
    ) -> Outcome | RequestRefused:
        try:
            return await self.run(admitted, payload)
        except RequestRefused as refusal:
            return refusal

    def _active_joint(self, admitted: AdmittedRequest) -> JointExpert | None:
        joint = self._joint.get(admitted.request.uid)
        return joint if joint is not None and joint.is_active else None

    async def run(self, admitted: AdmittedRequest, payload: Payload) -> Outcome:
        """Return the outcome of a request, as `_computed` does. A pass waits for a joint step that is due,
        and a backward pass is answered once replicas know of it.
        """
        joint = self._active_joint(admitted)
        if joint is None:
            return await self._computed(admitted, payload)
        if admitted.is_backward and (applied := self._earlier_outcome(admitted)) is not None:
            return applied
        samples, is_backward = admitted.request.batch, admitted.is_backward
        try:
            await joint.admit(samples, is_backward=is_backward)
        except TimeoutError:
            raise request_overloaded(admitted.hosted, "it waits for a step with its replicas") from None
        try:
            outcome = await self._computed(admitted, payload)
            if is_backward:
                await joint.tell()
            return outcome
        finally:
            joint.release(samples, is_backward=is_backward)

    async def _computed(self, admitted: AdmittedRequest, payload: Payload) -> Outcome:
        """Return the outcome of a request, possibly that of an earlier call with the same id. Raises
        RequestRefused when nothing was computed.
        """
        pending = self._earlier(admitted)
        if isinstance(pending, Outcome):
            return pending
        if pending is None:
            if len(payload) <= _POOLED_BYTES:
                tensors = _read(admitted, payload)
            else:
                tensors = await asyncio.get_running_loop().run_in_executor(
                    self._pool, _read, admitted, payload
                )
            # a repetition of the request may have been answered meanwhile
            pending = self._begun(admitted, tensors)
            if isinstance(pending, Outcome):
                return pending
        future = pending.join()
        try:
            outcome = await future
        except asyncio.CancelledError:
            self.leave(pending, future)
            raise
        if outcome.failure:
            raise RequestRefused(expert_pb2.EXPERT_FAILED, outcome.failure)
        return outcome

    def _begun(
        self, admitted: AdmittedRequest, tensors: Sequence[ReceivedTensor | None], *, wake: bool = True
    ) -> PendingJob | Outcome:
        """Return the job of a request, which is queued unless one with the same id is under way or was
        applied. Raises RequestRefused.
        """
        earlier = self._earlier(admitted)
        return self._enqueue(admitted, tensors, wake=wake) if earlier is None else earlier

    def _earlier(self, admitted: AdmittedRequest) -> PendingJob | Outcome | None:
        if not admitted.is_backward:
            return None
        return self._earlier_outcome(admitted) or self._pending.get(admitted.pass_id)

    def _earlier_outcome(self, admitted: AdmittedRequest) -> Outcome | None:
        """Return the outcome of a backward pass that was applied before; None when it was not."""
        if not self._applied.is_known(*admitted.pass_id):
            return None
        answer = self._applied.answer(*admitted.pass_id)
        if answer is None:
            raise RequestRefused(
                expert_pb2.EXPERT_APPLIED,
                "this backward pass was applied before, and its result is no longer kept",
            )
        return answer

    def leave(self, pending: PendingJob, future: asyncio.Future[Outcome]) -> None:
        """Stop waiting for a job with a future of `join`. It is withdrawn when no call waits for it any
        longer.
        """
        pending.waiting.remove(future)
        if not pending.waiting and pending.compute.withdraw(pending.number):
            self._jobs.pop(pending.number, None)
            self._pending.pop(pending.pass_id, None)

    def _enqueue(
        self, admitted: AdmittedRequest, tensors: Sequence[ReceivedTensor | None], *, wake: bool
    ) -> PendingJob:
        """Queue a job. Raises RequestRefused when there is no room."""
        hosted, request = admitted.hosted, admitted.request
        if admitted.is_backward and request.inputs_kept:
            count, inputs = 0, (admitted.kept or self.kept_inputs(admitted.caller, request)).tensors
        else:
            count = len(hosted.expert.schema.input_leaves)
            inputs = [tensor for tensor in tensors[:count] if tensor is not None]
        job = Job(
            number=next(self._numbers),
            uid=request.uid,
            expert=hosted.expert,
            caller=admitted.caller,
            pass_id=admitted.pass_id,
            inputs=inputs,
            gradients=tensors[count:] if admitted.is_backward else None,
            keep=request.keep,
            batch=request.batch,
            sequence_length=request.sequence_length,
            size_bytes=admitted.size_bytes,
            codec=admitted.codec,
            is_stranger=self._is_stranger(admitted.caller),
        )
        pending = PendingJob(hosted.compute, job.number, job.pass_id)
        self._jobs[job.number] = pending
        if admitted.is_backward:
            self._pending[job.pass_id] = pending
        busy = hosted.compute.offer(job, wake=wake)
        if busy:
            del self._jobs[job.number]
            self._pending.pop(job.pass_id, None)
            raise request_overloaded(hosted, busy)
        if request.keep and not admitted.is_backward:
            kept = KeptInputs.snapshot(inputs, request)
            self.input_cache.put(admitted.caller, (request.request_id, request.uid), kept, kept.size_bytes)
        return pending


def _read(admitted: AdmittedRequest, payload: Payload) -> Sequence[ReceivedTensor | None]:
    """Return the checked tensors of the payload; decoded, unless the expert's device does that."""
    read: Callable[..., Sequence[ReceivedTensor | None]] = (
        check_payload if admitted.hosted.compute.decodes_on_device else decode
    )
    try:
        return read(admitted.headers, admitted.leaves, admitted.request.batch, payload)
    except PeerError as error:
        raise request_refused(str(error)) from None


async def _answer_as_they_come(
    waiting: dict[int, asyncio.Future[Any]],
    answer: Callable[[dict[int, Outcome | RequestRefused]], Awaitable[None]],
) -> None:
    """Answer with the outcomes of the futures. Those that come within GATHER_S of the first are answered with
    it.
    """
    while waiting:
        _, left = await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_COMPLETED)
        if left:
            await asyncio.wait(left, timeout=GATHER_S)
        numbers = [number for number, future in waiting.items() if future.done()]
        await answer({number: outcome_of(waiting.pop(number)) for number in numbers})


def outcome_of(future: asyncio.Future[Any]) -> Outcome | RequestRefused:
    """Return what a request with this future, which is done, is answered with."""
    error = future.exception()
    if error is not None:
        assert isinstance(error, RequestRefused)
        return error
    outcome: Outcome | RequestRefused = future.result()
    if isinstance(outcome, Outcome) and outcome.failure:
        return RequestRefused(expert_pb2.EXPERT_FAILED, outcome.failure)
    return outcome
