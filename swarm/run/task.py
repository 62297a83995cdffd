"""Tasks: a `Task` provides a model, its data and its loss. A specification only names a task and the package
that provides it; the task itself is installed on every machine by its user and never sent.

A package adds a task with an entry point of the group `swarm.tasks`. Its value is a callable that takes the
settings of the specification and returns a `Task`:

    [project.entry-points."swarm.tasks"]
    mytask = "mypackage.mytask:MyTask"
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from swarm.core.errors import UsageError
from swarm.run.task_errors import explained, guarded

if TYPE_CHECKING:
    import torch

    from swarm.core.ids import PeerId

ENTRY_POINT_GROUP = "swarm.tasks"
_BUILT_IN = {
    "bytelm": "swarm.run.tasks.bytelm:ByteLanguageModel",
    "causal-lm": "swarm.run.tasks.causal_lm:CausalLanguageModel",
}
_SETTINGS_REFUSED = "refuses the settings of the run"
_DRAW_CONTEXT = b"swarm run draw 1\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDescription:
    """Size and memory of a task, which the volunteer sees before it agrees to train.

    It is computed without building the model, so that it does not wait for the import of torch.
    """

    summary: str  # one line: the model and its data
    parameters: int
    sample: str  # one sample in words: "128 bytes of text"
    # Shapes of the trained parameters, in any order. Without them, the traffic of a strategy is estimated as
    # if no tensor was compressed.
    shapes: tuple[tuple[int, ...], ...] = ()
    # Peak memory of the model's parameters and buffers, the activations of one step, and the data, on the
    # device of the model. `swarm.run.memory` adds gradients, optimizer statistics and the mode's memory.
    memory_bytes: int
    data_bytes: int = 0  # the part of it that is read into host memory before it is copied to a device
    downloads: tuple[str, ...] = ()  # downloads from outside the swarm: name, size, source and licence


@dataclass(frozen=True, slots=True)
class Draw:
    """Seed of a volunteer's samples in one epoch.

    The same (run, epoch, peer) gives the same samples on every machine that has the same data.
    """

    run_id: str
    epoch: int
    peer_id: PeerId
    others: tuple[PeerId, ...] = ()  # other peers that are known to train in this epoch

    @property
    def seed(self) -> int:
        """Return 63 bits of a SHA-256 hash of run, epoch and peer, for a random generator."""
        return self._seed_of(self.peer_id)

    @property
    def other_seeds(self) -> list[int]:
        """Return the seeds of the other peers. A task may use them to divide its data among all peers."""
        return [self._seed_of(peer) for peer in self.others]

    def _seed_of(self, peer: PeerId) -> int:
        text = f"{self.run_id}\0{self.epoch}\0".encode() + peer.to_bytes()
        return int.from_bytes(hashlib.sha256(_DRAW_CONTEXT + text).digest()[:8], "big") >> 1


class TaskData(Protocol):
    """A volunteer's data, loaded and ready on the device.

    An implementation may also have these methods, which are called after a validation:

    - `metrics(validation_loss: float) -> dict[str, float]`: more numbers for the monitor, by name;
    - `write_sample(model: torch.nn.Module, epoch: int) -> str`: what the model produces, as text for people;
      empty in epochs without one.
    """

    @property
    def summary(self) -> str:
        """A short description of the loaded data."""
        ...

    def start_epoch(self, draw: Draw) -> None:
        """Start to draw batches with this seed, from the first batch."""
        ...

    def loss(self, model: torch.nn.Module, samples: int) -> torch.Tensor:
        """Draw the next batch of `samples` samples and return its mean loss, a scalar tensor."""
        ...

    def validation_loss(self, model: torch.nn.Module) -> float:
        """Return the mean loss on a fixed held-out part. It should be cheap enough for every few epochs."""
        ...


class Task(Protocol):
    """A kind of model on a kind of data, with its settings applied.

    `swarm.Task` is what a package implements so that others can train its models: docs/howto/task.md. An
    implementation may also have the method `export(model: torch.nn.Module, folder: Path) -> None`, with which
    `swarm export` writes a folder of the task's own format instead of one safetensors file; and the method
    `build_optimizer(name: str, model: torch.nn.Module, choice: OptimizerChoice) -> torch.optim.Optimizer` for
    runs whose optimizer is `task:NAME`; `choice` has the learning rate and the settings.
    """

    def describe(self, batch_size: int) -> TaskDescription:
        """Return size and memory of training with `batch_size` samples in each step."""
        ...

    def build_model(self, seed: int) -> torch.nn.Module:
        """Return a new model on the CPU. The same seed gives the same parameters, independent of the global
        random state.
        """
        ...

    def load_data(self, folder: Path | None, device: torch.device) -> TaskData:
        """Read the data from a folder, or the task's default data if it is None.

        Raises UsageError if the folder cannot be used.
        """
        ...


def available_tasks() -> list[str]:
    """Return the names of the tasks that are installed on this machine."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def make_task(name: str, settings: Mapping[str, Any], package: str | None = None) -> Task:
    """Return the named task with these settings.

    `package` is the package that a specification names, as "NAME==VERSION". Raises UsageError if the task is
    not installed here, is that of another package or version, or does not accept the settings. An exception
    of the task, here or in any later call, is raised as a SwarmError that names the task.
    """
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        factory = getattr(importlib.import_module(module), attribute)
    else:
        point = _entry_point(name, package)
        with explained(name, f"cannot be loaded from {point.value}"):
            factory = point.load()
    with explained(name, _SETTINGS_REFUSED):
        task: Task = guarded(name, factory(settings), _checked)
        return task


def _checked(method: str, result: Any) -> Any:
    """Return the result of a method, numbers as floats. Raise TypeError if it is not what callers need."""
    if method == "describe":
        if not isinstance(result, TaskDescription):
            raise TypeError(f"it must return a swarm.TaskDescription, not {result!r:.60}")
    elif method == "build_model":
        import torch

        if not isinstance(result, torch.nn.Module):
            raise TypeError(f"it must return a torch.nn.Module, not {result!r:.60}")
        if not any(one.requires_grad for one in result.parameters()):
            raise TypeError("its model has no parameters to train")
    elif method == "loss":
        import torch

        if not isinstance(result, torch.Tensor) or result.numel() != 1 or not result.requires_grad:
            raise TypeError("it must return one number that depends on the model's parameters: a mean loss")
    elif method == "validation_loss":
        return float(result)
    elif method == "metrics":
        return {str(name): float(value) for name, value in result.items()}
    return result


def installed_package(name: str) -> str | None:
    """Return the installed package that provides a task, as "NAME==VERSION"; None for a built-in task."""
    return None if name in _BUILT_IN else _package_of(_entry_point(name, None))


def _package_of(point: EntryPoint) -> str | None:
    return f"{point.dist.name}=={point.dist.version}" if point.dist is not None else None


def _entry_point(name: str, package: str | None) -> EntryPoint:
    """Return the entry point of a task. Raise UsageError if it is not installed, or not from `package`."""
    points = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not points:
        known = ", ".join(available_tasks())
        raise UsageError(
            f"the task {name!r} is not installed on this machine (installed: {known}): {_advice(package)}"
        )
    provided = {_package_of(point): point for point in points}
    if package is None:
        return points[0]
    for found, point in provided.items():
        if found is None or _normalized(found) == _normalized(package):
            return point
    here = ", ".join(str(found) for found in provided)
    raise UsageError(
        f"the run needs the task {name!r} of {package}, and this machine has {here}: {_advice(package)}"
    )


def _normalized(package: str) -> str:
    name, _, version = package.partition("==")
    return f"{re.sub('[-_.]+', '-', name).lower()}=={version}"


def _advice(package: str | None) -> str:
    if package is None:
        return "install the package that provides it; the run does not name one"
    return (
        f"if you trust its authors, whose code it runs on this machine, install it with: "
        f"pip install {package}"
    )
