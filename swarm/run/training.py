"""The training loop of a volunteer: steps, rounds, validation, and the events about them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarm.core.device import is_out_of_memory, release_cached_memory
from swarm.core.errors import NotEnoughPeers
from swarm.core.working import working
from swarm.run.events import (
    Contributed,
    Emit,
    EpochDone,
    Notice,
    Resynchronised,
    RoundFailed,
    TextSample,
    TrainingProgress,
)
from swarm.run.machine import process_age_s
from swarm.run.microbatches import MicroBatches, StepSize
from swarm.run.signed import SignedSpecification
from swarm.run.stats import TrainingStats, ValidationSchedule
from swarm.run.task import Draw, TaskData

if TYPE_CHECKING:
    import torch

    from averaging.optim.optimizer import Optimizer, StepReport
    from averaging.optim.reports import LoadResult
    from swarm.core.ids import PeerId

STATE_TIMEOUT_S = 600.0  # timeout of a download of the whole state
SAMPLE_CHARACTERS_MAX = 2000  # limit of a text sample of the model
_PROGRESS_S = 1.0  # interval of `TrainingProgress` events


@dataclass(slots=True, kw_only=True)
class Training:
    """Model, data and optimizer of one volunteer, trained step by step on the caller's thread."""

    model: torch.nn.Module
    data: TaskData
    optimizer: Optimizer
    signed: SignedSpecification  # may be replaced by a newer version
    own_peer_id: PeerId
    emit: Emit
    swarm_s: Callable[[], float]
    stats: TrainingStats
    validation_schedule: ValidationSchedule
    micro_batches: MicroBatches
    step_size: StepSize
    progress_sent_s: float = float("-inf")
    drawn_epoch: int = -1
    validates: bool = True  # False once validation has run out of memory

    def end_reason(self) -> str:
        """Return why the run has ended according to its specification; empty if it has not ended."""
        end = self.signed.training.end
        if self.signed.training.ended:
            return "the run's owner ended it"
        if end.epochs is not None and self.optimizer.epoch >= end.epochs:
            return f"the run ended at epoch {end.epochs}"
        if end.seconds is not None and self.swarm_s() >= self.signed.created_s + end.seconds:
            return f"the run ended {end.seconds:g} s after it was created"
        loss = self.stats.validation_loss
        if end.loss is not None and loss is not None and loss <= end.loss:
            return f"the run reached the loss {end.loss:g}"
        return ""

    def step(self) -> bool:
        """Train one batch and, if it completes an epoch, average. Return whether an epoch was completed."""
        view = self.optimizer.progress
        processes = self.micro_batches.processes
        batch_size = self.signed.training.batch_size * processes
        each = max(1, self.step_size.next(batch_size, view, self.own_peer_id) // processes)
        samples = each * processes
        if self.optimizer.epoch != self.drawn_epoch:
            self.drawn_epoch = self.optimizer.epoch
            others = tuple(peer for peer in view.peers if peer != self.own_peer_id)
            self.micro_batches.start_epoch(
                Draw(self.signed.run_id, self.drawn_epoch, self.own_peer_id, others)
            )
        self.stats.epoch.add(self.micro_batches.backward(each, self.optimizer.zero_grad))
        # a peer that is behind downloads the state in its step
        is_behind = view.swarm_epoch > self.optimizer.epoch
        with working("catching up with the swarm") if is_behind else contextlib.nullcontext():
            report = self._optimizer_step(samples)
        if report is None or _ran_out_of_memory(report):
            self.optimizer.zero_grad()
            self.micro_batches.shrink(
                each, "a round of averaging" if report is not None else "the end of a step"
            )
        if report is None:
            self._recover()
            return False
        return self.record(report)

    def _optimizer_step(self, samples: int) -> StepReport | None:
        """Run the optimizer's step. Return None if it ran out of memory, which may leave a partial update."""
        try:
            return self.optimizer.step(samples)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        return None

    def _recover(self) -> None:
        """Download the swarm's state after an incomplete step. Without other peers, continue with the local
        state.

        Raises NotEnoughPeers if there are other peers and none could send its state.
        """
        load = load_state(self.optimizer)
        if load.loaded:
            self.stats.finish_epoch(0)
            reason = "memory ran out in the middle of a step"
            self.emit(Resynchronised(epoch=load.epoch, loaded=True, reason=reason, seconds=load.seconds))
        elif not load.alone:
            raise NotEnoughPeers(
                "memory ran out in the middle of a step, and the swarm's state could not be downloaded: "
                f"{load.reason}"
            )

    def record(self, report: StepReport) -> bool:
        """Add a step's report to the statistics and emit its events. Return whether it completed an epoch."""
        now_s = time.monotonic()
        stats = self.stats
        for result in (report.round, report.state_round):
            stats.sent_bytes += result.bytes_sent if result is not None else 0
        if report.rounds_failed:  # a search that ended because the swarm was ahead is not a failed round
            stats.failed_rounds += report.rounds_failed
            self.emit(RoundFailed(epoch=report.epoch, reason=_failure_reason(report)))
        if report.resynchronised is not None:
            load = report.resynchronised
            if report.dropped:  # otherwise the samples so far count in the epoch that was loaded
                stats.finish_epoch(0)
            reason = report.reason or load.reason or "the swarm was ahead"
            self.emit(
                Resynchronised(
                    epoch=report.epoch,
                    loaded=load.loaded,
                    reason=reason,
                    seconds=load.seconds,
                    epochs_given_up=report.epochs_given_up,
                )
            )
        if report.stepped:
            self._epoch_done(report, now_s)
            return True
        if now_s - self.progress_sent_s >= _PROGRESS_S:
            self._emit_progress(now_s)
        return False

    def _epoch_done(self, report: StepReport, now_s: float) -> None:
        stats = self.stats
        done = stats.finish_epoch(report.contributed)
        averaged, state = report.round, report.state_round
        if not report.alone:
            stats.rounds += 1
            digest = averaged.digest if averaged is not None else ""
            stats.digest, stats.digest_epoch = (
                (digest, report.epoch) if digest else (stats.digest, stats.digest_epoch)
            )
        if stats.contributing_epoch is None and report.contributed:
            stats.contributing_epoch = report.epoch
            self.emit(Contributed(epoch=report.epoch, start_s=process_age_s()))
        validation_loss = (
            self._validate() if self.validates and self.validation_schedule.is_due(now_s) else None
        )
        metrics = self._task_metrics(validation_loss) if validation_loss is not None else {}
        losses = {
            "loss": done.loss if report.contributed and done.samples else None,
            "validation_loss": validation_loss,
        }
        reported = losses | metrics
        self.optimizer.report(**{name: value for name, value in reported.items() if value is not None})
        view = self.optimizer.progress
        mine = view.peers.get(self.own_peer_id)
        self.emit(
            EpochDone(
                epoch=report.epoch,
                loss=done.loss,
                validation_loss=validation_loss,
                metrics=metrics,
                samples=report.contributed,
                samples_per_s=mine.samples_per_s if mine is not None else 0.0,
                swarm_samples_per_s=view.samples_per_s,
                peers=len(averaged.peers) if averaged is not None else 1,
                sent_bytes=sum(result.bytes_sent for result in (averaged, state) if result is not None),
                round_s=report.seconds,
                digest=(averaged.digest or None) if averaged is not None else None,
                state_digest=(state.digest or None) if state is not None and not state.failed else None,
                drift=report.drift,
            )
        )
        self.progress_sent_s = now_s
        if validation_loss is not None:
            self._write_sample(report.epoch)

    def _task_metrics(self, validation_loss: float) -> dict[str, float]:
        """Return the numbers that the task adds to a validation loss."""
        measure = getattr(self.data, "metrics", None)
        if measure is None:
            return {}
        metrics: dict[str, float] = measure(validation_loss)
        return metrics

    def _write_sample(self, epoch: int) -> None:
        """Show a sample of the model's output, if the task writes one for this epoch."""
        write = getattr(self.data, "write_sample", None)
        if write is None:
            return
        self.model.eval()
        try:
            text = write(self.model, epoch)
        finally:
            self.model.train()
        if text:
            self.emit(TextSample(epoch=epoch, text=text[:SAMPLE_CHARACTERS_MAX]))

    def _emit_progress(self, now_s: float) -> None:
        view = self.optimizer.progress
        mine = view.peers.get(self.own_peer_id)
        self.progress_sent_s = now_s
        self.emit(
            TrainingProgress(
                epoch=view.epoch,
                loss=self.stats.epoch.loss,
                samples_per_s=mine.samples_per_s if mine is not None else 0.0,
                swarm_samples=int(view.samples),
                swarm_samples_per_s=view.samples_per_s,
                peers=len(view.peers),
            )
        )

    def _validate(self) -> float | None:
        """Return the validation loss. If memory runs out, return None and do not validate again."""
        started_s = time.monotonic()
        self.model.eval()
        loss = None
        try:
            loss = self.stats.validation_loss = self.data.validation_loss(self.model)
            if self.stats.validation_first is None:
                self.stats.validation_first = loss
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.validates = False
        finally:
            self.model.train()
        if not self.validates:
            device = self.micro_batches.device
            release_cached_memory(device)
            self.emit(
                Notice(
                    text=f"the held-out part does not fit into the memory of {device}: "
                    "this peer stops measuring its validation loss"
                )
            )
        ended_s = time.monotonic()
        self.validation_schedule.finished(ended_s - started_s, ended_s)
        return loss


def load_state(optimizer: Optimizer) -> LoadResult:
    """Download the whole state from peers, and show how far it is."""
    with working("downloading the state", unit="bytes") as update:
        return optimizer.load_state_from_peers(timeout_s=STATE_TIMEOUT_S, on_progress=update)


def _ran_out_of_memory(report: StepReport) -> bool:
    """Return whether a round failed because a device of this peer had no memory left."""
    return any(
        one is not None and one.failed and one.reason == "memory"
        for one in (report.round, report.state_round)
    )


def _failure_reason(report: StepReport) -> str:
    result = report.round
    reasons = [report.reason] if report.reason else []
    if result is not None and result.failed:
        reasons.append(result.detail or result.reason)
        reasons += [f"{peer.short}: {why}" for peer, why in result.left_out.items()]
    return "; ".join(dict.fromkeys(reasons)) or "no reason was given"
