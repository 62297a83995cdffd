"""The task `paced-bytelm`: the language model of `bytelm` with a minimum duration of each step.

Several peers of one machine then do not compete for its cores, and the failure of one does not speed up the
others. The task is installed by an entry point, as that of any package: in a folder on the path of the
processes that use it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.run.task import ENTRY_POINT_GROUP, Draw, TaskData
from swarm.run.tasks.bytelm import ByteLanguageModel

if TYPE_CHECKING:
    import torch

NAME = "paced-bytelm"


class PacedLanguageModel(ByteLanguageModel):
    """The language model of `bytelm`. The additional setting `step_s` is the minimum duration of a step."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__({name: value for name, value in settings.items() if name != "step_s"})
        self._step_s = float(settings["step_s"])

    def load_data(self, folder: Path | None, device: torch.device) -> TaskData:
        return _Paced(super().load_data(folder, device), self._step_s)


class _Paced:
    def __init__(self, data: TaskData, step_s: float) -> None:
        self._data, self._step_s, self._due_s = data, step_s, 0.0

    @property
    def summary(self) -> str:
        return self._data.summary

    def start_epoch(self, draw: Draw) -> None:
        self._data.start_epoch(draw)

    def loss(self, model: torch.nn.Module, samples: int) -> torch.Tensor:
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        self._due_s = time.monotonic() + self._step_s
        return self._data.loss(model, samples)

    def validation_loss(self, model: torch.nn.Module) -> float:
        return self._data.validation_loss(model)


def install(folder: Path) -> None:
    """Make the task known to every Python that has `folder` on its path."""
    described = folder / "swarm_benchmark_tasks-0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: swarm-benchmark-tasks\nVersion: 0\n", encoding="utf-8"
    )
    (described / "entry_points.txt").write_text(
        f"[{ENTRY_POINT_GROUP}]\n{NAME} = {__name__}:{PacedLanguageModel.__name__}\n", encoding="utf-8"
    )
