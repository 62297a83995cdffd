"""Mode `gossip` (NoLoCo, arXiv 2506.10911): rounds of two peers. There is no all-reduce, and no peer waits
for more than one other.

Each peer has its own base. The base is pulled towards the partner's, in addition to the step that both make
with what both have learned: m <- μ·m + β·mean(θ - base) + γ·(mean(base) - base); base <- base + m; θ <-
base. Partners change from round to round (docs/decisions/0013).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from averaging.optim.finite import all_finite
from averaging.optim.memory import zeros_like
from averaging.optim.modes import ModeParts, ModeTraits
from averaging.optim.modes.local_steps import LocalSteps
from averaging.optim.modes.outer import MOMENTUM, OuterSGD
from averaging.result import RoundFailure


@dataclass(frozen=True, slots=True)
class GossipRates:
    """The rates μ, β and γ of the module's formula."""

    momentum: float
    lr: float
    consensus: float


class GossipMode:
    """Gossip averaging. A round averages two vectors end to end: the peers' progress and their bases."""

    def __init__(self, parts: ModeParts, rates: GossipRates, traits: ModeTraits) -> None:
        self.traits, self._rates = traits, rates

        def outer(parameters: Sequence[torch.Tensor], trained: Sequence[torch.Tensor]) -> OuterSGD:
            return OuterSGD(parameters, trained, lr=rates.lr, momentum=rates.momentum, nesterov=False)

        self.learner = LocalSteps(parts, outer)
        self.state = self.learner.state
        self._progress = [zeros_like(base) for base in self.learner.base]
        self._bases = [zeros_like(base) for base in self.learner.base]

    def tensors(self) -> list[torch.Tensor]:
        return [*self._progress, *self._bases]

    def prepare(self, epoch: int) -> tuple[float, Any]:
        learner = self.learner
        learner.begin_round()
        for progress, mine, base in zip(self._progress, self._bases, learner.base, strict=True):
            progress.copy_(base.detach())
            mine.copy_(base.detach())
        learner.progress_(self._progress)
        if not all_finite(self._progress):
            learner.reset_to_base("local steps resulted in NaN or infinity")
            torch._foreach_zero_(self._progress)
        # equal weights: the mean of all bases moves by the mean of all progress
        return 0.0 if learner.is_suspended else 1.0, None

    def merge_metadata(self, metadata: Sequence[Any]) -> None:
        return None

    def apply(self, metadata: Sequence[Any]) -> None:
        rates = self._rates
        with torch.no_grad():
            for base, progress, middle in zip(self.learner.base, self._progress, self._bases, strict=True):
                step = progress.mul_(rates.lr).add_(middle.sub_(base), alpha=rates.consensus)
                if rates.momentum:
                    step = self.learner.outer.state[base][MOMENTUM].mul_(rates.momentum).add_(step)
                base.add_(step)
        self.learner.set_weights(None)
        self.learner.commit_round()

    def failed(self, reason: RoundFailure) -> None:
        self.learner.failed(reason)

    def capture(self, epoch: int, metadata: Sequence[Any]) -> None:
        self.learner.failed("")

    def replay(self, captured: None) -> None:
        """Do nothing: a round of other peers is no part of the loaded state, whose donor proceeds without
        it, as this peer does.
        """

    def on_state_averaged(self, before: Sequence[torch.Tensor]) -> None:
        self.learner.progress_(before)
        self.learner.set_weights(before)

    def state_dict(self) -> dict[str, Any]:
        return self.learner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state)
