"""Checks of the arguments of `swarm.Optimizer`."""

from __future__ import annotations

import torch

from averaging.optim.delegating import DelegatingOptimizer
from averaging.optim.modes import ModeSettings
from averaging.optim.modes.settings import ModeName, settings_of
from averaging.optim.progress.logic.reports import SAMPLES_MAX
from averaging.optim.state.encoding import EXACT, check_state_codec
from swarm.core.errors import UsageError


def check_arguments(
    inner: torch.optim.Optimizer,
    mode: ModeName | ModeSettings,
    batch_size_per_step: int | None,
    state_sync_epochs: int | None,
) -> ModeSettings:
    """Return the settings of a mode. Raise UsageError for wrong arguments of `swarm.Optimizer`."""
    if not isinstance(inner, torch.optim.Optimizer) or isinstance(inner, DelegatingOptimizer):
        raise UsageError(
            "the first argument is a torch optimizer such as torch.optim.AdamW(model.parameters()), "
            f"not {inner!r:.60}"
        )
    if batch_size_per_step is not None:
        check_samples(batch_size_per_step)
    if state_sync_epochs is not None and (not isinstance(state_sync_epochs, int) or state_sync_epochs < 0):
        raise UsageError(
            f"state_sync_epochs is a whole number of epochs, 0 for never, not {state_sync_epochs!r}"
        )
    return settings_of(mode)


def check_samples(value: int | None) -> int:
    """Return a number of samples. Raise UsageError when it is none, or not given."""
    if value is None:
        raise UsageError(
            "say how many samples are behind the gradients: "
            "step(batch_size) or Optimizer(batch_size_per_step=…)"
        )
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= SAMPLES_MAX:
        raise UsageError(f"a number of samples is a positive whole number, not {value!r:.60}")
    return value


def check_peers(count: int) -> None:
    """Raise UsageError unless `count` is a positive number of peers."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UsageError(f"a number of peers is at least 1, not {count!r:.60}")


def check_load(timeout_s: float, codec: str, *, may_round: bool) -> None:
    """Raise UsageError for wrong arguments of a download of the state. `may_round`: a later round over the
    state removes the difference that a codec other than float32 makes.
    """
    if check_state_codec(codec) != EXACT and not may_round:
        raise UsageError(
            f"codec={codec!r} rounds what is loaded, and with state_sync_epochs=0 this peer would differ "
            "from the others forever: leave one of the two out"
        )
    if not 0 < timeout_s < float("inf"):
        raise UsageError(f"timeout_s must be a positive number of seconds, not {timeout_s!r}")
