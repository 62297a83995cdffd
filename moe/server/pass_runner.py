"""Running admitted requests: their tensors are decoded, their jobs queued for the computing threads, and the
outcomes awaited. A node has one instance, on its network loop.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TypeAlias

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
from swarm.core.notify import ChangeEvent, wait_until_set
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
# awaited with outcomes of the requests of a message, by their numbers in it
OnOutcomes: TypeAlias = Callable[[Mapping[int, "Outcome | RequestRefused"]], Awaitable[None]]


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
        self._results = ChangeEvent()
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
            if pending is not None:
                pending.settle(outcome)
        self._results.notify()

    async def drain(self, hosted: Sequence[HostedExpert], timeout_s: float) -> None:
        """Wait for requests of these experts that are queued or being computed."""
        threads, loop = {id(one.compute) for one in hosted}, asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while (left_s := deadline_s - loop.time()) > 0.0 and any(
            pending.waiting and id(pending.hosted.compute) in threads for pending in self._jobs.values()
        ):
            await self._results.wait(left_s)

    def drop_waiting(self, hosted: Sequence[HostedExpert], reason: str) -> None:
        """Refuse waiting requests of these experts, since their computing thread was stopped. Called on the
        loop.
        """
        threads = {id(one.compute) for one in hosted}
        for pending in list(self._jobs.values()):
            if id(pending.hosted.compute) in threads:
                self._forget(pending)
                pending.settle(RequestRefused(expert_pb2.EXPERT_MISSING, reason))

    def _forget(self, pending: PendingJob) -> None:
        del self._jobs[pending.job.number]
        if pending.job.is_backward:
            self._pending.pop(pending.job.pass_id, None)

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
        answer: OnOutcomes,
        *,
        is_finite: bool = False,
    ) -> None:
        """Run the requests of one message, by their numbers in it. Small ones are queued in one go, without a
        task for each. `answer` is awaited with outcomes by number; those that come within GATHER_S of one
        another share a call. `is_finite` as in `decode`.
        """
        # raised below: early versions of Python 3.11 wrap errors raised within `except*` in a group
        failed: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._run_in_group(tasks, requests, payloads, answer, is_finite)
        except* SwarmError as errors:  # the caller has gone
            failed = errors.exceptions[0]
        if failed is not None:
            raise failed

    async def _run_in_group(
        self,
        tasks: asyncio.TaskGroup,
        requests: Mapping[int, AdmittedRequest],
        payloads: Mapping[int, torch.Tensor],
        answer: OnOutcomes,
        is_finite: bool,
    ) -> None:
        outcomes, new = _MessageOutcomes(len(requests)), list[PendingJob]()
        joined: list[tuple[PendingJob, Hashable]] = []
        for number, admitted in requests.items():
            own = payloads[number].clone()  # what a part keeps must not hold the payload of all
            if self._active_joint(admitted) is not None or len(own) > _POOLED_BYTES:
                tasks.create_task(self._run_into(outcomes, number, admitted, own, is_finite))
                continue
            try:
                tensors = _read(admitted, own, is_finite)
                begun = self._earlier(admitted)
                if begun is None:
                    begun = self._register(admitted, tensors)
                    new.append(begun)
            except RequestRefused as refusal:
                outcomes.put(number, refusal)
                continue
            if isinstance(begun, Outcome):
                outcomes.put(number, begun)
            else:
                begun.waiting[outcomes, number] = functools.partial(outcomes.put, number)
                joined.append((begun, (outcomes, number)))
        try:
            self._queue(new)
            await outcomes.answer_as_they_come(answer)
        finally:
            for pending, name in joined:
                self.leave(pending, name)

    async def _run_into(
        self,
        outcomes: _MessageOutcomes,
        number: int,
        admitted: AdmittedRequest,
        payload: Payload,
        is_finite: bool,
    ) -> None:
        try:
            outcomes.put(number, await self.run(admitted, payload, is_finite=is_finite))
        except RequestRefused as refusal:
            outcomes.put(number, refusal)

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
        begun = self._register(admitted, _read(admitted, payload))
        self._queue_only(begun, wake=False)
        # later: this thread and the computing one would take turns at Python's lock
        if not self._to_wake:
            asyncio.get_running_loop().call_soon(self._wake)
        self._to_wake.add(begun.hosted.compute)
        return begun

    def _wake(self) -> None:
        to_wake, self._to_wake = self._to_wake, set()
        for compute in to_wake:
            compute.wake()

    def _active_joint(self, admitted: AdmittedRequest) -> JointExpert | None:
        joint = self._joint.get(admitted.request.uid)
        return joint if joint is not None and joint.is_active else None

    async def run(self, admitted: AdmittedRequest, payload: Payload, *, is_finite: bool = False) -> Outcome:
        """Return the outcome of a request, as `_computed` does. A pass waits for a joint step that is due,
        and a backward pass is answered once replicas know of it. `is_finite` as in `decode`.
        """
        joint = self._active_joint(admitted)
        if joint is None:
            return await self._computed(admitted, payload, is_finite)
        if admitted.is_backward and (applied := self._earlier_outcome(admitted)) is not None:
            return applied
        samples, is_backward = admitted.request.batch, admitted.is_backward
        try:
            await joint.admit(samples, is_backward=is_backward)
        except TimeoutError:
            raise request_overloaded(admitted.hosted, "it waits for a step with its replicas") from None
        try:
            outcome = await self._computed(admitted, payload, is_finite)
            if is_backward:
                await joint.tell()
            return outcome
        finally:
            joint.release(samples, is_backward=is_backward)

    async def _computed(self, admitted: AdmittedRequest, payload: Payload, is_finite: bool) -> Outcome:
        """Return the outcome of a request, possibly that of an earlier call with the same id. Raises
        RequestRefused when nothing was computed.
        """
        pending = self._earlier(admitted)
        if isinstance(pending, Outcome):
            return pending
        if pending is None:
            if len(payload) <= _POOLED_BYTES:
                tensors = _read(admitted, payload, is_finite)
            else:
                tensors = await asyncio.get_running_loop().run_in_executor(
                    self._pool, _read, admitted, payload, is_finite
                )
            pending = self._earlier(admitted)  # a repetition of the request may have been answered meanwhile
            if isinstance(pending, Outcome):
                return pending
            if pending is None:
                pending = self._register(admitted, tensors)
                self._queue_only(pending)
        future = pending.join()
        try:
            outcome = await future
        except asyncio.CancelledError:
            self.leave(pending, future)
            raise
        if outcome.failure:
            raise RequestRefused(expert_pb2.EXPERT_FAILED, outcome.failure)
        return outcome

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

    def leave(self, pending: PendingJob, name: Hashable) -> None:
        """Stop waiting for a job. It is withdrawn when no call waits for it any longer."""
        if pending.waiting.pop(name, None) is None or pending.waiting:
            return
        if pending.hosted.compute.withdraw(pending.job.number):
            self._forget(pending)

    def _register(self, admitted: AdmittedRequest, tensors: Sequence[ReceivedTensor | None]) -> PendingJob:
        """Return a new job, which is to be queued."""
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
        pending = self._jobs[job.number] = PendingJob(hosted, job)
        if admitted.is_backward:
            self._pending[job.pass_id] = pending
        return pending

    def _queue(self, new: Sequence[PendingJob], *, wake: bool = True) -> list[RequestRefused]:
        """Queue jobs. Those for which there is no room are refused; return these refusals."""
        by_thread: dict[ComputeThread, list[PendingJob]] = {}
        for pending in new:
            by_thread.setdefault(pending.hosted.compute, []).append(pending)
        refused = []
        for compute, own in by_thread.items():
            # before the computing thread has the jobs, since a module may write into its inputs
            snapshots = [
                KeptInputs.snapshot(one.job) if one.job.keep and not one.job.is_backward else None
                for one in own
            ]
            reasons = compute.offer([pending.job for pending in own], wake=wake)
            for pending, kept, reason in zip(own, snapshots, reasons, strict=True):
                job = pending.job
                if reason:
                    refusal = request_overloaded(pending.hosted, reason)
                    self._forget(pending)
                    pending.settle(refusal)
                    refused.append(refusal)
                elif kept is not None:
                    self.input_cache.put(job.caller, (job.pass_id[1], job.uid), kept, kept.size_bytes)
        return refused

    def _queue_only(self, pending: PendingJob, *, wake: bool = True) -> None:
        """Queue one job. Raises RequestRefused when there is no room."""
        for refusal in self._queue([pending], wake=wake):
            raise refusal


class _MessageOutcomes:
    """The outcomes of the requests of one message, by their numbers in it, until they are answered."""

    def __init__(self, count: int) -> None:
        self._left = count  # requests that are not answered yet
        self._found: dict[int, Outcome | RequestRefused] = {}
        self._first, self._all = asyncio.Event(), asyncio.Event()

    def put(self, number: int, outcome: Outcome | RequestRefused) -> None:
        """Add an outcome."""
        self._found[number] = _refused_if_failed(outcome)
        self._first.set()
        if len(self._found) == self._left:
            self._all.set()

    async def answer_as_they_come(self, answer: OnOutcomes) -> None:
        """Await `answer` with all outcomes. Those that come within GATHER_S of the first are answered with
        it; those that are there at the beginning at once.
        """
        wait_s = 0.0 if self._found else GATHER_S
        while self._left:
            await self._first.wait()
            if wait_s:
                await wait_until_set(self._all, wait_s)
            found, self._found = self._found, {}
            self._first.clear()
            self._left -= len(found)
            await answer(found)
            wait_s = GATHER_S


def _read(
    admitted: AdmittedRequest, payload: Payload, is_finite: bool = False
) -> Sequence[ReceivedTensor | None]:
    """Return the checked tensors of the payload; decoded, unless the expert's device does that."""
    read: Callable[..., Sequence[ReceivedTensor | None]] = (
        check_payload if admitted.hosted.compute.decodes_on_device else decode
    )
    try:
        return read(admitted.headers, admitted.leaves, admitted.request.batch, payload, is_finite=is_finite)
    except PeerError as error:
        raise request_refused(str(error)) from None


def outcome_of(future: asyncio.Future[Outcome]) -> Outcome | RequestRefused:
    """Return what a request with this future, which is done, is answered with."""
    error = future.exception()
    if error is not None:
        assert isinstance(error, RequestRefused)
        return error
    return _refused_if_failed(future.result())


def _refused_if_failed(outcome: Outcome | RequestRefused) -> Outcome | RequestRefused:
    if isinstance(outcome, Outcome) and outcome.failure:
        return RequestRefused(expert_pb2.EXPERT_FAILED, outcome.failure)
    return outcome
