"""The schedule of an optimizer's hyperparameters, which follows the epoch."""

from __future__ import annotations

import copy
import warnings
from typing import Any, Final, Protocol

import torch

from swarm.core.errors import PeerError

# a state of a later epoch is refused: moving the schedule there would take too long, at about 10 microseconds
# per step
STEPS_MAX: Final = 1 << 20


class Scheduler(Protocol):
    """The part of a torch learning-rate scheduler that is used here."""

    def step(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class EpochSchedule:
    """A scheduler that is stepped once per epoch, and can be moved to any epoch without a state from another
    peer.
    """

    def __init__(self, inner: torch.optim.Optimizer, scheduler: Scheduler) -> None:
        """Take the present values as those of epoch 0."""
        self._scheduler = scheduler
        # in modes with local steps, the schedule drives a different optimizer from the one in the state
        self._groups: list[dict[str, Any]] = getattr(scheduler, "optimizer", inner).param_groups
        self._first = copy.deepcopy(scheduler.state_dict())
        self._first_groups = [_settings(group) for group in self._groups]

    @staticmethod
    def check(epoch: int) -> None:
        """Raise PeerError for an epoch that is too far away for a schedule."""
        if epoch > STEPS_MAX:
            raise PeerError(f"a state of epoch {epoch}; a schedule has at most {STEPS_MAX} epochs")

    def move_to(self, epoch: int, present: int) -> None:
        """Set the hyperparameters to those of `epoch`. `present`: the epoch whose values they have now."""
        if epoch < present:
            self._scheduler.load_state_dict(copy.deepcopy(self._first))
            for group, first in zip(self._groups, self._first_groups, strict=True):
                group.update(copy.deepcopy(first))
            present = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns if the optimizer has made no step yet
            for _ in range(present, epoch):
                self._scheduler.step()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
