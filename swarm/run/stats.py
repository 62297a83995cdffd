"""Statistics of a volunteer: sums over its steps and rounds, and the schedule of its validations. Nothing
here needs a swarm.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_UNREAD_MAX = 4096  # limit of losses on the device; a scalar takes 512 bytes of GPU memory


@dataclass(slots=True)
class EpochStats:
    """Samples and losses of this peer's steps since the last round in which it took part.

    Losses stay on the device until the mean is requested, because reading one makes the host wait for all
    work that is queued on the device.
    """

    samples: int = 0
    loss_sum: float = 0.0  # sum over samples, of the losses that were read already
    unread: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # (samples, mean loss)

    def add(self, losses: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Add micro-batches, each as its number of samples and its mean loss (a tensor of one element)."""
        for samples, loss in losses:
            self.samples += samples
            self.unread.append((samples, loss))
        if len(self.unread) > _UNREAD_MAX:
            self._read()

    @property
    def loss(self) -> float:
        """Return the mean loss per sample; nan before the first sample. Reading it waits for the device."""
        self._read()
        return self.loss_sum / self.samples if self.samples else float("nan")

    def _read(self) -> None:
        """Copy all losses to the host in one transfer."""
        if not self.unread:
            return
        import torch

        unread, self.unread = self.unread, []
        losses = torch.stack([loss.reshape(()) for _, loss in unread]).tolist()
        for (samples, _), loss in zip(unread, losses, strict=True):
            self.loss_sum += samples * loss


@dataclass(slots=True)
class TrainingStats:
    """Totals since the volunteer began to train."""

    samples: int = 0  # in committed rounds
    rounds: int = 0
    failed_rounds: int = 0
    sent_bytes: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    validation_first: float | None = None
    validation_loss: float | None = None
    contributing_epoch: int | None = None  # the first epoch that contains samples of this peer
    digest: str | None = None
    digest_epoch: int | None = None
    epoch: EpochStats = field(default_factory=EpochStats)

    def finish_epoch(self, contributed: int) -> EpochStats:
        """Start the statistics of the next epoch and return those of the finished one.

        `contributed` is the number of this peer's samples that went into the swarm's step.
        """
        done, self.epoch = self.epoch, EpochStats()
        self.samples += contributed
        if contributed and done.samples:
            self.loss_last = done.loss
            self.loss_first = done.loss if self.loss_first is None else self.loss_first
        return done


class ValidationSchedule:
    """Decide when to measure the validation loss, so that validation takes at most a share of the time."""

    def __init__(self, share: float, gap_s_min: float) -> None:
        """`share`: largest fraction of the time for validation. `gap_s_min`: smallest pause between two."""
        self._share, self._gap_s_min = share, gap_s_min
        self._next_s = float("-inf")

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._next_s

    def finished(self, seconds: float, now_s: float) -> None:
        """Record that a validation took `seconds` and ended at `now_s`."""
        self._next_s = now_s + max(self._gap_s_min, seconds / self._share)
