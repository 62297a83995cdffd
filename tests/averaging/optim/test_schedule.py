"""A schedule that is moved to the epoch of a downloaded state."""

from __future__ import annotations

import pytest
import torch

from averaging.optim.state.training_state import TrainingState
from swarm.core.errors import UsageError


def training_state(total_steps: int, *, weight: float, epoch: int = 0) -> TrainingState:
    p = torch.nn.Parameter(torch.full((3,), weight))
    inner = torch.optim.SGD([p], lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(inner, 0.1, total_steps=total_steps)
    state = TrainingState(inner, (), scheduler)
    for _ in range(epoch):
        inner.step()
        scheduler.step()
        state.mark_changed(state.epoch + 1)
    return state


def test_learning_rate_that_is_a_tensor_keeps_its_place_when_the_schedule_moves_back() -> None:
    """Regression test: another tensor took its place, which a captured graph of the step does not read."""
    p, rate = torch.nn.Parameter(torch.ones(3)), torch.tensor(0.5)
    inner = torch.optim.AdamW([p], lr=rate)
    state = TrainingState(inner, (), torch.optim.lr_scheduler.StepLR(inner, 1, 0.5))
    inner.step()
    blobs = []
    for epoch in (1, 3):
        with state.lock:
            for _ in range(epoch - state.epoch):
                state.scheduler.step()  # type: ignore[union-attr]
            state.mark_changed(epoch)
        blobs.append(state.snapshot().blob)
    assert float(rate) == 0.0625
    state.load(blobs[0])
    assert inner.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25


@pytest.mark.parametrize("epoch", [0, 2, 6])
def test_state_beyond_the_end_of_a_schedule_is_refused_with_nothing_changed(epoch: int) -> None:
    """Regression test: the parameters were loaded, and the epoch was not."""
    donor = training_state(20, weight=5.0, epoch=8)
    own = training_state(7, weight=1.0, epoch=epoch)
    rate, steps = own.inner.param_groups[0]["lr"], own.scheduler.state_dict()  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="cannot follow to epoch 8"):
        own.load(donor.snapshot().blob)
    assert own.epoch == epoch
    assert own.inner.param_groups[0]["lr"] == rate
    assert own.scheduler.state_dict() == steps  # type: ignore[union-attr]
    assert torch.equal(own.parameters[0].detach(), torch.full((3,), 1.0))
