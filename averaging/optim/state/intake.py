"""Verification of the chunks of a state: each is received in its place, and threads of the pool compare it
with the digest that the donor declared.

While chunks are checked the next one is received: hashing, and slow allocation of memory pages by the
system, do not delay a download while another core is free. At most two chunks of each donor are being
checked.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from averaging.optim.state.snapshot import (
    CHUNK_BYTES,
    Blob,
    allocate_pages,
    allocate_zeros,
    chunk_digest,
)
from swarm.core.errors import DeadlineExceeded, NetworkError, PeerError
from swarm.core.ids import PeerId
from swarm.net.rpc import Stream

_CHECKED_MAX = 2  # chunks of one donor at once
_ALLOCATED = 8  # chunks whose memory is found by one piece of work of the pool


@dataclass(slots=True)
class PartialState:
    """A state that is being downloaded, with the chunks that have arrived."""

    digests: tuple[bytes, ...]
    blob: Blob
    missing: deque[int]  # chunks that were not requested yet
    # requested chunks, with the number of donors asked
    requested: Counter[int] = field(default_factory=Counter)
    have: set[int] = field(default_factory=set)
    given: dict[PeerId, int] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    # places in which a donor's chunk arrives or is checked; what another one sends is received beside them
    _lent: dict[int, memoryview] = field(default_factory=dict)
    _beside: dict[int, memoryview] = field(
        default_factory=dict
    )  # verified chunks that are not in their place
    _is_settled: bool = False

    @classmethod
    def begin(
        cls, digests: tuple[bytes, ...], total_bytes: int, earlier: PartialState | None
    ) -> PartialState:
        """Begin with the chunks that an earlier download received, even of another state: these are not
        fetched again.
        """
        partial = cls(digests, allocate_zeros(total_bytes), deque())
        known = (
            {}
            if earlier is None
            else {earlier.digests[index]: earlier.chunk(index) for index in earlier.have}
        )
        for index, digest in enumerate(digests):
            if digest in known and len(known[digest]) == len(partial.chunk(index)):
                partial.chunk(index)[:] = known[digest]
                partial.have.add(index)
            else:
                partial.missing.append(index)
        return partial

    @property
    def complete(self) -> bool:
        """Return whether all chunks have arrived."""
        return len(self.have) == len(self.digests)

    def chunk(self, index: int) -> memoryview:
        """Return the memory of a chunk."""
        return memoryview(self.blob)[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]

    def allocate_pages(self, pool: Executor | None, begin: int = 0) -> None:
        """Let the system find memory ahead of the chunks from this one on, in a thread of the pool, until
        `settle`.
        """
        chunks = [self.chunk(index) for index in range(begin, min(begin + _ALLOCATED, len(self.digests)))]
        if chunks and not self._is_settled:
            allocated = asyncio.get_running_loop().run_in_executor(pool, _allocate_all, chunks)
            allocated.add_done_callback(functools.partial(self._allocate_more, pool, begin + _ALLOCATED))

    def _allocate_more(self, pool: Executor | None, begin: int, allocated: asyncio.Future[bool]) -> None:
        # a few at a time, because a small machine has one thread, which checks the chunks, too
        if not allocated.cancelled() and allocated.result():
            self.allocate_pages(pool, begin)

    def lend(self, index: int) -> memoryview:
        """Return the memory in which to receive a chunk: its place, or, where the chunk is there or another
        donor's may arrive there, other memory. It belongs to the caller until `give_back`.
        """
        if index in self.have or index in self._lent:
            return memoryview(bytearray(len(self.chunk(index))))
        place = self._lent[index] = self.chunk(index)
        return place

    def give_back(self, index: int, memory: memoryview) -> None:
        """Take back what was lent for a chunk that was not received, or is not what was declared."""
        if self._lent.get(index) is memory:
            del self._lent[index]

    def take(self, count: int) -> list[int]:
        """Return the next chunks to ask for, at most `count`."""
        taken = [self.missing.popleft() for _ in range(min(count, len(self.missing)))]
        self.requested.update(taken)
        return taken

    def find_late(self, own: Container[int]) -> int | None:
        """Return a chunk that exactly one other donor was asked for and has not delivered yet."""
        return next(
            (
                index
                for index, times in self.requested.items()
                if times == 1 and index not in self.have and index not in own
            ),
            None,
        )

    def record_received(self, index: int, memory: memoryview, peer: PeerId) -> int:
        """Record that the chunk in memory that was lent was verified. The last one cancels the tasks of
        donors still at work. Return the number of new bytes.
        """
        new_bytes = 0
        if index not in self.have:
            self.have.add(index)
            new_bytes = len(memory)
            if self._lent.get(index) is not memory:
                self._beside[index] = memory
            self.given[peer] = self.given.get(peer, 0) + new_bytes
        self.give_back(index, memory)
        self.requested[index] -= 1
        if self.complete:
            for task in self.tasks - {asyncio.current_task()}:
                task.cancel()
        return new_bytes

    def settle(self) -> None:
        """Copy chunks that were received beside their place to it. No donor sends anything any more."""
        self._is_settled = True
        for index, memory in self._beside.items():
            self.chunk(index)[:] = memory
        self._beside.clear()

    def return_undelivered(self, indices: Iterable[int]) -> None:
        """Make chunks available again that a donor did not deliver."""
        for index in indices:
            self.requested[index] -= 1
            if not self.requested[index] and index not in self.have:
                self.missing.append(index)


@dataclass(slots=True)
class Intake:
    """The chunks that one donor sends, in the order of the requests."""

    partial: PartialState
    peer: PeerId
    stream: Stream
    digests: tuple[bytes, ...]  # declared by the donor
    pool: Executor | None  # None: the event loop's own
    timeout_s: float  # a donor that sends nothing for this long has failed
    on_new: Callable[[int], None]  # called with the number of valid bytes that were not there before
    requested: deque[int] = field(default_factory=deque)  # requested and not received
    lie: str = ""  # why the donor is known to lie; "" if it is not
    # chunks that are being checked, and the memory that they are in
    _checked: deque[tuple[int, memoryview, asyncio.Future[bool]]] = field(default_factory=deque)
    _waiting: asyncio.Timeout | None = None  # the wait for the next chunk, if there is one
    _is_waiting_checked: bool = False
    _closed: bool = False

    async def receive(self) -> None:
        """Receive the next chunk and start its check.

        Raises PeerError when it or one before it is not what was declared, DeadlineExceeded after `timeout_s`
        of silence, and NetworkError.
        """
        index = self.requested[0]
        memory = self.partial.lend(index)
        try:
            size_bytes = await self._receive_into(memory)
            await self.wait_checked(_CHECKED_MAX - 1)
            if size_bytes is None:
                raise PeerError("stopped before it had sent what was asked for")
        except BaseException:
            self.partial.give_back(index, memory)
            raise
        self.requested.popleft()
        checked = asyncio.get_running_loop().run_in_executor(
            self.pool, _is_valid, memory, size_bytes, self.digests[index]
        )
        self._checked.append((index, memory, checked))
        checked.add_done_callback(self._on_check_end)

    async def _receive_into(self, memory: memoryview) -> int | None:
        try:
            async with asyncio.timeout(self.timeout_s) as self._waiting:
                return await self.stream.receive_into(memory)
        except TimeoutError:
            raise (
                PeerError(self.lie)
                if self.lie
                else DeadlineExceeded(f"sent nothing for {self.timeout_s:g} s")
            ) from None
        finally:
            self._waiting = None

    @property
    def checking(self) -> bool:
        """Return whether chunks are being checked."""
        return bool(self._checked)

    async def wait_checked(self, left: int = 0) -> None:
        """Wait until at most `left` received chunks are unchecked. Raise PeerError when one does not match
        its declared digest.
        """
        self._is_waiting_checked = True
        try:
            while len(self._checked) > left and not self.lie:
                first = self._checked[0][2]
                await asyncio.wait((first,))
                if first.cancelled():
                    raise NetworkError("was given up: this node closes")
                self._process_ended_checks()
        finally:
            self._is_waiting_checked = False
        if self.lie:
            raise PeerError(self.lie)

    def close(self) -> list[int]:
        """Ignore the results of checks from now on. Return the chunks that were requested and not
        delivered.
        """
        self._closed = True
        for index, memory, _ in self._checked:
            self.partial.give_back(index, memory)
        return [*self.requested, *(index for index, *_ in self._checked)]

    def _on_check_end(self, checked: asyncio.Future[bool]) -> None:
        """Handle the end of a check, perhaps while the next chunk is waited for: that wait ends now if this
        donor lied.
        """
        if not (self._is_waiting_checked or self._closed or checked.cancelled()):
            self._process_ended_checks()
            if self.lie and self._waiting is not None:
                self._waiting.reschedule(asyncio.get_running_loop().time())

    def _process_ended_checks(self) -> None:
        """Handle the checks that have ended, in the order of their chunks."""
        while self._checked and self._checked[0][2].done() and not self.lie:
            index, memory, checked = self._checked[0]
            if checked.cancelled():
                return
            if checked.result():
                self._checked.popleft()
                self.on_new(self.partial.record_received(index, memory, self.peer))
            else:
                self.lie = (
                    f"sent a chunk {index} whose digest differs from the declared one: it lies, or its "
                    "memory is broken"
                )


def _allocate_all(chunks: Iterable[memoryview]) -> bool:
    return all(map(allocate_pages, chunks))


def _is_valid(memory: memoryview, size_bytes: int, digest: bytes) -> bool:
    """Return whether a message of this size, received into memory for a chunk, is the declared chunk."""
    return size_bytes == len(memory) and chunk_digest(memory) == digest
