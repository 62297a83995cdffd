"""Links: copies between the host and a CUDA device that run during its computation.

A link has two streams of its own: one for copies to the device, and one for copies to the host. Computation
uses the default stream (`moe.server.devices`). Events order the three: computation waits for the copies of
its inputs, and copies of results wait for the computation that makes them. The host waits for one thing only:
the event behind a copy to the host, before it reads the copy.

Not yet run on a GPU. The tests check the order of calls, and use a link whose copies arrive as late as
possible.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moe.server.devices import using
from swarm.core.copies import Arrival, CopyStream, CudaArrival, host_memory


class CopyToDevice(Protocol):
    """A queued copy to the device."""

    def use(self) -> torch.Tensor:
        """Return the copy. Work that is queued on this thread's current stream from now on runs after the
        copy has arrived; the host does not wait.
        """
        ...


class CopyToHost(Protocol):
    """A queued copy to the host."""

    def wait(self) -> torch.Tensor:
        """Return the copy when it has arrived. Other threads run meanwhile."""
        ...


class DeviceLink(Protocol):
    """The connection between the host and one device. Any thread but the network thread may use it."""

    def using(self) -> AbstractContextManager[None]:
        """Return the context of `moe.server.devices.using` for this device."""
        ...

    def host_memory(self, numel: int) -> torch.Tensor:
        """Return flat uint8 on the host, pinned, so that copies from it and to it run during other work."""
        ...

    def send(self, source: torch.Tensor) -> CopyToDevice:
        """Queue a copy to the device. `source` is from `host_memory` and must not be written to again."""
        ...

    def fetch(self, source: torch.Tensor) -> CopyToHost:
        """Queue a copy to the host of `source`, flat uint8, as this thread's current stream will have
        computed it.
        """
        ...

    def empty_cache(self) -> None:
        """Return memory that no tensor uses to the device."""
        ...


class ExpertDeviceLink:
    """The link of one CUDA device. Satisfies `DeviceLink`."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """Create the streams. `cuda` is the torch module, or its stand-in in tests."""
        self._device, self._cuda = device, cuda
        self._uploads, self._downloads = CopyStream(device, cuda), CopyStream(device, cuda)

    def using(self) -> AbstractContextManager[None]:
        return using(self._device, self._cuda)

    def host_memory(self, numel: int) -> torch.Tensor:
        # torch reuses freed pinned memory when the copies that used it are over
        return host_memory(self._device, numel)

    def send(self, source: torch.Tensor) -> CopyToDevice:
        # allocated on the copies' stream: memory of the default stream may be in use until computation ends
        with self._cuda.stream(self._uploads.stream):
            device_copy = torch.empty(source.numel(), dtype=torch.uint8, device=self._device)
        return _CudaCopyToDevice(
            self._cuda, device_copy, self._uploads.copy([(source, device_copy)], keep=source)
        )

    def fetch(self, source: torch.Tensor) -> CopyToHost:
        target = self.host_memory(source.numel())
        self._downloads.follow()
        return _CudaCopyToHost(target, self._downloads.copy([(source, target)], keep=source))

    def empty_cache(self) -> None:
        self._cuda.empty_cache()


@dataclass(slots=True)
class _CudaCopyToDevice:
    cuda: Any
    device_copy: torch.Tensor
    arrival: CudaArrival

    def use(self) -> torch.Tensor:
        current = self.cuda.current_stream(self.device_copy.device)
        current.wait_event(self.arrival.event)
        if self.device_copy.is_cuda:  # its memory must not be reused while it is being read
            self.device_copy.record_stream(current)
        return self.device_copy


@dataclass(slots=True)
class _CudaCopyToHost:
    target: torch.Tensor
    arrival: Arrival

    def wait(self) -> torch.Tensor:
        self.arrival.wait()
        return self.target


def link_of(device: torch.device) -> DeviceLink | None:
    """Return the link of a CUDA device; None for other devices, on which everything runs in order on one
    thread.
    """
    return ExpertDeviceLink(device) if device.type == "cuda" else None
