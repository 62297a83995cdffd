"""What can be trained: a `Task` knows a model, its data and its loss. Tasks are installed, never sent: a
specification only names one.

A package adds its own with an entry point of the group `swarm.tasks`, whose value is a callable that takes
the settings of the specification and returns a `Task`:

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
    """What a volunteer is told before being asked; computed without building the model, so that it is there
    before torch is imported.
    """

    summary: str  # one line: what is trained on what
    parameters: int
    sample: str  # what one sample is: "128 bytes of text"
    # of the trained parameters, in any order; where a task does not tell, traffic with a strategy is foretold
    # as if no tensor shrank
    shapes: tuple[tuple[int, ...], ...] = ()
    # what the task alone knows of: the model's parameters and buffers, the activations of one step, and the
    # data, at their peak, where the model is; gradients, the optimizer's statistics and everything that the
    # mode keeps are added by `swarm.run.memory`
    memory_bytes: int
    data_bytes: int = 0  # the part of it that is read into the machine's memory before it goes to a device


@dataclass(frozen=True, slots=True)
class Draw:
    """Where a volunteer's samples come from: the same (run, epoch, peer) gives the same samples on every
    machine that has the same data.
    """

    run_id: str
    epoch: int
    peer_id: PeerId

    @property
    def seed(self) -> int:
        """63 bits of SHA-256 over the three, for a random generator."""
        text = f"{self.run_id}\0{self.epoch}\0".encode() + self.peer_id.to_bytes()
        return int.from_bytes(hashlib.sha256(_DRAW_CONTEXT + text).digest()[:8], "big") >> 1


class TaskData(Protocol):
    """A volunteer's data, loaded and ready on the device."""

    @property
    def summary(self) -> str:
        """What was loaded, in a few words."""
        ...

    def start_epoch(self, draw: Draw) -> None:
        """Batches come from this draw from now on, beginning with its first."""
        ...

    def loss(self, model: torch.nn.Module, samples: int) -> torch.Tensor:
        """Draw the next batch of this many samples and return its mean loss, a scalar to call backward on."""
        ...

    def validation_loss(self, model: torch.nn.Module) -> float:
        """Mean loss on a fixed part that no volunteer trains on; cheap enough for every few epochs."""
        ...


class Task(Protocol):
    """A kind of model on a kind of data, with its settings applied."""

    def describe(self, batch_size: int) -> TaskDescription:
        """What it takes to train it with steps of this many samples."""
        ...

    def build_model(self, seed: int) -> torch.nn.Module:
        """A fresh model on the CPU; the same seed gives the same parameters. It must not depend on the global
        random state.
        """
        ...

    def load_data(self, folder: Path | None, device: torch.device) -> TaskData:
        """Read the data from a folder, or the task's default data. UsageError says why it cannot be used."""
        ...


def available_tasks() -> list[str]:
    """The names that a specification may use on this machine."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def make_task(name: str, settings: Mapping[str, Any]) -> Task:
    """The named task with these settings. UsageError when it is not installed here or does not accept them."""
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
            f"the task {name!r} is not installed on this machine (installed: {known}): install the package that provides it"
        )
    try:
        return points[0].load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"the task {name!r} ({points[0].value}) cannot be loaded: {error}") from error
