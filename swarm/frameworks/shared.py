"""Parts of the callbacks for all frameworks: the schedule that the swarm steps, and refusals."""

from __future__ import annotations

from typing import Any

from averaging.optim.optimizer import Optimizer
from swarm.core.errors import NotEnoughPeers, UsageError

STATE_TIMEOUT_S = 600.0  # timeout of a download of the whole state
_REFUSED = (
    "changes the learning rate by the number of this peer's steps, so that the rates of the peers would "
    "differ: {cure}. The schedule of the run is the argument `scheduler` of swarm.Optimizer, which steps "
    "it once per epoch of the swarm on every peer"
)


class SharedSchedule:
    """The schedule of a run, for frameworks that expect a scheduler of their own.

    Stepping, saving and loading it have no effect: `optimizer` steps the schedule of the run once per epoch
    of the swarm, and saves it with its own state.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, *_: Any, **__: Any) -> None:
        """Change nothing."""

    def get_last_lr(self) -> list[float]:
        """Return the current learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Change nothing."""


def refuse_schedule(what: str, cure: str) -> UsageError:
    """Return the error for a schedule of a framework. `what` names the schedule, `cure` the remedy."""
    return UsageError(f"{what} {_REFUSED.format(cure=cure)}")


def check_one_process(processes: int) -> None:
    """Raise UsageError if the framework trains one model in several processes."""
    if processes > 1:
        raise UsageError(
            f"the framework trains in {processes} processes, and a swarm.Optimizer is for one: start each "
            "process as a peer of its own, without the framework's launcher"
        )


def begin(optimizer: Optimizer) -> None:
    """Continue after a pause, and load the swarm's state if it is ahead.

    Raises NotEnoughPeers if there are other peers and none could send its state.
    """
    optimizer.pause(False)
    load = optimizer.load_state_from_peers(timeout_s=STATE_TIMEOUT_S)
    if not load.loaded and not load.alone:
        raise NotEnoughPeers(f"the swarm's state could not be downloaded: {load.reason}")


def report_losses(optimizer: Optimizer, loss: Any, validation_loss: Any) -> None:
    """Publish losses that are numbers to the monitors of the run."""
    given = {"loss": loss, "validation_loss": validation_loss}
    numbers = {name: float(value) for name, value in given.items() if value is not None}
    if numbers:
        optimizer.report(**numbers)
