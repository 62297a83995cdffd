"""What distinguishes one way of training together from another. `averaging.optim.epochs` does everything
else.

Another mode is one class with the methods of `Mode`, over a `Learner` (`gradients.py` and `apart.py` have the
two there are), and a frozen dataclass with its settings (`settings.py`), which a user hands to
`swarm.Optimizer(mode=…)`. `gossip.py` is the shortest example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from averaging.optim.finite import Refused
from averaging.optim.offload import HostLink, link_of
from averaging.optim.state.training_state import Scheduler, TrainingState

Captured = Any  # what a round brought, kept by a mode to be replayed


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeTraits:
    """What the epochs' machinery must know about a mode; the same on all peers."""

    terms: str  # the mode with its settings, in words: peers compare them before they meet
    role: str  # of what its rounds average, for codec="adaptive": see swarm.compression.adaptive.ROLES
    # local steps move this peer's own parameters: what it learned outlives a failed round
    keeps_progress: bool = False
    overlapped: bool = False  # training goes on while a round is held
    # of an overlapped mode: apply a round after so many more steps, not sooner; None: when it is there
    delay_steps: int | None = None
    # rounds take turns between so many parts of the model, each with an error feedback of its own
    slots: int = 1
    group_size: int | None = None  # peers in a round; None: all
    lone: bool = False  # who finds no partner goes on by itself, though others live
    # all peers hold the same state after a round, and average it now and then; False: there is no such state
    canonical: bool = True
    # how often, unless the user says: what they hold stays equal by itself for so long
    state_sync_epochs: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeParts:
    """What a mode is made of: the user's optimizer, and what is shared beside it."""

    inner: torch.optim.Optimizer
    extras: tuple[torch.Tensor, ...] = ()
    scheduler: Scheduler | None = None
    offload: bool = False  # what the mode keeps beside the model lies on the host
    # how copies between a device and the host are made; for tests
    make_link: Callable[[torch.device], HostLink | None] = link_of


class Learner(Protocol):
    """What this peer does by itself between two rounds. Called on the trainer's thread only."""

    @property
    def samples(self) -> int:
        """Samples taken that no round has been asked to count yet."""
        ...

    def accumulate(self, samples: int) -> str | None:
        """Gradients over `samples` samples are in `.grad`: take them. Returns why nothing was taken, or None.

        On a device it may be known only later that they were of no use: nothing has come of them then, and
        `refused` tells.
        """
        ...

    def refused(self, *, wait: bool) -> Refused:
        """Return the samples that were taken and have turned out to be of no use since the last call. `wait`:
        find out about all of them, so that `samples` is exact, which may wait for the device.
        """
        ...

    def restart(self) -> None:
        """The model's parameters were set from outside, by a checkpoint that knows nothing of the swarm: they
        are what counts.
        """
        ...

    def loaded(self) -> None:
        """The state was replaced by a checkpoint's: go on from it; what was accumulated is dropped. The
        state's lock is held.
        """
        ...

    def set_aside(self) -> int:
        """The swarm is somewhere else, and its state is about to be loaded: until `resume` this peer weighs
        nothing. A second call does nothing. Returns how many samples are lost for good.
        """
        ...

    def resume(self) -> int:
        """The state is loaded, or there was none to load: go on from it, with what was set aside where it
        still counts; returns how many samples are lost. The state's lock is held.
        """
        ...


class Mode(Protocol):
    """One peer's part in the rounds. Called on the trainer's thread only."""

    @property
    def traits(self) -> ModeTraits: ...

    @property
    def state(self) -> TrainingState:
        """What peers share, serve to newcomers, and keep equal."""
        ...

    @property
    def learner(self) -> Learner: ...

    def tensors(self) -> Sequence[torch.Tensor]:
        """What a round averages: the same float tensors for the life of the mode, in the same layout on all
        peers.
        """
        ...

    def prepare(self, epoch: int) -> tuple[float, Any]:
        """Right before the round of `epoch`, or before going on alone: make `tensors()` ready, which lie
        still until `apply`, `failed` or `capture`. Returns this peer's weight, and what all members are told
        (msgpack, a few kB).
        """
        ...

    def apply(self, told: Sequence[Any]) -> None:
        """`tensors()` hold the average, or what `prepare` left if this peer is alone: move the state on by
        one epoch.

        `told`: what each member passed on. The state's lock is held. What was accumulated is spent.
        """
        ...

    def failed(self, reason: str) -> None:
        """The round for which `prepare` was called did not come about (`AveragingResult.reason`): what it was
        to count is still there.
        """
        ...

    def capture(self, epoch: int, told: Sequence[Any]) -> Captured:
        """Keep what the committed round of `epoch` brought, for `replay`; nothing moves. `tensors()` are free
        again afterwards.
        """
        ...

    def replay(self, captured: Captured) -> None:
        """As `apply`, from what was captured, on a state that was loaded; before `Learner.resume`."""
        ...

    def settled(self, before: Sequence[torch.Tensor]) -> None:
        """The state was averaged: whatever follows from it follows. The state's lock is held.

        `before`: what the parameters of the state that are trained were before that, in their order. They may
        be written.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs beside parameters and inner optimizer. A round that is held counts as not made.
        Tensors are references.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """UsageError when it was saved in another mode."""
        ...


class ModeSettings(Protocol):
    """A frozen dataclass: equal on all peers. `Optimizer(mode=…)` takes one, or its name for the defaults."""

    @property
    def name(self) -> str: ...

    def build(self, parts: ModeParts) -> Mode: ...
