"""A simulation of `torch.cuda`, as far as readers of a state use it, over tensors on the host: streams
execute in any order that CUDA allows.

A stream executes queued calls when a thread waits for it, and otherwise at random times drawn from a seed.
Reading or writing without an event in between therefore gives wrong bytes, at least with some seeds.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from averaging.optim.state.device_reads import CudaReader

POISON = 0xA5
HOST = torch.device("cpu")


class _Event:
    def __init__(self, cuda: SimulatedCuda, blocking: bool) -> None:
        assert blocking, "a thread that spins takes a core from the trainer"
        self._cuda = cuda
        self.stream: _Stream | None = None
        self.place = 0

    def record(self, stream: _Stream) -> None:
        with self._cuda.lock:
            self.stream, self.place = stream, len(stream.calls)

    def synchronize(self) -> None:
        self._cuda.on_wait()
        with self._cuda.lock:
            self.reach()

    def reach(self) -> None:
        if self.stream is not None:
            self.stream.execute(self.place)


class _Stream:
    def __init__(self, cuda: SimulatedCuda) -> None:
        self._cuda = cuda
        self.calls: list[Callable[[], object]] = []
        self.done = 0

    def wait_event(self, event: _Event) -> None:
        self._cuda.ask(self, event.reach)

    def execute(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.calls[self.done - 1]()


class _Calls(TorchFunctionMode):
    """Queue of the copies that are made within a stream's context."""

    def __init__(self, cuda: SimulatedCuda, stream: _Stream) -> None:
        super().__init__()
        self._cuda, self._stream = cuda, stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            target, source = args
            target.fill_(POISON)  # a host that reads too early finds this
            self._cuda.transfers += 1
            self._cuda.transferred_bytes += source.nbytes
            self._cuda.ask(self._stream, lambda: target.copy_(source))
            return target
        if func is torch.cat or (func is torch.Tensor.contiguous and not args[0].is_contiguous()):
            with self._cuda.lock:
                # these calls are made at once, after what they come after
                self._stream.execute(len(self._stream.calls))
        return func(*args, **(kwargs or {}))


class SimulatedCuda:
    """One device. `eager` is the probability that something is executed when something is queued."""

    def __init__(self, seed: int, eager: float = 0.0) -> None:
        self.lock = threading.RLock()
        self._chance, self._eager = random.Random(seed), eager
        self._streams: list[_Stream] = []
        self._here = threading.local()
        self.default: _Stream = self.Stream(HOST)
        self.on_wait: Callable[[], object] = lambda: None  # called when a host thread waits for an event
        self.transfers = self.transferred_bytes = 0  # to the host

    def Stream(self, device: torch.device) -> _Stream:
        self._streams.append(_Stream(self))
        return self._streams[-1]

    def Event(self, blocking: bool) -> _Event:
        return _Event(self, blocking)

    def current_stream(self, device: torch.device) -> _Stream:
        found: _Stream = getattr(self._here, "stream", self.default)
        return found

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self._here.stream = self.current_stream(HOST), stream
        try:
            with _Calls(self, stream):
                yield
        finally:
            self._here.stream = before

    def synchronize(self, device: torch.device) -> None:
        with self.lock:
            for stream in self._streams:
                stream.execute(len(stream.calls))

    def ask(self, stream: _Stream, call: Callable[[], object]) -> None:
        with self.lock:
            stream.calls.append(call)
            while self._chance.random() < self._eager:
                some = self._chance.choice(self._streams)
                some.execute(self._chance.randint(some.done, len(some.calls)))

    def launch(self, call: Callable[[], object]) -> None:
        """Queue a kernel on this thread's current stream."""
        self.ask(self.current_stream(HOST), call)

    def reader(self, device: torch.device) -> CudaReader:
        """Return a reader of host tensors that treats them as if they were on the device."""
        return CudaReader(device, self)
