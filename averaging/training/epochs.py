"""From one epoch to the next: accumulate, close the epoch together, fall back in line when the swarm went on without this peer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from averaging.result import AveragingResult
from averaging.training.averagers import Rounds, Synchronised
from averaging.training.catchup import CatchUp
from averaging.training.config import OptimizerConfig
from averaging.training.donor import Donor
from averaging.training.modes import Mode
from averaging.training.reports import LoadResult, StepReport
from averaging.training.state import TrainingState
from averaging.training.tracker import Tracker
from swarm.errors import NetworkError
from swarm.ids import PeerId

if TYPE_CHECKING:
    from swarm.node import Node

_log = logging.getLogger(__name__)

_RATE_GAIN = 0.2  # of the newest step in the running estimate of samples/s
_PROBE_TIMEOUT_S = 10.0
_ALONE_LOOK_S = 2.0


@dataclass(frozen=True, slots=True)
class _Closed:
    """How an attempt at closing the epoch ended."""

    stepped: bool
    reason: str = ""
    alone: bool = False
    behind: bool = False
    round: AveragingResult | None = None
    rounds_failed: int = 0


class EpochLoop:
    """What `Optimizer.step` does, on the trainer's thread."""

    def __init__(
        self,
        node: Node,
        parts: tuple[TrainingState, Mode, Tracker, Donor, Rounds, CatchUp],
        state_sync_epochs: int,
        config: OptimizerConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node, self._config, self._clock = node, config, clock
        self._state, self._mode, self._tracker, self._donor, self._rounds, self._catch_up = parts
        self._state_sync_epochs = state_sync_epochs
        self._rate = 0.0
        self._returned_s: float | None = None  # when the last step ended
        self._started = False
        self._out_of_step = ""  # why the state must be fetched anew before anything else

    def step(self, samples: int) -> StepReport:
        """One local step was made; close the epoch when it is full."""
        began_s = self._clock()
        self._measure(samples, began_s)
        if not self._started:
            self._start()
        behind = self._out_of_step or ("the swarm is ahead" if self._tracker.swarm_epoch() > self._state.epoch else "")
        if behind:
            report = self._resynchronise(behind, samples)
        else:
            refused = self._mode.accumulate(samples) or ""
            report = StepReport(
                epoch=self._state.epoch,
                stepped=False,
                samples=0 if refused else samples,
                accumulated=self._mode.samples,
                dropped=samples if refused else 0,
                reason=refused,
            )
            if self._tracker.report(self._mode.samples, self._rate):
                report = self._close(report)
        self._returned_s = self._clock()
        return replace(report, progress=self._tracker.view().fraction, seconds=self._returned_s - began_s)

    def load(self, timeout_s: float) -> LoadResult:
        """Fetch the state; afterwards this peer gives it to others, too."""
        result = self._catch_up.load(timeout_s)
        if result.loaded:
            self._out_of_step = ""
            self._started = True
            self._joined()
        elif result.alone:
            self._donor.start()
        return result

    def attend(self, timeout_s: float) -> StepReport | None:
        """Without a step of our own: the round of this epoch, if it begins within the time. None: it does not."""
        epoch = self._state.epoch
        if not self._started or not self._tracker.wait_begun(epoch, timeout_s):
            return None
        if self._tracker.swarm_epoch() > epoch:
            return self._resynchronise("the swarm is ahead", 0)
        return self._close(StepReport(epoch=epoch, stepped=False, samples=0, accumulated=self._mode.samples))

    def resumed(self) -> None:
        """The state was set from outside: a checkpoint."""
        self._tracker.begin_epoch(self._state.epoch)
        self._donor.changed()

    def _start(self) -> None:
        """Before the first step: know who else trains, and be known."""
        self._tracker.wait_look(self._config.first_look_s, first=True)
        self._started = True
        self._returned_s = None
        if self._tracker.swarm_epoch() <= self._state.epoch:
            self._joined()

    def _joined(self) -> None:
        self._donor.start()
        self._donor.changed()
        self._rounds.open()
        if self._state.epoch:
            self._rounds.open_state()

    def _measure(self, samples: int, now_s: float) -> None:
        """Samples per second between the end of one step and the beginning of the next: what this machine computes."""
        if self._returned_s is None or now_s <= self._returned_s:
            return
        rate = samples / (now_s - self._returned_s)
        self._rate = rate if self._rate == 0.0 else self._rate + _RATE_GAIN * (rate - self._rate)

    def _resynchronise(self, why: str, samples: int) -> StepReport:
        dropped = samples + self._mode.drop()
        _log.warning("fetching the state anew: %s; %d samples are dropped", why, dropped)
        loaded = self.load(self._config.load_timeout_s)
        if not loaded.loaded and self._tracker.swarm_epoch() <= self._state.epoch:
            self._out_of_step = ""  # who was ahead is gone
        return StepReport(
            epoch=self._state.epoch,
            stepped=False,
            samples=0,
            accumulated=0,
            dropped=dropped,
            reason=why if loaded.loaded else f"{why}; {loaded.reason}",
            resynchronised=loaded,
        )

    def _close(self, report: StepReport) -> StepReport:
        """The epoch is full: average and step, together."""
        contributed = self._mode.samples
        closed = self._attempt()
        if closed.behind:
            dropped = self._resynchronise(closed.reason, 0)
            return replace(
                dropped, samples=0, dropped=dropped.dropped + report.dropped, round=closed.round, rounds_failed=closed.rounds_failed
            )
        report = replace(report, round=closed.round, rounds_failed=closed.rounds_failed, accumulated=self._mode.samples)
        if not closed.stepped:
            return replace(report, reason="; ".join(filter(None, (report.reason, closed.reason))))
        state_round = self._synchronise(alone=closed.alone)
        return replace(
            report,
            epoch=self._state.epoch,
            stepped=True,
            alone=closed.alone,
            contributed=contributed,
            accumulated=0,
            state_round=state_round.result if state_round else None,
            drift=state_round.drift if state_round else None,
        )

    def _attempt(self) -> _Closed:
        """Rounds until one is committed, this peer turns out to be alone, the swarm is ahead, or there were enough of them."""
        result: AveragingResult | None = None
        failed, epoch = 0, self._state.epoch
        while failed < self._config.rounds_max:
            if not self._company():
                self._advance([], ())
                return _Closed(stepped=True, alone=True, round=result, rounds_failed=failed)
            result = self._rounds.average(epoch, lambda: self._tracker.swarm_epoch() > epoch, self._config.give_up_s)
            if not result.failed:
                self._advance(list(result.gathered.values()), [peer for peer in result.peers if peer not in result.left_out])
                return _Closed(stepped=True, round=result, rounds_failed=failed)
            failed += 1
            _log.info("round of epoch %d failed: %s", epoch, result.detail)
            self._probe()
            if result.reason == "passed" or self._tracker.swarm_epoch() > epoch:
                return _Closed(
                    stepped=False,
                    behind=True,
                    reason=f"the swarm completed epoch {epoch} without this peer",
                    round=result,
                    rounds_failed=failed,
                )
        assert result is not None
        return _Closed(stepped=False, reason=f"round failed: {result.detail or result.reason}", round=result, rounds_failed=failed)

    def _advance(self, told: list[object], members: Sequence[PeerId]) -> None:
        self._catch_up.advance(lambda: self._mode.apply(told))
        self._tracker.begin_epoch(self._state.epoch, members=members)
        self._donor.changed()

    def _company(self) -> bool:
        """Does anybody else train this epoch? Not those who lag behind and will fetch the state; certainty needs a recent look."""
        if not self._here() and self._tracker.looked_ago_s() > self._config.lonely_look_s:
            self._tracker.wait_look(_ALONE_LOOK_S)
        return self._here()

    def _here(self) -> bool:
        return any(claim.epoch >= self._state.epoch for claim in self._tracker.others().values())

    def _probe(self) -> None:
        """Find out at once who of the others still lives."""
        try:
            self._node.network.run(self._tracker.probe(), _PROBE_TIMEOUT_S)
        except NetworkError as error:
            _log.info("not everybody was asked: %s", error)

    def _synchronise(self, *, alone: bool) -> Synchronised | None:
        """Make the state canonical when its epoch has come."""
        epoch = self._state.epoch
        if not self._state_sync_epochs:
            return None
        self._rounds.open_state()  # even alone: a newcomer must know of this peer when the round comes
        if epoch % self._state_sync_epochs and epoch != min(2, self._state_sync_epochs):
            return None
        if alone:
            with self._state.lock:
                self._state.agree_extras()
                self._state.moved(epoch)
            return None
        synchronised = self._rounds.synchronise(self._others_went_on, self._config.give_up_s)
        for _ in range(self._config.state_rounds_max - 1):
            if not synchronised.result.failed or synchronised.result.reason == "passed" or self._others_went_on():
                break
            self._tracker.wait_look(_ALONE_LOOK_S)  # whoever made its averager a moment later is known now
            synchronised = self._rounds.synchronise(self._others_went_on, self._config.give_up_s)
        if synchronised.result.failed:
            _log.warning("the state of epoch %d was not averaged: %s", epoch, synchronised.result.detail)
        elif not synchronised.in_step:
            self._out_of_step = "most peers have other step counters or another schedule"
        self._donor.changed()
        return synchronised

    def _others_went_on(self) -> bool:
        """Whether all others are beyond averaging the state of this epoch: nobody will come to that round any more."""
        epoch = self._state.epoch
        claims = self._tracker.others().values()
        return all(claim.epoch > epoch or (claim.epoch == epoch and claim.samples > 0) for claim in claims)
