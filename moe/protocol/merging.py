"""Sending requests of experts. Those of one pass that go to the same server share messages
(`moe.protocol.parts`), because a message costs both ends more than a small request in it.

A single small request is a unary call, which shares messages of the transport with other calls to the same
peer. Large ones, and several together, are a stream of chunks on a connection of its own, where the answers
come as they are computed. Everything here runs on the network loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from google.protobuf.message import DecodeError

from moe.protocol import methods
from moe.protocol.call_slots import CallSlots
from moe.protocol.declarations import ExpertReplica
from moe.protocol.errors import ExpertFailed
from moe.protocol.parts import PARTS_BYTES_MAX, PARTS_MAX, announced_bytes
from moe.protocol.tensors import TensorPayload, join_payloads, payload_bytes
from swarm.compression import Buffer
from swarm.core.errors import NetworkError, PeerError, SwarmError
from swarm.core.ids import PeerId
from swarm.net.channels import Channels
from swarm.net.rpc import Stream
from swarm.wire import expert_pb2
from swarm.wire.expert_pb2 import ExpertReply, ExpertRequest

_TENSOR_CONNECTION = 1
_REPLY_BYTES = 64  # of a reply without reason and tensors, at most
_TENSOR_HEADER_BYTES = 32  # at most
_OLDER_PEERS_MAX = 1024  # servers that take single requests only, and are remembered


@dataclass(frozen=True, slots=True)
class Part:
    """A request to send, without `more` and payload. `reply_bytes` is the size of the answer's tensors, and
    `reply_tensors` their number.
    """

    request: ExpertRequest
    payloads: Sequence[TensorPayload]
    reply_bytes: int
    reply_tensors: int
    request_bytes: int = field(init=False)  # of the tensors

    def __post_init__(self) -> None:
        object.__setattr__(self, "request_bytes", payload_bytes(self.payloads))

    @property
    def header_bytes(self) -> int:
        """Return the size, at most, of everything but tensors in the request or in its answer."""
        return max(
            self.request.ByteSize(),
            methods.REASON_BYTES_MAX + _REPLY_BYTES + _TENSOR_HEADER_BYTES * self.reply_tensors,
        )


@dataclass(frozen=True, slots=True)
class MessageAnswers:
    """Answers that came together, to the requests with these numbers. `payload` has the tensors of all, in
    their order. `error` is why there are none.
    """

    numbers: Sequence[int]
    replies: Sequence[ExpertReply] = ()
    payload: Buffer | torch.Tensor = b""
    error: SwarmError | None = None


OnAnswers: TypeAlias = Callable[[MessageAnswers], Awaitable[None]]


class MergedRequests:
    """Sends requests, each in a message of its own or several in one."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._slots = CallSlots()
        self._older: OrderedDict[PeerId, None] = OrderedDict()

    async def send(
        self, replica: ExpertReplica, parts: Mapping[int, Part], deadline_s: float, on_answers: OnAnswers
    ) -> None:
        """Send requests to one server, each as soon as not too many others are under way there. `on_answers`
        is awaited with the answers as they come, by the numbers in `parts`, and with the errors of
        `Channels.call`: once for each request. `deadline_s` is a time of the event loop.
        """
        if len(parts) == 1:
            await self._send_message(replica, parts, deadline_s, on_answers)
            return
        if replica.peer_id in self._older:
            messages = [{number: part} for number, part in parts.items()]
        else:
            messages = shared_messages(parts)
        async with asyncio.TaskGroup() as tasks:
            for message in messages:
                tasks.create_task(self._send_message(replica, message, deadline_s, on_answers))

    async def _send_message(
        self, replica: ExpertReplica, parts: Mapping[int, Part], deadline_s: float, on_answers: OnAnswers
    ) -> None:
        peer, unanswered, is_older = replica.peer_id, dict(parts), False

        async def pass_on(answers: MessageAnswers) -> None:
            for number in answers.numbers:
                del unanswered[number]
            self._slots.leave(peer, len(answers.numbers))
            await on_answers(answers)

        try:
            if not self._slots.try_enter(peer, len(parts)):
                await self._slots.wait(peer, len(parts), deadline_s)
        except NetworkError as error:
            await on_answers(MessageAnswers(list(parts), error=error))
            return
        try:
            await self._exchange(replica, parts, deadline_s, pass_on)
        except _OlderServer:
            is_older = True
        except SwarmError as error:
            await pass_on(MessageAnswers(list(unanswered), error=error))
        finally:
            self._slots.leave(peer, len(unanswered))
        if is_older:
            self._older[peer] = None
            if len(self._older) > _OLDER_PEERS_MAX:
                self._older.popitem(last=False)
            await self.send(replica, unanswered, deadline_s, on_answers)

    async def _exchange(
        self, replica: ExpertReplica, parts: Mapping[int, Part], deadline_s: float, on_answers: OnAnswers
    ) -> None:
        """Send a message and receive its answers. Raises the errors of `Channels.call`."""
        timeout_s = deadline_s - asyncio.get_running_loop().time()
        first, *others = parts.values()
        request = first.request
        if not others and max(first.request_bytes, first.reply_bytes) <= methods.INLINE_BYTES_MAX:
            request.payload = join_payloads(first.payloads)
            reply = await self._channels.call(replica.contact, methods.CALL, request, timeout_s=timeout_s)
            await on_answers(MessageAnswers(list(parts), [reply], reply.payload))
            return
        if others:
            request = ExpertRequest()
            request.CopyFrom(first.request)
            request.more.extend([part.request for part in others])
        request.payload_bytes = sum([part.request_bytes for part in parts.values()])
        payloads = [one for part in parts.values() for one in part.payloads]
        await self._stream(replica, request, payloads, timeout_s, _Receiver(replica, parts, on_answers))

    async def _stream(
        self,
        replica: ExpertReplica,
        request: ExpertRequest,
        payloads: list[TensorPayload],
        timeout_s: float,
        answers: _Receiver,
    ) -> None:
        """Send a message over a stream, and receive the answers to its requests. A server may refuse before
        it has received everything, so the answers are awaited while the message is still being sent.
        """
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


class _Receiver:
    """Receives the answers to the requests of one message, as they come."""

    def __init__(self, replica: ExpertReplica, parts: Mapping[int, Part], on_answers: OnAnswers) -> None:
        self._replica, self._on_answers = replica, on_answers
        self._numbers, self._parts = list(parts), list(parts.values())
        self.request_was_read = False  # the whole message, with its payload

    async def receive(self, stream: Stream) -> None:
        unanswered = set(range(len(self._parts)))
        while unanswered:
            reply = await self._next_reply(stream)
            if not reply.parts and len(self._parts) > 1:
                raise _OlderServer("it takes single requests only")
            replies = [reply, *reply.more]
            places = [one.part for one in replies]
            if len(set(places)) < len(places) or not unanswered.issuperset(places):
                raise PeerError(f"peer {self._replica.peer_id} answers requests that wait for no answer")
            unanswered.difference_update(places)
            if any(one.status == expert_pb2.EXPERT_OK for one in replies):
                self.request_was_read = True
            payload = await self._payload(stream, replies, places)
            await self._on_answers(
                MessageAnswers([self._numbers[place] for place in places], replies, payload)
            )

    async def _next_reply(self, stream: Stream) -> ExpertReply:
        raw = await stream.receive()
        if raw is None:
            uid = self._parts[0].request.uid
            raise PeerError(f"peer {self._replica.peer_id} did not answer a call of {uid}")
        try:
            return ExpertReply.FromString(raw)
        except DecodeError:
            raise PeerError(
                f"peer {self._replica.peer_id} answered with something that is not an ExpertReply"
            ) from None

    async def _payload(
        self, stream: Stream, replies: Sequence[ExpertReply], places: Sequence[int]
    ) -> torch.Tensor:
        """Receive the payload that follows these replies, which came in one message."""
        announced = sum([announced_bytes(one.tensors) for one in replies])
        bytes_max = sum([self._parts[place].reply_bytes for place in places])
        if replies[0].payload_bytes not in (0, announced) or announced > bytes_max:
            raise ExpertFailed(
                f"peer {self._replica.peer_id} announces tensors of {announced} bytes and a payload of "
                f"{replies[0].payload_bytes}; at most {bytes_max} fit the experts' schemas"
            )
        return await methods.receive_payload(stream, announced)


def shared_messages(parts: Mapping[int, Part]) -> list[dict[int, Part]]:
    """Return the requests of each message: as many as its limits allow, in their order."""
    found: list[dict[int, Part]] = []
    sent = received = headers = 0
    for number, part in parts.items():
        sent, received = sent + part.request_bytes, received + part.reply_bytes
        own_headers = part.header_bytes
        headers += own_headers
        if (
            found
            and len(found[-1]) < PARTS_MAX
            and max(sent, received) <= PARTS_BYTES_MAX
            and headers <= methods.HEADER_BYTES_MAX // 2
        ):
            found[-1][number] = part
        else:
            found.append({number: part})
            sent, received, headers = part.request_bytes, part.reply_bytes, own_headers
    return found
