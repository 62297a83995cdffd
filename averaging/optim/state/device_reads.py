"""Reads of a training state on accelerators: ordered against the trainer's writes, concurrent with its
work, each byte copied once.

A GPU executes one stream's work in order, and only events order two streams. The trainer writes the state
on its current stream, while threads of the pool read it. So every device has a stream for reads. It waits
for an event that is recorded on the trainer's stream when a write ends (`after_write`), and a write waits, on
the device and not on the host, for the reads queued before it (`before_write`). Reads are queued only by a
thread that holds the state's lock; their arrival is waited for without it.

Not yet run on a GPU. `tests/averaging/optim/simulated_cuda.py` executes streams in every order that CUDA
allows.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from averaging.optim.state.snapshot import CHUNK_BYTES, Blob, BlobLayout, copy_bytes, flat_bytes
from swarm.core.copies import Arrival, CopiedAtOnce, Copy, CopyStream, host_memory

# bytes copied at a time. Too small: more waits; too large: more pinned memory, since a view needs two windows
WINDOW_BYTES = 8 * CHUNK_BYTES
_WINDOWS = 2  # one is in transit from the device while the other is copied to the blob and hashed


class DeviceReader(Protocol):
    """Reads tensors on one device. Any thread may use it."""

    def after_write(self) -> None:
        """Make all reads queued from now on wait for the work queued so far on this thread's current
        stream.
        """
        ...

    def before_write(self) -> None:
        """Make the work queued from now on on this thread's current stream wait for all reads queued so
        far.
        """
        ...

    def flat(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the bytes of `tensors`, one after another, on the device; for `fetch` only. One contiguous
        tensor is not copied.
        """
        ...

    def fetch(self, pairs: Iterable[Copy]) -> Arrival:
        """Copy each source, bytes on the device, to its target in `host_memory`. Sources must live until
        the copies have arrived.
        """
        ...

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        """Return uninitialised bytes on the host that `fetch` can copy to without blocking."""
        ...


class CudaReader:
    """Reader of one CUDA device, on a stream of its own."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """Create the stream and wait for the device once, so that tensors made on any stream are complete.

        `cuda` is the module `torch.cuda`, or a simulated one in tests.
        """
        self._cuda, self._device, self._reads = cuda, device, CopyStream(device, cuda)
        cuda.synchronize(device)

    def after_write(self) -> None:
        self._reads.follow()

    def before_write(self) -> None:
        self._reads.precede()

    def flat(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        with self._cuda.stream(self._reads.stream):
            return _joined(tensors)

    def fetch(self, pairs: Iterable[Copy]) -> Arrival:
        return self._reads.copy(pairs)

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        return host_memory(self._device, size_bytes)


class PlainReader:
    """Reader of a device without streams known to this library (MPS): it executes all work in the order in
    which it is queued.
    """

    def after_write(self) -> None:
        return

    def before_write(self) -> None:
        return

    def flat(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return _joined(tensors)

    def fetch(self, pairs: Iterable[Copy]) -> Arrival:
        for source, target in pairs:
            target.copy_(source)
        return CopiedAtOnce()

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    flat = [flat_bytes(tensor) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def reader_of(device: torch.device) -> DeviceReader | None:
    """Return a new reader of this device; None for the host, whose memory is read where it lies."""
    if device.type == "cpu":
        return None
    return CudaReader(device) if device.type == "cuda" else PlainReader()


class DeviceReads:
    """The readers of all devices that a state lies on; empty when that is the host alone."""

    def __init__(
        self,
        devices: Iterable[torch.device] = (),
        make: Callable[[torch.device], DeviceReader | None] = reader_of,
    ) -> None:
        self._make = make
        self._readers = {device: make(device) for device in dict.fromkeys(devices)}

    def __bool__(self) -> bool:
        return any(reader is not None for reader in self._readers.values())

    def of(self, device: torch.device) -> DeviceReader | None:
        """Return the device's reader, None for the host. It is created now for a device that has a
        statistic but no parameter.
        """
        if device not in self._readers:
            self._readers.setdefault(device, self._make(device))
        return self._readers[device]

    def after_write(self) -> None:
        """Call `DeviceReader.after_write` on all devices."""
        for reader in list(self._readers.values()):
            if reader is not None:
                reader.after_write()

    def before_write(self) -> None:
        """Call `DeviceReader.before_write` on all devices."""
        for reader in list(self._readers.values()):
            if reader is not None:
                reader.before_write()

    def numbers(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Return the value of each tensor with one element, as `item` does, with a single transfer per
        device.
        """
        found: list[Any] = [tensor.item() if self.of(tensor.device) is None else None for tensor in tensors]
        places: dict[torch.device, list[int]] = {}
        for place, tensor in enumerate(tensors):
            if self.of(tensor.device) is not None:
                places.setdefault(tensor.device, []).append(place)
        begun = []
        for device, those in places.items():
            reader = self.of(device)
            assert reader is not None
            source = reader.flat([tensors[place] for place in those])
            target = reader.host_memory(source.numel())
            begun.append((those, source, target, reader.fetch([(source, target)])))
        for those, _, target, transfer in begun:
            transfer.wait()
            at = 0
            for place in those:
                dtype = tensors[place].dtype
                # a view with another dtype must begin at a multiple of its size
                raw = target[at : at + dtype.itemsize].clone()
                found[place] = raw.view(dtype).item()
                at += dtype.itemsize
        return found


@dataclass(slots=True)
class _Window:
    end: int
    buffer: torch.Tensor
    transfers: list[Arrival]


class HostCopy:
    """A copy of a state in host memory, made from the first byte to the last, window by window.

    It needs memory for the whole state, and two pinned windows until it is complete. It keeps the tensors
    alive until then.
    """

    def __init__(
        self, layout: BlobLayout, tensors: Sequence[torch.Tensor], reads: DeviceReads, blob: Blob
    ) -> None:
        """Prepare the copy into `blob`: `layout.total_bytes` zeros. `tensors` may have any strides and lie
        on any devices, the host included.
        """
        self.blob = blob
        self.queued_bytes = 0  # number of leading bytes that are copied or in transit
        self.copied_bytes = 0  # number of leading bytes that are in the blob
        self._layout, self._tensors, self._reads = layout, list(tensors), reads
        # bytes of the tensor that was read last: a window may end within it
        self._flat: tuple[int, torch.Tensor] | None = None
        self._free: list[torch.Tensor] = []
        self._buffers = 0
        self._in_transit: deque[_Window] = deque()
        self._finish_lock = threading.Lock()

    @property
    def copied_chunks(self) -> int:
        """Return how many chunks are in the blob, from the first on; the last one may be shorter than the
        others.
        """
        copied = self.copied_bytes
        return -(-copied // CHUNK_BYTES) if copied == self._layout.total_bytes else copied // CHUNK_BYTES

    @property
    def all_queued(self) -> bool:
        """Return whether all reads of the tensors are queued."""
        return self.queued_bytes == self._layout.total_bytes

    def queue_next(self) -> bool:
        """Queue the copy of the next window, without waiting for a device. The state's lock is held. Return
        False when nothing is left, or no buffer is free.

        Raises MemoryError, or torch's error, when the host or the device has no memory for it; nothing is
        queued then.
        """
        if self.all_queued or not (self._free or self._buffers < _WINDOWS):
            return False
        begin, end = self.queued_bytes, min(self.queued_bytes + WINDOW_BYTES, self._layout.total_bytes)
        buffer = self._buffer()
        pairs: dict[DeviceReader, list[Copy]] = {}
        memory = memoryview(buffer.numpy())  # type: ignore[arg-type, unused-ignore]
        prefix = self._layout.prefix[begin:end]
        memory[: len(prefix)] = prefix
        at = begin + len(prefix)
        for place, low, high in self._layout.spans(begin, end):
            memory[at - begin : low - begin] = bytes(low - at)  # gap between tensors
            reader = self._reads.of(self._tensors[place].device)
            start = self._layout.starts[place]
            source, target = (
                self._bytes_of(place, reader)[low - start : high - start],
                buffer[low - begin : high - begin],
            )
            if reader is None:
                target.copy_(source)
            else:
                pairs.setdefault(reader, []).append((source, target))
            at = high
        memory[at - begin : end - begin] = bytes(end - at)
        self._in_transit.append(
            _Window(end, buffer, [reader.fetch(those) for reader, those in pairs.items()])
        )
        self.queued_bytes = end
        return True

    def finish_oldest(self) -> None:
        """Wait for the oldest window in transit, if there is one, and move it to the blob. Needs no lock of
        the state.
        """
        with self._finish_lock:
            if not self._in_transit:
                return
            window = self._in_transit[0]
            for transfer in window.transfers:
                transfer.wait()
            begin, end = self.copied_bytes, window.end
            arrived = memoryview(window.buffer.numpy())  # type: ignore[arg-type, unused-ignore]
            copy_bytes(arrived[: end - begin], memoryview(self.blob)[begin:end])
            self.copied_bytes = end
            self._in_transit.popleft()
            self._free.append(window.buffer)
            if end == self._layout.total_bytes:
                self._tensors, self._free, self._flat = [], [], None

    def _buffer(self) -> torch.Tensor:
        if self._free:
            return self._free.pop()
        reader = next(
            one for one in (self._reads.of(tensor.device) for tensor in self._tensors) if one is not None
        )
        buffer = reader.host_memory(min(WINDOW_BYTES, self._layout.total_bytes))
        self._buffers += 1
        return buffer

    def _bytes_of(self, place: int, reader: DeviceReader | None) -> torch.Tensor:
        """Return the bytes of a tensor on its device. Those of a non-contiguous tensor are a copy, one such
        tensor at a time.
        """
        if self._flat is None or self._flat[0] != place:
            tensor = self._tensors[place]
            self._flat = (place, flat_bytes(tensor) if reader is None else reader.flat([tensor]))
        return self._flat[1]
