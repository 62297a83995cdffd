"""The task `digits` learns, and describes itself correctly."""

from __future__ import annotations

import torch
from swarm_digits import Digits

import swarm


def test_model_is_what_the_task_describes() -> None:
    task = Digits({"channels": 8})
    shapes = sorted(tuple(one.shape) for one in task.build_model(seed=0).parameters())
    described = task.describe(batch_size=8)
    assert shapes == sorted(described.shapes)
    assert described.parameters == sum(torch.Size(shape).numel() for shape in shapes)


def test_network_learns_to_read_digits() -> None:
    task: swarm.Task = Digits({"channels": 8})
    model, data = task.build_model(seed=0), task.load_data(None, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        data.loss(model, 32).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert data.validation_loss(model) < 0.6
