"""What distinguishes one way of training together from another. `averaging.training.epochs` does everything else.

Another mode is one class with these methods and one line in `averaging.optimizer.MODES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from averaging.training.state import TrainingState

Captured = Any  # what a round brought, kept by a mode to be replayed


class Mode(Protocol):
    """One peer's part between two rounds. Called on the trainer's thread only."""

    def accumulate(self, samples: int) -> str | None:
        """A local step was made over `samples` samples: take what it gave. Returns why nothing was taken, or None."""
        ...

    @property
    def samples(self) -> int:
        """Samples taken since the epoch began."""
        ...

    def tensors(self) -> Sequence[torch.Tensor]:
        """What a round averages: the same float tensors for the life of the mode, in the same layout on all peers."""
        ...

    def prepare(self) -> tuple[float, Any]:
        """Right before a round: make `tensors()` ready. Returns this peer's weight, and what all members are told (msgpack, a few kB)."""
        ...

    def apply(self, told: Sequence[Any]) -> None:
        """`tensors()` hold the average, or this peer's own values if it is alone: move the parameters on by one epoch.

        `told`: what each member passed on. The state's lock is held. What was accumulated is spent.
        """
        ...

    def drop(self) -> int:
        """Forget what was accumulated; returns how many samples that were."""
        ...

    def capture(self, told: Sequence[Any]) -> Captured:
        """Keep what a committed round brought, for `replay`; the parameters stay as they are. `tensors()` are free again afterwards."""
        ...

    def replay(self, captured: Captured) -> None:
        """As `apply`, from what was captured."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What resuming within an epoch needs."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ModeFactory(Protocol):
    def __call__(self, state: TrainingState) -> Mode: ...
