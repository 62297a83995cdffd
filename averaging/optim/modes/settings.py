"""The settings of each mode, and the modes by name, for `swarm.Optimizer(mode=…)`. Settings must be equal
on all peers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from averaging.optim.modes import ModeParts, ModeSettings, ModeTraits
from averaging.optim.modes.diloco import DilocoMode, OuterSettings
from averaging.optim.modes.gossip import GossipMode, GossipRates
from averaging.optim.modes.gradients import GradientsMode
from swarm.core.errors import UsageError

_STATE_SYNC_EPOCHS_OF_LOCAL_STEPS = 100  # epochs: outer states are equal bit for bit on every processor


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """One large synchronous batch over the whole swarm: gradients are averaged, and all peers step once an
    epoch.
    """

    name: ClassVar[str] = "gradients"

    # compute the next epoch's gradients during the round, on parameters that lack its step
    delayed: bool = False

    def build(self, parts: ModeParts) -> GradientsMode:
        return GradientsMode(parts, delayed=self.delayed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Local steps of the inner optimizer; once an epoch parameters are averaged, weighted by samples."""

    name: ClassVar[str] = "local"

    def build(self, parts: ModeParts) -> DilocoMode:
        """Build the mode. The average of parameters equals the base minus the average pseudo-gradient: an
        outer step with a learning rate of 1.
        """
        traits = ModeTraits(
            compatibility_tag="local",
            role="pseudo_gradient",
            keeps_progress=True,
            state_sync_epochs=_STATE_SYNC_EPOCHS_OF_LOCAL_STEPS,
        )
        return DilocoMode(
            parts,
            OuterSettings(
                lr=1.0,
                momentum=0.0,
                nesterov=False,
                fragments=1,
                traits=traits,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Diloco:
    """Local steps; once an epoch an outer step with Nesterov momentum on the average of the
    pseudo-gradients (DiLoCo).
    """

    name: ClassVar[str] = "diloco"

    outer_lr: float = 0.7  # learning rate of the outer step
    momentum: float = 0.9  # momentum of the outer step; 0: none, and no tensors for it
    nesterov: bool = True  # look ahead along the momentum, as DiLoCo does
    # number of fragments of the model, of equal size. 1: the whole model each epoch, while training waits.
    # More: each epoch synchronises the next fragment while training continues, so that a fragment's period is
    # this many epochs; divide target_batch_size by it to keep the period
    streaming: int = 1
    # the whole model each epoch, while training continues: a peer keeps its own progress at once, and gets
    # that of the others with the outer step at the end of the round, at most one epoch late
    delayed: bool = False
    # streaming, delayed: apply a round after this many further local steps, waiting for it if necessary;
    # None: as soon as it has ended, at most one epoch later
    delay_steps: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.outer_lr < float("inf") or not 0 <= self.momentum < 1:
            raise UsageError("Diloco needs an outer_lr above 0 and a momentum from 0 to below 1")
        if self.streaming < 1 or (
            self.delay_steps is not None and (self.delay_steps < 0 or not self.overlapped)
        ):
            raise UsageError(
                "Diloco: streaming is a number of fragments, at least 1; "
                "delay_steps is not negative, and for streaming or delayed only"
            )
        if self.delayed and self.streaming > 1:
            raise UsageError("Diloco: rounds of fragments are always delayed: leave delayed out")

    @property
    def overlapped(self) -> bool:
        """Return whether rounds run while training continues."""
        return self.delayed or self.streaming > 1

    def build(self, parts: ModeParts) -> DilocoMode:
        nesterov = self.nesterov and self.momentum > 0
        traits = ModeTraits(
            compatibility_tag=f"diloco outer_lr={self.outer_lr:g} momentum={self.momentum:g} "
            f"nesterov={nesterov:d} streaming={self.streaming}" + " delayed" * self.delayed,
            role="pseudo_gradient",
            keeps_progress=True,
            overlapped=self.overlapped,
            delay_steps=self.delay_steps,
            flat=self.overlapped,
            slots=self.streaming,
            state_sync_epochs=_STATE_SYNC_EPOCHS_OF_LOCAL_STEPS,
        )
        outer = OuterSettings(
            lr=self.outer_lr,
            momentum=self.momentum,
            nesterov=nesterov,
            fragments=self.streaming,
            traits=traits,
        )
        return DilocoMode(parts, outer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gossip:
    """Local steps; once an epoch an exchange with one other peer (NoLoCo). Parameters differ between peers
    but stay close to one another.
    """

    name: ClassVar[str] = "gossip"

    outer_lr: float = 0.7  # β: learning rate for the mean progress of the two peers
    momentum: float = 0.5  # μ
    consensus: float = 0.7  # γ: fraction of the way towards the mean of the two bases

    def __post_init__(self) -> None:
        if not 0 < self.outer_lr < float("inf") or not 0 <= self.momentum < 1 or not 0 <= self.consensus < 2:
            raise UsageError(
                "Gossip needs an outer_lr above 0, a momentum from 0 to below 1, "
                "and a consensus from 0 to below 2"
            )

    def build(self, parts: ModeParts) -> GossipMode:
        traits = ModeTraits(
            compatibility_tag=f"gossip outer_lr={self.outer_lr:g} momentum={self.momentum:g} "
            f"consensus={self.consensus:g}",
            role="parameter",
            keeps_progress=True,
            group_size=2,
            proceeds_alone=True,
            canonical=False,
        )
        rates = GossipRates(momentum=self.momentum, lr=self.outer_lr, consensus=self.consensus)
        return GossipMode(parts, rates, traits)


ModeName: TypeAlias = Literal["gradients", "local", "diloco", "gossip"]
MODES: dict[str, type[Gradients | Local | Diloco | Gossip]] = {
    mode.name: mode for mode in (Gradients, Local, Diloco, Gossip)
}


def settings_of(mode: ModeName | ModeSettings) -> ModeSettings:
    """Return a mode's settings: the given ones, or the defaults of a name. Raise UsageError with the list
    of names for an unknown one.
    """
    if not isinstance(mode, str):
        if not hasattr(mode, "build") or not hasattr(mode, "name"):
            raise UsageError(
                f"mode is a name ({', '.join(MODES)}) or settings such as Diloco(streaming=4), "
                f"not {mode!r:.60}"
            )
        return mode
    if mode not in MODES:
        raise UsageError(f"there is no mode {mode!r}; there is: {', '.join(MODES)}")
    return MODES[mode]()
