"""Modes `diloco` (arXiv 2311.08105), its streaming form (arXiv 2501.18512), and `local`, which is the same
with a plain outer step.

Between rounds each peer makes local steps. A round averages the pseudo-gradients base - θ, weighted by
samples, and every peer applies the same outer step to the base. In streaming mode a round is for one of
several fragments of the model and runs while training continues; local steps made meanwhile are kept, since
only the difference is added to θ. Delayed rounds do the same with the whole model, the eager form of
arXiv 2502.12996 without its guess of what the others will bring.

A round that failed for all peers changes nothing: θ and base stay, and the next pseudo-gradient covers both
periods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from averaging.optim.finite import all_finite
from averaging.optim.memory import Fragment, zeros_for
from averaging.optim.modes import ModeParts, ModeTraits
from averaging.optim.modes.local_steps import LocalSteps
from averaging.optim.modes.outer import OuterSGD, fragments_of
from averaging.result import RoundFailure
from swarm.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSettings:
    """Settings of `DilocoMode`."""

    lr: float
    momentum: float
    nesterov: bool
    fragments: int
    traits: ModeTraits


@dataclass(frozen=True, slots=True)
class CapturedDeltas:
    """The averaged pseudo-gradient of one round that this peer did not contribute to."""

    epoch: int
    deltas: list[torch.Tensor]  # flat float32, one for each of the fragment's parts


class DilocoMode:
    """DiLoCo. The round of epoch e is for fragment e mod `fragments`."""

    def __init__(self, parts: ModeParts, settings: OuterSettings) -> None:
        self.traits = settings.traits

        def outer(parameters: Sequence[torch.Tensor], trained: Sequence[torch.Tensor]) -> OuterSGD:
            return OuterSGD(
                parameters, trained, lr=settings.lr, momentum=settings.momentum, nesterov=settings.nesterov
            )

        self.learner = LocalSteps(parts, outer)
        self.state = self.learner.state
        base = self.learner.base
        self._fragments = fragments_of([one.numel() for one in base], settings.fragments)
        # per fragment: number of this peer's samples counted up to its last committed round
        self._counted_at = [0] * settings.fragments
        if not self.traits.overlapped:
            self._tensors = [zeros_for(one.shape, one.device) for one in base]
            self._views = [[tensor.view(-1) for tensor in self._tensors if tensor.numel()]]
            self._weights_at_start: torch.Tensor | None = None
        else:
            size = max(sum(piece.numel for piece in pieces) for pieces in self._fragments)
            whole = zeros_for((size,), base[0].device)
            self._tensors, self._views = (
                [whole],
                [_consecutive_views(whole, pieces) for pieces in self._fragments],
            )
            self._weights_at_start = torch.empty_like(whole)  # θ's elements when the round began

    def tensors(self) -> list[torch.Tensor]:
        return self._tensors

    def prepare(self, epoch: int) -> tuple[float, Any]:
        learner, number = self.learner, epoch % len(self._fragments)
        learner.begin_round()
        if learner.is_suspended:
            return 0.0, None
        pieces, views = self._fragments[number], self._views[number]
        learner.read(pieces, views)
        if self._weights_at_start is not None:
            for own, view in zip(_consecutive_views(self._weights_at_start, pieces), views, strict=True):
                own.copy_(view)
        learner.pseudo_gradient_(pieces, views)
        if not all_finite(self._views[number]):
            learner.reset_to_base("local steps resulted in NaN or infinity")
            for view in self._views[number]:
                view.zero_()
        return learner.weight(max(self._counted_at[number], learner.dropped)), None

    def merge_metadata(self, metadata: Sequence[Any]) -> None:
        return None

    def apply(self, metadata: Sequence[Any]) -> None:
        number = self.state.epoch % len(self._fragments)
        try:
            self._step(number)
        except BaseException:
            if self.state.has_stepped:
                self.learner.rewrite_later()
            raise
        finally:
            if self.state.has_stepped:
                self._counted_at[number] = self.learner.commit_round()

    def _step(self, number: int) -> None:
        """Make the outer step, and write what follows to θ."""
        learner, pieces, views = self.learner, self._fragments[number], self._views[number]
        has_no_new_steps = learner.has_no_new_steps
        self._outer_step(number, views)
        bases = [learner.base[piece.place].detach().view(-1)[piece.start : piece.stop] for piece in pieces]
        if self._weights_at_start is None or has_no_new_steps:
            learner.write(pieces, bases)
        else:
            learner.read(pieces, views)  # the outer step has overwritten the views
            for view, base, own in zip(
                views, bases, _consecutive_views(self._weights_at_start, pieces), strict=True
            ):
                view.add_(base - own)
            learner.write(pieces, views)

    def failed(self, reason: RoundFailure) -> None:
        self.learner.failed(reason)

    def capture(self, epoch: int, metadata: Sequence[Any]) -> CapturedDeltas:
        self.learner.failed("")
        return CapturedDeltas(epoch, [view.clone() for view in self._views[epoch % len(self._fragments)]])

    def replay(self, captured: CapturedDeltas) -> None:
        self._outer_step(captured.epoch % len(self._fragments), captured.deltas)

    def on_state_averaged(self, before: Sequence[torch.Tensor]) -> None:
        self.learner.progress_(before)
        self.learner.set_weights(before)

    def state_dict(self) -> dict[str, Any]:
        return {**self.learner.state_dict(), "sent_at": list(self._counted_at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = len(state.get("sent_at", ()))
        if parts != len(self._counted_at):
            raise UsageError(
                f"this was saved in a mode whose rounds alternate between {parts} parts of the model; "
                f"this mode has {len(self._counted_at)}"
                if parts
                else "this was not saved in a mode with local steps and rounds of all peers"
            )
        self.learner.load_state_dict(state)
        self._counted_at = [int(samples) for samples in state["sent_at"]]

    def _outer_step(self, number: int, deltas: Sequence[torch.Tensor]) -> None:
        parts = [
            (self.learner.base[piece.place], delta, piece.start, piece.stop)
            for piece, delta in zip(self._fragments[number], deltas, strict=True)
        ]
        self.learner.outer.step_parts(parts, partial(setattr, self.state, "has_stepped", True))


def _consecutive_views(whole: torch.Tensor, pieces: Sequence[Fragment]) -> list[torch.Tensor]:
    """Return views of a flat tensor for fragments that lie in it end to end."""
    views, at = [], 0
    for piece in pieces:
        views.append(whole[at : at + piece.numel])
        at += piece.numel
    return views
