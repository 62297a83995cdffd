"""Calls whose batches are larger than a server takes in one request: they are cut into parts, which go to the
same server, a few at a time.

A server's limit is learned when it refuses a request: it is then asked to describe the expert. Until then a
call is one request, as long as its tensors fit into one.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import torch

from moe.client.replicas.together import run_together
from moe.protocol.calls import (
    DEFAULT_OPTIONS,
    UNCOMPRESSED,
    BackwardReply,
    ExpertCalls,
    ForwardOptions,
    ForwardReply,
    GradientPass,
    WireCodecs,
)
from moe.protocol.declarations import ExpertReplica
from moe.protocol.errors import ExpertRefused
from moe.protocol.methods import PAYLOAD_BYTES_MAX
from moe.protocol.names import ExpertUid
from moe.protocol.schema import ExpertSchema, Leaf
from moe.protocol.tensors import ALIGNMENT
from swarm.core.ids import PeerId

# a server that claims to take one sample at a time must not make a caller send thousands of requests
PARTS_MAX = 256
_PARTS_IN_FLIGHT_MAX = 4  # enough to keep a server busy while answers travel
_PEERS_MAX = 4096  # servers whose limits are remembered
# Limits learned in one call: a server that names a smaller limit each time is not followed.
_LIMITS_LEARNED_MAX = 2


class SplitCalls:
    """Makes the calls of `ExpertCalls` with batches of any size. Satisfies `ExpertClient`.

    Every part of a backward pass is applied once by itself; a server that computes parts together makes one
    step of them.
    """

    def __init__(self, calls: ExpertCalls) -> None:
        self._calls = calls
        self._limits: OrderedDict[PeerId, int] = OrderedDict()  # samples of one request, where it is known

    async def schema_of(self, replica: ExpertReplica, uid: ExpertUid, *, timeout_s: float) -> ExpertSchema:
        """Return the schema of an expert, as `ExpertCalls.schema_of` does."""
        return await self._calls.schema_of(replica, uid, timeout_s=timeout_s)

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
        """Run a forward pass, as `ExpertCalls.forward` does. Raises ExpertRefused also when the server takes
        so few samples at a time that the batch would become more than PARTS_MAX requests.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        schema = await self.schema_of(replica, uid, timeout_s=timeout_s)
        schema = schema.at(schema.length_of(inputs))
        samples = len(inputs[0])
        size = min(self._limits.get(replica.peer_id, samples), _samples_that_fit(schema), samples)
        for left in range(_LIMITS_LEARNED_MAX, -1, -1):
            if samples > size * PARTS_MAX:
                raise ExpertRefused(
                    f"peer {replica.peer_id} takes {size} samples of {uid} in one request: "
                    f"{samples} would be more than {PARTS_MAX} requests, so send fewer at a time"
                )
            try:
                if size == samples:
                    left_s = deadline_s - asyncio.get_running_loop().time()
                    return await self._calls.forward(
                        replica, uid, inputs, timeout_s=left_s, codecs=codecs, options=options
                    )
                # the server computes one part while the answer to another travels
                own = replace(options, together=False)
                call = functools.partial(self._calls.forward, replica, uid, codecs=codecs, options=own)
                return await self._forward_in_parts(call, inputs, size, deadline_s)
            except ExpertRefused:
                left_s = deadline_s - asyncio.get_running_loop().time()
                limit = await self._learn_limit(replica, uid, left_s)
                if not left or not 0 < limit < size:
                    raise
                size = limit
        raise AssertionError("the last attempt returns or raises")

    async def _forward_in_parts(
        self,
        call: Callable[..., Awaitable[ForwardReply]],
        inputs: Sequence[torch.Tensor],
        size: int,
        deadline_s: float,
    ) -> ForwardReply:
        """Make a call for each part of at most `size` samples, all until `deadline_s` of the loop's clock."""

        async def run(part: Sequence[torch.Tensor]) -> ForwardReply:
            return await call(part, timeout_s=deadline_s - asyncio.get_running_loop().time())

        columns = zip(*(torch.split(tensor, size) for tensor in inputs), strict=True)
        parts = await run_together([run(part) for part in columns], _PARTS_IN_FLIGHT_MAX)
        return _joined_forward(parts, size)

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
        """Run a backward pass, as `ExpertCalls.backward` does, in the parts of the forward pass."""
        parts = forward_reply.parts
        if not parts:
            return await self._calls.backward(
                replica, uid, forward_reply, tensors, timeout_s=timeout_s, codecs=codecs
            )
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        schema = await self.schema_of(replica, uid, timeout_s=timeout_s)
        schema = schema.at(schema.length_of(tensors.inputs))

        async def run(part: ForwardReply, tensors: GradientPass) -> BackwardReply:
            left_s = deadline_s - asyncio.get_running_loop().time()
            return await self._calls.backward(replica, uid, part, tensors, timeout_s=left_s, codecs=codecs)

        size = forward_reply.part_samples
        inputs = [torch.split(tensor, size) for tensor in tensors.inputs]
        gradients = [
            (None,) * len(parts) if one is None else torch.split(one, size) for one in tensors.gradients
        ]
        passes = [
            GradientPass(
                [column[number] for column in inputs],
                [column[number] for column in gradients],
                tensors.staleness_max,
            )
            for number in range(len(parts))
        ]
        replies = await run_together(
            [run(part, one) for part, one in zip(parts, passes, strict=True)], _PARTS_IN_FLIGHT_MAX
        )
        sizes = [len(one.inputs[0]) for one in passes]
        by_input = zip(*(reply.gradients for reply in replies), strict=True)
        return BackwardReply(
            gradients=[
                _joined_gradient(leaf, found, sizes)
                for leaf, found in zip(schema.input_gradient_leaves, by_input, strict=True)
            ],
            version=min(reply.version for reply in replies),
            wait_s=replies[-1].wait_s,
        )

    async def _learn_limit(self, replica: ExpertReplica, uid: ExpertUid, timeout_s: float) -> int:
        """Ask a server how many samples a request may have, and remember it. Return 0 when it does not
        say.
        """
        described = (await self._calls.describe(replica, [uid], timeout_s=max(timeout_s, 0.001)))[0]
        limit = described.batch_size_max if described is not None else 0
        if limit:
            self._limits[replica.peer_id] = limit
            self._limits.move_to_end(replica.peer_id)
            if len(self._limits) > _PEERS_MAX:
                self._limits.popitem(last=False)
        return limit


def _samples_that_fit(schema: ExpertSchema) -> int:
    """Return how many samples a forward and a backward pass may have so that the tensors of each direction
    fit into one call.
    """
    padding = ALIGNMENT * (len(schema.input_leaves) + len(schema.output_leaves))
    return max((PAYLOAD_BYTES_MAX - padding) // max(schema.sample_bytes_max, 1), 1)


def _joined_forward(parts: Sequence[ForwardReply], size: int) -> ForwardReply:
    """Return the reply for the whole batch. It counts as computed by the oldest version among its parts."""
    outputs = [torch.cat(column) for column in zip(*(part.take_outputs() for part in parts), strict=True)]
    return ForwardReply(
        outputs=outputs,
        version=min(part.version for part in parts),
        request_id=parts[0].request_id,
        wait_s=parts[-1].wait_s,
        parts=tuple(parts),
        part_samples=size,
    )


def _joined_gradient(
    leaf: Leaf, parts: Sequence[torch.Tensor | None], sizes: Sequence[int]
) -> torch.Tensor | None:
    """Return an input's gradient over all parts; None where no part has one."""
    if all(part is None for part in parts):
        return None
    return torch.cat(
        [
            torch.zeros((size, *leaf.shape), dtype=leaf.dtype, device="cpu") if part is None else part
            for part, size in zip(parts, sizes, strict=True)
        ]
    )
