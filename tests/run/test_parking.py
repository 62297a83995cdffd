"""Tensors whose memory is freed during a pause, and which come back bit for bit."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.core.errors import SwarmError
from swarm.run.parking import ParkedTensors, tensors_in


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))
    model[2].weight = model[0].weight  # tied
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(32.0).reshape(4, 8)).sum().backward()
    optimizer.step()


def everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers(), *tensors_in(list(optimizer.state.values()))]


def bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_everything_comes_back_and_training_continues_as_without_a_pause(tmp_path: Path) -> None:
    model, optimizer = trained()
    twin, twins_optimizer = trained()
    tensors = everything(model, optimizer)
    parked = ParkedTensors(tensors)
    assert bytes_of(tensors) > 0, "tensors of the host stay until they go to the disk"
    parked.to_disk(tmp_path)
    parked.to_disk(tmp_path)
    assert bytes_of(tensors) == 0
    assert list(tmp_path.iterdir()) == [], (
        "the file has no name, so nothing is left when the process is killed"
    )
    parked.restore()
    for one, other in zip(tensors, everything(twin, twins_optimizer), strict=True):
        assert torch.equal(one, other)
    assert model[2].weight is model[0].weight
    step(model, optimizer)
    step(twin, twins_optimizer)
    assert all(
        torch.equal(one, other) for one, other in zip(model.parameters(), twin.parameters(), strict=True)
    )


def test_a_full_disk_leaves_everything_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    before = [tensor.clone() for tensor in everything(model, optimizer)]

    def full(**given: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    parked = ParkedTensors(everything(model, optimizer))
    with pytest.raises(OSError, match="No space"):
        parked.to_disk(tmp_path)
    parked.restore()
    assert all(
        torch.equal(one, other) for one, other in zip(before, everything(model, optimizer), strict=True)
    )


def test_a_file_that_became_shorter_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = (tmp_path / "parked").open("wb+")
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **given: file)
    tensor = torch.ones(1000)
    parked = ParkedTensors([tensor])
    parked.to_disk(tmp_path)
    with contextlib.closing(file):
        file.truncate(100)
        with pytest.raises(SwarmError, match="shorter"):
            parked.restore()
