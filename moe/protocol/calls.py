"""The caller's end of the protocol: describe, forward and backward calls to one expert on one server.

Requests of one pass to several experts of a server share a message (`moe.protocol.merging`). Everything here
runs on the network loop. The server's refusals are raised as the errors of `moe.protocol.errors`,
network failures as NetworkError and DeadlineExceeded. UsageError means that the tensors do not fit the
expert's schema; nothing was sent in that case.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from moe.protocol import methods
from moe.protocol.call_slots import CallSlots
from moe.protocol.codecs import UNCOMPRESSED as UNCOMPRESSED
from moe.protocol.codecs import WireCodecs as WireCodecs
from moe.protocol.declarations import ExpertReplica, ServerLoad
from moe.protocol.errors import (
    ExpertApplied,
    ExpertError,
    ExpertFailed,
    ExpertMissing,
    ExpertNotInvited,
    ExpertOverloaded,
    ExpertRefused,
    ExpertStale,
)
from moe.protocol.expected_reply import ExpectedReply
from moe.protocol.merging import MergedRequests, Part
from moe.protocol.names import ExpertUid
from moe.protocol.schema import ExpertSchema, check
from moe.protocol.tensors import TensorPayload, encode
from swarm.compression import Codec, find
from swarm.core.errors import DeadlineExceeded, PeerError, UsageError
from swarm.core.ids import PeerId
from swarm.net.channels import Channels
from swarm.runtime.supervise import Supervisor
from swarm.wire import expert_pb2
from swarm.wire.expert_pb2 import DescribeRequest, ExpertReply, ExpertRequest

if TYPE_CHECKING:
    from swarm.node import Node

_SCHEMAS_MAX = 1024
_CLASS_CHARACTERS_MAX = 64
_POOLED_BYTES = 256 << 10  # encoding more bytes than this takes longer than a thread switch


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A server's description of an expert that it hosts."""

    uid: ExpertUid
    schema: ExpertSchema
    version: int  # counts optimizer steps and averages with replicas
    batch_size_max: int  # the most samples of one request
    frozen: bool
    load: ServerLoad
    expert_class: str = ""  # the class from which its server made it; empty: a module of the server's user


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardReply:
    """The reply to a forward pass."""

    outputs: list[torch.Tensor]  # flat, in the order of the schema, on the host
    version: int  # version of the parameters that computed the outputs
    request_id: bytes  # identifies this pass in the backward pass that follows
    wait_s: float  # how long the server's next request would wait
    kept: bool = False  # the server keeps the inputs: the backward pass need not send them
    # a batch that is too large for one request is cut into requests of `part_samples` samples, the last one
    # of fewer: their replies; () when it was one request
    parts: tuple[ForwardReply, ...] = ()
    part_samples: int = 0

    def take_outputs(self) -> list[torch.Tensor]:
        """Remove and return the outputs, which a backward pass does not need."""
        outputs = list(self.outputs)
        self.outputs.clear()
        return outputs

    def for_pass(self, number: int) -> ForwardReply:
        """Return the reply for the backward pass with this number, from 0 on, of one forward pass. Each pass
        has a separate request id, which stays the same when the pass is repeated, and is applied in addition
        to the others.
        """
        if not number:
            return self
        name = hashlib.sha256(self.request_id + number.to_bytes(8, "big")).digest()[: len(self.request_id)]
        parts = tuple(part.for_pass(number) for part in self.parts)
        return replace(self, request_id=name, kept=False, parts=parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardReply:
    """The reply to a backward pass."""

    # gradients of the floating-point inputs, in order; None: the expert does not depend on that input
    gradients: list[torch.Tensor | None]
    version: int  # version of the parameters that computed the gradients, before the step
    wait_s: float


@dataclass(frozen=True, slots=True)
class ForwardOptions:
    """How a forward pass is made. `keep`: a backward pass is likely to follow, so the server may keep the
    inputs for it. `together`: share a message with other such passes to that server which are made in the
    same turn of the event loop.
    """

    keep: bool = False
    together: bool = False


DEFAULT_OPTIONS = ForwardOptions()


class ExpertClient(Protocol):
    """The calls that `ReplicaCalls` needs. `ExpertCalls` makes them over the network, simulated servers in
    tests.
    """

    async def schema_of(
        self, replica: ExpertReplica, uid: ExpertUid, *, timeout_s: float
    ) -> ExpertSchema: ...

    async def forward(
        self,
        replica: ExpertReplica,
        uid: ExpertUid,
        inputs: Sequence[torch.Tensor],
        *,
        timeout_s: float,
        codecs: WireCodecs = ...,
        options: ForwardOptions = ...,
    ) -> ForwardReply: ...

    async def backward(
        self,
        replica: ExpertReplica,
        uid: ExpertUid,
        forward_reply: ForwardReply,
        tensors: GradientPass,
        *,
        timeout_s: float,
        codecs: WireCodecs = ...,
    ) -> BackwardReply: ...


@dataclass(frozen=True, slots=True)
class GradientPass:
    """The tensors of a backward pass: the inputs of the forward pass again, and for every floating-point
    output its gradient (None stands for zeros).

    `staleness_max`: refuse the pass when the expert's version differs by more than this from that of the
    forward pass; None: apply it at any version.
    """

    inputs: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor | None]
    staleness_max: int | None = None
    together: bool = False  # share a message with others of the same turn of the event loop


def check_staleness_max(staleness_max: int | None) -> int | None:
    """Return a user's `staleness_max`. Raises UsageError when it is neither None nor a number of versions."""
    if staleness_max is not None and not 0 <= staleness_max < 2**32:
        raise UsageError(f"staleness_max is a number of versions from 0 up, or None, not {staleness_max!r}")
    return staleness_max


class ExpertCalls:
    """The caller's end of expert calls. A node has one instance: `node.service(ExpertCalls.from_node)`."""

    def __init__(
        self, channels: Channels, pool: ThreadPoolExecutor, supervisor: Supervisor | None = None
    ) -> None:
        self._channels, self._pool = channels, pool
        self._requests = MergedRequests(channels, supervisor or Supervisor())
        self._schemas: OrderedDict[bytes, ExpertSchema] = OrderedDict()  # by digest
        self._slots = CallSlots()
        # held while a server is asked for a schema
        self._asking: dict[tuple[PeerId, bytes], asyncio.Lock] = {}

    @classmethod
    def from_node(cls, node: Node) -> ExpertCalls:
        """Create the instance for a node."""
        return cls(node.channels, node.network.pool, node.supervisor)

    async def describe(
        self, replica: ExpertReplica, uids: Sequence[ExpertUid], *, timeout_s: float
    ) -> list[Description | None]:
        """Return a server's descriptions of some of its experts, in the order of `uids`; None for an expert
        that it does not host.

        Raises UsageError for no uids or more than `UIDS_PER_DESCRIBE_MAX`, and PeerError for a reply of the
        wrong length.
        """
        if not 0 < len(uids) <= methods.UIDS_PER_DESCRIBE_MAX:
            raise UsageError(
                f"describe takes 1 to {methods.UIDS_PER_DESCRIBE_MAX} experts at a time, not {len(uids)}"
            )
        request = DescribeRequest(uids=map(str, uids))
        reply = await self._channels.call(replica.contact, methods.DESCRIBE, request, timeout_s=timeout_s)
        if len(reply.experts) != len(uids):
            raise PeerError(
                f"peer {replica.peer_id} described {len(reply.experts)} experts when asked for {len(uids)}"
            )
        found: list[Description | None] = []
        for uid, one in zip(uids, reply.experts, strict=True):
            if not one.schema:
                found.append(None)
                continue
            schema = ExpertSchema.unpack(one.schema)
            self._remember_schema(schema)
            found.append(
                Description(
                    uid=uid,
                    schema=schema,
                    version=one.version,
                    batch_size_max=one.batch_size_max,
                    frozen=one.frozen,
                    load=ServerLoad(one.wait_s, one.samples_per_s),
                    expert_class=one.expert_class[:_CLASS_CHARACTERS_MAX],
                )
            )
        return found

    async def schema_of(self, replica: ExpertReplica, uid: ExpertUid, *, timeout_s: float) -> ExpertSchema:
        """Return the schema whose digest the replica was declared with. The replica is asked only the first
        time.

        Raises ExpertMissing when the replica no longer hosts the expert, or hosts one with another schema.
        """
        known = self._schemas.get(replica.schema)
        if known is not None:
            return known
        # hundreds of experts of one server may have one schema: it is asked for once
        key = replica.peer_id, replica.schema
        asking = self._asking.setdefault(key, asyncio.Lock())
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline_s), asking:
                known = self._schemas.get(replica.schema)
                if known is not None:
                    return known
                left_s = deadline_s - asyncio.get_running_loop().time()
                described = (await self.describe(replica, [uid], timeout_s=left_s))[0]
        except TimeoutError:
            raise DeadlineExceeded(f"peer {replica.peer_id} did not describe {uid} in time") from None
        finally:
            self._asking.pop(key, None)
        if described is None:
            raise ExpertMissing(f"peer {replica.peer_id} does not host {uid} any more")
        if replica.schema and described.schema.digest != replica.schema:
            raise ExpertMissing(f"peer {replica.peer_id} hosts another {uid} now: {described.schema}")
        return described.schema

    async def forward(
        self,
        replica: ExpertReplica,
        uid: ExpertUid,
        inputs: Sequence[torch.Tensor],
        *,
        timeout_s: float,
        codecs: WireCodecs = UNCOMPRESSED,
        options: ForwardOptions = DEFAULT_OPTIONS,
    ) -> ForwardReply:
        """Run a forward pass. `inputs` are the flat input tensors, on any device; they must not change until
        this returns.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        known = self._schemas.get(replica.schema)
        schema = known or await self.schema_of(replica, uid, timeout_s=timeout_s)
        codecs, length = codecs.or_else(schema.codecs), schema.length_of(inputs)
        fitted = schema.at(length)
        batch = check(fitted.input_leaves, inputs, "input")
        codec = find(codecs.outputs) if codecs.outputs else None
        request = _request(uid, schema, batch, length, codec)
        request.keep = options.keep  # its kind, forward, is the default
        request.request_id = request_id = os.urandom(methods.REQUEST_ID_BYTES)
        payloads = await self._encode(inputs, codecs.inputs)
        expected = ExpectedReply(fitted.output_leaves, batch, codec, may_be_absent=False)
        reply, outputs = await self._exchange(
            replica, request, payloads, expected, deadline_s, options.together
        )
        tensors = [tensor for tensor in outputs if tensor is not None]
        return ForwardReply(
            outputs=tensors,
            version=reply.version,
            request_id=request_id,
            wait_s=reply.wait_s,
            kept=reply.kept,
        )

    async def backward(
        self,
        replica: ExpertReplica,
        uid: ExpertUid,
        forward_reply: ForwardReply,
        tensors: GradientPass,
        *,
        timeout_s: float,
        codecs: WireCodecs = UNCOMPRESSED,
    ) -> BackwardReply:
        """Run a backward pass and return the gradients of the floating-point inputs; the expert's optimizer
        makes a step. `replica` must be the one that answered the forward pass.

        The pass is applied once for one `forward_reply`, however many times this is called with it, so a call
        that got no reply can be repeated.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        schema = await self.schema_of(replica, uid, timeout_s=timeout_s)
        codecs, length = codecs.or_else(schema.codecs), schema.length_of(tensors.inputs)
        fitted = schema.at(length)
        batch = check(fitted.input_leaves, tensors.inputs, "input")
        if len(tensors.gradients) != len(schema.gradient_leaves):
            raise UsageError(
                f"{uid} has {len(schema.gradient_leaves)} floating-point outputs, "
                f"and there are {len(tensors.gradients)} gradients"
            )
        given = [
            (leaf, one)
            for leaf, one in zip(fitted.gradient_leaves, tensors.gradients, strict=True)
            if one is not None
        ]
        if (
            given
            and check([leaf for leaf, _ in given], [one for _, one in given], "gradient of output") != batch
        ):
            raise UsageError(f"the gradients have another batch size than the inputs, {batch}")
        codec = find(codecs.input_gradients) if codecs.input_gradients else None
        expected = ExpectedReply(fitted.input_gradient_leaves, batch, codec, may_be_absent=True)
        gradients = await self._encode(tensors.gradients, codecs.gradients)
        for kept in (True, False) if forward_reply.kept else (False,):
            request = _request(uid, schema, batch, length, codec)
            request.kind, request.request_id, request.version = (
                expert_pb2.EXPERT_BACKWARD,
                forward_reply.request_id,
                forward_reply.version,
            )
            request.inputs_kept = kept
            if tensors.staleness_max is not None:
                request.staleness_max = tensors.staleness_max
            payloads = gradients if kept else [*await self._encode(tensors.inputs, codecs.inputs), *gradients]
            try:
                reply, found = await self._exchange(
                    replica, request, payloads, expected, deadline_s, tensors.together
                )
            except _InputsForgotten:
                if not kept:
                    raise
            else:
                return BackwardReply(gradients=found, version=reply.version, wait_s=reply.wait_s)
        raise AssertionError("a request with its inputs is answered, or fails")

    def _remember_schema(self, schema: ExpertSchema) -> None:
        self._schemas[schema.digest] = schema
        if len(self._schemas) > _SCHEMAS_MAX:
            self._schemas.popitem(last=False)

    async def _encode(
        self, tensors: Sequence[torch.Tensor | None], codec_name: str | None
    ) -> list[TensorPayload]:
        codec = find(codec_name) if codec_name else None
        size = sum([tensor.nbytes for tensor in tensors if tensor is not None])
        if size <= _POOLED_BYTES or (
            codec is None
            and all(one is None or (one.device.type == "cpu" and one.is_contiguous()) for one in tensors)
        ):
            return encode(tensors, codec)
        return await asyncio.get_running_loop().run_in_executor(self._pool, encode, tensors, codec)

    async def _exchange(
        self,
        replica: ExpertReplica,
        request: ExpertRequest,
        payloads: list[TensorPayload],
        expected: ExpectedReply,
        deadline_s: float,
        together: bool,
    ) -> tuple[ExpertReply, list[torch.Tensor | None]]:
        """Send a request as soon as not too many others are under way to that server, receive the reply and
        decode its tensors.
        """
        methods.add_headers(request.tensors, payloads)
        part = Part(request, payloads, expected.size_bytes, len(expected.leaves), deadline_s)
        if max(part.request_bytes, part.reply_bytes) > methods.PAYLOAD_BYTES_MAX:
            raise UsageError(
                f"a call of an expert carries at most {methods.PAYLOAD_BYTES_MAX >> 20} MiB each way: "
                "split the batch"
            )
        peer = replica.peer_id
        if not self._slots.try_enter(peer):
            await self._slots.wait(peer, deadline_s)
        try:
            send = self._requests.send_together if together else self._requests.send
            reply, payload = await send(replica, part)
        finally:
            self._slots.leave(peer)
        _raise_unless_ok(replica, request, reply)
        if len(payload) <= _POOLED_BYTES:
            return reply, expected.read(replica, reply, payload)
        return reply, await asyncio.get_running_loop().run_in_executor(
            self._pool, expected.read, replica, reply, payload
        )


class _InputsForgotten(ExpertFailed):
    """The server no longer has the inputs of the forward pass."""


def _request(
    uid: ExpertUid, schema: ExpertSchema, batch: int, length: int, codec: Codec | None
) -> ExpertRequest:
    return ExpertRequest(
        uid=str(uid),
        schema_digest=schema.digest,
        batch=batch,
        sequence_length=length,
        reply_codec=codec.wire_id if codec else 0,
        reply_codec_version=codec.version if codec else 0,
    )


def _raise_unless_ok(replica: ExpertReplica, request: ExpertRequest, reply: ExpertReply) -> None:
    if reply.status == expert_pb2.EXPERT_OK:
        return
    what = "backward" if request.kind == expert_pb2.EXPERT_BACKWARD else "forward"
    text = f"{what} of {request.uid} at peer {replica.peer_id}: {reply.reason[:500] or 'no reason given'}"
    if reply.status == expert_pb2.EXPERT_OVERLOADED:
        raise ExpertOverloaded(text, reply.queued)
    kinds: dict[int, type[ExpertError]] = {
        expert_pb2.EXPERT_MISSING: ExpertMissing,
        expert_pb2.EXPERT_REFUSED: ExpertRefused,
        expert_pb2.EXPERT_APPLIED: ExpertApplied,
        expert_pb2.EXPERT_FORGOTTEN: _InputsForgotten,
        expert_pb2.EXPERT_STALE: ExpertStale,
        expert_pb2.EXPERT_NOT_INVITED: ExpertNotInvited,
    }
    raise kinds.get(reply.status, ExpertFailed)(text)
