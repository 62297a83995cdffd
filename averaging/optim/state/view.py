"""A view of the state of one moment, read chunk by chunk while training continues, and copied lazily before
the next write.

A view of a state in host memory reads the live tensors until something is written: a download that ends
before the epoch does costs no copy at all. A view of a state that lies on a device, even in part, is copied
to the host when it is first read, each byte once, and hashed and served from that copy: it costs host
memory for the whole state until it is closed, and 16 MiB of pinned memory while it is made.

A thread that is about to write takes `WriteLock`, which completes the copy of every open view first. A copy
that began earlier, during a round (`complete_copy`), leaves the writer little to do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from averaging.optim.state.device_reads import DeviceReads, HostCopy
from averaging.optim.state.snapshot import (
    CHUNK_BYTES,
    Blob,
    allocate_zeros,
    chunk_digest,
    flat_bytes,
    memory_of,
    pieces_digest,
    plan_snapshot,
    snapshot_digest,
    write_marks,
)
from swarm.core.device import is_out_of_memory
from swarm.core.errors import PeerError

_log = logging.getLogger(__name__)

_LOST_COPY = "this copy of the state is gone: open the state again"
_SAMPLED_CHUNKS = 8  # chunks hashed again before the digests of an earlier view are used
_SETTLE_CHUNKS = 8  # chunks copied each time the lock is held: a writer waits for at most this many


class StateView:
    """One moment of a training state as a blob (`averaging.optim.state.snapshot`). Callable from any
    thread; methods that read may wait for the lock.
    """

    def __init__(
        self,
        moment: tuple[int, int, bool],
        header: Mapping[str, Any],
        named: Sequence[tuple[str, torch.Tensor]],
        lock: threading.RLock,
        reads: DeviceReads,
    ) -> None:
        """Create a view, with the lock held. `moment`: epoch, version, canonical. `reads`: the readers of
        tensors on devices.
        """
        self.epoch, self.version, self.canonical = moment
        self.names = [name for name, _ in named]
        self._layout = plan_snapshot(self.epoch, header, named)
        # two views with the same contents show the same bytes, unless somebody writes a tensor in a way that
        # neither the state nor torch counts (`adopt_digests`)
        self.contents: tuple[object, ...] = (
            self.version,
            self._layout.prefix,
            *write_marks(tensor for _, tensor in named),
        )
        self.total_bytes = self._layout.total_bytes
        self._header = dict(header)
        self._shapes = [(tensor.dtype, tuple(tensor.shape)) for _, tensor in named]
        self._lock, self._reads = lock, reads
        self._on_device = any(reads.of(tensor.device) is not None for _, tensor in named)
        self._live = [tensor.detach() if self._on_device else flat_bytes(tensor) for _, tensor in named]
        # host memory is read directly, without tensors
        self._memory = [] if self._on_device else [memory_of(live) for live in self._live]
        self._host_copy: HostCopy | None = None  # copies `_live` from devices, from the first read on
        self._blob: Blob | None = None
        self._copied_from_host = 0  # chunks copied from host memory to the blob, from the first on
        self._digests: tuple[bytes, ...] = ()
        self.closed = False

    @property
    def chunks(self) -> int:
        """Return the number of chunks."""
        return -(-self.total_bytes // CHUNK_BYTES)

    @property
    def _copied(self) -> int:
        """Return how many chunks are in the blob, from the first on."""
        return self._copied_from_host if self._host_copy is None else self._host_copy.copied_chunks

    @property
    def is_copied(self) -> bool:
        """Return whether everything is copied: the live tensors are not read any more."""
        return self._copied == self.chunks

    @property
    def header(self) -> dict[str, Any]:
        """Return everything in the state that is not a tensor."""
        return dict(self._header)

    @property
    def blob(self) -> Blob:
        """Return the complete copy. Raise PeerError when it is not complete."""
        if self._blob is None or not self.is_copied:
            raise PeerError(_LOST_COPY)
        return self._blob

    @property
    def chunk_digests(self) -> tuple[bytes, ...]:
        """Return the digests that `compute_digests` computed; empty before that."""
        return self._digests

    @property
    def digest(self) -> bytes:
        """Return the digest of the whole state."""
        return snapshot_digest(self.total_bytes, self._digests)

    def compute_digests(self) -> None:
        """Compute the digests, from live memory or from the copy: a second for a gigabyte. Raise PeerError
        when there is no memory for the copy.
        """
        if not self._digests:
            self._digests = tuple(self._digest(index) for index in range(self.chunks))

    def adopt_digests(self, digests: tuple[bytes, ...], turn: int) -> bool:
        """Take the digests of an earlier view with the same contents, if those of a few chunks are right,
        others in each turn. Return whether they were: a user may have written the tensors through
        `Tensor.data`, which nothing counts.
        """
        step = -(-self.chunks // _SAMPLED_CHUNKS)
        if any(self._digest(index) != digests[index] for index in range(turn % step, self.chunks, step)):
            return False
        self._digests = digests
        return True

    def _digest(self, index: int) -> bytes:
        begin, end = self._bounds(index)
        if self._on_device:
            return chunk_digest(self._read(begin, end))
        with self._lock:
            if self.is_copied or self.closed:
                return chunk_digest(self._read(begin, end))
            return pieces_digest(self._live_bytes(begin, end))

    def chunk(self, index: int) -> bytes:
        """Return one chunk. Raise PeerError when there was no memory for the copy."""
        begin, end = self._bounds(index)
        if index >= self._copied and not self._on_device:
            with self._lock:
                if self._is_live(index):
                    return b"".join(self._live_bytes(begin, end))
        return bytes(self._read(begin, end))

    def chunk_without_waiting(self, index: int) -> bytes | None:
        """Return the result of `chunk` without waiting; None when the chunk is not copied yet and either a
        writer has the lock or the tensors are on a device.
        """
        if index < self._copied:
            return self.chunk(index)
        if self._on_device or not self._lock.acquire(blocking=False):
            return None
        try:
            return self.chunk(index) if self._is_live(index) else None
        finally:
            self._lock.release()

    def _is_live(self, index: int) -> bool:
        """Return whether a chunk can be read from the live tensors. The lock is held."""
        return not (self.closed or index < self._copied)

    def _bounds(self, index: int) -> tuple[int, int]:
        return index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, self.total_bytes)

    def tensor(self, place: int) -> torch.Tensor:
        """Return the tensor `names[place]` on the CPU, as it was, read-only. It is a part of the view's
        copy if there is one.
        """
        dtype, shape = self._shapes[place]
        start, length = self._layout.starts[place], self._layout.lengths[place]
        if not length:
            return torch.empty(shape, dtype=dtype, device="cpu")
        raw = self._read(start, start + length)
        return (
            torch.frombuffer(bytearray(raw) if raw.readonly else raw, dtype=torch.uint8)
            .view(dtype)
            .reshape(shape)
        )

    def complete_copy(self) -> None:
        """Complete the copy, a few chunks at a time, so that a writer that needs the lock can finish it."""
        if self._on_device:
            self._copy_from_devices(self.chunks)
        while not (self.is_copied or self.closed):
            with self._lock:
                self.complete_copy_locked(self._copied + _SETTLE_CHUNKS)

    def complete_copy_locked(self, until: int | None = None) -> None:
        """Complete the copy in one go, up to chunk `until`. The lock is held. If there is no memory for it
        the view is closed, and readers get an error.

        Afterwards this thread may write the tensors. Bytes may still be in transit from a device: `is_copied`
        is false until a reader has waited for them.
        """
        if self.closed or self.is_copied:
            return
        until = self.chunks if until is None else min(until, self.chunks)
        if until <= self._copied:
            return
        try:
            if self._on_device:
                self._queue_reads(until * CHUNK_BYTES)
            else:
                if self._blob is None:
                    self._blob = allocate_zeros(self.total_bytes)
                begin, end = self._copied * CHUNK_BYTES, min(until * CHUNK_BYTES, self.total_bytes)
                self._copy_live(begin, end, memoryview(self._blob)[begin:end])
                self._copied_from_host = until
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            _log.warning(
                "there is no memory for a copy of the state of epoch %d: "
                "peers that download it must start again",
                self.epoch,
            )
            self.close()
            return
        if self._copied_from_host == self.chunks:
            self._live, self._memory = [], []

    def close(self) -> None:
        """Mark the view as unused: it is not copied when the state changes."""
        self.closed = True

    def _read(self, begin: int, end: int) -> memoryview:
        """Return the blob's bytes [begin, end): a part of the copy, or copied from host memory."""
        if self._on_device:
            self._copy_from_devices(-(-end // CHUNK_BYTES))
        if not self._is_copied_until(end):
            with self._lock:
                if not self._is_copied_until(end):  # not copied by another thread meanwhile
                    if self.closed or self._on_device:
                        raise PeerError(_LOST_COPY)
                    return memoryview(b"".join(self._live_bytes(begin, end)))
        assert self._blob is not None
        return memoryview(self._blob)[begin:end]

    def _live_bytes(self, begin: int, end: int) -> Iterator[bytes | memoryview]:
        """Yield the blob's bytes [begin, end) from live host memory. The lock is held."""
        prefix = self._layout.prefix[begin:end]
        yield prefix
        at = begin + len(prefix)
        for place, low, high in self._layout.spans(begin, end):
            live, start = self._memory[place], self._layout.starts[place]
            assert live is not None
            yield bytes(low - at)  # gap between tensors
            yield live[low - start : high - start]
            at = high
        yield bytes(end - at)

    def _is_copied_until(self, end: int) -> bool:
        """Return whether the blob's bytes before `end` are copied."""
        return self.is_copied or end <= self._copied * CHUNK_BYTES

    def _copy_live(self, begin: int, end: int, out: memoryview) -> None:
        """Copy the blob's bytes [begin, end) from live host memory; gaps between tensors stay zero."""
        prefix = self._layout.prefix[begin:end]
        out[: len(prefix)] = prefix
        flat = torch.frombuffer(out, dtype=torch.uint8)
        for place, low, high in self._layout.spans(begin, end):
            start = self._layout.starts[place]
            flat[low - begin : high - begin].copy_(self._live[place][low - start : high - start])

    # --- tensors on devices

    def _copy_from_devices(self, until: int) -> None:
        """Copy chunks to the host, up to chunk `until`. The lock is held while reads are queued, and not
        while they are waited for.
        """
        while self._copied < until and not self.closed:
            with self._lock:
                self.complete_copy_locked(self._copied + 1)
            if self._host_copy is not None:
                self._host_copy.finish_oldest()

    def _queue_reads(self, until_bytes: int) -> None:
        """Queue reads up to these bytes, and as many beyond them as there is room for. The lock is held.

        Waits for a device only when those bytes are more than the windows of a copy take.
        """
        if self._host_copy is None:
            self._blob = allocate_zeros(self.total_bytes)
            self._host_copy, self._live = HostCopy(self._layout, self._live, self._reads, self._blob), []
        while self._host_copy.queued_bytes < min(until_bytes, self.total_bytes):
            if not self._host_copy.queue_next():
                self._host_copy.finish_oldest()
        while self._host_copy.queue_next():
            pass


class WriteLock:
    """Lock held while the state is changed, reentrant within one thread. Open views are copied first.

    Work that the thread queues on its current streams while it holds the lock begins, on the device, after
    the reads of the old values; reads of the new values begin after it. The thread itself waits for
    neither.
    """

    def __init__(self, lock: threading.RLock, views: list[StateView], reads: DeviceReads) -> None:
        self._lock, self._views, self._reads = lock, views, reads

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            with torch.no_grad():
                for view in self._views:
                    view.complete_copy_locked()
            self._views.clear()  # all their reads are queued
            self._reads.before_write()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._reads.after_write()
        finally:
            self._lock.release()
