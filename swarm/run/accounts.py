"""What a volunteer did so far: sums over its steps and rounds, kept by plain arithmetic so that they can be
tested without a swarm.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_UNREAD_MAX = 4096  # losses that stay on the device; a scalar takes 512 bytes of a GPU's memory


@dataclass(slots=True)
class EpochAccount:
    """This peer's steps since the last round that it took part in.

    Losses stay on the device until the mean is asked for: reading one makes the host wait for everything that
    the device has to do.
    """

    samples: int = 0
    loss_sum: float = 0.0  # weighted by samples, of the losses that were read
    unread: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # samples, and their mean loss

    def add(self, losses: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Add micro-batches: the number of samples of each, and their mean loss, a tensor of one element."""
        for samples, loss in losses:
            self.samples += samples
            self.unread.append((samples, loss))
        if len(self.unread) > _UNREAD_MAX:
            self._read()

    @property
    def loss(self) -> float:
        """The mean per sample; nan before the first. Waits for the device."""
        self._read()
        return self.loss_sum / self.samples if self.samples else float("nan")

    def _read(self) -> None:
        """Bring all losses to the host, in one transfer."""
        if not self.unread:
            return
        import torch

        unread, self.unread = self.unread, []
        losses = torch.stack([loss.reshape(()) for _, loss in unread]).tolist()
        for (samples, _), loss in zip(unread, losses, strict=True):
            self.loss_sum += samples * loss


@dataclass(slots=True)
class TrainingStats:
    """Since the volunteer began."""

    samples: int = 0  # that went into committed rounds
    rounds: int = 0
    failed_rounds: int = 0
    sent_bytes: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    validation_loss: float | None = None
    contributing_epoch: int | None = None  # the first epoch that holds samples of this peer
    digest: str | None = None
    digest_epoch: int | None = None
    epoch: EpochAccount = field(default_factory=EpochAccount)

    def finish_epoch(self, contributed: int) -> EpochAccount:
        """Close the current epoch's account and open the next. `contributed`: samples that went into the
        swarm's step.
        """
        done, self.epoch = self.epoch, EpochAccount()
        self.samples += contributed
        if contributed and done.samples:
            self.loss_last = done.loss
            self.loss_first = done.loss if self.loss_first is None else self.loss_first
        return done


class ValidationSchedule:
    """When to measure the loss on the held-out part: at most a share of the time may go into it."""

    def __init__(self, share: float, gap_s_min: float) -> None:
        self._share, self._gap_s_min = share, gap_s_min
        self._next_s = float("-inf")

    def due(self, now_s: float) -> bool:
        return now_s >= self._next_s

    def took(self, seconds: float, now_s: float) -> None:
        self._next_s = now_s + max(self._gap_s_min, seconds / self._share)
