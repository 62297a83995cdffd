"""Calls whose batches are larger than a server takes in one request: they are cut into parts, which go to the
same server, a few at a time.

A server's limit is learned when it refuses a request: it is then asked to describe the expert. Until then a
call is one request, as long as its tensors fit into one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from moe.client.replicas.together import run_together
from moe.protocol.calls import (
    UNCOMPRESSED,
    BackwardReply,
    BackwardRequest,
    ExpertCalls,
    ForwardReply,
    ForwardRequest,
    GradientPass,
    OnBackward,
    OnForward,
    WireCodecs,
    reply_or_raise,
)
from moe.protocol.declarations import ExpertReplica
from moe.protocol.errors import ExpertRefused
from moe.protocol.methods import PAYLOAD_BYTES_MAX
from moe.protocol.names import ExpertUid
from moe.protocol.schema import ExpertSchema, Leaf
from moe.protocol.tensors import ALIGNMENT
from swarm.core.errors import SwarmError, UsageError
from swarm.core.ids import PeerId

ReplyT = TypeVar("ReplyT")

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

    async def forward_all(
        self,
        replica: ExpertReplica,
        requests: Mapping[int, ForwardRequest],
        on_replies: OnForward,
        *,
        timeout_s: float,
        codecs: WireCodecs = UNCOMPRESSED,
    ) -> None:
        """Run forward passes, as `ExpertCalls.forward_all` does. The error is ExpertRefused also when the
        server takes so few samples at a time that the batch would become more than PARTS_MAX requests.
        """
        deadline_s = _now_s() + timeout_s
        call = functools.partial(self._calls.forward_all, replica, codecs=codecs)
        in_parts: dict[int, ExpertRefused | None] = {
            number: None for number, one in requests.items() if len(one.inputs[0]) > self._size(replica, one)
        }
        refused: dict[int, ExpertRefused | None] = {}

        def take(found: Mapping[int, ForwardReply | SwarmError]) -> None:
            refusals = {number: one for number, one in found.items() if isinstance(one, ExpertRefused)}
            if refusals:
                refused.update(refusals)
                found = {number: one for number, one in found.items() if number not in refusals}
            if found:
                on_replies(found)

        async def cut(numbers: Mapping[int, ExpertRefused | None]) -> None:
            async with asyncio.TaskGroup() as tasks:
                for number, refusal in numbers.items():
                    work = self._forward_in_parts(call, replica, requests[number], refusal, deadline_s)
                    tasks.create_task(_pass_on(work, number, on_replies))

        if in_parts:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(cut(in_parts))
                whole = {number: one for number, one in requests.items() if number not in in_parts}
                if whole:
                    await call(whole, take, timeout_s=timeout_s)
        else:
            await call(requests, take, timeout_s=timeout_s)
        if refused:  # the server's limit was not known
            await cut(refused)

    async def _forward_in_parts(
        self,
        call: Callable[..., Awaitable[None]],
        replica: ExpertReplica,
        request: ForwardRequest,
        refusal: ExpertRefused | None,
        deadline_s: float,
    ) -> ForwardReply:
        """Make a call in parts of as many samples as the server takes. `refusal`: it has refused the whole
        batch. `deadline_s` is a time of the loop's clock.
        """
        samples = len(request.inputs[0])
        # a batch that was refused was one request, whatever other calls have learned since
        size = samples if refusal is not None else min(self._size(replica, request), samples)
        for left in range(_LIMITS_LEARNED_MAX, -1, -1):
            if refusal is not None:
                limit = await self._learn_limit(replica, request.uid, deadline_s - _now_s())
                if not left or not 0 < limit < size:
                    raise refusal
                size = limit
            if samples > size * PARTS_MAX:
                raise ExpertRefused(
                    f"peer {replica.peer_id} takes {size} samples of {request.uid} in one request: "
                    f"{samples} would be more than {PARTS_MAX} requests, so send fewer at a time"
                )
            columns = zip(*(torch.split(tensor, size) for tensor in request.inputs), strict=True)
            # not in one message: the server computes one part while the answer to another travels
            parts = [_call_alone(call, replace(request, inputs=part), deadline_s) for part in columns]
            try:
                return _joined_forward(await run_together(parts, _PARTS_IN_FLIGHT_MAX), size)
            except ExpertRefused as error:
                refusal = error
        raise AssertionError("the last attempt returns or raises")

    async def backward_all(
        self,
        replica: ExpertReplica,
        requests: Mapping[int, BackwardRequest],
        on_replies: OnBackward,
        *,
        timeout_s: float,
        codecs: WireCodecs = UNCOMPRESSED,
    ) -> None:
        """Run backward passes, as `ExpertCalls.backward_all` does, in the parts of the forward passes."""
        call = functools.partial(self._calls.backward_all, replica, codecs=codecs)
        in_parts = {number: one for number, one in requests.items() if one.forward_reply.parts}
        if not in_parts:
            await call(requests, on_replies, timeout_s=timeout_s)
            return
        deadline_s = _now_s() + timeout_s
        async with asyncio.TaskGroup() as tasks:
            for number, one in in_parts.items():
                work = _backward_in_parts(call, one, deadline_s)
                tasks.create_task(_pass_on(work, number, on_replies))
            whole = {number: one for number, one in requests.items() if number not in in_parts}
            if whole:
                await call(whole, on_replies, timeout_s=timeout_s)

    def _size(self, replica: ExpertReplica, request: ForwardRequest) -> int:
        """Return how many samples one request may have, as far as that is known."""
        schema = request.schema
        if schema.sequence_length:
            with contextlib.suppress(UsageError):  # reported when the request is prepared
                schema = schema.at(schema.length_of(request.inputs))
        return min(self._limits.get(replica.peer_id, sys.maxsize), _samples_that_fit(schema))

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


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def _pass_on(
    work: Coroutine[Any, Any, ReplyT],
    number: int,
    on_replies: Callable[[Mapping[int, ReplyT | SwarmError]], None],
) -> None:
    """Call `on_replies` with the result of `work`, or its error."""
    try:
        found: ReplyT | SwarmError = await work
    except SwarmError as error:
        found = error
    on_replies({number: found})


async def _call_alone(
    call: Callable[..., Awaitable[None]], request: ForwardRequest | BackwardRequest, deadline_s: float
) -> Any:
    """Return the reply to a request in a message of its own, or raise its error."""
    found: dict[int, Any] = {}
    await call({0: request}, found.update, timeout_s=deadline_s - _now_s())
    return reply_or_raise(found[0])


async def _backward_in_parts(
    call: Callable[..., Awaitable[None]], request: BackwardRequest, deadline_s: float
) -> BackwardReply:
    """Run a backward pass in the parts of its forward pass."""
    tensors, forward = request.tensors, request.forward_reply
    schema = request.schema.at(request.schema.length_of(tensors.inputs))
    parts, size = forward.parts, forward.part_samples
    inputs = [torch.split(tensor, size) for tensor in tensors.inputs]
    gradients = [(None,) * len(parts) if one is None else torch.split(one, size) for one in tensors.gradients]
    passes = [
        GradientPass(
            [column[number] for column in inputs],
            [column[number] for column in gradients],
            tensors.staleness_max,
        )
        for number in range(len(parts))
    ]
    work = [
        _call_alone(call, BackwardRequest(request.uid, request.schema, part, one), deadline_s)
        for part, one in zip(parts, passes, strict=True)
    ]
    replies: list[BackwardReply] = await run_together(work, _PARTS_IN_FLIGHT_MAX)
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
