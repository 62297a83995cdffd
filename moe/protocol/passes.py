"""Forward and backward passes of experts: what a caller asks for, the requests that are sent for it, and the
replies.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from moe.protocol import methods
from moe.protocol.codecs import WireCodecs
from moe.protocol.expected_reply import ExpectedReply
from moe.protocol.merging import Part
from moe.protocol.names import ExpertUid
from moe.protocol.schema import ExpertSchema, check
from moe.protocol.tensors import TensorPayload, encode
from swarm.compression import Codec, find
from swarm.core.errors import UsageError
from swarm.wire import expert_pb2
from swarm.wire.expert_pb2 import ExpertRequest

_POOLED_BYTES = 256 << 10  # encoding more bytes than this takes longer than a thread switch


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
class GradientPass:
    """The tensors of a backward pass: the inputs of the forward pass again, and for every floating-point
    output its gradient (None stands for zeros).

    `staleness_max`: refuse the pass when the expert's version differs by more than this from that of the
    forward pass; None: apply it at any version.
    """

    inputs: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor | None]
    staleness_max: int | None = None


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """A forward pass of an expert with this schema. `inputs` are the flat input tensors, on any device; they
    must not change until there is a reply. `keep`: a backward pass is likely to follow, so the server may
    keep the inputs for it.
    """

    uid: ExpertUid
    schema: ExpertSchema
    inputs: Sequence[torch.Tensor]
    keep: bool = False


@dataclass(frozen=True, slots=True)
class BackwardRequest:
    """The backward pass that follows a forward pass."""

    uid: ExpertUid
    schema: ExpertSchema
    forward_reply: ForwardReply
    tensors: GradientPass


def check_staleness_max(staleness_max: int | None) -> int | None:
    """Return a user's `staleness_max`. Raises UsageError when it is neither None nor a number of versions."""
    if staleness_max is not None and not 0 <= staleness_max < 2**32:
        raise UsageError(f"staleness_max is a number of versions from 0 up, or None, not {staleness_max!r}")
    return staleness_max


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that is ready to be sent, and what its reply must look like."""

    part: Part
    expected: ExpectedReply


def _codec_of(name: str | None) -> Codec | None:
    return find(name) if name else None


def encoding_takes_long(requests: Sequence[Sequence[torch.Tensor | None]], codec_name: str | None) -> bool:
    """Return whether encoding the tensors of all requests takes longer than a thread switch."""
    given = [one for tensors in requests for one in tensors if one is not None]
    if sum([one.nbytes for one in given]) <= _POOLED_BYTES:
        return False
    return codec_name is not None or not all(one.is_cpu and one.is_contiguous() for one in given)


def _request(
    uid: ExpertUid, schema: ExpertSchema, request_id: bytes, batch: int, length: int, codec: Codec | None
) -> ExpertRequest:
    return ExpertRequest(
        uid=str(uid),
        schema_digest=schema.digest,
        request_id=request_id,
        batch=batch,
        sequence_length=length,
        reply_codec=codec.wire_id if codec else 0,
        reply_codec_version=codec.version if codec else 0,
    )


def _prepared(
    request: ExpertRequest, payloads: list[TensorPayload], expected: ExpectedReply
) -> PreparedRequest:
    methods.add_headers(request.tensors, payloads)
    part = Part(request, payloads, expected.size_bytes, len(expected.leaves))
    if max(part.request_bytes, part.reply_bytes) > methods.PAYLOAD_BYTES_MAX:
        raise UsageError(
            f"a call of an expert carries at most {methods.PAYLOAD_BYTES_MAX >> 20} MiB each way: "
            "split the batch"
        )
    return PreparedRequest(part, expected)


def prepared_forward(one: ForwardRequest, codecs: WireCodecs) -> PreparedRequest:
    """Return a forward pass as it is sent. Raises UsageError when its tensors do not fit the schema."""
    schema, length = one.schema, one.schema.length_of(one.inputs)
    fitted = schema.at(length)
    batch = check(fitted.input_leaves, one.inputs, "input")
    codec = _codec_of(codecs.outputs)
    request = _request(one.uid, schema, os.urandom(methods.REQUEST_ID_BYTES), batch, length, codec)
    request.keep = one.keep  # its kind, forward, is the default
    expected = ExpectedReply(fitted.output_leaves, batch, codec, may_be_absent=False)
    return _prepared(request, encode(one.inputs, _codec_of(codecs.inputs)), expected)


def prepared_backward(one: BackwardRequest, codecs: WireCodecs, *, inputs_kept: bool) -> PreparedRequest:
    """Return a backward pass as it is sent. Raises UsageError when its tensors do not fit the schema."""
    schema, tensors, forward = one.schema, one.tensors, one.forward_reply
    length = schema.length_of(tensors.inputs)
    fitted = schema.at(length)
    batch = check(fitted.input_leaves, tensors.inputs, "input")
    if len(tensors.gradients) != len(schema.gradient_leaves):
        raise UsageError(
            f"{one.uid} has {len(schema.gradient_leaves)} floating-point outputs, "
            f"and there are {len(tensors.gradients)} gradients"
        )
    given = [
        (leaf, gradient)
        for leaf, gradient in zip(fitted.gradient_leaves, tensors.gradients, strict=True)
        if gradient is not None
    ]
    if given and check([leaf for leaf, _ in given], [one for _, one in given], "gradient of output") != batch:
        raise UsageError(f"the gradients have another batch size than the inputs, {batch}")
    codec = _codec_of(codecs.input_gradients)
    request = _request(one.uid, schema, forward.request_id, batch, length, codec)
    request.kind, request.version, request.inputs_kept = (
        expert_pb2.EXPERT_BACKWARD,
        forward.version,
        inputs_kept,
    )
    if tensors.staleness_max is not None:
        request.staleness_max = tensors.staleness_max
    payloads = encode(tensors.gradients, _codec_of(codecs.gradients))
    if not inputs_kept:
        payloads = [*encode(tensors.inputs, _codec_of(codecs.inputs)), *payloads]
    expected = ExpectedReply(fitted.input_gradient_leaves, batch, codec, may_be_absent=True)
    return _prepared(request, payloads, expected)
