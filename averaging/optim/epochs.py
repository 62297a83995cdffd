"""The loop over epochs: accumulate, close the epoch together with the other peers, and download the state
when the swarm went on without this peer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from averaging.optim.catchup import CatchUp
from averaging.optim.config import OptimizerConfig
from averaging.optim.epoch_averager import BackgroundRound, EpochAverager, StateRound
from averaging.optim.modes import Mode
from averaging.optim.progress.tracker import Tracker
from averaging.optim.reports import LoadResult, StepReport
from averaging.optim.state.donor import Donor
from averaging.result import RoundResult
from swarm.core.errors import NetworkError
from swarm.core.ids import PeerId

_log = logging.getLogger(__name__)

_RATE_GAIN = 0.2  # weight of the newest step in the running estimate of samples/s
_PROBE_TIMEOUT_S = 10.0
_REFRESH_TIMEOUT_S = 2.0
# in modes where peers differ anyway: a peer at most this far behind keeps its own state
_TOLERATED_LAG_EPOCHS_MAX = 3


@dataclass(frozen=True, slots=True)
class _CloseOutcome:
    """How an attempt at closing the epoch ended."""

    stepped: bool
    reason: str = ""
    alone: bool = False
    behind: bool = False
    round: RoundResult | None = None
    rounds_failed: int = 0


@dataclass(slots=True)
class _BackgroundEpoch:
    """A round that runs while training continues."""

    background_round: BackgroundRound
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
        config: OptimizerConfig,
    ) -> None:
        self._mode, self._state, self._tracker, self._donor = mode, mode.state, tracker, donor
        self._averager, self._catch_up, self._config = averager, catch_up, config
        self._traits, self._learner = self._mode.traits, self._mode.learner
        self._rate = 0.0
        self._last_step_ended_s: float | None = None  # when the last step ended
        self._started = False
        self._resync_reason = ""  # why the state must be downloaded before anything else
        self._background: _BackgroundEpoch | None = None
        # samples at the time when the round failed, in a mode that keeps training
        self._failed_at_samples = 0
        self._retry_at_samples = 0  # samples at which it is tried again: after as many more as had led to it
        self._announcements_at_failure = 0  # the tracker's `full_announcements` when the round failed

    def step(self, samples: int) -> StepReport:
        """Account for one local step of `samples` samples and close the epoch when it is full. Return a
        report of this call.
        """
        began_s = time.monotonic()
        self._measure(samples, began_s)
        if not self._started:
            self._start()
        behind = self._resync_reason or (
            "the swarm is ahead" if self._background is None and self._is_behind() else ""
        )
        if behind and not self._traits.keeps_progress:
            report = self._resynchronise(behind, samples)
        else:
            report = self._accumulate(samples)
            if self._background is not None:
                report = self._poll_background_round(report)
            if behind:
                report = replace(self._resynchronise(behind, report.dropped), samples=report.samples)
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
        self._last_step_ended_s = time.monotonic()
        return replace(
            report, progress=self._tracker.view().fraction, seconds=self._last_step_ended_s - began_s
        )

    def load(self, timeout_s: float) -> LoadResult:
        """Download the state. Afterwards this peer serves it to others, too."""
        return self._load(timeout_s)[0]

    def _load(self, timeout_s: float) -> tuple[LoadResult, int]:
        """Download the state. Return the result and the number of local samples that were dropped."""
        self._cancel_background_round()
        try:
            result = self._catch_up.load(timeout_s)
        finally:
            with self._state.lock:
                lost = self._learner.resume()
        self._retry_at_samples = self._failed_at_samples = 0
        if result.loaded:
            self._resync_reason = ""
            self._started = True
            self._joined()
        elif result.alone:
            self._donor.start()
        return result, lost

    def join_started_round(self, timeout_s: float) -> StepReport | None:
        """Take part in this epoch's round without a step of this peer's own. Return None when no round
        begins within `timeout_s`.
        """
        epoch = self._state.epoch
        if not self._started or not self._tracker.wait_full(epoch, timeout_s):
            return None
        if self._tracker.swarm_epoch() > epoch:
            return self._resynchronise("the swarm is ahead", 0)
        report = StepReport(epoch=epoch, stepped=False, samples=0, accumulated=self._learner.samples)
        return self._close(self._with_rejected_samples(report, wait=True))

    def resumed(self) -> None:
        """Continue after the state was replaced from outside, for instance by a checkpoint."""
        self._cancel_background_round()
        self._retry_at_samples = self._failed_at_samples = 0
        self._tracker.begin_epoch(self._state.epoch)
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

    def _is_behind(self) -> bool:
        """Return whether the swarm went on without this peer. In modes where peers proceed alone, a few
        epochs of difference are tolerated.
        """
        return self._tracker.swarm_epoch() > self._state.epoch + (
            _TOLERATED_LAG_EPOCHS_MAX if self._traits.proceeds_alone else 0
        )

    def _should_close(self) -> bool:
        """Return whether the epoch is full and, if its round failed before, whether it should be tried
        again.
        """
        if not self._tracker.update_own(self._learner.samples, self._rate):
            return False
        return (
            self._learner.samples >= self._retry_at_samples
            or self._tracker.full_announcements > self._announcements_at_failure
        )

    def _start(self) -> None:
        """Find out who else trains and become visible to them, before the first step."""
        self._tracker.wait_refresh(self._config.first_refresh_timeout_s, first=True)
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

    def _resynchronise(self, why: str, samples: int) -> StepReport:
        dropped = samples + self._learner.suspend()
        _log.warning("downloading the state again: %s", why)
        loaded, lost = self._load(self._config.load_timeout_s)
        if dropped + lost:
            _log.warning("%d samples of this peer are dropped", dropped + lost)
        if not loaded.loaded and not self._is_behind():
            self._resync_reason = ""  # the peer that was ahead has left
        return StepReport(
            epoch=self._state.epoch,
            stepped=False,
            samples=0,
            accumulated=self._learner.samples,
            dropped=dropped + lost,
            reason=why if loaded.loaded else f"{why}; {loaded.reason}",
            resynchronised=loaded,
        )

    def _close(self, report: StepReport) -> StepReport:
        """Average and step together with the others; the epoch is full."""
        contributed = self._learner.samples
        return self._finish_close(report, self._run_rounds(), contributed)

    def _finish_close(self, report: StepReport, outcome: _CloseOutcome, contributed: int) -> StepReport:
        """Complete the report of an attempt at closing the epoch, and average the state when it is due."""
        if outcome.behind:
            dropped = self._resynchronise(outcome.reason, 0)
            return replace(
                dropped,
                samples=report.samples if self._traits.keeps_progress else 0,
                dropped=dropped.dropped + report.dropped,
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
            if self._traits.keeps_progress:
                self._retry_at_samples, self._failed_at_samples = (
                    2 * contributed - self._failed_at_samples,
                    contributed,
                )
            return replace(report, reason="; ".join(filter(None, (report.reason, outcome.reason))))
        self._retry_at_samples = self._failed_at_samples = 0
        state_round = self._average_state_if_due(alone=outcome.alone)
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

    def _run_rounds(self) -> _CloseOutcome:
        """Run rounds until one is committed, this peer turns out to be alone, the swarm is ahead, or
        `rounds_max` rounds have failed.
        """
        result: RoundResult | None = None
        failed, epoch = 0, self._state.epoch
        while failed < (1 if self._traits.keeps_progress else self._config.rounds_max):
            if not self._has_peers_after_refresh():
                return self._step_alone(result, failed)
            if failed or self._retry_at_samples:
                self._tracker.announce_full(epoch)
            try:
                result = self._averager.average(
                    epoch, lambda: self._tracker.swarm_epoch() > epoch, self._config.obsolete_round_grace_s
                )
            except BaseException:
                self._mode.failed("cancelled")
                raise
            if not result.failed:
                return self._committed(result, failed)
            failed += 1
            outcome = self._failed(result, failed)
            if outcome is not None:
                return outcome
        assert result is not None
        return _CloseOutcome(
            stepped=False,
            reason=f"round failed: {result.detail or result.reason}",
            round=result,
            rounds_failed=failed,
        )

    def _start_background_round(self, report: StepReport) -> StepReport:
        """Begin the round of the full epoch and let training continue."""
        epoch, contributed = self._state.epoch, self._learner.samples
        if not self._has_peers_after_refresh():
            return self._finish_close(report, self._step_alone(None, 0), contributed)
        if self._retry_at_samples:
            self._tracker.announce_full(epoch)
        background_round = self._averager.begin(
            epoch, lambda: self._tracker.swarm_epoch() > epoch, self._config.obsolete_round_grace_s
        )
        self._background = _BackgroundEpoch(background_round, epoch, contributed, time.monotonic())
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
            outcome = self._committed(result, 0, time.monotonic() - background.began_s)
        else:
            behind = self._failed(result, 1)
            reason = f"round failed: {result.detail or result.reason}"
            outcome = behind or _CloseOutcome(stepped=False, reason=reason, round=result, rounds_failed=1)
        return self._finish_close(report, outcome, background.contributed)

    def _step_alone(self, result: RoundResult | None, failed: int) -> _CloseOutcome:
        """Step without a round: no other peer is live, or the mode allows it."""
        self._mode.prepare(self._state.epoch)
        self._advance([], ())
        return _CloseOutcome(stepped=True, alone=True, round=result, rounds_failed=failed)

    def _committed(self, result: RoundResult, failed: int, began_ago_s: float = 0.0) -> _CloseOutcome:
        self._advance(
            list(result.gathered.values()),
            [peer for peer in result.peers if peer not in result.left_out],
            began_ago_s,
        )
        return _CloseOutcome(stepped=True, round=result, rounds_failed=failed)

    def _failed(self, result: RoundResult, failed: int) -> _CloseOutcome | None:
        """Return the outcome of a failed round, or None when it may be tried again."""
        self._mode.failed(result.reason)
        epoch = self._state.epoch
        _log.info("round of epoch %d failed: %s", epoch, result.detail)
        if self._traits.proceeds_alone:
            return self._step_alone(result, failed)
        self._probe()
        if result.reason == "passed" or self._tracker.swarm_epoch() > epoch:
            reason = f"the swarm completed epoch {epoch} without this peer"
            return _CloseOutcome(
                stepped=False, behind=True, reason=reason, round=result, rounds_failed=failed
            )
        return None

    def _advance(self, metadata: list[object], members: Sequence[PeerId], began_ago_s: float = 0.0) -> None:
        self._catch_up.advance(lambda: self._mode.apply(metadata))
        if self._traits.proceeds_alone:
            # catch up with epochs that passed while this peer waited for a partner in vain
            for _ in range(self._state.epoch, self._tracker.swarm_epoch()):
                self._catch_up.advance(lambda: None)
        self._tracker.begin_epoch(self._state.epoch, members=members, began_ago_s=began_ago_s)
        self._donor.changed()

    def _has_peers_after_refresh(self) -> bool:
        """Return whether another peer trains in this epoch. Peers that lag behind do not count, they will
        fetch the state. The answer "no" needs a recent read of the DHT.
        """
        if (
            not self._has_peers_in_epoch()
            and self._tracker.refresh_age_s() > self._config.alone_check_age_s_max
        ):
            self._tracker.wait_refresh(_REFRESH_TIMEOUT_S)
        return self._has_peers_in_epoch()

    def _has_peers_in_epoch(self) -> bool:
        return any(other.epoch >= self._state.epoch for other in self._tracker.others().values())

    def _probe(self) -> None:
        """Contact the other peers directly, so that dead ones are known at once."""
        try:
            self._catch_up.probe(_PROBE_TIMEOUT_S)
        except NetworkError as error:
            _log.info("not all peers could be asked: %s", error)

    def _average_state_if_due(self, *, alone: bool) -> StateRound | None:
        """Average the state when this epoch is one for that. Return None when no round was made."""
        epoch = self._state.epoch
        if not self._averager.state_sync_epochs or not self._traits.canonical:
            return None
        # even alone: newcomers must be able to find this peer when the round comes
        self._averager.open_state()
        if epoch % self._averager.state_sync_epochs and epoch != min(2, self._averager.state_sync_epochs):
            return None
        if alone:
            with self._state.lock:
                self._state.agree_extras()
                self._state.mark_changed(epoch)
            return None
        state_round = self._averager.average_state(self._others_went_on, self._config.obsolete_round_grace_s)
        for _ in range(self._config.state_rounds_max - 1):
            if (
                not state_round.result.failed
                or state_round.result.reason == "passed"
                or self._others_went_on()
            ):
                break
            # by now a peer that opened its averager a moment later is known
            self._tracker.wait_refresh(_REFRESH_TIMEOUT_S)
            state_round = self._averager.average_state(
                self._others_went_on, self._config.obsolete_round_grace_s
            )
        if state_round.result.failed:
            _log.warning("the state of epoch %d was not averaged: %s", epoch, state_round.result.detail)
        elif not state_round.counters_agree:
            self._resync_reason = "most peers have other step counters or another schedule"
        self._donor.changed()
        return state_round

    def _others_went_on(self) -> bool:
        """Return whether all others are past averaging the state of this epoch, so that nobody will join
        that round.
        """
        epoch = self._state.epoch
        others = self._tracker.others().values()
        return all(other.epoch > epoch or (other.epoch == epoch and other.samples > 0) for other in others)
