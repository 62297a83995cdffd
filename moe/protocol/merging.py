"""Sending requests of experts. Those of one pass that go to the same server share a message
(`moe.protocol.parts`), because a message costs both ends more than a small request in it.

A single small request is a unary call, which shares messages of the transport with other calls to the same
peer. Large ones, and several together, are a stream of chunks on a connection of its own, where the answers
come as they are computed. Everything here runs on the network loop.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from google.protobuf.message import DecodeError

from moe.protocol import methods
from moe.protocol.declarations import ExpertReplica
from moe.protocol.errors import ExpertFailed
from moe.protocol.parts import PARTS_BYTES_MAX, PARTS_MAX, announced_bytes, cut
from moe.protocol.tensors import TensorPayload, join_payloads, payload_bytes
from swarm.compression import Buffer
from swarm.core.errors import NetworkError, PeerError
from swarm.core.ids import PeerId
from swarm.net.channels import Channels
from swarm.net.rpc import Stream
from swarm.runtime.supervise import Supervisor
from swarm.wire import expert_pb2
from swarm.wire.expert_pb2 import ExpertReply, ExpertRequest

_TENSOR_CONNECTION = 1
# Requests whose deadlines differ by more do not share a message: its deadline is that of the last one.
_DEADLINES_APART_S_MAX = 0.1
_REPLY_BYTES = 64  # of a reply without reason and tensors, at most
_TENSOR_HEADER_BYTES = 32  # at most
_OLDER_PEERS_MAX = 1024  # servers that take single requests only, and are remembered

# the reply to a request, and the payload of its tensors
Answer = tuple[ExpertReply, Buffer | torch.Tensor]


@dataclass(slots=True, eq=False)
class Part:
    """A request to send, without `more` and payload. `reply_bytes` is the size of the answer's tensors, and
    `reply_tensors` their number; `deadline_s` is a time of the event loop.
    """

    request: ExpertRequest
    payloads: list[TensorPayload]
    reply_bytes: int
    reply_tensors: int
    deadline_s: float
    request_bytes: int = field(init=False)  # of the tensors
    # of one that may share a message; None: nobody sends it together with others, so its caller sends it
    answer: asyncio.Future[Answer | None] = field(init=False)
    withdraw: Callable[[], None] | None = None  # to be called when its caller is cancelled

    def __post_init__(self) -> None:
        self.request_bytes = payload_bytes(self.payloads)

    @property
    def header_bytes(self) -> int:
        """Return the size, at most, of everything but tensors in the request or in its answer."""
        return max(
            self.request.ByteSize(),
            methods.REASON_BYTES_MAX + _REPLY_BYTES + _TENSOR_HEADER_BYTES * self.reply_tensors,
        )

    def answer_with(self, answer: Answer | None) -> None:
        """Give the caller its answer, if it still waits."""
        if not self.answer.done():
            self.answer.set_result(answer)


class MergedRequests:
    """Sends requests, each in a message of its own or several in one."""

    def __init__(self, channels: Channels, tasks: Supervisor) -> None:
        self._channels, self._tasks = channels, tasks
        self._gathered: dict[PeerId, list[Part]] = {}  # in this turn of the loop
        self._older: OrderedDict[PeerId, None] = OrderedDict()

    async def send(self, replica: ExpertReplica, part: Part) -> Answer:
        """Send a request in a message of its own, and return the answer. Raises the errors of
        `Channels.call`.
        """
        request = part.request
        if max(part.request_bytes, part.reply_bytes) <= methods.INLINE_BYTES_MAX:
            request.payload = join_payloads(part.payloads)
            timeout_s = part.deadline_s - asyncio.get_running_loop().time()
            reply = await self._channels.call(replica.contact, methods.CALL, request, timeout_s=timeout_s)
            return reply, reply.payload
        request.payload_bytes = part.request_bytes
        answer = _SingleAnswer(replica, part)
        await self._stream(replica, request, part.payloads, part.deadline_s, answer)
        return answer.found

    async def send_together(self, replica: ExpertReplica, part: Part) -> Answer:
        """Send a request with those for which this is called in the same turn of the event loop, and return
        its answer. Raises the same errors. When this is cancelled, the request is withdrawn, unless others in
        its message are still wanted.
        """
        peer = replica.peer_id
        if peer in self._older:
            return await self.send(replica, part)
        part.answer = asyncio.get_running_loop().create_future()
        gathered = self._gathered.get(peer)
        if gathered is not None:
            gathered.append(part)
        else:
            gathered = self._gathered[peer] = [part]
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                part.answer.cancel()
                raise
            finally:
                del self._gathered[peer]
                self._begin(replica, gathered)
        try:
            answer = await part.answer
        except asyncio.CancelledError:
            if part.withdraw is not None:
                part.withdraw()
            raise
        finally:
            part.withdraw = None  # it holds all parts, with their tensors
        return await self.send(replica, part) if answer is None else answer

    def _begin(self, replica: ExpertReplica, gathered: list[Part]) -> None:
        for parts in shared_messages([part for part in gathered if not part.answer.done()]):
            if len(parts) == 1:
                parts[0].answer.set_result(None)
                continue
            work = functools.partial(self._send_together, replica, parts)
            task = self._tasks.spawn("requests of experts", work)
            for part in parts:
                part.withdraw = functools.partial(_withdraw, task, parts)
            task.add_done_callback(functools.partial(_end, replica.peer_id, parts))

    async def _send_together(self, replica: ExpertReplica, parts: list[Part]) -> None:
        request = ExpertRequest()
        request.CopyFrom(parts[0].request)
        request.more.extend(part.request for part in parts[1:])
        request.payload_bytes = sum(part.request_bytes for part in parts)
        payloads = [one for part in parts for one in part.payloads]
        answers = _Answers(replica, parts)
        try:
            await self._stream(replica, request, payloads, max(part.deadline_s for part in parts), answers)
        except _OlderServer:
            self._older[replica.peer_id] = None
            if len(self._older) > _OLDER_PEERS_MAX:
                self._older.popitem(last=False)
            for part in parts:
                part.answer_with(None)
        except (PeerError, NetworkError) as error:
            for part in parts:
                if not part.answer.done():
                    part.answer.set_exception(copy.copy(error))

    async def _stream(
        self,
        replica: ExpertReplica,
        request: ExpertRequest,
        payloads: list[TensorPayload],
        deadline_s: float,
        answers: _Answers | _SingleAnswer,
    ) -> None:
        """Send a message over a stream, and receive the answers to its requests. A server may refuse before
        it has received everything, so the answers are awaited while the message is still being sent.
        """
        timeout_s = deadline_s - asyncio.get_running_loop().time()
        stream_of = self._channels.open_stream(
            replica.contact, methods.EXCHANGE, timeout_s=timeout_s, connection=_TENSOR_CONNECTION
        )
        async with stream_of as stream:

            async def send() -> None:
                try:
                    await stream.send(request.SerializeToString())
                    await methods.send_payload(stream, payloads)
                    await stream.finish()
                except NetworkError:
                    return  # the reply says why

            # raised below: early versions of Python 3.11 wrap errors raised within `except*` in a group
            failed: BaseException | None = None
            try:
                async with asyncio.TaskGroup() as tasks:
                    sending = tasks.create_task(send())
                    await answers.receive(stream)
                    if not answers.request_was_read:
                        sending.cancel()
            except* (PeerError, NetworkError) as errors:
                failed = errors.exceptions[0]
            if failed is not None:
                raise failed


class _OlderServer(PeerError):
    """The server has read the first request of a message only."""


class _SingleAnswer:
    """Receives the answer to a single request."""

    def __init__(self, replica: ExpertReplica, part: Part) -> None:
        self._replica, self._part = replica, part
        self.request_was_read = False  # the whole request, with its payload
        self.found: Answer

    async def receive(self, stream: Stream) -> None:
        reply = await _next_reply(self._replica, self._part.request, stream)
        self.request_was_read = reply.status == expert_pb2.EXPERT_OK
        announced = announced_bytes(reply.tensors) if self.request_was_read else 0
        self.found = reply, await _receive(self._replica, stream, reply, announced, self._part.reply_bytes)


class _Answers:
    """Receives the answers to the requests of one message, as they come."""

    def __init__(self, replica: ExpertReplica, parts: Sequence[Part]) -> None:
        self._replica, self._parts = replica, parts
        self.request_was_read = False

    async def receive(self, stream: Stream) -> None:
        unanswered = set(range(len(self._parts)))
        while unanswered:
            reply = await _next_reply(self._replica, self._parts[0].request, stream)
            if not reply.parts:
                raise _OlderServer("it takes single requests only")
            replies = [reply, *reply.more]
            numbers = [one.part for one in replies]
            if len(set(numbers)) < len(numbers) or not unanswered.issuperset(numbers):
                raise PeerError(f"peer {self._replica.peer_id} answers requests that wait for no answer")
            unanswered.difference_update(numbers)
            bytes_max = sum(self._parts[number].reply_bytes for number in numbers)
            sizes = [announced_bytes(one.tensors) for one in replies]
            if any(one.status == expert_pb2.EXPERT_OK for one in replies):
                self.request_was_read = True
            payload = await _receive(self._replica, stream, reply, sum(sizes), bytes_max)
            for one, own in zip(replies, cut(payload, sizes), strict=True):
                self._parts[one.part].answer_with((one, own))


async def _next_reply(replica: ExpertReplica, request: ExpertRequest, stream: Stream) -> ExpertReply:
    raw = await stream.receive()
    if raw is None:
        raise PeerError(f"peer {replica.peer_id} did not answer a call of {request.uid}")
    try:
        return ExpertReply.FromString(raw)
    except DecodeError:
        raise PeerError(
            f"peer {replica.peer_id} answered with something that is not an ExpertReply"
        ) from None


async def _receive(
    replica: ExpertReplica, stream: Stream, reply: ExpertReply, announced: int, bytes_max: int
) -> torch.Tensor:
    """Receive the payload that follows a reply."""
    if reply.payload_bytes not in (0, announced) or announced > bytes_max:
        raise ExpertFailed(
            f"peer {replica.peer_id} announces tensors of {announced} bytes and a payload of "
            f"{reply.payload_bytes}; at most {bytes_max} fit the experts' schemas"
        )
    return await methods.receive_payload(stream, announced)


def shared_messages(parts: Sequence[Part]) -> list[list[Part]]:
    """Return the requests of each message: as many as its limits allow, in the order of their deadlines."""
    found: list[list[Part]] = []
    sent = received = headers = 0
    for part in sorted(parts, key=lambda one: one.deadline_s):
        sent, received = sent + part.request_bytes, received + part.reply_bytes
        own_headers = part.header_bytes
        headers += own_headers
        if (
            found
            and len(found[-1]) < PARTS_MAX
            and max(sent, received) <= PARTS_BYTES_MAX
            and headers <= methods.HEADER_BYTES_MAX // 2
            and part.deadline_s - found[-1][0].deadline_s <= _DEADLINES_APART_S_MAX
        ):
            found[-1].append(part)
        else:
            found.append([part])
            sent, received, headers = part.request_bytes, part.reply_bytes, own_headers
    return found


def _withdraw(task: asyncio.Task[None], parts: Sequence[Part]) -> None:
    """End a message when its last caller is gone."""
    if all(part.answer.done() for part in parts):
        task.cancel()


def _end(peer: PeerId, parts: Sequence[Part], task: asyncio.Task[None]) -> None:
    """Answer callers that still wait when a message has ended, as when this node is closing."""
    for part in parts:
        if not part.answer.done():
            part.answer.set_exception(NetworkError(f"the call to peer {peer} ended before its answer came"))
