"""The caller's end of the protocol: describe, forward and backward calls to one expert on one server.

Requests of one pass to several experts of a server share a message (`moe.protocol.merging`). Everything here
runs on the network loop. The server's refusals are raised as the errors of `moe.protocol.errors`,
network failures as NetworkError and DeadlineExceeded. UsageError means that the tensors do not fit the
expert's schema; nothing was sent in that case.
"""

from __future__ import annotations

import asyncio
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

import torch

from moe.protocol import methods
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
from moe.protocol.merging import MergedRequests, MessageAnswers
from moe.protocol.names import ExpertUid
from moe.protocol.parts import announced_bytes, cut
from moe.protocol.passes import BackwardReply as BackwardReply
from moe.protocol.passes import BackwardRequest as BackwardRequest
from moe.protocol.passes import ForwardReply as ForwardReply
from moe.protocol.passes import ForwardRequest as ForwardRequest
from moe.protocol.passes import GradientPass as GradientPass
from moe.protocol.passes import (
    PreparedRequest,
    encoding_takes_long,
    prepared_backward,
    prepared_forward,
)
from moe.protocol.passes import check_staleness_max as check_staleness_max
from moe.protocol.schema import ExpertSchema
from moe.protocol.tensors import is_finite_as_float32
from swarm.compression import Buffer
from swarm.core.errors import DeadlineExceeded, PeerError, SwarmError, UsageError
from swarm.core.ids import PeerId
from swarm.net.channels import Channels
from swarm.wire import expert_pb2
from swarm.wire.expert_pb2 import DescribeRequest, ExpertReply, ExpertRequest

if TYPE_CHECKING:
    from swarm.node import Node

ReplyT = TypeVar("ReplyT")

_SCHEMAS_MAX = 1024
_CLASS_CHARACTERS_MAX = 64
_POOLED_BYTES = 256 << 10  # decoding more bytes than this takes longer than a thread switch


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


# called with the replies or errors of requests that are made together, by their numbers, as they come
OnForward: TypeAlias = Callable[[Mapping[int, ForwardReply | SwarmError]], None]
OnBackward: TypeAlias = Callable[[Mapping[int, BackwardReply | SwarmError]], None]


class ExpertClient(Protocol):
    """The calls that `ReplicaCalls` needs. `ExpertCalls` makes them over the network, simulated servers in
    tests.
    """

    async def schema_of(
        self, replica: ExpertReplica, uid: ExpertUid, *, timeout_s: float
    ) -> ExpertSchema: ...

    async def forward_all(
        self,
        replica: ExpertReplica,
        requests: Mapping[int, ForwardRequest],
        on_replies: OnForward,
        *,
        timeout_s: float,
        codecs: WireCodecs = ...,
    ) -> None: ...

    async def backward_all(
        self,
        replica: ExpertReplica,
        requests: Mapping[int, BackwardRequest],
        on_replies: OnBackward,
        *,
        timeout_s: float,
        codecs: WireCodecs = ...,
    ) -> None: ...


class ExpertCalls:
    """The caller's end of expert calls. A node has one instance: `node.service(ExpertCalls.from_node)`."""

    def __init__(self, channels: Channels, pool: ThreadPoolExecutor) -> None:
        self._channels, self._pool = channels, pool
        self._requests = MergedRequests(channels)
        self._schemas: OrderedDict[bytes, ExpertSchema] = OrderedDict()  # by digest
        # held while a server is asked for a schema
        self._asking: dict[tuple[PeerId, bytes], asyncio.Lock] = {}

    @classmethod
    def from_node(cls, node: Node) -> ExpertCalls:
        """Create the instance for a node."""
        return cls(node.channels, node.network.pool)

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

    async def forward_all(
        self,
        replica: ExpertReplica,
        requests: Mapping[int, ForwardRequest],
        on_replies: OnForward,
        *,
        timeout_s: float,
        codecs: WireCodecs = UNCOMPRESSED,
    ) -> None:
        """Run forward passes of experts of one server. `on_replies` is called with replies
        or errors by number, several at a time, as they come; each number occurs once.
        """

        def prepare(number: int) -> PreparedRequest:
            one = requests[number]
            return prepared_forward(one, codecs.or_else(one.schema.codecs))

        def reply_of(
            prepared: PreparedRequest, reply: ExpertReply, found: list[torch.Tensor | None]
        ) -> ForwardReply:
            return ForwardReply(
                outputs=[tensor for tensor in found if tensor is not None],
                version=reply.version,
                request_id=prepared.part.request.request_id,
                wait_s=reply.wait_s,
                kept=reply.kept,
            )

        encoding = codecs.or_else(next(iter(requests.values())).schema.codecs)
        takes_long = encoding_takes_long([one.inputs for one in requests.values()], encoding.inputs)
        deadline_s = _until(timeout_s)
        prepared = await self._prepare(list(requests), prepare, takes_long, on_replies)
        await self._exchange(replica, prepared, reply_of, on_replies, deadline_s)

    async def backward_all(
        self,
        replica: ExpertReplica,
        requests: Mapping[int, BackwardRequest],
        on_replies: OnBackward,
        *,
        timeout_s: float,
        codecs: WireCodecs = UNCOMPRESSED,
    ) -> None:
        """Run backward passes of experts of one server; each expert's optimizer makes a step. `replica` must
        be the one that answered the forward passes. `on_replies` is called as in `forward_all`; a reply has
        the gradients of the floating-point inputs.

        A pass is applied once for one forward reply, however many times this is called with it, so a call
        that got no reply can be repeated.
        """
        deadline_s = _until(timeout_s)
        sent_without_inputs = {number for number, one in requests.items() if one.forward_reply.kept}
        encoding = codecs.or_else(next(iter(requests.values())).schema.codecs)
        forgotten: list[int] = []

        def prepare(number: int) -> PreparedRequest:
            one = requests[number]
            kept = number in sent_without_inputs
            return prepared_backward(one, codecs.or_else(one.schema.codecs), inputs_kept=kept)

        def reply_of(
            prepared: PreparedRequest, reply: ExpertReply, found: list[torch.Tensor | None]
        ) -> BackwardReply:
            return BackwardReply(gradients=found, version=reply.version, wait_s=reply.wait_s)

        def take(found: Mapping[int, BackwardReply | SwarmError]) -> None:
            missing = [
                number
                for number, one in found.items()
                if isinstance(one, _InputsForgotten) and number in sent_without_inputs
            ]
            if missing:
                forgotten.extend(missing)
                found = {number: one for number, one in found.items() if number not in missing}
            if found:
                on_replies(found)

        async def exchange(numbers: Sequence[int], on_some: OnBackward) -> None:
            takes_long = encoding_takes_long(
                [
                    [*requests[number].tensors.inputs, *requests[number].tensors.gradients]
                    for number in numbers
                ],
                encoding.inputs or encoding.gradients,
            )
            prepared = await self._prepare(numbers, prepare, takes_long, on_some)
            await self._exchange(replica, prepared, reply_of, on_some, deadline_s)

        await exchange(list(requests), take)
        if forgotten:  # mostly those of all requests: the server was restarted
            sent_without_inputs.clear()
            await exchange(forgotten, on_replies)

    async def forward(
        self,
        replica: ExpertReplica,
        uid: ExpertUid,
        inputs: Sequence[torch.Tensor],
        *,
        timeout_s: float,
        codecs: WireCodecs = UNCOMPRESSED,
        keep: bool = False,
    ) -> ForwardReply:
        """Run one forward pass, as `forward_all` does. Raises its error."""
        deadline_s = _until(timeout_s)
        schema = await self.schema_of(replica, uid, timeout_s=timeout_s)
        found: dict[int, ForwardReply | SwarmError] = {}
        requests = {0: ForwardRequest(uid, schema, inputs, keep)}
        await self.forward_all(replica, requests, found.update, timeout_s=_left_s(deadline_s), codecs=codecs)
        return reply_or_raise(found[0])

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
        """Run one backward pass, as `backward_all` does. Raises its error."""
        deadline_s = _until(timeout_s)
        schema = await self.schema_of(replica, uid, timeout_s=timeout_s)
        found: dict[int, BackwardReply | SwarmError] = {}
        requests = {0: BackwardRequest(uid, schema, forward_reply, tensors)}
        await self.backward_all(replica, requests, found.update, timeout_s=_left_s(deadline_s), codecs=codecs)
        return reply_or_raise(found[0])

    def _remember_schema(self, schema: ExpertSchema) -> None:
        self._schemas[schema.digest] = schema
        if len(self._schemas) > _SCHEMAS_MAX:
            self._schemas.popitem(last=False)

    async def _prepare(
        self,
        numbers: Sequence[int],
        prepare: Callable[[int], PreparedRequest],
        takes_long: bool,
        on_failures: Callable[[Mapping[int, SwarmError]], None],
    ) -> dict[int, PreparedRequest]:
        """Prepare the requests with these numbers. Those that do not fit are passed to `on_failures`."""
        prepared: dict[int, PreparedRequest] = {}
        failed: dict[int, SwarmError] = {}

        def prepare_all() -> None:
            for number in numbers:
                try:
                    prepared[number] = prepare(number)
                except SwarmError as error:
                    failed[number] = error

        if takes_long:
            await asyncio.get_running_loop().run_in_executor(self._pool, prepare_all)
        else:
            prepare_all()
        if failed:
            on_failures(failed)
        return prepared

    async def _exchange(
        self,
        replica: ExpertReplica,
        prepared: Mapping[int, PreparedRequest],
        reply_of: Callable[[PreparedRequest, ExpertReply, list[torch.Tensor | None]], ReplyT],
        on_replies: Callable[[Mapping[int, ReplyT | SwarmError]], None],
        deadline_s: float,
    ) -> None:
        """Send requests, and call `on_replies` with what `reply_of` makes of the replies, or with errors."""

        def read(answers: MessageAnswers) -> dict[int, ReplyT | SwarmError]:
            found: dict[int, ReplyT | SwarmError] = {}
            for number, reply, payload, are_finite in _each(answers):
                own = prepared[number]
                try:
                    _raise_unless_ok(replica, own.part.request, reply)
                    tensors = own.expected.read(replica, reply, payload, is_finite=are_finite)
                    found[number] = reply_of(own, reply, tensors)
                except PeerError as error:
                    found[number] = error
            return found

        async def on_answers(answers: MessageAnswers) -> None:
            error = answers.error
            if error is not None:
                on_replies({number: copy.copy(error) for number in answers.numbers})
            elif len(answers.payload) <= _POOLED_BYTES * len(answers.numbers):
                on_replies(read(answers))
            else:
                loop = asyncio.get_running_loop()
                on_replies(await loop.run_in_executor(self._pool, read, answers))

        if prepared:
            parts = {number: one.part for number, one in prepared.items()}
            await self._requests.send(replica, parts, deadline_s, on_answers)


class _InputsForgotten(ExpertFailed):
    """The server no longer has the inputs of the forward pass."""


def _until(timeout_s: float) -> float:
    return asyncio.get_running_loop().time() + timeout_s


def _left_s(deadline_s: float) -> float:
    return deadline_s - asyncio.get_running_loop().time()


def reply_or_raise(found: ReplyT | SwarmError) -> ReplyT:
    """Return a reply, or raise it if it is an error."""
    if isinstance(found, SwarmError):
        raise found
    return found


def _each(answers: MessageAnswers) -> Iterator[tuple[int, ExpertReply, Buffer | torch.Tensor, bool]]:
    """Yield the number of each request, its reply, its payload, and whether that is known to have finite
    float32 elements only: looking at all together takes a fraction of the time.
    """
    payload = answers.payload
    if len(answers.replies) == 1 or not isinstance(payload, torch.Tensor):
        for number, reply in zip(answers.numbers, answers.replies, strict=True):
            yield number, reply, payload, False
        return
    are_finite = is_finite_as_float32(payload)
    payloads = cut(payload, [announced_bytes(reply.tensors) for reply in answers.replies])
    for number, reply, own in zip(answers.numbers, answers.replies, payloads, strict=True):
        yield number, reply, own, are_finite


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
