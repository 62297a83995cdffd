"""Tasks: a `Task` provides a model, its data and its loss. A specification only names a task; the task itself
is installed on every machine and never sent.

A package adds a task with an entry point of the group `swarm.tasks`. Its value is a callable that takes the
settings of the specification and returns a `Task`:

    [project.entry-points."swarm.tasks"]
    mytask = "mypackage.mytask:MyTask"
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from swarm.core.errors import UsageError

if TYPE_CHECKING:
    import torch

    from swarm.core.ids import PeerId

ENTRY_POINT_GROUP = "swarm.tasks"
_BUILT_IN = {"bytelm": "swarm.run.tasks.bytelm:ByteLanguageModel"}
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


@dataclass(frozen=True, slots=True)
class Draw:
    """Seed of a volunteer's samples in one epoch.

    The same (run, epoch, peer) gives the same samples on every machine that has the same data.
    """

    run_id: str
    epoch: int
    peer_id: PeerId

    @property
    def seed(self) -> int:
        """Return 63 bits of a SHA-256 hash of the three fields, for a random generator."""
        text = f"{self.run_id}\0{self.epoch}\0".encode() + self.peer_id.to_bytes()
        return int.from_bytes(hashlib.sha256(_DRAW_CONTEXT + text).digest()[:8], "big") >> 1


class TaskData(Protocol):
    """A volunteer's data, loaded and ready on the device."""

    @property
    def summary(self) -> str:
        """A few words about the loaded data."""
        ...

    def start_epoch(self, draw: Draw) -> None:
        """Start to draw batches with this seed, from its first one."""
        ...

    def loss(self, model: torch.nn.Module, samples: int) -> torch.Tensor:
        """Draw the next batch of `samples` samples and return its mean loss, a scalar tensor."""
        ...

    def validation_loss(self, model: torch.nn.Module) -> float:
        """Return the mean loss on a fixed held-out part. It should be cheap enough for every few epochs."""
        ...


class Task(Protocol):
    """A kind of model on a kind of data, with its settings applied."""

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


def make_task(name: str, settings: Mapping[str, Any]) -> Task:
    """Return the named task with these settings.

    Raises UsageError if the task is not installed here or does not accept the settings.
    """
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        factory = getattr(importlib.import_module(module), attribute)
    else:
        factory = _plugin(name)
    return cast("Callable[[Mapping[str, Any]], Task]", factory)(settings)


def _plugin(name: str) -> object:
    points = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not points:
        known = ", ".join(available_tasks())
        raise UsageError(
            f"the task {name!r} is not installed on this machine (installed: {known}): "
            "install the package that provides it"
        )
    try:
        return points[0].load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"the task {name!r} ({points[0].value}) cannot be loaded: {error}") from error
