"""Work on accelerators beside the trainer's: streams of their own, copies that overlap with computation, and
how threads wait for them.

A GPU executes the calls of one stream in order, and several streams side by side. The trainer's calls go to
its current stream. A round works in other threads and on three streams of its own per device: one computes
(`working`), one copies to the host (`fetch`), so that a part is on its way while the next is being encoded,
and one copies to the device (`upload`).

Streams wait for each other by events, which block no thread. The round begins after what the trainer had
asked for (`fork`); the trainer's stream waits for each upload before it reads it. Threads wait (`Fetch.wait`,
`finish`, `finish_uploads`) only for the round's own streams, only on events that let the thread sleep, and
never on the event loop.

Not yet run on a GPU: what is tested is the order of calls, and with a queue whose copies arrive as late as
they may.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

# bytes: what CUDA's allocator gives, so that payloads in slots are as aligned as in memory of their own
_SLOT_ALIGNMENT = 256
_REQUEST = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
_GPU = re.compile(r"\bGPU (\d+)\b")


class Fetch(Protocol):
    """A copy to the host that was begun. It keeps its source alive."""

    def wait(self) -> None:
        """Return when the bytes are there; at once when called again. Other threads run meanwhile."""
        ...


class Upload(Protocol):
    """A copy to the device that was begun."""

    def ready(self) -> AbstractContextManager[torch.Tensor]:
        """Give the bytes on the device, for calls to this thread's current stream within the context. To be
        entered once.

        Their memory is used for other uploads when those calls are done.
        """
        ...


class Queue(Protocol):
    """The streams of one device that are used beside the trainer's. Any thread may use it; uploads one thread
    at a time.
    """

    def fork(self) -> None:
        """Let everything that the queue is asked from now on begin after what this thread's current stream
        was asked so far.
        """
        ...

    def working(self) -> AbstractContextManager[Any]:
        """Send torch's calls within the context to this queue."""
        ...

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> Fetch:
        """Begin to copy `source`, as `working` has made it, to `target` (`host_memory`), which is not to be
        touched until it is there.
        """
        ...

    def reserve(self, slot_bytes: int, slots: int) -> None:
        """Have memory on the device for so many uploads at a time, of 1 to `slot_bytes` bytes each; all of it
        is free afterwards.

        Uploads that nobody has read are dropped. An error of the allocator leaves the queue without slots.
        """
        ...

    def upload(self, source: torch.Tensor) -> Upload | None:
        """Begin to copy `source` (flat uint8 on the host, unchanged until `finish_uploads`) to the device;
        None while no slot is free.
        """
        ...

    def finish_uploads(self) -> None:
        """Wait until no upload reads host memory any more."""
        ...

    def finish(self) -> None:
        """Wait until everything that the queue was asked is done, except uploads. The trainer's stream is not
        waited for.
        """
        ...

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate flat memory on the host that `fetch` and `upload` copy from and to without blocking a
        thread.
        """
        ...


class _CudaFetch:
    def __init__(self, done: Any, source: torch.Tensor) -> None:
        self._done, self._source = done, source

    def wait(self) -> None:
        self._done.synchronize()


class _Slot:
    """Device memory of one upload at a time."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.read: Any = None  # the event after which what was uploaded last is not read any more


class _CudaUpload:
    def __init__(self, queue: CudaQueue, slot: _Slot, payload: torch.Tensor, arrived: Any) -> None:
        self._queue, self._slot, self._payload, self._arrived = queue, slot, payload, arrived

    @contextlib.contextmanager
    def ready(self) -> Iterator[torch.Tensor]:
        current = self._queue.current_stream()
        current.wait_event(self._arrived)
        # allocated on the stream of uploads: should it be freed, then not before this stream has read it
        if self._payload.is_cuda:
            self._payload.record_stream(current)
        try:
            yield self._payload
        finally:
            self._queue.give_back(self._slot, current)


class CudaQueue:
    """The queue of one CUDA device.

    Uploads go through a ring of slots: the copy into a slot waits, on the device, for the event after which
    its last content is not read any more. However far the trainer's stream lags behind, uploads take no more
    memory than the ring.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """`cuda`: the module `torch.cuda`, or what stands for it in tests."""
        self._cuda, self._device = cuda, device
        self._work = cuda.Stream(device=device)
        self._fetches = cuda.Stream(device=device)
        self._uploads = cuda.Stream(device=device)
        self._slots: list[_Slot] = []
        self._free: deque[_Slot] = deque()  # the slot that was given back first is taken first

    def fork(self) -> None:
        self._work.wait_event(self._mark(self.current_stream()))

    def working(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._cuda.stream(self._work)
        return context

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> Fetch:
        self._fetches.wait_event(self._mark(self._work))
        with self._cuda.stream(self._fetches):
            target.copy_(source, non_blocking=True)
        return _CudaFetch(self._mark(self._fetches), source)

    def reserve(self, slot_bytes: int, slots: int) -> None:
        size = -(-slot_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        if len(self._slots) < slots or self._slots[0].memory.numel() < size:
            self._free.clear()
            self._slots.clear()  # before the new ring is made: never both at a time
            with self._cuda.stream(self._uploads):
                ring = torch.empty(size * slots, dtype=torch.uint8, device=self._device)
            self._slots += [_Slot(ring[begin : begin + size]) for begin in range(0, size * slots, size)]
        self._free = deque(self._slots)

    def upload(self, source: torch.Tensor) -> Upload | None:
        if not self._free:
            return None
        slot = self._free.popleft()
        payload = slot.memory[: source.numel()]
        if slot.read is not None:
            self._uploads.wait_event(slot.read)
        with self._cuda.stream(self._uploads):
            payload.copy_(source, non_blocking=True)
        return _CudaUpload(self, slot, payload, self._mark(self._uploads))

    def give_back(self, slot: _Slot, reader: Any) -> None:
        """Use the slot again once everything that `reader`, a stream, was asked so far is done."""
        slot.read = self._mark(reader)
        self._free.append(slot)

    def finish_uploads(self) -> None:
        self._mark(self._uploads).synchronize()

    def finish(self) -> None:
        self._mark(self._work).synchronize()
        self._mark(self._fetches).synchronize()

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)

    def current_stream(self) -> Any:
        """The stream to which this thread's calls go."""
        return self._cuda.current_stream(self._device)

    def _mark(self, stream: Any) -> Any:
        # a thread that waits for it sleeps, and leaves its core to the trainer
        event = self._cuda.Event(blocking=True)
        event.record(stream)
        return event


class _Arrived:
    def wait(self) -> None:
        return


class _PlainUpload:
    """Copies when it is read, so that what is begun early takes no memory."""

    def __init__(self, source: torch.Tensor, device: torch.device) -> None:
        self._source, self._device = source, device

    def ready(self) -> AbstractContextManager[torch.Tensor]:
        return contextlib.nullcontext(self._source.to(self._device))


class PlainQueue:
    """For devices without streams that we know of: everything in the order in which it is asked, and copies
    at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def fork(self) -> None:
        return

    def working(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> Fetch:
        target.copy_(source)
        return _Arrived()

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
    """Make the queue for a device; None for the host, whose memory everybody works on directly."""
    if device.type == "cpu":
        return None
    return CudaQueue(device) if device.type == "cuda" else PlainQueue(device)


class Queues:
    """The queues of all devices that a list of tensors lies on; false when that is the host alone."""

    def __init__(
        self, devices: Iterable[torch.device] = (), make: Callable[[torch.device], Queue | None] | None = None
    ) -> None:
        """`make`: what makes a device's queue; None: `queue_of`."""
        make = make or queue_of
        made = {device: make(device) for device in dict.fromkeys(devices)}
        self._queues = {device: queue for device, queue in made.items() if queue is not None}

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices that have a queue."""
        return tuple(self._queues)

    def of(self, device: torch.device) -> Queue | None:
        """The queue of a device; None for the host."""
        return self._queues.get(device)

    def fork(self) -> None:
        """As `Queue.fork`, for all."""
        for queue in self._queues.values():
            queue.fork()

    def reserve(self, slot_bytes: int, slots: int) -> None:
        """As `Queue.reserve`, for all."""
        for queue in self._queues.values():
            queue.reserve(slot_bytes, slots)

    def finish_uploads(self) -> None:
        """As `Queue.finish_uploads`, for all."""
        for queue in self._queues.values():
            queue.finish_uploads()

    def finish(self) -> None:
        """As `Queue.finish`, for all."""
        for queue in self._queues.values():
            queue.finish()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """As `Queue.working`, for all: what is called within goes to the queue of the device that it is for."""
        with contextlib.ExitStack() as stack:
            for queue in self._queues.values():
                stack.enter_context(queue.working())
            yield

    def host_memory(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """As `Queue.host_memory`, of the first queue (pinned memory serves all CUDA devices); ordinary memory
        where there is no queue.
        """
        for queue in self._queues.values():
            return queue.host_memory(numel, dtype)
        return torch.empty(numel, dtype=dtype, device="cpu")


NO_QUEUES = Queues()


def describe_out_of_memory(error: BaseException, queues: Queues = NO_QUEUES) -> str:
    """Say where memory ran out, as the end of a sentence about this peer. `queues`: of the devices that were
    worked on.
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
