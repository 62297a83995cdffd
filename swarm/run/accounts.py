"""What a volunteer did so far: sums over its steps and rounds, kept by plain arithmetic so that they can be
tested without a swarm.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class EpochAccount:
    """This peer's steps since the last round that it took part in."""

    samples: int = 0
    loss_sum: float = 0.0  # weighted by samples

    def add(self, samples: int, loss: float) -> None:
        self.samples += samples
        self.loss_sum += samples * loss

    @property
    def loss(self) -> float:
        """Mean per sample; nan before the first."""
        return self.loss_sum / self.samples if self.samples else float("nan")


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
