"""The device that GPU checks and benchmarks run on, how they measure it, and how they keep it busy."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.environments import NoEnvironment

# "cpu": the same programs at small sizes on the host, to find errors in them before a GPU is available
DEVICE_VARIABLE = "SWARM_GPU_DEVICE"
# keeps a figure: its name, value and unit, and the bounds `at_most` and `at_least`
Figure = Callable[..., None]
_WARM_UP = 3


def chosen_device() -> torch.device:
    """The device named by `SWARM_GPU_DEVICE`, by default the first CUDA device. NoEnvironment where torch
    sees none.
    """
    name = os.environ.get(DEVICE_VARIABLE, "cuda")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise NoEnvironment(
            f"the section cuda needs a CUDA device, and torch {torch.__version__} sees none on this machine"
        )
    device = torch.device(name)
    return torch.device("cuda", device.index or 0)


def finish(device: torch.device) -> None:
    """Wait until the device has completed the work on this thread's current stream; return at once for the
    host.

    Does not wait for the streams of rounds and readers of the state, because a trainer does not either.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def device_name(device: torch.device) -> str:
    """Return the name of the device, as reports give it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the host"


def peak_bytes(device: torch.device) -> int:
    """The most memory that tensors took on the device since `forget_peak`; 0 for the host, where torch does
    not count.
    """
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def allocated_bytes(device: torch.device) -> int:
    """Memory of the tensors that are alive on the device; 0 for the host."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def forget_peak(device: torch.device) -> None:
    """Reset `peak_bytes`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def pinned_bytes() -> int:
    """Bytes of page-locked host memory that torch's allocator holds, cached blocks included; 0 where torch
    does not count them.
    """
    read: Callable[[], dict[str, Any]] | None = getattr(torch.cuda, "host_memory_stats", None)
    if read is None or not torch.cuda.is_available():
        return 0
    found = read()
    return int(found.get("allocated_bytes.current", 0))


@contextlib.contextmanager
def limited_memory(device: torch.device, spare_bytes: int) -> Iterator[bool]:
    """Let torch take only `spare_bytes` more on the device. Yields false on the host, where there is no such
    limit.
    """
    if device.type != "cuda":
        yield False
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, (torch.cuda.memory_reserved(device) + spare_bytes) / total), device
    )
    try:
        yield True
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def seconds_of(work: Callable[[], object], device: torch.device, times: int) -> list[float]:
    """Return the seconds that each of `times` calls of `work` took until the device was done. A few calls
    before them are not counted.
    """
    found = []
    for _ in range(times + _WARM_UP):
        finish(device)
        started_s = time.perf_counter()
        work()
        finish(device)
        found.append(time.perf_counter() - started_s)
    return found[_WARM_UP:]


@dataclass(slots=True)
class Load:
    """Work that keeps a device busy for a known time: `launch(seconds)` queues it on the current stream and
    returns at once.
    """

    left: torch.Tensor
    right: torch.Tensor
    out: torch.Tensor
    product_s: float

    @classmethod
    def on(cls, device: torch.device, size: int = 0) -> Load:
        """Measure how long one product of square matrices takes. `size`: of the matrices, 0 for one that
        suits the device.
        """
        size = size or (8192 if device.type == "cuda" else 128)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
        load = cls(left, right, torch.empty_like(left), 0.0)
        load.product_s = sorted(seconds_of(lambda: load._products(10), device, 3))[1] / 10
        return load

    def launch(self, seconds: float) -> None:
        """Queue products that take about `seconds`. At most 1000 calls: CUDA's launch queue holds no more
        without blocking the caller.
        """
        self._products(max(1, min(1000, round(seconds / self.product_s))))

    def _products(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self.left, self.right, out=self.out)


@contextlib.contextmanager
def kept_busy(device: torch.device, step_s: float) -> Iterator[None]:
    """A thread queues products on the default stream, a step of `step_s` after another, as another trainer
    would.
    """
    load, stop = Load.on(device), threading.Event()

    def train() -> None:
        while not stop.is_set():
            load.launch(step_s)
            finish(device)

    trainer = threading.Thread(target=train, name="matmul loop")
    trainer.start()
    try:
        yield
    finally:
        stop.set()
        trainer.join()
