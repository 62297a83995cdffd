"""The server's end of calls: it checks requests completely and answers them. A node has one instance, on its
network loop.

A request is queued, and a large payload is read, only after its announcement was found to fit the expert's
schema and there is room. A request that does not fit gets an answer that names its defect. Several requests
may share a message (`moe.protocol.parts`): each is checked and answered by itself.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from google.protobuf.message import DecodeError

from moe.protocol import methods
from moe.protocol.names import ExpertUid
from moe.protocol.parts import PARTS_BYTES_MAX, announced_bytes, cut, parts_of
from moe.protocol.tensors import (
    TensorPayload,
    check_headers,
    expected_bytes,
    is_finite_as_float32,
    join_payloads,
    payload_bytes,
)
from moe.server.jobs import Outcome
from moe.server.joint_steps import JointExpert, read_count, wire_count
from moe.server.pass_runner import PassRunner, outcome_of
from moe.server.replica_states import StateDonor, wire_past
from moe.server.requests import (
    AdmittedRequest,
    HostedExpert,
    RequestRefused,
    check_staleness,
    request_overloaded,
    request_refused,
)
from swarm.compression import find_wire_id
from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import PeerId
from swarm.net.rpc import Later, Stream
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

_SMALL_ANSWER_BYTES_MAX = 48 << 10  # of tensors: with its header, it is sent at once whatever the caps are
_RECEIVING_BYTES_MAX = 1 << 30  # limit for all payloads being received together
_RECEIVING_BYTES_PER_CALLER_MAX = 512 << 20


class HostingService:
    """Answers calls for every expert that servers on this node have opened."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._hosted: dict[str, HostedExpert] = {}
        self._expecting = False  # experts will be opened soon, and their names are not known yet
        self._reserved: set[str] = set()  # names, also of experts that are not ready for calls yet
        self._receiving: Counter[PeerId] = Counter()  # bytes by caller
        self._joint: dict[str, JointExpert] = {}  # steps with replicas, by the expert's name
        self.runner = PassRunner(self._joint, node.network.pool, self._is_stranger)
        self._states = StateDonor(self._hosted, self._is_stranger)
        node.handlers.direct(methods.DESCRIBE, self._describe)
        node.handlers.direct(methods.COUNT, self._count)
        node.handlers.deferred(methods.CALL, self._begin_call, self._call)
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

    def _begin_call(self, caller: PeerId, request: ExpertRequest) -> ExpertReply | Later[ExpertReply] | None:
        """Answer a call without a task for it. Return None for one whose answer is large, and one that must
        wait for more than its computation.
        """
        if request.more:
            return None  # refused by `_call`
        try:
            admitted = self._admit(caller, request, methods.INLINE_BYTES_MAX)
            if admitted.answer_bytes > _SMALL_ANSWER_BYTES_MAX:
                return None
            begun = self.runner.begin(admitted, request.payload)
        except RequestRefused as refusal:
            return self._refusal(request, refusal)
        if begun is None:
            return None
        if isinstance(begun, Outcome):
            return self._whole_reply(admitted, begun)
        future = begun.join()

        def reply() -> ExpertReply:
            outcome = outcome_of(future)
            if isinstance(outcome, RequestRefused):
                return self._refusal(request, outcome)
            return self._whole_reply(admitted, outcome)

        return Later(future, reply, functools.partial(self.runner.leave, begun, future))

    async def _call(self, caller: PeerId, request: ExpertRequest) -> ExpertReply:
        if request.more:
            raise PeerError("several requests to experts share a message of a stream, not a call")
        try:
            admitted = self._admit(caller, request, methods.INLINE_BYTES_MAX)
            outcome = await self.runner.run(admitted, request.payload)
        except RequestRefused as refusal:
            return self._refusal(request, refusal)
        return self._whole_reply(admitted, outcome)

    def _whole_reply(self, admitted: AdmittedRequest, outcome: Outcome) -> ExpertReply:
        """Return the reply to a call, with its tensors."""
        reply = self._reply(admitted, outcome, admitted.hosted.compute.wait_s)
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
        if request.more:
            await self._exchange_together(stream, request)
            return
        try:
            admitted = self._admit(stream.peer_id, request, methods.PAYLOAD_BYTES_MAX)
            payload = await self._receive(stream, admitted.hosted, request, admitted.size_bytes)
            outcome = await self.runner.run(admitted, payload)
        except RequestRefused as refusal:
            await stream.send(self._refusal(request, refusal).SerializeToString())
            return
        reply = self._reply(admitted, outcome, admitted.hosted.compute.wait_s)
        reply.payload_bytes = payload_bytes(outcome.payloads)
        await stream.send(reply.SerializeToString())
        await methods.send_payload(stream, outcome.payloads)

    async def _exchange_together(self, stream: Stream, message: ExpertRequest) -> None:
        """Answer several requests, each by itself, in a few messages."""
        requests = parts_of(message)
        sizes = [announced_bytes(one.tensors) for one in requests]
        admitted: dict[int, AdmittedRequest] = {}

        async def answer(outcomes: Mapping[int, Outcome | RequestRefused]) -> None:
            replies, payloads = list[ExpertReply](), list[TensorPayload]()
            threads = {admitted[number].hosted.compute for number in outcomes if number in admitted}
            waits_s = {compute: compute.wait_s for compute in threads}
            for number, outcome in outcomes.items():
                if isinstance(outcome, Outcome):
                    wait_s = waits_s[admitted[number].hosted.compute]
                    reply = self._reply(admitted[number], outcome, wait_s)
                    payloads += outcome.payloads
                else:
                    reply = self._refusal(requests[number], outcome)
                reply.part, reply.parts = number, len(requests)
                replies.append(reply)
            first = replies[0]
            first.more.extend(replies[1:])
            first.payload_bytes = payload_bytes(payloads)
            await stream.send(first.SerializeToString())
            await methods.send_payload(stream, payloads)

        refused: dict[int, Outcome | RequestRefused] = {}
        # the tensors of all parts are one payload, which cannot be received in part
        request_bytes, answer_bytes = sum(sizes), 0
        for number, request in enumerate(requests):
            try:
                own = self._admit(stream.peer_id, request, PARTS_BYTES_MAX)
                if max(answer_bytes + own.answer_bytes, request_bytes) > PARTS_BYTES_MAX:
                    raise _too_large(PARTS_BYTES_MAX)
            except RequestRefused as refusal:
                refused[number] = refusal
                continue
            admitted[number] = own
            answer_bytes += own.answer_bytes
        if admitted:
            first = next(iter(admitted.values()))
            try:
                payload = await self._receive(stream, first.hosted, message, request_bytes)
            except RequestRefused as refusal:
                refused |= dict.fromkeys(admitted, refusal)
                admitted.clear()
        if refused:
            await answer(refused)
        if admitted:
            payloads = cut(payload, sizes)
            await self.runner.run_together(
                admitted,
                {number: payloads[number] for number in admitted},
                answer,
                is_finite=is_finite_as_float32(payload),
            )

    async def _receive(
        self, stream: Stream, hosted: HostedExpert, message: ExpertRequest, size_bytes: int
    ) -> torch.Tensor:
        """Receive the payload of a message, one of whose requests is to `hosted`. Bytes count once they have
        arrived, so an announcement costs nothing. Raises RequestRefused when too many have arrived meanwhile,
        or the message announces another size.
        """
        if message.payload_bytes != size_bytes:
            raise request_refused(f"{size_bytes} bytes of tensors should follow, not {message.payload_bytes}")
        caller, received_bytes = stream.peer_id, 0

        def count(size_bytes: int) -> None:
            nonlocal received_bytes
            busy = self._receiving_refusal(caller, size_bytes)
            if busy:
                raise request_overloaded(hosted, busy)
            received_bytes += size_bytes
            self._receiving[caller] += size_bytes

        try:
            return await methods.receive_payload(stream, size_bytes, count)
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
        repeated = backward and self.runner.is_repeated(caller, request)
        if backward and not repeated and request.HasField("staleness_max"):
            check_staleness(hosted, request)
        kept = (
            self.runner.kept_inputs(caller, request)
            if backward and request.inputs_kept and not repeated
            else None
        )
        inputs = () if backward and request.inputs_kept else schema.input_leaves
        leaves = (*inputs, *(schema.gradient_leaves if backward else ()))
        headers = methods.read_headers(request.tensors)
        try:
            size = check_headers(headers, leaves, batch, absent_from=len(inputs))
        except PeerError as error:
            raise request_refused(str(error)) from None
        answered = schema.input_gradient_leaves if backward else schema.output_leaves
        answer_bytes = expected_bytes(answered, batch, codec)
        if max(size, answer_bytes) > bytes_max:
            raise _too_large(bytes_max)
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
            answer_bytes=answer_bytes,
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
        if not self._receiving and size_bytes <= _RECEIVING_BYTES_PER_CALLER_MAX:
            return ""
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

    def _reply(self, admitted: AdmittedRequest, outcome: Outcome, wait_s: float) -> ExpertReply:
        request = admitted.request
        reply = ExpertReply(version=outcome.version, wait_s=wait_s)
        methods.add_headers(reply.tensors, outcome.payloads)
        if request.keep:
            reply.kept = self.runner.input_cache.has(admitted.caller, (request.request_id, request.uid))
        return reply

    def _refusal(self, request: ExpertRequest, refusal: RequestRefused) -> ExpertReply:
        hosted = self._hosted.get(request.uid)
        if hosted is not None:
            hosted.refusals[ExpertStatus.Name(refusal.status)] += 1
        reason = refusal.reason.encode(errors="replace")[: methods.REASON_BYTES_MAX].decode(errors="ignore")
        return ExpertReply(status=refusal.status, reason=reason, queued=refusal.queued)


def _too_large(bytes_max: int) -> RequestRefused:
    return request_refused(f"such a call carries at most {bytes_max} bytes of tensors each way")
