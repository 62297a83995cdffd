"""Compute devices: check names against the devices of this machine, and classify the errors of a device.

Importing this module does not import torch: a command parses its options before it knows whether it needs
torch at all.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from swarm.core.errors import SwarmError, UsageError

if TYPE_CHECKING:
    import torch

_NAME = re.compile(r"auto|cpu|mps|cuda(?::(0|[1-9][0-9]{0,3}))?")

DEVICE_NAMES = "auto, cpu, cuda, cuda:N or mps"


def check_device_name(name: str) -> str:
    """Return `name` if it is `auto`, `cpu`, `cuda`, `cuda:N` or `mps`; raise UsageError otherwise. Does not
    import torch.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"a device is {DEVICE_NAMES}, not {name!r:.40}")
    return name


def resolve_device(name: str, option: str = "--device") -> torch.device:
    """Return the torch device that `name` means on this machine; a CUDA device always has its index.

    `auto` is the current CUDA device where there is one, else the CPU; MPS is used only when it is asked for
    by name. `option` is the name of the setting in error messages. Raises UsageError that says what is
    missing when the device is not there.
    """
    import torch

    kind = check_device_name(name).partition(":")[0]
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UsageError(
            f"{option} mps was given, but torch finds no Metal device here; use {option} cpu, or auto"
        )
    if kind != "cuda":
        return torch.device(kind)
    if not torch.cuda.is_available():
        raise UsageError(f"{option} {name} was given, but {missing_cuda()}; use {option} cpu, or auto")
    _, _, number = name.partition(":")
    index, count = int(number) if number else torch.cuda.current_device(), torch.cuda.device_count()
    if index >= count:
        there = "cuda:0 alone" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise UsageError(f"{option} {name} was given, but this machine has {there}")
    return torch.device("cuda", index)


def check_device_present(name: str) -> None:
    """Raise UsageError when this machine lacks the device that `name` asks for.

    Every machine has `auto` and `cpu`, so that torch is imported only for the other names.
    """
    if check_device_name(name) not in ("auto", "cpu"):
        resolve_device(name)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def missing_cuda() -> str:
    """Return why torch has no CUDA device on this machine, as the end of a sentence."""
    import torch

    if torch.version.cuda is None:
        return "this machine's torch was built without CUDA: install a CUDA build of torch"
    return "torch sees no CUDA device here: check `nvidia-smi` and the driver"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that a device or the host had no memory left: a smaller batch may succeed
    where this one failed.
    """
    import torch

    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    # The allocators of the CPU and of MPS raise a plain RuntimeError, as do CUDA's libraries (cuBLAS, cuDNN).
    text = str(error)
    return (
        "can't allocate memory" in text or "out of memory" in text.lower() or "_STATUS_ALLOC_FAILED" in text
    )


def is_device_failure(error: BaseException) -> bool:
    """Return whether `error` leaves its CUDA context unusable: every later call on the device fails too,
    until the process ends.

    CUDA calls such errors sticky (a device-side assert, an illegal address). Running out of memory is not one
    of them.
    """
    import torch

    if is_out_of_memory(error):
        return False
    accelerator_error = getattr(torch, "AcceleratorError", None)  # from torch 2.8 on
    if accelerator_error is not None and isinstance(error, accelerator_error):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith("CUDA error")


def first_line(error: BaseException) -> str:
    """Return what `error` says, without the advice for programmers that torch writes in the lines below."""
    return str(error).partition("\n")[0] or type(error).__name__


def free_bytes(device: torch.device) -> int | None:
    """Return the memory of a device that nobody uses now; of the host for "cpu". None where it is unknown."""
    if device.type == "cpu":
        import psutil

        return int(psutil.virtual_memory().available)
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return None


def release_cached_memory(device: torch.device) -> None:
    """Give memory that torch keeps for later allocations on `device`, and does not use now, back to the
    device.
    """
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def current_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which CUDA calls of this thread that name no device go to `device`; one that does
    nothing for other devices.
    """
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def explained_failures(device: torch.device) -> Iterator[None]:
    """Within the context, raise a SwarmError that a user understands when `device` fails permanently or has
    no memory left.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_device_failure(error):
            advice = (
                "start again; if it fails again, give another --device and look at the driver's messages "
                "(`nvidia-smi`, `dmesg`)"
            )
            raise SwarmError(
                f"{device} failed, and this process cannot use it any more ({first_line(error)}): {advice}"
            ) from error
        if is_out_of_memory(error):
            advice = "close other programs that use it, or give a --device with more memory"
            raise SwarmError(
                f"{device} has not enough memory left ({first_line(error)}): {advice}"
            ) from error
        raise
