"""The device of an expert: made current while its expert is worked with, and told apart when it can no longer
be used.

Whatever is done with an expert runs on the default stream of its device, in any thread. So forward and
backward passes, checkpoints and averaging with replicas follow each other on the device in the order in which
they held the expert's lock, and nobody has to wait for the device before letting go of that lock.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from swarm.core.device import is_device_failure


class DeviceFailed(Exception):
    """A device cannot be used any more until this process ends, as after a device-side assert of CUDA."""

    def __init__(self, device: torch.device, error: BaseException) -> None:
        self.device = device
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        super().__init__(f"{device} cannot be used any more until the server's process ends: {first_line}")


class using:
    """Make `device` and its default stream current in this thread, where it is a CUDA device; DeviceFailed
    when the device is lost.

    A class, and not a generator with `contextlib.contextmanager`, since every batch on the host enters it and
    a generator takes longer.
    """

    __slots__ = ("_cuda", "_device", "_stack")

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """`cuda` is the module, or what stands for it in tests."""
        self._device, self._cuda = device, cuda
        self._stack: ExitStack | None = None

    def __enter__(self) -> None:
        if self._device.type == "cuda" or self._cuda is not torch.cuda:
            with ExitStack() as stack:
                stack.enter_context(self._cuda.device(self._device))
                stack.enter_context(self._cuda.stream(self._cuda.default_stream(self._device)))
                self._stack = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stack is not None:
            self._stack.close()
        if isinstance(error, RuntimeError) and is_device_failure(error):
            raise DeviceFailed(self._device, error) from error
