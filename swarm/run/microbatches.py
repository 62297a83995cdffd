"""Compute the gradients of one step in as many micro-batches as the memory of the device requires."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarm.core.device import is_out_of_memory, release_cached_memory
from swarm.core.errors import SwarmError
from swarm.run.events import Emit, Notice
from swarm.run.task import TaskData

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, kw_only=True)
class MicroBatches:
    """Splits a step into micro-batches after the device ran out of memory: first in two, then in four, down
    to one sample each.

    The size of a micro-batch never grows again, because memory that was short once is likely to be short
    again and every attempt costs a step.
    """

    model: torch.nn.Module
    data: TaskData
    device: torch.device
    emit: Emit
    samples_max: int | None = None  # size of one micro-batch; None: all samples of a step at once

    def backward(self, samples: int, zero_grad: Callable[[], None]) -> list[tuple[int, torch.Tensor]]:
        """Compute the gradient of the mean loss over `samples` samples into `.grad`.

        Returns the number of samples and the mean loss of each micro-batch. The losses are scalars on the
        device, so that the host does not wait for it. `zero_grad` clears `.grad`. If memory runs out, the
        step starts again with the next samples in smaller micro-batches. Raises SwarmError if a single sample
        does not fit.
        """
        while True:
            zero_grad()
            try:
                return self._backward(samples)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            # The traceback keeps the graph and its activations alive until the `except` block ends.
            zero_grad()
            self.shrink(samples, "a step")

    def _backward(self, samples: int) -> list[tuple[int, torch.Tensor]]:
        losses = []
        left = samples
        while left:
            count = min(left, self.samples_max or left)
            loss = self.data.loss(self.model, count)
            weighted = loss if count == samples else loss * (count / samples)
            weighted.backward()  # type: ignore[no-untyped-call]
            losses.append((count, loss.detach()))
            left -= count
        return losses

    def shrink(self, samples: int, what: str) -> None:
        """Halve the micro-batch after `what` (a step of `samples` samples, or its round) ran out of memory,
        and release cached memory.

        Raises SwarmError if a micro-batch is a single sample already.
        """
        before = min(samples, self.samples_max or samples)
        if before == 1:
            raise SwarmError(
                f"{what} does not fit into the memory of {self.device}, even with one sample at a time: "
                "close other programs that use it, or volunteer with a device that has more memory"
            )
        self.samples_max = (before + 1) // 2
        gc.collect()  # a model may keep activations in reference cycles
        release_cached_memory(self.device)
        self.emit(
            Notice(
                text=f"{what} does not fit into the memory of {self.device}: "
                f"training with {self.samples_max} sample{'s' if self.samples_max > 1 else ''} at a time "
                f"instead of {before}"
            )
        )
