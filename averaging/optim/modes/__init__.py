"""The interface of training modes: the only code that differs from one mode to another.
`averaging.optim.epochs` does everything else.

A new mode is one class with the methods of `Mode`, over a `Learner` (`gradients.py` and `local_steps.py`
have the two that exist), and a frozen dataclass with its settings (`settings.py`), which a user passes to
`swarm.Optimizer(mode=…)`. `gossip.py` is the shortest example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from averaging.optim.finite import RejectedSamples
from averaging.optim.offload import HostLink, link_of
from averaging.optim.state.schedule import Scheduler
from averaging.optim.state.training_state import TrainingState
from averaging.result import RoundFailure
from swarm.compression.adaptive import Role

CapturedRound = Any  # result of a round, kept by a mode to be replayed


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeTraits:
    """Properties of a mode that the epoch loop must know. They are the same on all peers."""

    compatibility_tag: str  # the mode with its settings, as text; only peers with equal tags form a group
    # kind of tensor that rounds average, for codec="adaptive": see swarm.compression.adaptive.ROLES
    role: Role
    # local steps change this peer's own parameters: its progress outlives a failed round
    keeps_progress: bool = False
    overlapped: bool = False  # training continues while a round runs
    # for an overlapped mode: apply a round exactly this many local steps later; None: as soon as it has ended
    delay_steps: int | None = None
    flat: bool = False  # rounds average parameters laid end to end, which are no matrices any more
    # rounds alternate between this many parts of the model, each with its own error feedback
    slots: int = 1
    group_size: int | None = None  # peers in a round; None: all
    proceeds_alone: bool = False  # a peer without a partner steps alone, even if other peers are live
    # all peers hold the same state after a round, and average it at intervals; False: there is no common
    # state
    canonical: bool = True
    # default interval of rounds over the state; the states stay equal for about this long without them
    state_sync_epochs: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeParts:
    """The parts that a mode is built from: the user's optimizer, and the tensors and scheduler that are
    shared with it.
    """

    inner: torch.optim.Optimizer
    extras: tuple[torch.Tensor, ...] = ()
    scheduler: Scheduler | None = None
    offload: bool = False  # keep the mode's own tensors on the host
    # returns the link for copies between a device and the host; tests replace it
    make_link: Callable[[torch.device], HostLink | None] = link_of


class Learner(Protocol):
    """This peer's own work between two rounds. Called on the trainer's thread only."""

    @property
    def samples(self) -> int:
        """Return the number of accumulated samples that are not part of a round yet."""
        ...

    def accumulate(self, samples: int) -> str | None:
        """Take the gradients in `.grad`, over `samples` samples. Return the reason when they were refused,
        else None.

        On a device their defects may be known only later: such gradients have had no effect, and `refused`
        reports them.
        """
        ...

    def refused(self, *, wait: bool) -> RejectedSamples:
        """Return the samples that were accepted and have turned out not to be finite since the last call.
        `wait`: evaluate all pending checks, so that `samples` is exact; this may wait for the device.
        """
        ...

    def restart(self) -> None:
        """Adopt the model's present parameters, which a checkpoint without swarm state has set."""
        ...

    def loaded(self) -> None:
        """Continue from a checkpoint's state, which has replaced this one; drop what was accumulated. The
        state's lock is held.
        """
        ...

    @property
    def has_late_samples(self) -> bool:
        """Return whether some of `samples` are dropped unless they are part of this epoch's round."""
        ...

    def suspend(self) -> None:
        """Suspend this peer's own progress, because the swarm's state is about to be loaded: until `resume`
        this peer has weight 0. A second call has no effect.
        """
        ...

    def resume(self, *, parted: bool = False, counted: bool = False) -> int:
        """Continue after the state was loaded, or could not be, with the suspended progress if it is still
        valid. Return the number of dropped samples. The state's lock is held.

        `parted`: the loaded state does not follow from the one that the progress was made on, because that
        one's history lost a reunion. `counted`: the loaded state may contain the progress already.
        """
        ...


class Mode(Protocol):
    """One peer's part in the rounds. Called on the trainer's thread only."""

    @property
    def traits(self) -> ModeTraits:
        """Return the mode's properties."""
        ...

    @property
    def state(self) -> TrainingState:
        """Return the state that peers share, serve to newcomers, and keep equal."""
        ...

    @property
    def learner(self) -> Learner:
        """Return the part that trains between two rounds."""
        ...

    def tensors(self) -> Sequence[torch.Tensor]:
        """Return the tensors that a round averages: the same float tensors for the life of the mode, in the
        same layout on all peers.
        """
        ...

    def prepare(self, epoch: int) -> tuple[float, Any]:
        """Fill `tensors()` for the round of `epoch`, or for a step without a round. They do not change
        until `apply`, `failed` or `capture`. Return this peer's weight, and the metadata that all
        members receive (msgpack, a few kB).
        """
        ...

    def merge_metadata(self, metadata: Sequence[Any]) -> Any:
        """Return the metadata of the next of several rounds of an epoch, from what the members of the last
        one sent.
        """
        ...

    def apply(self, metadata: Sequence[Any]) -> None:
        """Move the state one epoch forward with the average in `tensors()`, or with what `prepare` left
        there if this peer is alone.

        `metadata`: what each member sent with the round. The state's lock is held. What was accumulated is
        used up. A mode that raises an error after a complete step of the state sets `state.has_stepped`.
        """
        ...

    def failed(self, reason: RoundFailure) -> None:
        """Undo `prepare` after its round failed (`reason` is `RoundResult.reason`), and keep the samples for
        the next round.
        """
        ...

    def capture(self, epoch: int, metadata: Sequence[Any]) -> CapturedRound:
        """Copy the result of the committed round of `epoch`, for `replay`, without changing the state.
        `tensors()` are free again afterwards.
        """
        ...

    def replay(self, captured: CapturedRound) -> None:
        """Do what `apply` does, with a captured round, on a state that was loaded. Called before
        `Learner.resume`.
        """
        ...

    def on_state_averaged(self, before: Sequence[torch.Tensor]) -> None:
        """Update derived values after the state was averaged. The state's lock is held.

        `before`: the previous values of the state's trained parameters, in their order. They may be
        overwritten.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state that resuming needs in addition to parameters and inner optimizer. A round in the
        background counts as not made. Tensors are references.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`. Raise UsageError when it was saved in another mode."""
        ...


class ModeSettings(Protocol):
    """Settings of a mode: a frozen dataclass, equal on all peers. `Optimizer(mode=…)` takes one, or its
    name for the defaults.
    """

    @property
    def name(self) -> str:
        """Return the name of the mode."""
        ...

    def build(self, parts: ModeParts) -> Mode:
        """Build the mode."""
        ...
