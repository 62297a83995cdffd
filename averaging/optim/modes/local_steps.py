"""Peers that train apart between two rounds: local steps of the inner optimizer, beside a base that all of
them hold.

θ is this peer's own parameters, the model's. The base is where the last round left everybody, in float32; it
is what peers share, serve and keep equal, together with the outer optimizer's momentum. What θ is away from
it is what this peer has learned since. The inner optimizer's statistics are this peer's own: a newcomer
begins without, and its first round has weight 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from averaging.optim.accumulate import flaw_of_gradients, names_of
from averaging.optim.memory import home_of, room_beside
from averaging.optim.modes import ModeParts
from averaging.optim.modes.outer import Fragment, OuterSGD
from averaging.optim.state.training_state import TrainingState
from swarm.core.errors import UsageError

_log = logging.getLogger(__name__)

# of all parameters, and those that are trained
OuterFactory = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], OuterSGD]


@dataclass(slots=True)
class _SuspendedProgress:
    """What this peer had learned when it found that the swarm was elsewhere."""

    epoch: int
    version: int  # of the state: another one afterwards means that a state was loaded
    progress: list[torch.Tensor] | None  # θ - base; None: nothing was learned


class LocalSteps:
    """The learner of all modes with local steps.

    `carried_epochs_max`: what was learned on a base so many epochs old at most is added to the one that is
    loaded; older progress is dropped, as is all that was learned before the first round, on a base that need
    not have been the swarm's.
    """

    def __init__(self, parts: ModeParts, outer: OuterFactory, carried_epochs_max: int) -> None:
        self.inner, self._scheduler, self._carried_epochs_max = (
            parts.inner,
            parts.scheduler,
            carried_epochs_max,
        )
        parameters = _parameters(parts.inner)
        self.weights = [p for p in parameters if _is_trained(p)]
        if not self.weights:
            raise UsageError(
                "there is nothing to train: no parameter of the optimizer is a floating-point tensor that requires a gradient"
            )
        self._names = names_of(self.weights, parts.inner)
        home = home_of(self.weights, parts.offload)
        self.base = [torch.nn.Parameter(room_beside(p, home).copy_(p.detach())) for p in self.weights]
        bases = iter(self.base)
        self.outer = outer([next(bases) if _is_trained(p) else p for p in parameters], self.base)
        self.state = TrainingState(self.outer, parts.extras, parts.scheduler)
        self.newcomer = False  # the next round must not count what this peer learned
        self.total = 0  # samples, ever
        self.counted = 0  # of them those that are in a committed round, or dropped
        self.dropped = 0  # how many there were when something was dropped last
        # of them those that were there when the round that is being held began
        self._launched: int | None = None
        self._aside: _SuspendedProgress | None = None
        # no step was made yet: the base is what the parameters are when it is, whoever set them until then
        self._fresh = True

    # --- the interface

    @property
    def samples(self) -> int:
        return self.total - (self.counted if self._launched is None else self._launched)

    def accumulate(self, samples: int) -> str | None:
        """One local step."""
        flaw = flaw_of_gradients(self.weights, self._names)
        if flaw is None:
            if self._fresh:
                self._begin()
            self.inner.step()
            self.total += samples
        return flaw

    def restart(self) -> None:
        self._fresh = True

    def _begin(self) -> None:
        self._fresh = False
        with self.state.lock, torch.no_grad():
            for p, base in zip(self.weights, self.base, strict=True):
                base.copy_(p)

    def loaded(self) -> None:
        self.failed("")
        self._aside, self._fresh, self.newcomer = None, False, False
        self._take_learning_rates()
        self.follow(None)
        self.counted = self.dropped = self.total

    def set_aside(self) -> int:
        if self._aside is None:
            self.failed("")
            progress = self.progress() if self.total > 0 else None
            self._aside = _SuspendedProgress(self.state.epoch, self.state.version, progress)
        return 0

    def resume(self) -> int:
        aside, self._aside = self._aside, None
        if aside is None or self.state.version == aside.version:
            return 0
        self._fresh = False
        self._take_learning_rates()
        if (
            aside.progress is not None
            and aside.epoch > 0
            and self.state.epoch - aside.epoch <= self._carried_epochs_max
        ):
            self.follow(aside.progress)
            return 0
        self.follow(None)
        lost, self.newcomer = self.samples, True
        self.counted = self.dropped = self.total
        return lost

    def state_dict(self) -> dict[str, Any]:
        counts = {
            "total": self.total,
            "counted": self.counted,
            "dropped": self.dropped,
            "newcomer": self.newcomer,
        }
        return {**counts, "base": [base.detach() for base in self.base], "outer": self.outer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """UsageError when it belongs to another mode or to other parameters; nothing has changed then."""
        saved = state.get("base")
        if not isinstance(saved, list) or "outer" not in state:
            raise UsageError("this was not saved in a mode with local steps")
        if [tuple(t.shape) for t in saved] != [tuple(t.shape) for t in self.base]:
            raise UsageError("the saved base has other shapes than this optimizer's parameters")
        with torch.no_grad():
            for base, one in zip(self.base, saved, strict=True):
                base.copy_(one)
            for key, statistics in state["outer"]["state"].items():
                own = self.outer.state[_nth(self.outer, key)]
                for name, value in statistics.items():
                    own[name].copy_(value)
        self.total, self.counted, self.dropped = (
            int(state["total"]),
            int(state["counted"]),
            int(state["dropped"]),
        )
        self.newcomer = bool(state["newcomer"])
        self._launched = self._aside = None
        self._fresh = False

    # --- for the modes

    @property
    def away(self) -> bool:
        """The swarm is elsewhere: this peer weighs nothing."""
        return self._aside is not None

    def weight(self, since: int) -> float:
        """For a round that counts all samples after the first `since`."""
        return 0.0 if self.newcomer or self.away else float(self.total - max(since, 0))

    def launch(self) -> int:
        """A round begins; returns the samples so far."""
        self._launched = self.total
        return self.total

    @property
    def still(self) -> bool:
        """No step was made since the round began."""
        return self._launched == self.total

    def landed(self) -> int:
        """The round is committed; returns how many samples it counted, of all."""
        launched, self._launched = self._launched, None
        self.counted = self.total if launched is None else launched
        self.newcomer = False
        return self.counted

    def failed(self, reason: str) -> None:
        """The round did not come about."""
        self._launched = None
        if reason == "nobody contributes":  # newcomers among themselves: somebody has to begin
            self.newcomer = False

    def discard(self) -> None:
        """Local steps ended in NaN or infinity: back to the base."""
        _log.warning("%d samples are dropped: local steps ran into NaN or infinity", self.samples)
        self.follow(None)
        self.counted = self.dropped = self._launched = self.total

    def progress(self) -> list[torch.Tensor]:
        """θ - base: float32, where the base is. Rounding of the base to θ's type is not progress."""
        return [
            self.moved(Fragment(place, 0, base.numel())).neg_().view(base.shape)
            for place, base in enumerate(self.base)
        ]

    def moved(self, piece: Fragment) -> torch.Tensor:
        """base - θ of some elements: a pseudo-gradient, flat float32, where the base is."""
        p, base = self.weights[piece.place], self.base[piece.place]
        own = p.detach().reshape(-1)[piece.start : piece.stop].to(base.device, torch.float32)
        return base.detach().view(-1)[piece.start : piece.stop].to(p.dtype).to(torch.float32) - own

    def follow(self, progress: Sequence[torch.Tensor] | None) -> None:
        """θ <- base + progress; None: θ <- base, exactly."""
        with torch.no_grad():
            for place, (p, base) in enumerate(zip(self.weights, self.base, strict=True)):
                p.copy_(base if progress is None else base + progress[place])

    def own(self, piece: Fragment) -> torch.Tensor:
        """A copy of θ's elements: flat float32, where the base is."""
        p = self.weights[piece.place].detach().reshape(-1)[piece.start : piece.stop]
        return p.to(self.base[piece.place].device, torch.float32, copy=True)

    def put(self, piece: Fragment, values: torch.Tensor) -> None:
        """θ's elements <- values."""
        p = self.weights[piece.place].detach()
        if p.is_contiguous():
            p.view(-1)[piece.start : piece.stop].copy_(values)
        else:
            whole = p.flatten()
            whole[piece.start : piece.stop].copy_(values)
            p.copy_(whole.view(p.shape))

    def _take_learning_rates(self) -> None:
        """The schedule was loaded; it writes the inner optimizer's learning rates only when it steps."""
        rates = self._scheduler.state_dict().get("_last_lr") if self._scheduler is not None else None
        if isinstance(rates, list) and len(rates) == len(self.inner.param_groups):
            for group, rate in zip(self.inner.param_groups, rates, strict=True):
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate


def _is_trained(p: torch.Tensor) -> bool:
    return p.requires_grad and p.is_floating_point()


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All of them, each once."""
    return list({id(p): p for group in optimizer.param_groups for p in group["params"]}.values())


def _nth(optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    """The parameter that a state dict of this optimizer calls `number`."""
    found: torch.Tensor = [p for group in optimizer.param_groups for p in group["params"]][number]
    return found
