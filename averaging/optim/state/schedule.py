"""The schedule of an optimizer's hyperparameters, which follows the epoch."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any, Final, Protocol

import torch

from averaging.optim.parameters import set_option
from swarm.core.errors import PeerError, UsageError

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
        """Set the hyperparameters to those of `epoch`. `present`: the epoch whose values they have now. Raise
        UsageError, with nothing changed, when the scheduler raises an error before that epoch.
        """
        try:
            self._move(epoch, present, again=epoch < present)
        except Exception as error:  # the caller's code: OneCycleLR has a last step, for instance
            with contextlib.suppress(Exception):  # the same error, if it had reached its end before
                self._move(present, present, again=True)
            raise UsageError(
                f"the scheduler cannot follow to epoch {epoch}, which the run has reached: {error}"
            ) from error

    def _move(self, epoch: int, present: int, *, again: bool) -> None:
        """`again`: begin at epoch 0."""
        if again:
            self._scheduler.load_state_dict(copy.deepcopy(self._first))
            for group, first in zip(self._groups, self._first_groups, strict=True):
                for key, value in first.items():
                    set_option(group, key, copy.deepcopy(value))
            present = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns if the optimizer has made no step yet
            for _ in range(present, epoch):
                self._scheduler.step()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
