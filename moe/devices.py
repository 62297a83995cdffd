"""The device of an expert: made current while its expert is worked with, and told apart when it can no longer be used.

Whatever is done with an expert runs on the default stream of its device, in any thread. So forward and backward passes, checkpoints and
averaging with replicas follow each other on the device in the order in which they held the expert's lock, and nobody has to wait for the
device before letting go of that lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from swarm.device import is_device_failure


class DeviceFailed(Exception):
    """A device cannot be used any more until this process ends, as after a device-side assert of CUDA."""

    def __init__(self, device: torch.device, error: BaseException) -> None:
        self.device = device
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        super().__init__(f"{device} cannot be used any more until the server's process ends: {first_line}")


@contextmanager
def using(device: torch.device, cuda: Any = torch.cuda) -> Iterator[None]:
    """Make `device` and its default stream current in this thread, where it is a CUDA device; DeviceFailed when the device is lost.

    `cuda` is the module, or what stands for it in tests.
    """
    with ExitStack() as stack:
        if device.type == "cuda" or cuda is not torch.cuda:
            stack.enter_context(cuda.device(device))
            stack.enter_context(cuda.stream(cuda.default_stream(device)))
        try:
            yield
        except RuntimeError as error:
            if is_device_failure(error):
                raise DeviceFailed(device, error) from error
            raise
