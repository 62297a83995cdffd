"""Errors in the outer step of DiLoCo: the base is stepped as a whole, or not at all."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from averaging.optim.catchup import CatchUp
from averaging.optim.modes import ModeSettings
from averaging.optim.modes.settings import Diloco
from tests.averaging.optim.seats import Seat, hold, prepare, seat

ALLOCATING = (
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.sub.Tensor,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.copy_.default,  # as if it went through a buffer
)


class Memory(TorchDispatchMode):
    """Memory that is enough for a number of operations."""

    def __init__(self, enough_for: int) -> None:
        super().__init__()
        self.left = enough_for

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ALLOCATING:
            self.left -= 1
            if self.left < 0:
                raise torch.OutOfMemoryError("out of memory")
        return func(*args, **(kwargs or {}))


def advance(one: Seat) -> None:
    """Apply the round as the optimizer does."""
    parts: Any = SimpleNamespace(clock=None, run_id="run", root_of=lambda epoch: None)
    parts.learner, parts.state = one.mode.learner, one.mode.state
    CatchUp(parts, parts, parts, parts, parts, None).advance(lambda: one.mode.apply([]))


def before_the_step(settings: ModeSettings) -> Seat:
    """Return a peer in its second round, alone."""
    one = seat(settings)
    one.step(1, 4)
    hold([one])
    one.step(2, 4)
    prepare([one])
    return one


@pytest.mark.parametrize("enough_for", range(8))
@pytest.mark.parametrize("settings", [Diloco(), Diloco(streaming=2)], ids=["plain", "streaming"])
def test_outer_step_is_made_as_a_whole_or_not_at_all(settings: ModeSettings, enough_for: int) -> None:
    """Regression test: after an error half of the base was stepped, which newcomers then downloaded."""
    one, other = before_the_step(settings), before_the_step(settings)
    before = one.mode.state.snapshot()
    with Memory(enough_for), contextlib.suppress(torch.OutOfMemoryError):
        advance(one)
    if one.mode.state.epoch > before.epoch:
        advance(other)
    assert one.mode.state.snapshot().digest == other.mode.state.snapshot().digest
    assert (one.mode.state.epoch > before.epoch) is (enough_for > 0), "memory is taken before the step"


@pytest.mark.parametrize("settings", [Diloco(), Diloco(streaming=2)], ids=["plain", "streaming"])
def test_parameters_that_were_written_in_part_return_to_the_base_with_the_next_step(
    settings: ModeSettings, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = before_the_step(settings), before_the_step(settings)
    with Memory(2), pytest.raises(torch.OutOfMemoryError):
        advance(one)
    one.mode.failed("cancelled")  # as the optimizer does after an error
    advance(other)
    other.mode.learner.set_weights(None)
    for table in (one, other):
        table.net.zero_grad()
        for p in table.net.parameters():
            p.grad = torch.ones_like(p)
        assert table.mode.learner.accumulate(3) is None
    assert torch.equal(one.theta, other.theta)
    assert "parameters were not written completely" in caplog.text
    assert one.mode.learner.samples == 3


def test_parameters_that_a_download_left_half_written_return_to_the_base(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regression test: the next round pulled everybody back to this peer's parameters of before."""
    one, other = before_the_step(Diloco()), before_the_step(Diloco())
    one.mode.failed("round")
    advance(other)
    one.mode.learner.suspend()
    one.mode.state.load(other.mode.state.snapshot().blob)
    with Memory(0), pytest.raises(torch.OutOfMemoryError):
        one.mode.learner.resume()
    other.mode.learner.set_weights(None)
    prepare([one])
    assert torch.equal(one.theta, other.theta)
    assert not any(view.any() for view in one.mode.tensors()), "it has nothing to contribute"
    assert "parameters were not written completely" in caplog.text
