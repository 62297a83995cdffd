"""Mode `gradients`: one large synchronous batch over the whole swarm (DeDLOC, arXiv 2106.10207)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from averaging.optim.accumulate import GradientAccumulator, bit_field, names_of
from averaging.optim.finite import RejectedSamples
from averaging.optim.memory import storage_for, zeros_like
from averaging.optim.modes import ModeParts, ModeTraits
from averaging.optim.parameters import is_trained
from averaging.optim.state.training_state import TrainingState
from averaging.result import RoundFailure

# a contribution counts in the epoch for which it was computed, or in the next one
_LATE_EPOCHS_MAX = 1


@dataclass(slots=True)
class _Suspended:
    """This peer's progress at the time when it found the swarm in another epoch."""

    epoch: int
    version: int  # version of the state; if it differs afterwards, a state was loaded
    sums: dict[str, Any] | None = None  # sums taken out of the accumulator while a round uses it


@dataclass(frozen=True, slots=True)
class CapturedGradients:
    """The averaged gradients of one epoch that this peer did not contribute to."""

    gradients: list[torch.Tensor]  # float32, on the accumulators' device
    touched: list[bool]


class GradientsMode:
    """Large synchronous batches: gradients are averaged by samples, and the inner optimizer steps once an
    epoch, on all peers with the same bytes.

    With `delayed`, a round works on a copy of the accumulators while the next epoch's gradients are
    computed, on parameters that lack that round's step. This takes twice the memory for accumulators.

    Gradients of a peer that missed its epoch's round count in the next epoch, weighted by their samples
    as all others. Gradients that missed two rounds are dropped, and so are those of epoch 0, whose
    parameters may not have been the swarm's, and those of a history that lost a reunion. While the state
    is downloaded the gradients that are kept take the memory of one more accumulator if a round is made
    meanwhile.
    """

    def __init__(self, parts: ModeParts, *, delayed: bool = False) -> None:
        self.state = TrainingState(parts.inner, parts.extras, parts.scheduler)
        self.traits = ModeTraits(
            compatibility_tag="gradients, delayed" if delayed else "gradients",
            role="gradient",
            overlapped=delayed,
        )
        self._inner = parts.inner
        self._parameters = [p for p in self.state.parameters if is_trained(p)]
        self._accumulator = GradientAccumulator(
            self._parameters,
            names=names_of(self._parameters, parts.inner),
            storage=storage_for(self._parameters, parts.offload),
            make_link=parts.make_link,
        )
        self._round_means = [zeros_like(buffer) for buffer in self._accumulator.buffers] if delayed else None
        # for a delayed round: its samples, and which parameters had a gradient
        self._in_round: tuple[int, list[bool]] | None = None
        self._is_late = False  # gradients of the epoch before are among the accumulated ones
        self._suspended: _Suspended | None = None

    # --- the learner: implemented by this class itself

    @property
    def learner(self) -> GradientsMode:
        return self

    @property
    def samples(self) -> int:
        return self._accumulator.samples

    def accumulate(self, samples: int) -> str | None:
        return self._accumulator.add(samples)

    def refused(self, *, wait: bool) -> RejectedSamples:
        self._accumulator.resolve_checks(wait=wait)
        return self._accumulator.refused()

    def restart(self) -> None:
        return None

    def loaded(self) -> None:
        self._in_round = self._suspended = None
        self._reset()

    @property
    def has_late_samples(self) -> bool:
        return self._is_late

    def suspend(self) -> None:
        if self._suspended is None:
            self.failed("")
            self._accumulator.resolve_checks()
            self._suspended = _Suspended(self.state.epoch, self.state.version)

    def resume(self, *, parted: bool = False, counted: bool = False) -> int:
        suspended, self._suspended = self._suspended, None
        if suspended is None:
            return 0
        if suspended.sums is not None:
            self._accumulator.load_state_dict(suspended.sums)
        if self.state.version == suspended.version:
            return 0
        samples, late_epochs = self.samples, self.state.epoch - suspended.epoch
        is_recent = suspended.epoch > 0 and 0 < late_epochs + self._is_late <= _LATE_EPOCHS_MAX
        if samples and is_recent and not (parted or counted):
            self._is_late = True
            return 0
        self._reset()
        return samples

    def _set_aside(self) -> None:
        """Take the gradients of a suspended peer out of the accumulator, which a round is about to use."""
        assert self._suspended is not None
        if self._suspended.sums is None and self._accumulator.samples:
            state = self._accumulator.state_dict()
            self._suspended.sums = {**state, "sums": [one.clone() for one in state["sums"]]}
        self._accumulator.reset()

    def _reset(self) -> None:
        self._accumulator.reset()
        self._is_late = False

    def state_dict(self) -> dict[str, Any]:
        state = {**self._accumulator.state_dict(), "late": self._is_late}
        if self._in_round is None or self._round_means is None:
            return state
        samples, touched = self._in_round
        # the same result as that of `restore_means`
        sums = torch._foreach_add(state["sums"], self._round_means, alpha=samples)
        both = [one or other for one, other in zip(state["touched"], touched, strict=True)]
        return {**state, "samples": state["samples"] + samples, "touched": both, "sums": list(sums)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accumulator.load_state_dict(state)
        self._in_round = self._suspended = None
        self._is_late = bool(state.get("late", False))

    # --- rounds

    def tensors(self) -> list[torch.Tensor]:
        return self._accumulator.buffers if self._round_means is None else self._round_means

    def prepare(self, epoch: int) -> tuple[float, Any]:
        accumulator = self._accumulator
        if self._suspended is not None:
            self._set_aside()
        if not accumulator.finite():  # sums of finite gradients that overflowed are never sent
            accumulator.reset()
        means = accumulator.average_()
        samples, metadata = accumulator.samples, accumulator.touched_bytes()
        if self._round_means is not None:
            for held, mean in zip(self._round_means, means, strict=True):
                held.copy_(mean)
            self._in_round = samples, list(accumulator.touched)
            accumulator.reset()
        return float(samples), metadata

    def merge_metadata(self, metadata: Sequence[Any]) -> bytes:
        return bit_field(self._touched(metadata))

    def apply(self, metadata: Sequence[Any]) -> None:
        own = self._accumulator.touched if self._in_round is None else self._in_round[1]
        touched = self._touched(metadata) if metadata else own
        self._step(self.tensors(), touched)
        self._in_round = None  # only now: `failed` keeps the samples when the inner optimizer raised an error
        if self._round_means is None:
            self._accumulator.reset()
        self._is_late = False

    def failed(self, reason: RoundFailure) -> None:
        if self._in_round is not None and self._round_means is not None:
            self._accumulator.restore_means(self._round_means, *self._in_round)
            self._in_round = None

    def capture(self, epoch: int, metadata: Sequence[Any]) -> CapturedGradients:
        captured = CapturedGradients([buffer.clone() for buffer in self.tensors()], self._touched(metadata))
        self._accumulator.reset()
        self._in_round = None
        return captured

    def replay(self, captured: CapturedGradients) -> None:
        self._step(captured.gradients, captured.touched)

    def on_state_averaged(self, before: Sequence[torch.Tensor]) -> None:
        return None

    def _touched(self, metadata: Sequence[Any]) -> list[bool]:
        return self._accumulator.merge_touched(
            [field if isinstance(field, bytes) else b"" for field in metadata]
        )

    def _step(self, gradients: Sequence[torch.Tensor], touched: Sequence[bool]) -> None:
        """Make one step of the inner optimizer, then restore `.grad` of the trainer's own last batch."""
        own = [p.grad for p in self._parameters]
        try:
            for p, gradient in zip(
                self._parameters, self._accumulator.gradients_for(gradients, touched), strict=True
            ):
                p.grad = gradient
            self._inner.step()
        finally:
            for p, gradient_of_batch in zip(self._parameters, own, strict=True):
                p.grad = gradient_of_batch
