"""Work on accelerators concurrent with the trainer's: separate streams, copies that overlap with computation,
and how threads wait.

A GPU executes the calls of one stream in order, and several streams concurrently. The trainer's calls go to
its current stream. A round works in other threads and on three streams of its own per device: one computes
(`working`), one copies to the host (`fetch`), so that a chunk is copied while the next is being encoded, and
one copies to the device (`upload`).

Streams wait for each other through events, which block no thread. The round's work begins after the calls
that the trainer had queued (`fork`); the trainer's stream waits for each upload before it reads it. Threads
wait (`Arrival.wait`, `finish`, `finish_uploads`) only for the round's own streams, only on events that let
the thread sleep, and never on the event loop.

Not yet run on a GPU: tests check the order of calls, and use a queue whose copies arrive as late as possible.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from swarm.core.copies import Arrival, CopiedAtOnce, CopyStream, host_memory

# bytes: as CUDA's allocator aligns, so that payloads in slots are aligned as in memory of their own
_SLOT_ALIGNMENT = 256
_REQUEST = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
_GPU = re.compile(r"\bGPU (\d+)\b")


class Upload(Protocol):
    """A copy to the device that has begun."""

    def ready(self) -> AbstractContextManager[torch.Tensor]:
        """Return a context that gives the bytes on the device, for calls to this thread's current stream.
        Enter it once.

        The memory is used for other uploads once those calls are done.
        """
        ...


class Queue(Protocol):
    """The streams of one device that are used in addition to the trainer's. Any thread may use it; uploads
    one thread at a time.
    """

    def fork(self) -> None:
        """Order all later work of the queue after the calls made so far on this thread's current stream."""
        ...

    def working(self) -> AbstractContextManager[Any]:
        """Send torch's calls within the context to this queue."""
        ...

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> Arrival:
        """Begin to copy `source`, as `working` has made it, to `target` (`host_memory`). Do not touch
        `target` until the copy is done.
        """
        ...

    def reserve(self, slot_bytes: int, slots: int) -> None:
        """Allocate device memory for this number of uploads at a time, of 1 to `slot_bytes` bytes each; all
        of it is free afterwards.

        Uploads that nobody has read are dropped. An error of the allocator leaves the queue without slots.
        """
        ...

    def upload(self, source: torch.Tensor) -> Upload | None:
        """Begin to copy `source` (flat uint8 on the host, unchanged until `finish_uploads`) to the device.
        Returns None while no slot is free.
        """
        ...

    def finish_uploads(self) -> None:
        """Wait until no upload reads host memory any more."""
        ...

    def finish(self) -> None:
        """Wait until all work of the queue except uploads is done. Does not wait for the trainer's stream."""
        ...

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate flat memory on the host that `fetch` and `upload` copy from and to without blocking a
        thread.
        """
        ...


class _Slot:
    """Device memory for one upload at a time."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.read: Any = None  # the event after which its content is not read any more


class _CudaUpload:
    def __init__(self, queue: CudaQueue, slot: _Slot, payload: torch.Tensor, arrived: Any) -> None:
        self._queue, self._slot, self._payload, self._arrived = queue, slot, payload, arrived

    @contextlib.contextmanager
    def ready(self) -> Iterator[torch.Tensor]:
        current = self._queue.current_stream()
        current.wait_event(self._arrived)
        # It was allocated on the stream of uploads, and must not be freed before this stream has read it.
        if self._payload.is_cuda:
            self._payload.record_stream(current)
        try:
            yield self._payload
        finally:
            self._queue.give_back(self._slot, current)


class CudaQueue:
    """The queue of one CUDA device.

    Uploads go through a ring of slots: the copy into a slot waits, on the device, for the event after which
    its last content is not read any more. Even if the trainer's stream lags far behind, uploads take no more
    memory than the ring.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """Create the streams. `cuda`: the module `torch.cuda`, or a stand-in in tests."""
        self._cuda, self._device = cuda, device
        self._work = cuda.Stream(device=device)
        self._fetches, self._uploads = CopyStream(device, cuda), CopyStream(device, cuda)
        self._slots: list[_Slot] = []
        self._free: deque[_Slot] = deque()  # the slot that was given back first is taken first

    def fork(self) -> None:
        self._work.wait_event(self._fetches.mark(self.current_stream()))

    def working(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._cuda.stream(self._work)
        return context

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> Arrival:
        self._fetches.follow(self._work)
        return self._fetches.copy([(source, target)], keep=source)

    def reserve(self, slot_bytes: int, slots: int) -> None:
        size = -(-slot_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        if len(self._slots) < slots or self._slots[0].memory.numel() < size:
            self._free.clear()
            self._slots.clear()  # before the new ring is made: never both at a time
            with self._cuda.stream(self._uploads.stream):
                ring = torch.empty(size * slots, dtype=torch.uint8, device=self._device)
            self._slots += [_Slot(ring[begin : begin + size]) for begin in range(0, size * slots, size)]
        self._free = deque(self._slots)

    def upload(self, source: torch.Tensor) -> Upload | None:
        if not self._free:
            return None
        slot = self._free.popleft()
        payload = slot.memory[: source.numel()]
        if slot.read is not None:
            self._uploads.stream.wait_event(slot.read)
        arrival = self._uploads.copy([(source, payload)])
        return _CudaUpload(self, slot, payload, arrival.event)

    def give_back(self, slot: _Slot, reader: Any) -> None:
        """Free the slot for the next upload, after all calls made so far on the stream `reader`."""
        slot.read = self._uploads.mark(reader)
        self._free.append(slot)

    def finish_uploads(self) -> None:
        self._uploads.mark().synchronize()

    def finish(self) -> None:
        self._fetches.mark(self._work).synchronize()
        self._fetches.mark().synchronize()

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return host_memory(self._device, numel, dtype)

    def current_stream(self) -> Any:
        """Return the stream to which this thread's calls go."""
        return self._cuda.current_stream(self._device)


class _PlainUpload:
    """An upload that copies when it is read, so that beginning it early takes no memory."""

    def __init__(self, source: torch.Tensor, device: torch.device) -> None:
        self._source, self._device = source, device

    def ready(self) -> AbstractContextManager[torch.Tensor]:
        return contextlib.nullcontext(self._source.to(self._device))


class PlainQueue:
    """The queue of a device for which no streams are used: everything runs in call order, and
    copies at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def fork(self) -> None:
        return

    def working(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> Arrival:
        target.copy_(source)
        return CopiedAtOnce()

    def reserve(self, slot_bytes: int, slots: int) -> None:
        return

    def upload(self, source: torch.Tensor) -> Upload | None:
        return _PlainUpload(source, self._device)

    def finish_uploads(self) -> None:
        return

    def finish(self) -> None:
        return

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu")


def queue_of(device: torch.device) -> Queue | None:
    """Return a new queue for a device; None for the host, whose memory all threads use directly."""
    if device.type == "cpu":
        return None
    return CudaQueue(device) if device.type == "cuda" else PlainQueue(device)


class Queues:
    """The queues of all devices that a list of tensors lies on; false when that is only the host."""

    def __init__(
        self, devices: Iterable[torch.device] = (), make: Callable[[torch.device], Queue | None] | None = None
    ) -> None:
        """Make a queue for each device. `make`: returns the queue of a device; None: `queue_of`."""
        make = make or queue_of
        made = {device: make(device) for device in dict.fromkeys(devices)}
        self._queues = {device: queue for device, queue in made.items() if queue is not None}

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Return the devices that have a queue."""
        return tuple(self._queues)

    def of(self, device: torch.device) -> Queue | None:
        """Return the queue of a device; None for the host."""
        return self._queues.get(device)

    def fork(self) -> None:
        """Call `Queue.fork` of all queues."""
        for queue in self._queues.values():
            queue.fork()

    def reserve(self, slot_bytes: int, slots: int) -> None:
        """Call `Queue.reserve` of all queues."""
        for queue in self._queues.values():
            queue.reserve(slot_bytes, slots)

    def finish_uploads(self) -> None:
        """Call `Queue.finish_uploads` of all queues."""
        for queue in self._queues.values():
            queue.finish_uploads()

    def finish(self) -> None:
        """Call `Queue.finish` of all queues."""
        for queue in self._queues.values():
            queue.finish()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Enter `Queue.working` of all queues: each call of torch goes to the queue of its device."""
        with contextlib.ExitStack() as stack:
            for queue in self._queues.values():
                stack.enter_context(queue.working())
            yield

    def host_memory(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return host memory from the first queue (pinned memory serves all CUDA devices); ordinary memory
        where there is no queue.
        """
        for queue in self._queues.values():
            return queue.host_memory(numel, dtype)
        return torch.empty(numel, dtype=dtype, device="cpu")


NO_QUEUES = Queues()


def describe_out_of_memory(error: BaseException, queues: Queues = NO_QUEUES) -> str:
    """Return where memory ran out, as the end of a sentence about this peer. `queues`: of the
    devices in use.
    """
    named = _GPU.search(str(error))
    if named is not None:
        where = f"cuda:{named[1]}"
    elif isinstance(error, torch.cuda.OutOfMemoryError) and queues:
        where = " or ".join(str(device) for device in queues.devices)
    else:
        where = "the host"
    request = _REQUEST.search(str(error))
    return f"ran out of memory on {where}" + (
        f" when it wanted {request[1]} more" if request is not None else ""
    )
