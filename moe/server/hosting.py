"""The server's end of calls: it checks a request completely, queues it, and answers. A node has one instance,
on its network loop.

A request is queued, and a large payload is read, only after its announcement was found to fit the expert's
schema and there is room. A request that does not fit gets an answer that names its defect.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from google.protobuf.message import DecodeError

from moe.protocol import methods
from moe.protocol.names import ExpertUid
from moe.protocol.tensors import (
    check_headers,
    check_payload,
    decode,
    expected_bytes,
    join_payloads,
    payload_bytes,
)
from moe.server.jobs import Job, Outcome, ReceivedTensor
from moe.server.joint_steps import JointExpert, read_count, wire_count
from moe.server.logic.applied import AppliedRequests
from moe.server.logic.caller_cache import CacheLimits, CallerCache
from moe.server.replica_states import StateDonor, wire_past
from moe.server.requests import (
    AdmittedRequest,
    HostedExpert,
    KeptInputs,
    PendingJob,
    RequestRefused,
    check_staleness,
    request_overloaded,
    request_refused,
)
from swarm.compression import Buffer, find_wire_id
from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import PeerId
from swarm.net.rpc import Stream
from swarm.wire import expert_pb2
from swarm.wire.expert_pb2 import (
    DescribeReply,
    DescribeRequest,
    ExpertCount,
    ExpertDescription,
    ExpertReply,
    ExpertRequest,
    ExpertStatus,
)

if TYPE_CHECKING:
    from swarm.node import Node

_POOLED_BYTES = 256 << 10
_RECEIVING_BYTES_MAX = 1 << 30  # limit for all payloads being received together
_RECEIVING_BYTES_PER_CALLER_MAX = 512 << 20
# the inputs between a forward pass and its backward pass; missing ones are sent again
INPUT_LIMITS = CacheLimits(bytes_max=256 << 20, bytes_per_caller_max=64 << 20, strangers_bytes_max=16 << 20)


class HostingService:
    """Answers calls for every expert that servers on this node have opened."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._hosted: dict[str, HostedExpert] = {}
        self._expecting = False  # experts will be opened soon, and their names are not known yet
        self._reserved: set[str] = set()  # names, also of experts that are not ready for calls yet
        self._applied: AppliedRequests[Outcome] = AppliedRequests(self._is_stranger)
        # by caller and (request id, expert)
        self.input_cache: CallerCache[KeptInputs] = CallerCache(INPUT_LIMITS, self._is_stranger)
        self._jobs: dict[int, PendingJob] = {}  # by number: queued or being computed
        # the backward passes among them, by pass id
        self._pending: dict[tuple[PeerId, bytes], PendingJob] = {}
        self._numbers = itertools.count(1)
        self._receiving: Counter[PeerId] = Counter()  # bytes by caller
        self._joint: dict[str, JointExpert] = {}  # steps with replicas, by the expert's name
        self._states = StateDonor(self._hosted, self._is_stranger)
        node.handlers.direct(methods.DESCRIBE, self._describe)
        node.handlers.direct(methods.COUNT, self._count)
        node.handlers.unary(methods.CALL, self._call)
        node.handlers.stream(methods.EXCHANGE, self._exchange)
        node.handlers.stream(methods.STATE, self._states.give)

    def expect(self) -> None:
        """Answer calls for unknown experts with "not ready yet" until the first experts are open."""
        self._expecting = True

    def reserve(self, hosted: Sequence[HostedExpert]) -> None:
        """Reserve the names of these experts, for which calls are refused until `open`. Raises ValueError,
        which names one that is taken already.
        """
        names = [str(one.uid) for one in hosted]
        taken = [name for name in names if name in self._reserved]
        if taken:
            raise ValueError(f"{taken[0]} is hosted on this node already")
        self._reserved.update(names)

    def open(self, hosted: Sequence[HostedExpert], joint: Mapping[ExpertUid, JointExpert]) -> None:
        """Answer calls for these experts, whose names are reserved. `joint` may step with replicas."""
        self._expecting = False
        self._joint.update({str(uid): one for uid, one in joint.items()})
        self._hosted.update({str(one.uid): one for one in hosted if str(one.uid) in self._reserved})

    def close(self, hosted: Sequence[HostedExpert]) -> None:
        """Answer no new calls for these experts; calls under way continue."""
        for one in hosted:
            self._hosted.pop(str(one.uid), None)
            self._joint.pop(str(one.uid), None)
            self._reserved.discard(str(one.uid))

    def on_results(self, done: Sequence[tuple[Job, Outcome]]) -> None:
        """Process the results of a computing thread. Called on the loop."""
        for job, outcome in done:
            pending = self._jobs.pop(job.number, None)
            if job.is_backward:
                self._pending.pop(job.pass_id, None)
                self.input_cache.drop(job.caller, (job.pass_id[1], job.uid))
                if not outcome.failure:
                    self._applied.note(*job.pass_id, outcome, payload_bytes(outcome.payloads))
                    if job.uid in self._joint:
                        self._joint[job.uid].counted()
            if pending is not None and not pending.future.done():
                pending.future.set_result(outcome)

    async def drain(self, hosted: Sequence[HostedExpert], timeout_s: float) -> None:
        """Wait for requests of these experts that are queued or being computed."""
        threads = {id(one.compute) for one in hosted}
        futures = [pending.future for pending in self._jobs.values() if id(pending.compute) in threads]
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
                if pending.waiting and not pending.future.done():
                    pending.future.set_exception(RequestRefused(expert_pb2.EXPERT_MISSING, reason))

    def _is_stranger(self, caller: Hashable) -> bool:
        """Return whether a caller is not among the members that this node knows. A node that knows no members
        treats all callers alike.
        """
        standing = self._node.standing
        return isinstance(caller, PeerId) and standing.has_members() and not standing.is_member(caller)

    # --- handlers

    def _describe(self, caller: PeerId, request: DescribeRequest) -> DescribeReply:
        count_max = (
            methods.LINEAGES_PER_DESCRIBE_MAX if request.with_lineage else methods.UIDS_PER_DESCRIBE_MAX
        )
        if len(request.uids) > count_max:
            raise PeerError(f"at most {count_max} experts are described at a time")
        reply = DescribeReply()
        for uid in request.uids:
            hosted = self._hosted.get(uid)
            if hosted is None:
                reply.experts.append(ExpertDescription(uid=uid))
                continue
            reply.experts.append(
                ExpertDescription(
                    uid=uid,
                    schema=hosted.expert.schema.packed,
                    version=hosted.expert.version,
                    batch_size_max=hosted.batch_size_max,
                    frozen=hosted.expert.frozen,
                    wait_s=hosted.compute.wait_s,
                    samples_per_s=hosted.compute.samples_per_s,
                    past=wire_past(hosted.expert.lineage) if request.with_lineage else (),
                    turns=hosted.expert.turns if request.with_lineage else 0,
                    expert_class=hosted.expert.expert_class,
                )
            )
        return reply

    def _count(self, caller: PeerId, request: ExpertCount) -> ExpertCount:
        joint = self._joint.get(request.uid)
        if joint is None or request.schema_digest != joint.expert.schema.digest:
            raise PeerError("this expert does not learn on this server")
        return wire_count(joint.hear(caller, read_count(request)))

    async def _call(self, caller: PeerId, request: ExpertRequest) -> ExpertReply:
        try:
            admitted = self._admit(caller, request, methods.INLINE_BYTES_MAX)
            outcome = await self._outcome(admitted, request.payload)
        except RequestRefused as refusal:
            return self._refusal(request, refusal)
        reply = self._reply(admitted, outcome)
        reply.payload = join_payloads(outcome.payloads)
        return reply

    async def _exchange(self, stream: Stream) -> None:
        raw = await stream.receive()
        if raw is None:
            raise PeerError("a call begins with its request")
        try:
            request = ExpertRequest.FromString(raw)
        except DecodeError:
            raise PeerError("the first message of a call is not a swarm.wire.ExpertRequest") from None
        try:
            admitted = self._admit(stream.peer_id, request, methods.PAYLOAD_BYTES_MAX)
            if request.payload_bytes != admitted.size_bytes:
                raise request_refused(
                    f"{admitted.size_bytes} bytes of tensors should follow, not {request.payload_bytes}"
                )
            payload = await self._receive(stream, admitted)
            outcome = await self._outcome(admitted, payload)
        except RequestRefused as refusal:
            await stream.send(self._refusal(request, refusal).SerializeToString())
            return
        reply = self._reply(admitted, outcome)
        reply.payload_bytes = payload_bytes(outcome.payloads)
        await stream.send(reply.SerializeToString())
        await methods.send_payload(stream, outcome.payloads)

    async def _receive(self, stream: Stream, admitted: AdmittedRequest) -> torch.Tensor:
        """Receive the payload of a request. Bytes count once they have arrived, so an announcement costs
        nothing. Raises RequestRefused when too many have arrived meanwhile.
        """
        caller, received_bytes = admitted.caller, 0

        def count(size_bytes: int) -> None:
            nonlocal received_bytes
            busy = self._receiving_refusal(caller, size_bytes)
            if busy:
                raise request_overloaded(admitted.hosted, busy)
            received_bytes += size_bytes
            self._receiving[caller] += size_bytes

        try:
            return await methods.receive_payload(stream, admitted.size_bytes, count)
        finally:
            self._receiving[caller] -= received_bytes
            if not self._receiving[caller]:
                del self._receiving[caller]

    # --- checks

    def _admit(self, caller: PeerId, request: ExpertRequest, bytes_max: int) -> AdmittedRequest:
        """Check everything that is known before the payload is read. Raises RequestRefused."""
        hosted = self._hosted.get(request.uid)
        if hosted is None:
            raise self._unhosted(request.uid)
        schema, batch = hosted.expert.schema, request.batch
        if request.schema_digest != schema.digest:
            raise request_refused(f"it was made for another schema than this expert's, which is {schema}")
        try:
            schema = schema.at(request.sequence_length)
        except UsageError as error:
            raise request_refused(str(error)) from None
        if not 1 <= batch <= hosted.batch_size_max:
            raise request_refused(f"a request has 1 to {hosted.batch_size_max} samples, not {batch}")
        backward = request.kind == expert_pb2.EXPERT_BACKWARD
        if (backward or request.keep) and len(request.request_id) != methods.REQUEST_ID_BYTES:
            raise request_refused(
                f"a request id has {methods.REQUEST_ID_BYTES} bytes, not {len(request.request_id)}"
            )
        membership = self._node.membership
        if backward and membership is not None and not hosted.expert.frozen:
            reason = membership.training_refusal(caller)
            if reason:
                raise RequestRefused(expert_pb2.EXPERT_NOT_INVITED, reason)
        codec = None
        if request.reply_codec:
            codec = find_wire_id(request.reply_codec, request.reply_codec_version)
            if codec is None:
                raise request_refused(
                    f"codec {request.reply_codec}, version {request.reply_codec_version}, "
                    "for the answer is not known here"
                )
        repeated = backward and self._is_repeated(caller, request)
        if backward and not repeated and request.HasField("staleness_max"):
            check_staleness(hosted, request)
        kept = (
            self._kept_inputs(caller, request) if backward and request.inputs_kept and not repeated else None
        )
        inputs = () if backward and request.inputs_kept else schema.input_leaves
        leaves = (*inputs, *(schema.gradient_leaves if backward else ()))
        headers = methods.read_headers(request.tensors)
        try:
            size = check_headers(headers, leaves, batch, absent_from=len(inputs))
        except PeerError as error:
            raise request_refused(str(error)) from None
        answered = schema.input_gradient_leaves if backward else schema.output_leaves
        if max(size, expected_bytes(answered, batch, codec)) > bytes_max:
            raise request_refused(f"such a call carries at most {bytes_max} bytes of tensors each way")
        if not repeated:
            busy = hosted.compute.refusal(caller, size, is_stranger=self._is_stranger(caller))
            if not busy and bytes_max > methods.INLINE_BYTES_MAX:
                busy = self._receiving_refusal(caller, size)
            if busy:
                raise request_overloaded(hosted, busy)
        return AdmittedRequest(
            hosted=hosted,
            caller=caller,
            request=request,
            headers=headers,
            leaves=leaves,
            size_bytes=size,
            codec=codec,
            is_backward=backward,
            kept=kept,
        )

    def _unhosted(self, uid: str) -> RequestRefused:
        """Return the refusal of a call for an expert that is not open. Callers do not avoid a server that is
        starting; they ask again soon.
        """
        if self._expecting or uid in self._reserved:
            return RequestRefused(expert_pb2.EXPERT_OVERLOADED, f"{uid[:100]!r} is not ready here yet")
        return RequestRefused(expert_pb2.EXPERT_MISSING, f"{uid[:100]!r} is not hosted here")

    def _receiving_refusal(self, caller: PeerId, size_bytes: int) -> str:
        """Return why no payload of that size can be received now; "" when it can."""
        total, own = self._receiving.total(), self._receiving.get(caller, 0)
        is_member = self._node.standing.is_member
        # strangers together get half
        shared, shared_max = total, _RECEIVING_BYTES_MAX
        if not is_member(caller):
            shared = sum(held for peer, held in self._receiving.items() if not is_member(peer))
            shared_max = _RECEIVING_BYTES_MAX // 2
        if shared + size_bytes > shared_max or own + size_bytes > _RECEIVING_BYTES_PER_CALLER_MAX:
            return f"{total >> 20} MiB are being received already, {own >> 20} of them from you"
        return ""

    def _is_repeated(self, caller: PeerId, request: ExpertRequest) -> bool:
        name = (caller, request.request_id)
        return name in self._pending or self._applied.is_known(*name)

    def _kept_inputs(self, caller: PeerId, request: ExpertRequest) -> KeptInputs:
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

    # --- computing

    async def _outcome(self, admitted: AdmittedRequest, payload: Buffer | torch.Tensor) -> Outcome:
        """Return the outcome of a request, as `_computed` does. A pass waits for a joint step that is due,
        and a backward pass is answered once replicas know of it.
        """
        joint = self._joint.get(admitted.request.uid)
        if joint is None or not joint.is_active:
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

    async def _computed(self, admitted: AdmittedRequest, payload: Buffer | torch.Tensor) -> Outcome:
        """Return the outcome of a request, possibly that of an earlier call with the same id. Raises
        RequestRefused when nothing was computed.
        """
        pending = None
        if admitted.is_backward:
            applied = self._earlier_outcome(admitted)
            if applied is not None:
                return applied
            pending = self._pending.get(admitted.pass_id)
        if pending is None:
            tensors = await self._decode(admitted, payload)
            # a repetition of the request may have been answered meanwhile
            if admitted.is_backward and len(payload) > _POOLED_BYTES:
                applied = self._earlier_outcome(admitted)
                if applied is not None:
                    return applied
                pending = self._pending.get(admitted.pass_id)
            pending = pending or self._enqueue(admitted, tensors)
        pending.waiting += 1
        try:
            outcome = await asyncio.shield(pending.future)
        except asyncio.CancelledError:
            pending.waiting -= 1
            if not pending.waiting and pending.compute.withdraw(pending.number):
                self._jobs.pop(pending.number, None)
                self._pending.pop(admitted.pass_id, None)
            raise
        if outcome.failure:
            raise RequestRefused(expert_pb2.EXPERT_FAILED, outcome.failure)
        return outcome

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

    async def _decode(
        self, admitted: AdmittedRequest, payload: Buffer | torch.Tensor
    ) -> Sequence[ReceivedTensor | None]:
        """Return the checked tensors of the payload; decoded, unless the expert's device does that."""
        read: Callable[..., Sequence[ReceivedTensor | None]] = (
            check_payload if admitted.hosted.compute.decodes_on_device else decode
        )
        arguments = (admitted.headers, admitted.leaves, admitted.request.batch, payload)
        try:
            if len(payload) <= _POOLED_BYTES:
                return read(*arguments)
            return await asyncio.get_running_loop().run_in_executor(self._node.network.pool, read, *arguments)
        except PeerError as error:
            raise request_refused(str(error)) from None

    def _enqueue(self, admitted: AdmittedRequest, tensors: Sequence[ReceivedTensor | None]) -> PendingJob:
        """Queue a job. Raises RequestRefused when there is no room."""
        hosted, request = admitted.hosted, admitted.request
        if admitted.is_backward and request.inputs_kept:
            count, inputs = 0, (admitted.kept or self._kept_inputs(admitted.caller, request)).tensors
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
        pending = PendingJob(asyncio.get_running_loop().create_future(), hosted.compute, job.number)
        self._jobs[job.number] = pending
        if admitted.is_backward:
            self._pending[job.pass_id] = pending
        busy = hosted.compute.offer(job)
        if busy:
            del self._jobs[job.number]
            self._pending.pop(job.pass_id, None)
            raise request_overloaded(hosted, busy)
        if request.keep and not admitted.is_backward:
            kept = KeptInputs.snapshot(inputs, request)
            self.input_cache.put(admitted.caller, (request.request_id, request.uid), kept, kept.size_bytes)
        return pending

    def _reply(self, admitted: AdmittedRequest, outcome: Outcome) -> ExpertReply:
        request = admitted.request
        return ExpertReply(
            status=expert_pb2.EXPERT_OK,
            version=outcome.version,
            tensors=methods.wire_headers(outcome.payloads),
            wait_s=admitted.hosted.compute.wait_s,
            kept=request.keep
            and self.input_cache.get(admitted.caller, (request.request_id, request.uid)) is not None,
        )

    def _refusal(self, request: ExpertRequest, refusal: RequestRefused) -> ExpertReply:
        hosted = self._hosted.get(request.uid)
        if hosted is not None:
            hosted.refusals[ExpertStatus.Name(refusal.status)] += 1
        return ExpertReply(status=refusal.status, reason=refusal.reason, queued=refusal.queued)
