"""Chunks that are verified while further ones are received: which count, which do not, and how soon a false
one is detected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from averaging.optim.exchange import chunk_head
from averaging.optim.state.intake import Intake, PartialState
from averaging.optim.state.snapshot import CHUNK_BYTES, chunk_digest
from swarm.core.errors import NetworkError, PeerError
from swarm.core.ids import PeerId
from swarm.testing.network import SimulatedNetwork

CHUNKS = 4


def chunk(index: int) -> bytes:
    return bytes([index + 1]) * CHUNK_BYTES


class HeldPool(Executor):
    """An executor whose work is done when the test says so."""

    def __init__(self) -> None:
        self.held: list[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.held.append((future, fn, args))
        return future

    def work(self) -> None:
        future, function, arguments = self.held.pop(0)
        future.set_result(function(*arguments))


class Sent:
    """A stream that delivers these messages, and then nothing."""

    def __init__(self, peer_id: PeerId, messages: list[bytes]) -> None:
        self.peer_id, self._messages = peer_id, messages
        self.waited_for = asyncio.Event()

    async def receive(self) -> bytes | None:
        if not self._messages:
            self.waited_for.set()
            await asyncio.Event().wait()
        return self._messages.pop(0)

    async def send(self, message: bytes) -> None:
        raise AssertionError

    finish = None  # type: ignore[assignment]
    cancel = None  # type: ignore[assignment]


def play(
    messages: list[bytes], scenario: Callable[[Intake, HeldPool, Sent, list[int]], Awaitable[None]]
) -> PartialState:
    digests = tuple(chunk_digest(chunk(index)) for index in range(CHUNKS))
    partial = PartialState.begin(digests, CHUNKS * CHUNK_BYTES, None)

    async def main() -> None:
        peer = SimulatedNetwork(1).peer().peer_id
        pool, stream, new = HeldPool(), Sent(peer, messages), list[int]()
        intake = Intake(partial, peer, stream, digests, pool, 60.0, new.append)
        intake.requested.extend(partial.take(CHUNKS))
        await asyncio.wait_for(scenario(intake, pool, stream, new), 20)

    asyncio.run(main())
    return partial


def message(index: int, payload: bytes | None = None) -> bytes:
    return chunk_head(index) + (chunk(index) if payload is None else payload)


def test_a_false_chunk_ends_the_wait_for_the_next() -> None:
    async def scenario(intake: Intake, pool: HeldPool, stream: Sent, new: list[int]) -> None:
        await intake.receive()
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(_fails(intake.receive(), PeerError, "chunk 0 whose digest"))
            await stream.waited_for.wait()
            pool.work()
            await waiting
        assert intake.lie
        assert intake.close() == [1, 2, 3, 0]
        assert not new

    partial = play([message(0, bytes(CHUNK_BYTES))], scenario)
    assert bytes(partial.chunk(0)) == bytes(CHUNK_BYTES)
    assert not partial.have


def test_a_chunk_that_is_too_short_fails_its_digest() -> None:
    async def scenario(intake: Intake, pool: HeldPool, stream: Sent, new: list[int]) -> None:
        await intake.receive()
        pool.work()
        await _fails(intake.wait_checked(), PeerError, "chunk 0 whose digest")

    assert not play([message(0, chunk(0)[:-1])], scenario).have


def test_two_chunks_are_checked_at_once_and_a_third_waits() -> None:
    async def scenario(intake: Intake, pool: HeldPool, stream: Sent, new: list[int]) -> None:
        await intake.receive()
        await intake.receive()
        assert intake.checking
        assert not new
        async with asyncio.TaskGroup() as group:
            third = group.create_task(intake.receive())
            for _ in range(10):
                await asyncio.sleep(0)
            assert not third.done()
            assert len(pool.held) == 2, "it has been received, and no more than that"
            pool.held.reverse()
            pool.work()
            for _ in range(10):
                await asyncio.sleep(0)
            assert not third.done(), "the second one's check does not make room for it, the first one's does"
            pool.work()
            await third
        assert new == [CHUNK_BYTES] * 2
        pool.work()
        await intake.wait_checked()
        assert not intake.checking
        assert intake.close() == [3]

    partial = play([message(index) for index in range(3)], scenario)
    assert partial.have == {0, 1, 2}
    assert all(bytes(partial.chunk(index)) == chunk(index) for index in partial.have)


def test_a_check_that_ends_after_close_is_ignored() -> None:
    async def scenario(intake: Intake, pool: HeldPool, stream: Sent, new: list[int]) -> None:
        await intake.receive()
        intake.partial.return_undelivered(intake.close())
        pool.work()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not new
        assert list(intake.partial.missing) == [1, 2, 3, 0]

    assert not play([message(0)], scenario).have


def test_a_closing_node_ends_the_wait_with_an_error() -> None:
    async def scenario(intake: Intake, pool: HeldPool, stream: Sent, new: list[int]) -> None:
        await intake.receive()
        pool.held[0][0].cancel()
        await _fails(intake.wait_checked(), NetworkError, "this node closes")

    play([message(0)], scenario)


async def _fails(doing: Awaitable[None], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        await doing
