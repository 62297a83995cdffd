"""The device of an expert: it is made current while the expert is used, and a failure that makes it unusable
is recognised.

Everything that is done with an expert runs on the default stream of its device, in any thread. Forward and
backward passes, checkpoints and averaging with replicas therefore follow each other on the device in the
order in which they held the expert's lock, and nothing has to wait for the device before it releases that
lock.
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
    """Make `device` and its default stream current in this thread, if it is a CUDA device. Raises
    DeviceFailed when the device is lost.

    This is a class, not a generator with `contextlib.contextmanager`: every batch on the host enters it, and
    a generator takes longer.
    """

    __slots__ = ("_cuda", "_device", "_stack")

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """Prepare the context. `cuda` is the torch module, or its stand-in in tests."""
        self._device, self._cuda = device, cuda
        self._stack: ExitStack | None = None

    def __enter__(self) -> None:
        if self._device.type == "cuda" or self._cuda is not torch.cuda:
            try:
                with ExitStack() as stack:
                    stack.enter_context(self._cuda.device(self._device))
                    stack.enter_context(self._cuda.stream(self._cuda.default_stream(self._device)))
                    self._stack = stack.pop_all()
            except RuntimeError as error:
                if is_device_failure(error):
                    raise DeviceFailed(self._device, error) from error
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stack is not None:
            try:
                self._stack.close()
            except RuntimeError as closing:
                # CUDA may refuse even this on a lost device: `error` says so, or the next call will
                if not is_device_failure(closing):
                    raise
        if isinstance(error, RuntimeError) and is_device_failure(error):
            raise DeviceFailed(self._device, error) from error
