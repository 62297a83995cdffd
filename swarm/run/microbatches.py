"""The size of a volunteer's steps: as many samples as the length of the epoch allows, in as many
micro-batches as the memory of the device requires.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from averaging.optim.progress.logic.punctuality import longest_step
from swarm.core.device import is_out_of_memory, release_cached_memory
from swarm.core.errors import SwarmError
from swarm.core.wording import counted
from swarm.run.events import Emit, Notice
from swarm.run.task import Draw, TaskData
from swarm.run.task_errors import explained_of

if TYPE_CHECKING:
    import torch

    from averaging.optim.progress.logic.view import ProgressView
    from swarm.core.ids import PeerId
    from swarm.run.rank_volunteers import LeadingRanks


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
    ranks: LeadingRanks | None = None  # further processes of this peer, which make each step with it

    @property
    def processes(self) -> int:
        """Return how many processes divide a step."""
        return 1 if self.ranks is None else self.ranks.size

    def start_epoch(self, draw: Draw) -> None:
        """Start to draw batches with this seed, in all processes."""
        self.data.start_epoch(draw if self.ranks is None else self.ranks.start_epoch(draw))

    def backward(self, samples: int, zero_grad: Callable[[], None]) -> list[tuple[int, torch.Tensor]]:
        """Compute the gradient of the mean loss over `samples` samples of each process into `.grad`. Returns
        and raises the same as `_fitting`, for the samples of this process.
        """
        if self.ranks is None:
            return self._fitting(samples, zero_grad)
        self.ranks.begin_step(samples)
        losses = self._fitting(samples, zero_grad)
        self.ranks.end_step()
        return losses

    def _fitting(self, samples: int, zero_grad: Callable[[], None]) -> list[tuple[int, torch.Tensor]]:
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
            with explained_of(self.data, "failed in the backward pass"):
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
                f"training with {counted(self.samples_max, 'sample')} at a time "
                f"instead of {before}"
            )
        )


@dataclass(slots=True, kw_only=True)
class StepSize:
    """Chooses the number of samples of a step: that of the specification, or fewer if such a step takes too
    large a part of an epoch on this machine. With long steps a peer would be late for rounds.

    The number is halved until a step takes at most a quarter of an epoch, down to one sample, and doubled
    when a step takes much less. It follows the speeds of this peer and of the swarm, which are running means.
    """

    emit: Emit
    _samples: int | None = None  # current size of a step; None: that of the specification
    _was_announced: bool = False

    def next(self, samples_max: int, view: ProgressView, own: PeerId) -> int:
        """Return the number of samples of the next step. `samples_max`: those of the specification; `view`:
        the swarm's progress.
        """
        limit, samples = longest_step(view, own), min(self._samples or samples_max, samples_max)
        while samples > 1 and samples > limit:
            samples //= 2
        # with a margin, so that the number does not oscillate
        if samples < samples_max and limit >= 3 * samples:
            samples = min(2 * samples, samples_max)
        self._samples = None if samples == samples_max else samples
        if self._samples is not None and not self._was_announced:
            self._was_announced = True
            self.emit(
                Notice(
                    text=f"a step of {samples_max} samples takes this machine more than a quarter of an "
                    f"epoch: training with {samples} at a time, so that they are ready in time for the "
                    "rounds. The number follows the swarm's speed"
                )
            )
        return samples
