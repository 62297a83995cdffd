"""Copies between the host and a CUDA device, on a stream of their own, so that they overlap with other work.

Events order a stream of copies and other streams, and block no thread. Which stream waits for which is up to
the callers: rounds (`averaging.reduction.devices`), the offload of gradients
(`averaging.optim.offload`), reads of a training state (`averaging.optim.state.device_reads`) and experts
(`moe.server.links`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

Copy = tuple[torch.Tensor, torch.Tensor]  # source and target, with the same number of elements


class Arrival(Protocol):
    """Copies that were queued together."""

    def ready(self) -> bool:
        """Return whether the copies are done, without waiting."""
        ...

    def wait(self) -> None:
        """Return when the copies are done; a second call returns at once. Other threads run meanwhile."""
        ...


class CopiedAtOnce:
    """Copies that were made at once. Satisfies `Arrival`."""

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        return


class CudaArrival:
    """Copies on a CUDA stream. `event` is behind them; `kept` lives as long as this object."""

    def __init__(self, event: Any, kept: torch.Tensor | None) -> None:
        self.event, self.kept = event, kept

    def ready(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class CopyStream:
    """A stream of one CUDA device that only copies."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """Create the stream. `cuda` is the module `torch.cuda`, or a simulated one in tests."""
        self._cuda, self._device = cuda, device
        self.stream = cuda.Stream(device=device)

    def follow(self, stream: Any = None) -> None:
        """Make the copies queued from now on wait for the work queued so far on `stream`; None: on this
        thread's current one.
        """
        self.stream.wait_event(self.mark(stream or self._cuda.current_stream(self._device)))

    def precede(self) -> None:
        """Make the work queued from now on on this thread's current stream wait for the copies queued so
        far. The host does not wait.
        """
        self._cuda.current_stream(self._device).wait_event(self.mark())

    def copy(self, copies: Iterable[Copy], *, keep: torch.Tensor | None = None) -> CudaArrival:
        """Queue copies. The sources must be neither freed nor written until the copies have arrived: `keep`
        lives as long as the result.
        """
        with torch.no_grad(), self._cuda.stream(self.stream):
            for source, target in copies:
                target.copy_(source, non_blocking=True)
        return CudaArrival(self.mark(), keep)

    def mark(self, stream: Any = None) -> Any:
        """Return an event behind the work queued so far on `stream`; None: behind the copies. A thread that
        waits for it sleeps, and leaves its core to others.
        """
        event = self._cuda.Event(blocking=True)
        event.record(stream or self.stream)
        return event


def host_memory(device: torch.device, numel: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Return flat, uninitialised memory on the host; pinned for a CUDA device, so that copies between the two
    overlap with other work.
    """
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
