"""Chunks that are verified while further ones are received: which count, which do not, and how soon a false
one is detected.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from averaging.optim.state.intake import Intake, PartialState
from averaging.optim.state.snapshot import CHUNK_BYTES, allocate_pages, chunk_digest
from swarm.core.errors import NetworkError, PeerError
from swarm.core.ids import PeerId
from swarm.net.rpc import copy_into
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
        self.waited_for, self._has_sent = asyncio.Event(), asyncio.Event()

    async def receive_into(self, buffer: memoryview) -> int | None:
        if not self._messages:
            self.waited_for.set()
            await self._has_sent.wait()
        return copy_into(self._messages.pop(0), buffer)

    def send_now(self, message: bytes) -> None:
        self._messages.append(message)
        self._has_sent.set()

    async def send(self, message: bytes) -> None:
        raise AssertionError

    receive = send  # type: ignore[assignment]
    finish = None  # type: ignore[assignment]
    cancel = None  # type: ignore[assignment]


def play(
    messages: list[bytes],
    scenario: Callable[[Intake, HeldPool, Sent, list[int]], Awaitable[None]],
    prepare: Callable[[PartialState], None] = lambda partial: None,
) -> PartialState:
    digests = tuple(chunk_digest(chunk(index)) for index in range(CHUNKS))
    partial = PartialState.begin(digests, CHUNKS * CHUNK_BYTES, None)
    prepare(partial)

    async def main() -> None:
        peer = SimulatedNetwork(1).peer().peer_id
        pool, stream, new = HeldPool(), Sent(peer, messages), list[int]()
        intake = Intake(partial, peer, stream, digests, pool, 60.0, new.append)
        intake.requested.extend(partial.take(CHUNKS))
        await asyncio.wait_for(scenario(intake, pool, stream, new), 20)

    asyncio.run(main())
    return partial


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

    assert not play([bytes(CHUNK_BYTES)], scenario).have


@pytest.mark.parametrize("wrong", [chunk(0)[:-1], chunk(0) + b"x"])
def test_a_chunk_of_another_length_fails_its_digest(wrong: bytes) -> None:
    async def scenario(intake: Intake, pool: HeldPool, stream: Sent, new: list[int]) -> None:
        await intake.receive()
        pool.work()
        await _fails(intake.wait_checked(), PeerError, "chunk 0 whose digest")

    def hold_the_right_chunk(partial: PartialState) -> None:
        partial.chunk(0)[:] = chunk(0)  # an earlier donor has sent it, and was given up before its check

    assert not play([wrong], scenario, hold_the_right_chunk).have


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

    partial = play([chunk(index) for index in range(3)], scenario)
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

    assert not play([chunk(0)], scenario).have


def test_a_closing_node_ends_the_wait_with_an_error() -> None:
    async def scenario(intake: Intake, pool: HeldPool, stream: Sent, new: list[int]) -> None:
        await intake.receive()
        pool.held[0][0].cancel()
        await _fails(intake.wait_checked(), NetworkError, "this node closes")

    play([chunk(0)], scenario)


@pytest.mark.parametrize("late", [chunk(0), bytes(CHUNK_BYTES)])
@pytest.mark.parametrize("is_late", [True, False])
def test_a_late_donor_does_not_overwrite_what_another_has_sent(late: bytes, is_late: bool) -> None:
    """The late chunk arrives when the other one has been checked, or while it is checked."""

    async def scenario(intake: Intake, pool: HeldPool, stream: Sent, new: list[int]) -> None:
        partial = intake.partial
        partial.requested.update([0])
        second = SimulatedNetwork(2).peer().peer_id
        other = Intake(partial, second, Sent(second, [chunk(0)]), intake.digests, pool, 60.0, new.append)
        other.requested.append(0)
        arrives = asyncio.create_task(intake.receive())
        await stream.waited_for.wait()
        await other.receive()
        if is_late:
            pool.work()
            await other.wait_checked()
        stream.send_now(late)
        await arrives
        while pool.held:
            pool.work()
        await other.wait_checked()
        with contextlib.suppress(PeerError):
            await intake.wait_checked()
        assert new == ([CHUNK_BYTES, 0] if late == chunk(0) else [CHUNK_BYTES])
        assert bool(intake.lie) == (late != chunk(0))
        assert set(partial.given) <= {intake.peer, second}
        for one in (intake, other):
            partial.return_undelivered(one.close())

    partial = play([], scenario)
    partial.settle()
    assert bytes(partial.chunk(0)) == chunk(0)
    assert partial.have == {0}
    assert 0 not in partial.missing


def test_the_place_of_a_chunk_is_free_again_after_its_donor_has_failed() -> None:
    async def scenario(intake: Intake, pool: HeldPool, stream: Sent, new: list[int]) -> None:
        partial = intake.partial
        arrives = asyncio.create_task(intake.receive())
        await stream.waited_for.wait()
        arrives.cancel()
        await asyncio.wait([arrives])
        partial.return_undelivered(intake.close())
        partial.lend(0)[:] = chunk(0)
        assert bytes(partial.chunk(0)) == chunk(0)

    play([], scenario)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux allocates pages ahead")
def resident_bytes(memory: memoryview) -> int:
    """Return how much of this memory has pages, by mincore(2)."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    states = (ctypes.c_ubyte * -(-(start + len(memory) - first) // mmap.PAGESIZE))()
    size = ctypes.c_size_t(len(states) * mmap.PAGESIZE)
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(first), size, states)
    return mmap.PAGESIZE * sum(state & 1 for state in states)


def test_memory_is_allocated_ahead_of_the_chunks_and_keeps_what_is_in_it() -> None:
    chunks = 64
    partial = PartialState.begin((b"",) * chunks, chunks * CHUNK_BYTES, None)
    partial.chunk(3)[:] = chunk(3)
    assert not bytes(partial.chunk(4)).strip(b"\0")
    if not allocate_pages(partial.chunk(0)):
        pytest.skip("Linux does this from 5.14 on")
    parts = [partial.chunk(index) for index in range(chunks)]
    assert sum(map(resident_bytes, parts)) < chunks // 2 * CHUNK_BYTES

    async def allocate() -> None:
        pool = HeldPool()
        partial.allocate_pages(pool)
        await _work_to_the_end(pool)

    asyncio.run(allocate())
    assert all(resident_bytes(part) >= CHUNK_BYTES for part in parts)
    assert bytes(partial.chunk(3)) == chunk(3)
    assert not bytes(partial.chunk(4)).strip(b"\0")


def test_a_check_waits_for_the_memory_of_a_few_chunks_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks, work = 64, list[str]()
    partial = PartialState.begin((b"",) * chunks, chunks * CHUNK_BYTES, None)

    def allocate(memory: memoryview) -> bool:
        work.append("memory")
        return True

    async def scenario() -> None:
        monkeypatch.setattr("averaging.optim.state.intake.allocate_pages", allocate)
        pool = HeldPool()
        partial.allocate_pages(pool)
        pool.submit(work.append, "check")
        await _work_to_the_end(pool)

    asyncio.run(scenario())
    assert work.count("memory") == chunks
    assert work.index("check") <= 8


def test_no_more_memory_is_allocated_when_the_donors_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    partial, work = PartialState.begin((b"",) * 64, 64 * CHUNK_BYTES, None), list[memoryview]()

    def allocate(memory: memoryview) -> bool:
        work.append(memory)
        return True

    async def scenario() -> None:
        monkeypatch.setattr("averaging.optim.state.intake.allocate_pages", allocate)
        pool = HeldPool()
        partial.allocate_pages(pool)
        partial.settle()
        await _work_to_the_end(pool)

    asyncio.run(scenario())
    assert len(work) <= 8


async def _work_to_the_end(pool: HeldPool) -> None:
    while pool.held:
        pool.work()
        for _ in range(3):  # what follows is begun on the loop
            await asyncio.sleep(0)


async def _fails(doing: Awaitable[None], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        await doing
