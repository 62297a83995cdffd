"""Devices, memory and clock of this machine, and checks whether they suffice for a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from swarm.core.device import missing_cuda, resolve_device
from swarm.core.errors import SwarmError, UsageError
from swarm.core.wording import size
from swarm.run.specification import RunSpecification

if TYPE_CHECKING:
    import torch


def choose_device(name: str, specification: RunSpecification) -> torch.device:
    """Return the device with this name on this machine. Imports torch, unless the name itself is refused.

    Raises UsageError if this machine has no such device, or if the run requires CUDA and the device is not a
    CUDA device.
    """
    needs_cuda = specification.requirements.device == "cuda"
    refused = f"the run {specification.name} is trained on CUDA devices only, and"
    if needs_cuda and name in ("cpu", "mps"):
        raise UsageError(
            f"{refused} --device {name} was given: give --device cuda, or volunteer for another run"
        )
    device = resolve_device(name)
    if needs_cuda and device.type != "cuda":
        raise UsageError(f"{refused} {missing_cuda()}")
    return device


def free_bytes(device: torch.device | None = None) -> int:
    """Return the free memory of a CUDA device; for any other device or None, that of the machine."""
    if device is not None and device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available)


def check_memory(needed_bytes: int, free: int, run: str, where: str = "this machine") -> None:
    """Raise SwarmError if the run needs more memory than is free on `where`."""
    if needed_bytes > free:
        raise SwarmError(
            f"the run {run} needs about {size(needed_bytes)} of memory "
            f"and {size(free)} are free on {where}: "
            "close other programs, or volunteer with a larger machine"
        )


def used_bytes() -> int:
    """Return the resident set of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def second_of_day() -> float:
    """Return the seconds since midnight in local time."""
    now = time.localtime()
    return now.tm_hour * 3600.0 + now.tm_min * 60.0 + now.tm_sec


_asked_s = [0.0]  # in which this process waited for an answer of its user


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """Leave the time of this context out of `process_age_s`: a person reads, and answers."""
    began_s = time.monotonic()
    try:
        yield
    finally:
        _asked_s[0] += time.monotonic() - began_s


def process_age_s() -> float:
    """Return the seconds since this process started, including the start of Python, and without those in
    which it waited for an answer of its user.
    """
    import psutil

    return max(0.0, time.time() - psutil.Process().create_time() - _asked_s[0])
