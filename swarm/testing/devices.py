"""A stand-in for an accelerator on machines without one: tensors on the host, and copies that arrive as late
as possible.

`LateQueue` records which thread waits for the device and which allocates pinned memory; `HostReads` records
calls of torch that would make the thread wait for a GPU. With both, a test can check that the network thread
never waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_POISON = 0xA5
# calls that return a value on the host or copy between devices; with a CUDA tensor they wait for its stream
_WAITING = {
    "item",
    "tolist",
    "__float__",
    "__int__",
    "__bool__",
    "__index__",
    "numpy",
    "cpu",
    "to",
    "copy_",
    "nonzero",
    "equal",
}


class LateFetch:
    """A copy to the host that is made only when it is waited for."""

    def __init__(self, queue: LateQueue, source: torch.Tensor, target: torch.Tensor) -> None:
        self._queue, self._source, self._target = queue, source, target
        self.done = False
        self._lock = threading.Lock()
        target.view(torch.uint8).fill_(_POISON)  # what a reader sees before the copy is made

    def wait(self) -> None:
        self._queue.note_wait()
        with self._lock:
            if not self.done:
                self._target.copy_(self._source)
                self.done = True


class LateUpload:
    """A copy to the device that is made when it is read. Its memory is overwritten afterwards, because it
    belongs to the next upload.
    """

    def __init__(self, queue: LateQueue, slot: torch.Tensor, source: torch.Tensor) -> None:
        self._queue, self._slot, self._source = queue, slot, source

    @contextmanager
    def ready(self) -> Iterator[torch.Tensor]:
        payload = self._slot[: self._source.numel()].copy_(self._source)
        yield payload
        self._slot.fill_(_POISON)
        self._queue.slots.append(self._slot)


class LateQueue:
    """A queue that satisfies `averaging.reduction.devices.Queue`, and raises AssertionError for callers that
    break its rules.

    `waits` and `host_allocations` name the thread of every wait for the device and of every allocation of
    pinned memory. With `memory` set, that many fetches succeed and the next one raises OutOfMemoryError, as
    an allocation for it would; with `slots_max` 0 `reserve` raises it, too.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.forks = 0
        self.waits: list[str] = []
        self.host_allocations: list[str] = []
        self.memory: int | None = None
        self.slots_max: int | None = None
        self.slots: deque[torch.Tensor] = deque()
        self.slots_made = 0
        self.fetches: list[LateFetch] = []
        self.uploaded: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._forked = False
        self._here = threading.local()

    def fork(self) -> None:
        self.forks += 1
        self._forked = True

    @contextmanager
    def working(self) -> Iterator[None]:
        assert self._forked, (
            "work must begin after a fork; otherwise it may read values that are not written yet"
        )
        before, self._here.working = getattr(self._here, "working", False), True
        try:
            yield
        finally:
            self._here.working = before

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> LateFetch:
        assert target.device.type == "cpu"
        assert source.numel() == target.numel()
        if self.memory is not None:
            self.memory -= 1
            if self.memory < 0:
                raise torch.cuda.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 7 has a total capacity of 3.00 GiB"
                )
        fetch = LateFetch(self, source, target)
        self.fetches.append(fetch)
        return fetch

    def reserve(self, slot_bytes: int, slots: int) -> None:
        if self.slots_max == 0:
            raise torch.cuda.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 7 has a total capacity of 3.00 GiB"
            )
        self.slots_made = min(slots, self.slots_max or slots)
        self.slots = deque(
            torch.full((slot_bytes,), _POISON, dtype=torch.uint8) for _ in range(self.slots_made)
        )

    def upload(self, source: torch.Tensor) -> LateUpload | None:
        if not self.slots:
            return None
        self.uploaded.append((source, source.clone()))
        return LateUpload(self, self.slots.popleft(), source)

    def finish_uploads(self) -> None:
        self.note_wait()
        for source, then in self.uploaded:
            assert torch.equal(source, then), "host memory changed while a copy of it was under way"
        self.uploaded.clear()

    def finish(self) -> None:
        self.note_wait()
        for fetch in self.fetches:
            fetch.wait()

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.host_allocations.append(threading.current_thread().name)
        return torch.empty(numel, dtype=dtype, device="cpu")

    def note_wait(self) -> None:
        """Record that this thread waits for the device."""
        self.waits.append(threading.current_thread().name)

    @property
    def under_way(self) -> int:
        """Return the number of copies to the host that no caller has waited for."""
        return sum(not fetch.done for fetch in self.fetches)


class HostReads(TorchFunctionMode):
    """While entered, records calls by this thread on `tensors`, or on views of them, that would wait for a
    GPU if the tensors were on one.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.found: list[str] = []
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _WAITING and any(self._is_theirs(arg) for arg in args):
            self.found.append(name)
        return func(*args, **(kwargs or {}))

    def _is_theirs(self, arg: Any) -> bool:
        return isinstance(arg, torch.Tensor) and arg.untyped_storage().data_ptr() in self._storages
