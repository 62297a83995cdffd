"""Memory of a volunteer: estimated before it joins a run, and measured when it has finished.

The task states the memory of the model, its activations and its data. This module adds all other memory: what
the mode, the optimizer and error feedback keep for each parameter (`averaging.optim.memory_estimate`), the
buffers of averaging rounds, copies of the state for joining peers and for checkpoints, and the process
itself.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from averaging.optim.memory_estimate import bytes_per_parameter
from swarm.run.estimate import epoch_bytes
from swarm.run.specification import RunSpecification
from swarm.run.task import TaskDescription

if TYPE_CHECKING:
    import torch

_FLOAT32 = 4
# A process with torch's CPU build and a node that trains an empty model: 373 MiB were measured.
_CPU_PROCESS_BYTES = 400 << 20
# What the libraries of a CUDA build of torch add to it, also where the model is on the CPU: an estimate
_CUDA_LIBRARIES_BYTES = 300 << 20
# A process with CUDA libraries and a CUDA context: an estimate, not measured on a GPU yet
_CUDA_PROCESS_BYTES = 2 << 30
# Shards of a round that are being sent or received, and the buffers in which they are encoded and reduced.
_ROUND_BYTES_MAX = 96 << 20
_CUDA_ROUND_BYTES = 64 << 20  # the same on a CUDA device
_SLACK = 1.1  # allocators keep unused memory between blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Peak memory of a volunteer. Unless the model is on a CUDA device, all of it is host memory."""

    host_bytes: int  # memory of the whole process
    device_bytes: int  # on the CUDA device, without the CUDA context; 0 for other devices


def estimate_memory(
    specification: RunSpecification, description: TaskDescription, *, on_cuda: bool, saves: bool
) -> MemoryEstimate:
    """Return the peak memory of training a run. `saves`: whether checkpoints are written meanwhile."""
    parameters, optimizer = description.parameters, specification.optimizer
    statistics = optimizer.statistics
    kept = bytes_per_parameter(
        specification.mode.build(),
        optimizer_statistics=statistics,
        error_feedback=specification.error_feedback,
        strategy=specification.strategy is not None,
        offload=False,
    )
    training = description.memory_bytes + kept.device * parameters
    host = kept.host * parameters + _rounds_and_copies(
        specification, description, statistics, pinned=on_cuda, saves=saves
    )
    if on_cuda:
        # The model is built and the data are read on the host. torch's optimizers need one more tensor for
        # each parameter during a step.
        host += _FLOAT32 * parameters + description.data_bytes
        training += _FLOAT32 * parameters + _CUDA_ROUND_BYTES
    else:
        host += training
    required = specification.requirements.memory_mb * 1_000_000
    process = _CUDA_PROCESS_BYTES if on_cuda else _process_bytes()
    return MemoryEstimate(
        host_bytes=max(int(_SLACK * host) + process, required),
        device_bytes=int(_SLACK * training) if on_cuda else 0,
    )


def _process_bytes() -> int:
    """Return the memory of a process with torch and a node on the CPU. Does not import torch."""
    torch = find_spec("torch")
    libraries = Path(torch.origin).parent / "lib" if torch is not None and torch.origin else None
    has_cuda = libraries is not None and any(libraries.glob("*torch_cuda*"))
    return _CPU_PROCESS_BYTES + _CUDA_LIBRARIES_BYTES * has_cuda


def _rounds_and_copies(
    specification: RunSpecification,
    description: TaskDescription,
    statistics: int,
    *,
    pinned: bool,
    saves: bool,
) -> float:
    """Return the host memory of averaging rounds and of state copies for downloads and checkpoints."""
    mode = specification.mode
    shared = statistics if mode.name == "gradients" else mode.outer_statistics
    state = _FLOAT32 * description.parameters * (1 + shared)
    epochs = epoch_bytes(specification, description)
    averages: list[float] = [
        epochs,
        state if mode.state_sync_epochs else 0,
    ]  # the encoded results of both kinds of rounds stay in memory until the next one
    if pinned:
        averages = [_power_of_two(size) for size in averages]
    # One copy for a joining peer. A checkpoint is copied as a whole and then tensor by tensor.
    copies = state * (3 if saves else 1)
    return sum(averages) + min(2 * max(epochs, state), _ROUND_BYTES_MAX) + copies


def _power_of_two(size: float) -> float:
    """Return the number of bytes that torch allocates for `size` bytes of pinned memory."""
    return 1 << (int(size) - 1).bit_length() if size > 0 else 0


def peak_bytes() -> int:
    """Return the peak resident set of this process."""
    status = Path("/proc/self/status")
    # getrusage would report the peak of the parent process, if that was higher.
    if status.exists():
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """Peak memory of this process on a CUDA device; zeros for other devices."""

    allocated_bytes: int = 0  # memory used by tensors
    reserved_bytes: int = 0  # memory reserved by torch's allocator, including the space between tensors


def device_peak(device: torch.device) -> DevicePeak:
    """Return the peak memory on `device`, as torch counted it in this process."""
    if device.type != "cuda":
        return DevicePeak()
    import torch

    return DevicePeak(
        allocated_bytes=torch.cuda.max_memory_allocated(device),
        reserved_bytes=torch.cuda.max_memory_reserved(device),
    )
