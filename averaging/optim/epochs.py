"""The loop over epochs: accumulate, close the epoch together with the other peers, and download the state
when the swarm continued without this peer.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from averaging.optim.background_round import RunningRound
from averaging.optim.catchup import FIRST_REFRESH_TIMEOUT_S, CatchUp
from averaging.optim.closing import CloseOutcome, EpochCloser
from averaging.optim.epoch_averager import OBSOLETE_ROUND_GRACE_S, EpochAverager
from averaging.optim.modes import Mode
from averaging.optim.progress.logic.punctuality import absence_s, longest_wait_s
from averaging.optim.progress.tracker import Tracker
from averaging.optim.reports import LoadResult, StepReport
from averaging.optim.state.donor import Donor
from averaging.optim.state.download import OnProgress
from averaging.optim.state.encoding import EXACT
from swarm.core.errors import UsageError
from swarm.core.ids import PeerId
from swarm.core.wording import counted

_log = logging.getLogger(__name__)

_TOO_SLOW = (
    " (a step of this peer takes longer than an epoch of the others: "
    "make its steps smaller, or target_batch_size larger)"
)
_TOO_LATE = "their epoch is too long ago"
_COUNTED = "their round was completed by the others, and its step was not made here"
_RATE_GAIN = 0.2  # weight of the newest step in the running estimate of samples/s


@dataclass(slots=True)
class _BackgroundEpoch:
    """A round that runs while training continues."""

    background_round: RunningRound
    epoch: int
    contributed: int  # samples of this peer in the round
    began_s: float
    steps: int = 0  # local steps since the round began


class EpochLoop:
    """The logic of `Optimizer.step`. Runs on the trainer's thread."""

    def __init__(
        self,
        mode: Mode,
        tracker: Tracker,
        donor: Donor,
        averager: EpochAverager,
        catch_up: CatchUp,
        load_timeout_s: float,
    ) -> None:
        self._clock = catch_up.clock
        self._closer = EpochCloser(mode, tracker, donor, averager, catch_up, load_timeout_s)
        # hooks by torch's id, called before this peer discards epochs of its own
        self.reunion_hooks: OrderedDict[int, Callable[[], None]] = OrderedDict()
        self._mode, self._state, self._tracker, self._donor = mode, mode.state, tracker, donor
        self._averager, self._catch_up, self._load_timeout_s = averager, catch_up, load_timeout_s
        self._traits, self._learner = self._mode.traits, self._mode.learner
        self._inside = threading.RLock()  # held by the thread whose turn it is
        self._rate = 0.0
        self._last_step_ended_s: float | None = None  # when the last step ended
        self._absence_s = 0.0  # expected absence from rounds during the next step
        self._started = False
        self._resync_reason = ""  # why the state must be downloaded before anything else
        self._resync_donors: frozenset[PeerId] = frozenset()  # the donors to ask; empty: all
        self._background: _BackgroundEpoch | None = None
        # samples at the time when the round failed, in a mode that keeps training
        self._failed_at_samples = 0
        # number of samples at which the round is tried again, after as many further samples as before it
        self._retry_at_samples = 0
        self._announcements_at_failure = 0  # the tracker's `full_announcements` when the round failed
        self._failed_after_grace = False  # the failed round was meant to continue without a quorum

    def step(self, samples: int) -> StepReport:
        """Account for one local step of `samples` samples and close the epoch when it is full. Return a
        report of this call.
        """
        with self.turn():
            return self._step(samples)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Keep other threads out of one call of the trainer's. Raise UsageError where another thread is
        inside: this one would count samples twice, or lose them.

        After an error or Ctrl-C, even between two statements, no round continues without an owner, and the
        mode keeps the samples of a round that has not moved the state.
        """
        if not self._inside.acquire(blocking=False):
            raise UsageError(
                "another thread is in a call of this optimizer: make its calls from one thread at a time"
            )
        try:
            yield
        except BaseException:
            if self._background is None:
                try:
                    self._averager.cancel()
                finally:
                    self._mode.failed("cancelled")
            raise
        finally:
            self._inside.release()

    def _step(self, samples: int) -> StepReport:
        began_s = self._clock.monotonic_s()
        self._measure(samples, began_s)
        self._averager.set_computing(0.0)
        if not self._started:
            self._start()
        behind = self._resync_reason or (
            "the swarm is ahead" if self._background is None and self._closer.is_behind() else ""
        )
        if self._resync_reason and not self._traits.keeps_progress:
            report = self._resynchronise(behind, samples)  # these gradients belong to another model
        else:
            report = self._accumulate(samples)
            if self._background is not None:
                report = self._poll_background_round(report)
            if behind:
                report = self._resynchronise_after(report, behind)
            elif (
                self._background is None
                and report.resynchronised is None
                and not report.stepped
                and self._should_close()
            ):
                report = self._with_rejected_samples(report, wait=True)
                report = (
                    self._start_background_round(report) if self._traits.overlapped else self._close(report)
                )
            report = self._wait_for_round(report, samples)
        self._absence_s = absence_s(self._tracker.view(), self._tracker.own, samples)
        self._averager.set_computing(self._absence_s)
        self._last_step_ended_s = self._clock.monotonic_s()
        return replace(report, progress=self._tracker.fraction(), seconds=self._last_step_ended_s - began_s)

    def load(self, timeout_s: float, codec: str = EXACT, on_progress: OnProgress | None = None) -> LoadResult:
        """Download the state. Afterwards this peer serves it to others, too."""
        with self.turn():
            return self._load(timeout_s, codec, on_progress)

    def _load(self, timeout_s: float, codec: str, on_progress: OnProgress | None) -> LoadResult:
        self._cancel_background_round()
        try:
            result = self._catch_up.load(timeout_s, self._resync_donors, codec, on_progress)
        finally:
            with self._state.lock:
                history = self._tracker.history
                lost = self._learner.resume(
                    parted=history is not None and history.has_parted,
                    counted=self._closer.has_lost_round or (history is not None and history.has_counted),
                )
        self._retry_at_samples = self._failed_at_samples = 0
        if result.loaded:
            self._closer.has_lost_round = False
            self._resync_reason, self._resync_donors = "", frozenset()
            self._started = True
            # kept samples count in the loaded epoch. Also, a peer whose steps all end here would otherwise
            # never report a speed, which the choice of its micro-batch needs
            if self._learner.samples or self._rate:
                self._tracker.update_own(self._learner.samples, self._rate)
            self._joined()
        elif result.alone:
            self._donor.start()
        return replace(result, dropped=lost)

    def join_started_round(self, timeout_s: float) -> StepReport | None:
        """Take part in this epoch's round without a step of this peer's own. Return None when no round
        begins within `timeout_s`.
        """
        epoch = self._state.epoch
        if not self._started or not self._tracker.wait_full(epoch, timeout_s):
            return None
        report = StepReport(epoch=epoch, stepped=False, samples=0, accumulated=self._learner.samples)
        with self.turn():
            return self._join_round(report)

    def _join_round(self, report: StepReport) -> StepReport:
        """Close an epoch that the others have found to be full, or have closed already."""
        if self._tracker.swarm_epoch() > self._state.epoch:
            return self._resynchronise_after(report, "the swarm is ahead")
        return self._close(self._with_rejected_samples(report, wait=True))

    def _wait_for_round(self, report: StepReport, samples: int) -> StepReport:
        """Wait for the round instead of returning to the trainer, if its next step of `samples` samples would
        make the others wait or would end too late.
        """
        if self._traits.overlapped or self._traits.proceeds_alone:
            return report
        if report.stepped or report.round is not None or self._retry_at_samples:
            return report  # this epoch's round is over, or has failed and is tried again later
        wait_s = longest_wait_s(
            self._tracker.view(), self._tracker.own, samples, has_late_samples=self._learner.has_late_samples
        )
        if not wait_s or not self._tracker.wait_full(self._state.epoch, wait_s):
            return report
        return self._join_round(report)

    def resumed(self, *, keeps_samples: bool) -> None:
        """Continue after the state was replaced from outside, for instance by a checkpoint. The state is
        valid, so newcomers need not wait for this peer's first step. `keeps_samples`: what was accumulated
        was neither dropped nor replaced.
        """
        self._cancel_background_round()
        self._retry_at_samples = self._failed_at_samples = 0
        self._closer.has_lost_round &= keeps_samples
        self._tracker.begin_epoch(self._state.epoch)
        self._donor.start()
        self._donor.changed()

    def close(self) -> None:
        """Cancel the round in the background, if there is one."""
        self._cancel_background_round()

    @property
    def has_background_round(self) -> bool:
        """Return whether a round runs in the background."""
        return self._background is not None

    def _cancel_background_round(self) -> None:
        """Cancel the round in the background, because the state is about to be replaced."""
        background, self._background = self._background, None
        if background is not None:
            background.background_round.cancel()
            self._mode.failed("cancelled")

    def _accumulate(self, samples: int) -> StepReport:
        refused = self._learner.accumulate(samples) or ""
        if self._background is not None:
            self._background.steps += 1
        report = StepReport(
            epoch=self._state.epoch,
            stepped=False,
            samples=0 if refused else samples,
            accumulated=self._learner.samples,
            dropped=samples if refused else 0,
            reason=refused,
        )
        return self._with_rejected_samples(report, wait=False)

    def _with_rejected_samples(self, report: StepReport, *, wait: bool) -> StepReport:
        """Return the report with the samples that were found not finite after they had been accepted on a
        device. `wait`: evaluate all pending checks.
        """
        late = self._learner.refused(wait=wait)
        return replace(
            report,
            accumulated=self._learner.samples,
            dropped=report.dropped + late.samples,
            reason="; ".join(filter(None, (report.reason, late.reason))),
        )

    def _should_close(self) -> bool:
        """Return whether the epoch is full and, if its round failed before, whether it should be tried
        again.
        """
        if not self._tracker.update_own(self._learner.samples, self._rate):
            return False
        if self._closer.waits_for_newcomers():
            return False
        return (
            self._learner.samples >= self._retry_at_samples
            or self._tracker.full_announcements > self._announcements_at_failure
            or (self._grace_is_over() and not self._failed_after_grace)
            or self._closer.is_left_alone()
        )

    def _grace_is_over(self) -> bool:
        """Return whether this peer has waited for a quorum for long enough to continue without."""
        history = self._tracker.history
        return history is not None and history.keep_waiting(self._tracker.voters(), self._clock.monotonic_s())

    def _start(self) -> None:
        """Find the other trainers and become visible to them, before the first step."""
        self._tracker.wait_refresh(FIRST_REFRESH_TIMEOUT_S, first=True)
        self._started = True
        self._last_step_ended_s = None
        if self._tracker.swarm_epoch() <= self._state.epoch:
            self._joined()

    def _joined(self) -> None:
        self._donor.start()
        self._donor.changed()
        self._averager.open()
        if self._state.epoch and self._traits.canonical:
            self._averager.open_state()

    def _measure(self, samples: int, now_s: float) -> None:
        """Update the estimate of samples/s from the time between the end of one step and the beginning of
        the next, which is this machine's compute time.
        """
        if self._last_step_ended_s is None or now_s <= self._last_step_ended_s:
            return
        rate = samples / (now_s - self._last_step_ended_s)
        self._rate = rate if self._rate == 0.0 else self._rate + _RATE_GAIN * (rate - self._rate)

    def _resynchronise_after(self, report: StepReport, why: str) -> StepReport:
        """Download the state at the end of a step that took samples, of which `report` is the report."""
        loaded = self._resynchronise(why, report.dropped)
        return replace(
            loaded,
            samples=report.samples if self._learner.samples else 0,
            reason="; ".join(filter(None, (report.reason, loaded.reason))),
        )

    def _resynchronise(self, why: str, dropped: int) -> StepReport:
        """Download the state. `dropped`: samples of this step that do not count any more."""
        ahead = self._tracker.history.ahead if self._tracker.history is not None else None
        given_up = ahead.epochs_given_up if ahead is not None else 0
        if given_up:
            why = f"{why}; this peer gives up {counted(given_up, 'epoch')} that it made while it was cut off"
            for hook in list(self.reunion_hooks.values()):
                hook()
        has_lost_round = self._closer.has_lost_round
        self._learner.suspend()
        # Python shows only warnings by default: lost epochs are worth one, a download alone is not
        _log.log(logging.WARNING if given_up else logging.INFO, "downloading the state again: %s", why)
        loaded = self.load(self._load_timeout_s)
        if loaded.dropped:
            history = self._tracker.history
            is_parted = history is not None and history.has_parted
            if has_lost_round or (history is not None and history.has_counted):
                cause = _COUNTED
            elif is_parted:
                cause = "they are of a history that is given up"
            else:
                cause = _TOO_LATE + (_TOO_SLOW if math.isinf(self._absence_s) else "")
            why += f"; {loaded.dropped} samples are dropped, for {cause}"
        if dropped + loaded.dropped:
            _log.warning("%d samples of this peer are dropped: %s", dropped + loaded.dropped, why)
        if self._tracker.history is not None and not loaded.loaded and loaded.alone:
            self._tracker.history.stay()
        if not loaded.loaded and not self._closer.is_behind():
            # the peer that was ahead has left
            self._resync_reason, self._resync_donors = "", frozenset()
        return StepReport(
            epoch=self._state.epoch,
            stepped=False,
            samples=0,
            accumulated=self._learner.samples,
            dropped=dropped + loaded.dropped,
            epochs_given_up=given_up if loaded.loaded else 0,
            reason=why if loaded.loaded else f"{why}; {loaded.reason}",
            resynchronised=loaded,
        )

    def _close(self, report: StepReport) -> StepReport:
        """Average and step together with the others; the epoch is full."""
        contributed = self._learner.samples
        return self._finish_close(
            report, self._closer.run_rounds(again=bool(self._retry_at_samples)), contributed
        )

    def _finish_close(self, report: StepReport, outcome: CloseOutcome, contributed: int) -> StepReport:
        """Complete the report of an attempt at closing the epoch, and average the state when it is due."""
        if outcome.behind:
            return replace(
                self._resynchronise_after(report, outcome.reason),
                round=outcome.round,
                rounds_failed=outcome.rounds_failed,
            )
        report = replace(
            report,
            round=outcome.round,
            rounds_failed=outcome.rounds_failed,
            accumulated=self._learner.samples,
        )
        if not outcome.stepped:
            self._announcements_at_failure = self._tracker.full_announcements
            # a search that was abandoned at the end of the grace is tried again at once, with the others
            self._failed_after_grace = self._closer.round_is_break
            if self._traits.keeps_progress:
                self._retry_at_samples, self._failed_at_samples = (
                    2 * contributed - self._failed_at_samples,
                    contributed,
                )
            return replace(report, reason="; ".join(filter(None, (report.reason, outcome.reason))))
        self._retry_at_samples = self._failed_at_samples = 0
        if contributed and outcome.not_counted:  # the average has replaced this peer's values
            why = f"{contributed} samples are dropped, for they are in no average: {outcome.not_counted}"
            _log.warning("epoch %d: %s", self._state.epoch - 1, why)
            reason = "; ".join(filter(None, (report.reason, why)))
            report = replace(report, dropped=report.dropped + contributed, reason=reason)
            contributed = 0
        state_round = self._closer.average_state_if_due(alone=outcome.others_missed_it)
        if state_round is not None and not state_round.result.failed:
            self._resync_reason, self._resync_donors = state_round.deviation, state_round.donors
        return replace(
            report,
            epoch=self._state.epoch,
            stepped=True,
            alone=outcome.alone,
            contributed=contributed,
            accumulated=self._learner.samples,
            state_round=state_round.result if state_round else None,
            drift=state_round.drift if state_round else None,
        )

    def _start_background_round(self, report: StepReport) -> StepReport:
        """Begin the round of the full epoch and let training continue."""
        epoch, contributed = self._state.epoch, self._learner.samples
        waiting = self._closer.wait_for_quorum(0)
        if waiting is not None:
            return self._finish_close(report, waiting, contributed)
        if not self._closer.has_peers():
            return self._finish_close(report, self._closer.step_alone(None, 0), contributed)
        if self._retry_at_samples:
            self._tracker.announce_full(epoch)
        background_round = self._averager.begin(
            epoch,
            self._closer.is_obsolete,
            OBSOLETE_ROUND_GRACE_S,
            may_have_counted=self._closer.has_lost_round,
        )
        self._background = _BackgroundEpoch(background_round, epoch, contributed, self._clock.monotonic_s())
        return replace(report, accumulated=self._learner.samples)

    def _poll_background_round(self, report: StepReport) -> StepReport:
        """Take the result of the round in the background if it has ended, or if this peer may not train
        further without it.
        """
        background, delay_steps = self._background, self._traits.delay_steps
        assert background is not None
        if delay_steps is not None and background.steps < delay_steps:
            return report
        enough = delay_steps is not None or self._learner.samples >= background.contributed > 0
        if not enough and not background.background_round.done():
            return report
        try:
            result = background.background_round.result()
        except BaseException:
            self._cancel_background_round()
            raise
        self._background = None
        if not result.failed:
            outcome = self._closer.committed(result, 0, self._clock.monotonic_s() - background.began_s)
        else:
            behind = self._closer.failed(result, 1)
            reason = f"round failed: {result.detail or result.reason}"
            outcome = behind or CloseOutcome(stepped=False, reason=reason, round=result, rounds_failed=1)
        return self._finish_close(report, outcome, background.contributed)
