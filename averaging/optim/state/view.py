"""The state of one moment, read chunk by chunk while training goes on: copied lazily, before the next write.

As long as nothing is written a view reads the live tensors: a download that is over before the epoch is costs
no copy at all. Whoever is about to write takes `WriteLock`, which completes the copy of every open view
first; a copy that began ahead of that, beside a round (`settle`), leaves the writer little to do.
"""

from __future__ import annotations

import bisect
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from averaging.optim.state.snapshot import (
    CHUNK_BYTES,
    Blob,
    chunk_digest,
    flat_bytes,
    memory_of,
    pieces_digest,
    plan_snapshot,
    room,
    snapshot_digest,
)
from swarm.core.errors import PeerError

_log = logging.getLogger(__name__)

_SETTLE_CHUNKS = 8  # copied while the lock is held once: a writer that comes meanwhile waits for so many


class StateView:
    """One moment of a training state as a blob (`averaging.optim.state.snapshot`). Fit for any thread; what
    reads may wait for the lock.
    """

    def __init__(
        self,
        moment: tuple[int, int, bool],
        header: Mapping[str, Any],
        named: Sequence[tuple[str, torch.Tensor]],
        lock: threading.RLock,
    ) -> None:
        """`moment`: epoch, version, canonical. To be made with the lock held."""
        self.epoch, self.version, self.canonical = moment
        self.names = [name for name, _ in named]
        self._prefix, self._starts, self.total_bytes = plan_snapshot(self.epoch, header, named)
        self._header = dict(header)
        self._live: list[torch.Tensor] = [flat_bytes(tensor) for _, tensor in named]
        # what lies in this machine's own memory is read without a detour through tensors
        self._memory = [memory_of(live) for live in self._live]
        self._shapes = [(tensor.dtype, tuple(tensor.shape)) for _, tensor in named]
        self._lock = lock
        self._blob: Blob | None = None
        self._copied = 0  # chunks that are in the blob, from the first on
        self._digests: tuple[bytes, ...] = ()
        self.closed = False

    @property
    def chunks(self) -> int:
        """How many there are."""
        return -(-self.total_bytes // CHUNK_BYTES)

    @property
    def settled(self) -> bool:
        """Whether all of it is copied: the live tensors are not read any more."""
        return self._copied == self.chunks

    @property
    def header(self) -> dict[str, Any]:
        """Everything in the state that is no tensor."""
        return dict(self._header)

    @property
    def blob(self) -> Blob:
        """The whole copy, once it is settled."""
        assert self._blob is not None
        assert self.settled
        return self._blob

    @property
    def chunk_digests(self) -> tuple[bytes, ...]:
        """What `hash` has found."""
        return self._digests

    @property
    def digest(self) -> bytes:
        return snapshot_digest(self.total_bytes, self._digests)

    def hash(self) -> None:
        """Work out the digests: a second for a gigabyte, from live memory or from the copy."""
        if not self._digests:
            self._digests = tuple(self._digest(index) for index in range(self.chunks))

    def _digest(self, index: int) -> bytes:
        begin, end = index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, self.total_bytes)
        with self._lock:
            if None in self._memory or self.settled or self.closed:
                return chunk_digest(self._read(begin, end))
            return pieces_digest(self._pieces(begin, end))

    def chunk(self, index: int, before: bytes = b"") -> bytes:
        """One chunk, and what is to stand `before` it. PeerError when there was no memory for the copy."""
        begin, end = index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, self.total_bytes)
        if index >= self._copied:
            with self._lock:
                if self._is_live(index):
                    return b"".join((before, *self._pieces(begin, end)))
        return b"".join((before, self._read(begin, end)))

    def chunk_at_once(self, index: int, before: bytes = b"") -> bytes | None:
        """The same without any waiting; None when it is not copied yet, and a writer has the lock or a device
        the tensors.
        """
        if index < self._copied:
            return self.chunk(index, before)
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self.chunk(index, before) if self._is_live(index) else None
        finally:
            self._lock.release()

    def _is_live(self, index: int) -> bool:
        """Whether a chunk can be read where the tensors lie; with the lock held."""
        return not (self.closed or index < self._copied or None in self._memory)

    def tensor(self, place: int) -> torch.Tensor:
        """A copy, on the CPU, of the tensor `names[place]`."""
        dtype, shape = self._shapes[place]
        start = self._starts[place]
        length = self._live_bytes(place)
        if not length:
            return torch.empty(shape, dtype=dtype)
        raw = torch.frombuffer(bytearray(self._read(start, start + length)), dtype=torch.uint8)
        return raw.view(dtype).reshape(shape)

    def settle(self) -> None:
        """Complete the copy, a few chunks at a time, so that a writer who comes meanwhile can go on with it."""
        while not (self.settled or self.closed):
            with self._lock:
                self.settle_now(self._copied + _SETTLE_CHUNKS)

    def settle_now(self, until: int | None = None) -> None:
        """The same in one go, up to a chunk; with the lock held. Without memory for it the view is closed,
        and readers are told.
        """
        if self.closed or self.settled:
            return
        until = self.chunks if until is None else min(until, self.chunks)
        if until <= self._copied:
            return
        try:
            if self._blob is None:
                self._blob = room(self.total_bytes)
            begin, end = self._copied * CHUNK_BYTES, min(until * CHUNK_BYTES, self.total_bytes)
            self._gather(begin, end, memoryview(self._blob)[begin:end])
        except MemoryError:
            _log.warning(
                "there is no memory for a copy of the state of epoch %d: those who download it must begin anew",
                self.epoch,
            )
            self.close()
            return
        self._copied = until
        if until == self.chunks:
            self._live, self._memory = [], []

    def close(self) -> None:
        """Nobody reads it any more: it is not copied when the state changes."""
        self.closed = True

    def _live_bytes(self, place: int) -> int:
        dtype, shape = self._shapes[place]
        return torch.Size(shape).numel() * dtype.itemsize

    def _read(self, begin: int, end: int) -> memoryview:
        if self.settled:
            return memoryview(self.blob)[begin:end]
        with self._lock:
            if self._blob is not None and end <= self._copied * CHUNK_BYTES:  # meanwhile
                return memoryview(self._blob)[begin:end]
            if self.closed:
                raise PeerError("this copy of the state is gone: open the state again")
            if None not in self._memory:
                return memoryview(b"".join(self._pieces(begin, end)))
            out = bytearray(end - begin)
            self._gather(begin, end, memoryview(out))
        return memoryview(out)

    def _pieces(self, begin: int, end: int) -> Iterator[bytes | memoryview]:
        """The blob's bytes [begin, end) where they lie, with the lock held."""
        at = begin
        if at < len(self._prefix):
            yield self._prefix[at:end]
            at = min(end, len(self._prefix))
        for place in range(max(bisect.bisect_right(self._starts, at) - 1, 0), len(self._starts)):
            live, start = self._memory[place], self._starts[place]
            if start >= end:
                break
            assert live is not None
            low, high = max(at, start), min(end, start + len(live))
            if low < high:
                yield bytes(low - at)  # between tensors
                yield live[low - start : high - start]
                at = high
        yield bytes(end - at)

    def _gather(self, begin: int, end: int, out: memoryview) -> None:
        """Copy the blob's bytes [begin, end) out of the live tensors; what is between tensors stays zero."""
        if begin < len(self._prefix):
            piece = self._prefix[begin:end]
            out[: len(piece)] = piece
        flat = torch.frombuffer(out, dtype=torch.uint8)
        place = max(bisect.bisect_right(self._starts, begin) - 1, 0)
        while place < len(self._starts) and self._starts[place] < end:
            live, start = self._live[place], self._starts[place]
            low, high = max(begin, start), min(end, start + live.numel())
            if low < high:
                flat[low - begin : high - begin].copy_(live[low - start : high - start])
            place += 1


class WriteLock:
    """Held while the state is changed, any number of times by one thread. Open views are copied first."""

    def __init__(self, lock: threading.RLock, views: list[StateView]) -> None:
        self._lock, self._views = lock, views

    def __enter__(self) -> None:
        self._lock.acquire()
        with torch.no_grad():
            for view in self._views:
                view.settle_now()
        self._views.clear()  # what is settled is not ours any more

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
