"""Copies between the host and a CUDA device that run beside its computation.

A link has two streams of its own: one for copies to the device, and one for copies to the host. Computation
goes to the default stream (`moe.server.devices`). Events order the three: computation waits for the copies of
its inputs, and copies of results wait for the computation that makes them. The host waits for one thing only:
the event behind a copy to the host, before it reads what was copied.

Not yet run on a GPU: tested is the order of calls, and with a link whose copies arrive as late as they may.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moe.server.devices import using


class CopyToDevice(Protocol):
    """A copy to the device that was queued."""

    def use(self) -> torch.Tensor:
        """The copy: what this thread's current stream is asked from now on runs after it has arrived. The
        host does not wait.
        """
        ...


class CopyToHost(Protocol):
    """A copy to the host that was queued."""

    def wait(self) -> torch.Tensor:
        """Return the copy when it has arrived. Other threads run meanwhile."""
        ...


class Link(Protocol):
    """The way between the host and one device. Any thread but the network's may use it."""

    def using(self) -> AbstractContextManager[None]:
        """As `moe.server.devices.using`, for this device."""
        ...

    def host_memory(self, numel: int) -> torch.Tensor:
        """Flat uint8 on the host, pinned: copies from it and to it run beside other work."""
        ...

    def send(self, source: torch.Tensor) -> CopyToDevice:
        """Queue a copy of `source`, from `host_memory` and not written to again, to the device."""
        ...

    def fetch(self, source: torch.Tensor) -> CopyToHost:
        """Queue a copy to the host of `source`, flat uint8, as this thread's current stream will have made
        it.
        """
        ...

    def empty_cache(self) -> None:
        """Give memory that no tensor uses back to the device."""
        ...


class CudaLink:
    """The link of one CUDA device. Satisfies `Link`."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """`cuda` is the module, or what stands for it in tests."""
        self._device, self._cuda = device, cuda
        self._upload_stream = cuda.Stream(device=device)
        self._download_stream = cuda.Stream(device=device)

    def using(self) -> AbstractContextManager[None]:
        return using(self._device, self._cuda)

    def host_memory(self, numel: int) -> torch.Tensor:
        # torch keeps pinned memory that is freed, and hands it out again when the copies that used it are
        # over
        return torch.empty(numel, dtype=torch.uint8, device="cpu", pin_memory=self._device.type == "cuda")

    def send(self, source: torch.Tensor) -> CopyToDevice:
        # the memory comes from the copies' stream: memory of the default stream may be in use until what
        # computes now is done
        with self._cuda.stream(self._upload_stream):
            device_copy = torch.empty(source.numel(), dtype=torch.uint8, device=self._device)
            device_copy.copy_(source, non_blocking=True)
        return _CudaCopyToDevice(self._cuda, device_copy, self._record_event(self._upload_stream), source)

    def fetch(self, source: torch.Tensor) -> CopyToHost:
        target = self.host_memory(source.numel())
        self._download_stream.wait_event(self._record_event(self._cuda.current_stream(self._device)))
        with self._cuda.stream(self._download_stream):
            target.copy_(source, non_blocking=True)
        return _CudaCopyToHost(target, self._record_event(self._download_stream), source)

    def empty_cache(self) -> None:
        self._cuda.empty_cache()

    def _record_event(self, stream: Any) -> Any:
        event = self._cuda.Event(blocking=True)  # a thread that waits sleeps, and leaves its core to others
        event.record(stream)
        return event


@dataclass(slots=True)
class _CudaCopyToDevice:
    cuda: Any
    device_copy: torch.Tensor
    event: Any
    source: torch.Tensor  # alive until the copy is over

    def use(self) -> torch.Tensor:
        current = self.cuda.current_stream(self.device_copy.device)
        current.wait_event(self.event)
        if (
            self.device_copy.is_cuda
        ):  # the copies' stream must not hand its memory out again while it is being read
            self.device_copy.record_stream(current)
        return self.device_copy


@dataclass(slots=True)
class _CudaCopyToHost:
    target: torch.Tensor
    event: Any
    source: torch.Tensor  # alive until the copy is over

    def wait(self) -> torch.Tensor:
        self.event.synchronize()
        return self.target


def link_of(device: torch.device) -> Link | None:
    """The link of a CUDA device; None for others, with which everything is done in order on one thread."""
    return CudaLink(device) if device.type == "cuda" else None
