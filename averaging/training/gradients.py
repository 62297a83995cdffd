"""Mode `gradients`: one large synchronous batch over the whole swarm (DeDLOC, arXiv 2106.10207)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from averaging.training.accumulate import GradientAccumulator
from averaging.training.state import TrainingState


@dataclass(frozen=True, slots=True)
class CapturedGradients:
    """The averaged gradients of one epoch that this peer did not take part in."""

    gradients: list[torch.Tensor]  # float32, on the parameters' devices
    touched: list[bool]


class GradientsMode:
    """Gradients are accumulated, averaged by samples, and the inner optimizer steps once an epoch, on all peers with the same bytes."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._parameters = [p for p in state.parameters if p.requires_grad and p.is_floating_point()]
        self._accumulator = GradientAccumulator(self._parameters, state.names(self._parameters))

    @property
    def samples(self) -> int:
        return self._accumulator.samples

    def accumulate(self, samples: int) -> str | None:
        return self._accumulator.add(samples)

    def tensors(self) -> list[torch.Tensor]:
        return self._accumulator.buffers

    def prepare(self) -> tuple[float, Any]:
        if not self._accumulator.finite():  # sums of finite gradients that ran over: never sent
            self._accumulator.reset()
        self._accumulator.average_()
        return float(self._accumulator.samples), self._accumulator.touched_bytes()

    def apply(self, told: Sequence[Any]) -> None:
        touched = self._touched(told) if told else self._accumulator.touched
        self._step(self._accumulator.average_(), touched)
        self._accumulator.reset()

    def drop(self) -> int:
        samples = self._accumulator.samples
        self._accumulator.reset()
        return samples

    def capture(self, told: Sequence[Any]) -> CapturedGradients:
        captured = CapturedGradients([buffer.clone() for buffer in self._accumulator.buffers], self._touched(told))
        self._accumulator.reset()
        return captured

    def replay(self, captured: CapturedGradients) -> None:
        self._step(captured.gradients, captured.touched)

    def state_dict(self) -> dict[str, Any]:
        return self._accumulator.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accumulator.load_state_dict(state)

    def _touched(self, told: Sequence[Any]) -> list[bool]:
        return self._accumulator.merge_touched([field if isinstance(field, bytes) else b"" for field in told])

    def _step(self, gradients: Sequence[torch.Tensor], touched: Sequence[bool]) -> None:
        """One step of the inner optimizer; `.grad` of the trainer's own last batch is put back afterwards."""
        own = [p.grad for p in self._parameters]
        try:
            for p, gradient, has_gradient in zip(self._parameters, gradients, touched, strict=True):
                p.grad = gradient.to(p.dtype) if has_gradient else None
            self._state.inner.step()
        finally:
            for p, gradient_of_batch in zip(self._parameters, own, strict=True):
                p.grad = gradient_of_batch
