"""Requests of experts that share a message, with a stand-in for the network."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, cast

import pytest
import torch

from moe.protocol.declarations import ExpertReplica
from moe.protocol.merging import MergedRequests, MessageAnswers, Part, shared_messages
from moe.protocol.parts import PARTS_BYTES_MAX, PARTS_MAX, announced_bytes, cut, parts_of
from moe.protocol.tensors import TensorPayload
from swarm.core.errors import NetworkError, PeerError, SwarmError, UsageError
from swarm.core.ids import Address, Contact
from swarm.net.channels import Channels
from swarm.net.rpc import copy_into
from swarm.testing.identities import SeededIdentity
from swarm.testing.virtual_loop import VirtualLoop
from swarm.wire import expert_pb2
from swarm.wire.expert_pb2 import ExpertReply, ExpertRequest, TensorHeader

SIZE = 32
REPLICA = ExpertReplica(Contact(SeededIdentity("server").peer_id, (Address("127.0.0.1", 9),)), bytes(32))


def run(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(3600.0)) as runner:
        runner.run(work)


def part(name: str, *, size: int = SIZE, reply_bytes: int = SIZE) -> Part:
    request = ExpertRequest(uid=name, batch=1, tensors=[TensorHeader(payload_bytes=size)])
    payload = TensorPayload(0, 0, (name[-1:] * size).encode())
    return Part(request, [payload], reply_bytes, 1)


def flat(payload: bytes) -> torch.Tensor:
    return torch.tensor(list(payload), dtype=torch.uint8)


def answers_to(message: ExpertRequest, payload: bytes) -> list[ExpertReply]:
    """Return an answer to every request of a message: its own tensors, in capitals."""
    requests = parts_of(message)
    sizes = [announced_bytes(part.tensors) for part in requests]
    return [
        ExpertReply(tensors=one.tensors, reason=one.uid, payload=own.numpy().tobytes().upper(), part=number)
        for number, (one, own) in enumerate(zip(requests, cut(flat(payload), sizes), strict=True))
    ]


def in_one(replies: list[ExpertReply], parts: int) -> list[bytes]:
    """Return the messages of a stream that give these answers together."""
    payload = b"".join(reply.payload for reply in replies)
    for reply in replies:
        reply.ClearField("payload")
        reply.parts = parts
    first = replies[0]
    first.more.extend(replies[1:])
    first.payload_bytes = len(payload)
    return [first.SerializeToString(), payload]


def all_at_once(replies: list[ExpertReply]) -> list[bytes]:
    return in_one(replies, len(replies))


class Server:
    """A stand-in for `Channels`. A call is answered after a second; `answer` gives the messages of a stream,
    each of which comes a second after the one before.
    """

    def __init__(self, answer: Callable[[list[ExpertReply]], list[bytes]] = all_at_once) -> None:
        self.answer = answer
        self.messages: list[list[str]] = []  # names of the experts of each message
        self.cancelled = 0
        self.came_s: dict[str, float] = {}  # when the answer of an expert came
        self.requests = MergedRequests(cast(Channels, self))

    async def call(
        self, contact: Contact, method: object, request: ExpertRequest, *, timeout_s: float
    ) -> ExpertReply:
        self.messages.append([request.uid])
        await asyncio.sleep(1.0)
        return answers_to(ExpertRequest.FromString(request.SerializeToString()), request.payload)[0]

    @contextlib.asynccontextmanager
    async def open_stream(self, *_: object, **options: object) -> AsyncIterator[ServerStream]:
        try:
            yield ServerStream(self)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def ask(self, *names: str) -> dict[str, str | SwarmError]:
        """Send requests together, and return the payload of each answer, or the error, in the order in which
        they came.
        """
        found: dict[str, str | SwarmError] = {}

        async def on_answers(answers: MessageAnswers) -> None:
            if answers.error is not None:
                found.update((names[number], answers.error) for number in answers.numbers)
                return
            payload = answers.payload
            raw = payload.numpy().tobytes() if isinstance(payload, torch.Tensor) else bytes(payload)
            sizes = [announced_bytes(reply.tensors) for reply in answers.replies]
            cuts = cut(flat(raw), sizes)
            for number, reply, own in zip(answers.numbers, answers.replies, cuts, strict=True):
                assert reply.reason == names[number]
                found[names[number]] = own.numpy().tobytes().decode()
                self.came_s[names[number]] = asyncio.get_running_loop().time()

        deadline_s = asyncio.get_running_loop().time() + 10.0
        parts = {number: part(name) for number, name in enumerate(names)}
        await self.requests.send(REPLICA, parts, deadline_s, on_answers)
        assert found.keys() == set(names)
        return found


class ServerStream:
    """The caller's end of a stream to `Server`."""

    peer_id = REPLICA.peer_id

    def __init__(self, server: Server) -> None:
        self._server, self._sent = server, list[bytes]()
        self._has_all = asyncio.Event()
        self._answers: list[bytes] | None = None

    async def send(self, message: bytes) -> None:
        self._sent.append(message)

    async def finish(self) -> None:
        request = ExpertRequest.FromString(self._sent[0])
        self._server.messages.append([one.uid for one in parts_of(request)])
        self._replies = answers_to(request, b"".join(self._sent[1:]))
        self._has_all.set()

    async def receive(self) -> bytes | None:
        await self._has_all.wait()
        await asyncio.sleep(1.0)
        if self._answers is None:
            self._answers = self._server.answer(self._replies)
        return self._answers.pop(0) if self._answers else None

    async def receive_into(self, buffer: memoryview) -> int | None:
        return copy_into(await self.receive(), buffer)


def answers(*names: str) -> dict[str, str]:
    return {name: name[-1].upper() * SIZE for name in names}


def test_requests_that_are_made_together_share_a_message_and_each_gets_its_own_answer() -> None:
    async def scenario() -> None:
        server = Server()
        assert await server.ask("ffn.a", "ffn.b", "ffn.c") == answers("ffn.a", "ffn.b", "ffn.c")
        assert server.messages == [["ffn.a", "ffn.b", "ffn.c"]]
        assert await server.ask("ffn.d") == answers("ffn.d")
        assert server.messages[1:] == [["ffn.d"]]
        await asyncio.gather(server.ask("ffn.e"), server.ask("ffn.f"))
        assert server.messages[2:] == [["ffn.e"], ["ffn.f"]], "these are not made together"

    run(scenario())


def messages_of(parts: list[Part]) -> list[list[Part]]:
    return [list(one.values()) for one in shared_messages(dict(enumerate(parts)))]


def test_a_message_has_bounded_parts_and_bytes() -> None:
    assert [len(one) for one in messages_of([part("a") for _ in range(150)])] == [64, 64, 22]
    half = PARTS_BYTES_MAX // 2
    for options in ({"size": half}, {"reply_bytes": half}):
        assert [len(one) for one in messages_of([part("a", **options) for _ in range(5)])] == [2, 2, 1]
    assert [len(one) for one in messages_of([part("a", size=2 * half), part("b")])] == [1, 1]
    long_names = [part("x" * 4000) for _ in range(60)]
    sizes = [sum(one.request.ByteSize() for one in parts) for parts in messages_of(long_names)]
    assert max(sizes) <= 64 << 10
    assert len(sizes) == 4


def test_a_server_gets_so_many_requests_at_a_time_and_the_rest_when_answers_came() -> None:
    async def scenario() -> None:
        server = Server()
        names = [f"ffn.{number}.a" for number in range(100)]
        assert await server.ask(*names) == answers(*names)
        assert [len(one) for one in server.messages] == [PARTS_MAX, 100 - PARTS_MAX]
        assert sorted(set(server.came_s.values())) == [2.0, 4.0]

    run(scenario())


def test_an_older_server_gets_single_requests() -> None:
    def refuse(replies: list[ExpertReply]) -> list[bytes]:
        text = "32 bytes of tensors should follow, not 64"
        return [ExpertReply(status=expert_pb2.EXPERT_REFUSED, reason=text).SerializeToString()]

    async def scenario() -> None:
        server = Server(refuse)
        for _ in range(2):
            assert await server.ask("ffn.a", "ffn.b") == answers("ffn.a", "ffn.b")
        assert server.messages == [["ffn.a", "ffn.b"], *[["ffn.a"], ["ffn.b"]] * 2]

    run(scenario())


def test_answers_that_come_earlier_are_not_kept_by_later_ones() -> None:
    def one_by_one(replies: list[ExpertReply]) -> list[bytes]:
        return [message for reply in reversed(replies) for message in in_one([reply], len(replies))]

    async def scenario() -> None:
        server = Server(one_by_one)
        assert await server.ask("a", "b", "c") == answers("a", "b", "c")
        assert server.came_s == {"c": 2.0, "b": 4.0, "a": 6.0}
        assert server.messages == [["a", "b", "c"]]

    run(scenario())


def test_a_message_ends_when_its_caller_is_cancelled() -> None:
    async def scenario() -> None:
        server, loop = Server(), asyncio.get_running_loop()
        call = loop.create_task(server.ask("ffn.a", "ffn.b"))
        await asyncio.sleep(0.5)
        call.cancel()
        await asyncio.sleep(0.1)
        assert server.cancelled == 1
        names = [f"ffn.{number}.a" for number in range(PARTS_MAX)]
        assert await server.ask(*names) == answers(*names), "its requests do not count as open any more"

    run(scenario())


def test_each_request_gets_the_error_of_its_message() -> None:
    def fail(replies: list[ExpertReply]) -> list[bytes]:
        raise NetworkError("the connection broke")

    async def scenario() -> None:
        found = await Server(fail).ask("ffn.a", "ffn.b")
        assert all(isinstance(error, NetworkError) for error in found.values())
        assert {str(error) for error in found.values()} == {"the connection broke"}

    run(scenario())


def test_each_request_to_a_peer_that_cannot_be_called_gets_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a mixture failed, in a group of errors, when its own node hosted one of its experts."""

    @contextlib.asynccontextmanager
    async def refuse(*_: object, **options: object) -> AsyncIterator[ServerStream]:
        raise UsageError("a peer does not call itself")
        yield

    async def scenario() -> None:
        server = Server()
        monkeypatch.setattr(server, "open_stream", refuse)
        found = await server.ask("ffn.a", "ffn.b")
        assert all(isinstance(error, UsageError) for error in found.values())

    run(scenario())


def shorter(replies: list[ExpertReply]) -> list[bytes]:
    first, payload = all_at_once(replies)
    return [first, payload[1:]]


def twice(replies: list[ExpertReply]) -> list[bytes]:
    replies[1].part = 0
    return all_at_once(replies)


def unknown(replies: list[ExpertReply]) -> list[bytes]:
    replies[1].part = 2
    return all_at_once(replies)


def larger(replies: list[ExpertReply]) -> list[bytes]:
    replies[0].tensors[0].payload_bytes = 1 << 40
    return all_at_once(replies)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (shorter, "announced 64 bytes and sent 63"),
        (twice, "answers requests that wait for no answer"),
        (unknown, "answers requests that wait for no answer"),
        (larger, "at most 64 fit the experts' schemas"),
        (lambda replies: [], "did not answer a call of ffn.a"),
        (lambda replies: [b"\xff"], "something that is not an ExpertReply"),
    ],
)
def test_an_answer_that_does_not_fit_fails_all_that_wait(
    answer: Callable[[list[ExpertReply]], list[bytes]], said: str
) -> None:
    async def scenario() -> None:
        found = await Server(answer).ask("ffn.a", "ffn.b")
        assert all(isinstance(error, PeerError) and said in str(error) for error in found.values())

    run(scenario())


def test_malformed_messages_are_refused_with_the_reason() -> None:
    single = ExpertRequest(uid="ffn.0", payload=b"x")
    assert parts_of(single) == [single]
    with pytest.raises(PeerError, match="at most 64 requests to experts share a message, not 65"):
        parts_of(ExpertRequest(more=[ExpertRequest()] * PARTS_MAX))
    assert len(parts_of(ExpertRequest(more=[ExpertRequest()] * (PARTS_MAX - 1)))) == PARTS_MAX
    for part_of_its_own in (
        ExpertRequest(payload=b"x"),
        ExpertRequest(payload_bytes=1),
        ExpertRequest(more=[ExpertRequest()]),
    ):
        with pytest.raises(PeerError, match="request 3 of 3 in a message has requests or a payload"):
            parts_of(ExpertRequest(payload=b"x", more=[ExpertRequest(), part_of_its_own]))


def test_a_payload_is_cut_where_its_parts_end() -> None:
    tensors = [TensorHeader(payload_bytes=size) for size in (1, 16, 0, 17)]
    assert announced_bytes(tensors) == 16 + 16 + 0 + 32
    payload = flat(b"abcdef")
    assert [one.numpy().tobytes() for one in cut(payload, [2, 0, 4])] == [b"ab", b"", b"cdef"]
    for sizes in ([2, 3], [7], [1 << 64, 6]):
        with pytest.raises(PeerError, match="the payload has 6 bytes, not"):
            cut(payload, sizes)
