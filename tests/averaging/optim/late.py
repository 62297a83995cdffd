"""A simulated link between a CUDA device and the host, over tensors on the host: copies arrive as late as
CUDA allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swarm.core.copies import Copy

HOST_READS = ("_local_scalar_dense", "item", "is_nonzero", "equal")


class LateArrival:
    """Copies to the host that arrive when they are waited for, and not earlier."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = [(source, target, source.clone()) for source, target in copies]
        self.done = False
        self.released = False  # the trainer's stream continues after them: what it writes does not reach them
        for _, target in copies:
            target.view(torch.uint8).fill_(0xA5)  # a read that comes too early finds this

    def ready(self) -> bool:
        return self.done

    def wait(self) -> None:
        if not self.done:
            for source, target, then in self._copies:
                unchanged = self.released or torch.equal(source.nan_to_num(7.0), then.nan_to_num(7.0))
                assert unchanged, "the source was written before it was copied"
                target.copy_(then)
            self.done = True


class BroughtArrival:
    """Copies to the device, whose host memory must not change until they are waited for."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = [(source, source.clone()) for source, _ in copies]
        for source, target in copies:
            target.copy_(source)

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        assert all(torch.equal(source, then) for source, then in self._copies), (
            "host memory was written while it was being copied"
        )
        self._copies = []


class LateLink:
    """An `averaging.optim.offload.HostLink` that treats the CPU as a device."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"
        self.fetched: list[LateArrival] = []
        self._brought: list[BroughtArrival] = []

    def fetch(self, copies: Sequence[Copy]) -> LateArrival:
        self.fetched.append(LateArrival(copies))
        return self.fetched[-1]

    def release(self) -> None:
        for arrival in self.fetched:
            arrival.released = True

    def arrive(self) -> None:
        """Complete all copies in transit."""
        for arrival in self.fetched:
            arrival.wait()
        self.fetched.clear()

    def upload(self, copies: Sequence[Copy]) -> BroughtArrival:
        self._brought.append(BroughtArrival(copies))
        return self._brought[-1]

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu")


class _NoHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in HOST_READS, f"{name} reads a value on the host: it would wait for a device"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Raise AssertionError where a value of a tensor is read on the host."""
    with _NoHostReads():
        yield
