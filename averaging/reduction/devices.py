"""Work on accelerators beside the trainer's: queues of their own, copies to and from the host that overlap
with it, and when to wait.

A GPU does what its streams are asked, in order within a stream. The trainer's calls go to its current stream.
A round works in other threads, on a stream of its own (`working`), which begins after what the trainer had
asked for when the round did (`fork`); copies run on another one, so that a part is on its way to the host
while the next is being encoded.

Not yet run on a GPU: what is tested is the order of calls, and with a queue whose copies arrive as late as
they may.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Fetch(Protocol):
    """A copy to the host that was queued. It keeps its source alive."""

    def wait(self) -> None:
        """Return when the bytes are there; again at once. Lets other threads run meanwhile."""
        ...


class Queue(Protocol):
    """Where calls to one device, and copies to and from it, are lined up beside the trainer's. Any thread may
    use it.
    """

    def fork(self) -> None:
        """What this thread's current stream was asked so far comes before all that the queue is asked from
        now on.
        """
        ...

    def working(self) -> AbstractContextManager[Any]:
        """Torch's calls within go to this queue."""
        ...

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> Fetch:
        """Copy `source`, as `working` has made it, to `target` on the host (`host_memory`), which is not
        touched until then.
        """
        ...

    def bring(self, source: torch.Tensor) -> torch.Tensor:
        """A copy of `source`, host memory that stays as it is until `finish`, on the device: for this
        thread's current stream.
        """
        ...

    def finish(self) -> None:
        """Return when everything that the queue, and this thread's current stream, was asked is done."""
        ...


class _CudaFetch:
    def __init__(self, done: Any, source: torch.Tensor) -> None:
        self._done, self._source = done, source

    def wait(self) -> None:
        self._done.synchronize()


class CudaQueue:
    """Of one CUDA device: a stream for work and one for copies."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """`cuda`: the module, or what stands for it in tests."""
        self._cuda, self._device = cuda, device
        self._work = cuda.Stream(device=device)
        self._copies = cuda.Stream(device=device)

    def fork(self) -> None:
        self._work.wait_event(self._mark(self._cuda.current_stream(self._device)))

    def working(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._cuda.stream(self._work)
        return context

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> Fetch:
        self._copies.wait_event(self._mark(self._work))
        with self._cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
        return _CudaFetch(self._mark(self._copies), source)

    def bring(self, source: torch.Tensor) -> torch.Tensor:
        with self._cuda.stream(self._copies):
            there = torch.empty_like(source, device=self._device)
            there.copy_(source, non_blocking=True)
        current = self._cuda.current_stream(self._device)
        current.wait_event(self._mark(self._copies))
        # its memory belongs to the copies' stream, which must not hand it out again while it is being read
        if there.is_cuda:
            there.record_stream(current)
        return there

    def finish(self) -> None:
        self._work.synchronize()
        self._copies.synchronize()
        self._cuda.current_stream(self._device).synchronize()

    def _mark(self, stream: Any) -> Any:
        # a thread that waits sleeps, and leaves its core to the trainer
        event = self._cuda.Event(blocking=True)
        event.record(stream)
        return event


class _Arrived:
    def wait(self) -> None:
        return


class PlainQueue:
    """For devices without streams that we know of: everything in the order in which it is asked."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def fork(self) -> None:
        return

    def working(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> Fetch:
        target.copy_(source)
        return _Arrived()

    def bring(self, source: torch.Tensor) -> torch.Tensor:
        return source.to(self._device)

    def finish(self) -> None:
        return


def queue_of(device: torch.device) -> Queue | None:
    """The queue for this device; None for the host, whose memory everybody works on directly."""
    if device.type == "cpu":
        return None
    return CudaQueue(device) if device.type == "cuda" else PlainQueue(device)


class Queues:
    """The queues of all devices that a list of tensors lies on; none when that is the host alone."""

    def __init__(
        self, devices: Iterable[torch.device] = (), make: Callable[[torch.device], Queue | None] = queue_of
    ) -> None:
        made = {device: make(device) for device in dict.fromkeys(devices)}
        self._queues = {device: queue for device, queue in made.items() if queue is not None}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def of(self, device: torch.device) -> Queue | None:
        """Its queue; None for the host."""
        return self._queues.get(device)

    def fork(self) -> None:
        """As `Queue.fork`, for all."""
        for queue in self._queues.values():
            queue.fork()

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
        """Flat memory on the host; pinned where there are queues, so that copies run beside other work. torch
        keeps what is freed.
        """
        return torch.empty(
            numel,
            dtype=dtype,
            device="cpu",
            pin_memory=any(isinstance(queue, CudaQueue) for queue in self._queues.values()),
        )


NO_QUEUES = Queues()
