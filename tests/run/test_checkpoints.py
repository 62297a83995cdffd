"""Checkpoints that cannot be written because the device failed, and not the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.run.checkpoints import CheckpointConfig, CheckpointWriter
from swarm.run.events import Event, Notice


class View:
    epoch, closed = 4, False

    def close(self) -> None:
        self.closed = True


class FakeOptimizer:
    epoch = 4

    def __init__(self) -> None:
        self.view = View()

    def state_view(self) -> Any:
        return self.view


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be"),
            "CUDA error: device-side assert triggered",
        ),
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried"), "CUDA out of memory. Tried"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_checkpoint_that_a_failed_device_prevents_is_reported_and_leaves_no_file(
    error: BaseException, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise error

    monkeypatch.setattr("averaging.optim.state.checkpoint.write", failing)
    emitted: list[Event] = []
    optimizer: Any = FakeOptimizer()
    # `close` writes a last checkpoint and waits for it
    CheckpointWriter(CheckpointConfig(folder=tmp_path), [], {}, emitted.append).close(optimizer)
    assert emitted == [Notice(text=f"the checkpoint of epoch 4 was not written: {why}")]
    assert optimizer.view.closed
    assert list(tmp_path.iterdir()) == []
