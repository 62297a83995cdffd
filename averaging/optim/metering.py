"""Statistics of one optimizer, which a peer publishes about itself. Called from the trainer's and the
network's thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from averaging.optim.reports import LoadResult, StepReport
from averaging.result import RoundResult
from swarm.core.ids import PeerId
from swarm.metrics.record import BLAME_MAX, ROUNDS_MAX, Blame, Metrics, RoundReport, check_own

_LOSSES = ("loss", "validation_loss")
_FAILED_MAX = 2  # failed rounds among the published ones
_FAILED_S = 60.0  # for this long a failed round takes precedence over newer successes
_IDLE_S = 20.0  # a trainer is idle when it has been outside of `step` for this long and …
# … for this many times the usual time between two steps
_IDLE_STEPS = 5.0
_INTERVAL_GAIN = 0.2  # weight of the newest interval in the usual time between two steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The tracker's present knowledge of this peer."""

    epoch: int
    samples_per_s: float
    head: str = ""  # head of this peer's history, in hexadecimal
    line: str = ""  # the head after the last break of it


class Meter:
    """Sums over one optimizer's life."""

    def __init__(self, since_s: float, *, name: str = "", device: str = "", agent: str = "") -> None:
        self._since_s = since_s
        self._texts = {"name": name, "device": device, "agent": agent}
        self._lock = threading.Lock()
        self._user_metrics: dict[str, float] = {}
        self._losses: dict[str, float] = {}
        self._non_finite: set[str] = set()
        self._rounds: list[RoundReport] = []
        self._samples = self._bytes_up = self._bytes_down = self._rounds_done = self._rounds_failed = 0
        self._epochs_given_up = 0
        self._last_contribution: tuple[int, float] | None = None
        self._stepping = False
        self._stepped_s: float | None = None  # when the last step returned
        self._usual_interval_s = 0.0  # usual time between the end of a step and the next one
        self._drift: float | None = None

    @contextlib.contextmanager
    def stepping(self, clock: Callable[[], float]) -> Iterator[None]:
        """Mark the trainer as being in `Optimizer.step`, where rounds take their time. A trainer that stays
        outside for long counts as idle.
        """
        with self._lock:
            self._stepping = True
            if self._stepped_s is not None:
                since_s = max(clock() - self._stepped_s, 0.0)
                self._usual_interval_s += (
                    _INTERVAL_GAIN * (since_s - self._usual_interval_s) if self._usual_interval_s else since_s
                )
        try:
            yield
        finally:
            with self._lock:
                self._stepping, self._stepped_s = False, clock()

    def on_step(self, report: StepReport, now_s: float) -> None:
        """Account for one call of `Optimizer.step`. `now_s` is the swarm's time."""
        if (
            report.round is None
            and report.state_round is None
            and report.resynchronised is None
            and not report.stepped
        ):
            return
        with self._lock:
            epoch = report.epoch - (1 if report.stepped else 0)  # the epoch that the round was for
            if report.round is not None:
                self._round("epoch", epoch, report.round, now_s)
            if report.state_round is not None:
                self._round("state", report.epoch, report.state_round, now_s)
            self._rounds_failed += report.rounds_failed
            self._rounds_done += report.round is not None and not report.round.failed
            if report.stepped and report.contributed:
                self._samples += report.contributed
                self._last_contribution = report.epoch, now_s
            self._epochs_given_up += report.epochs_given_up
            if report.drift is not None:
                self._drift = report.drift
        if report.resynchronised is not None:
            self.on_load(report.resynchronised)

    def on_load(self, result: LoadResult) -> None:
        """Account for a download of the state, complete or not."""
        with self._lock:
            self._bytes_down += result.bytes_received

    def set_user_metrics(self, values: Mapping[str, Any]) -> None:
        """Store the user's own metrics, and `loss` and `validation_loss`. Raise UsageError for an invalid
        one; nothing is stored then.
        """
        with self._lock:
            known = list(self._user_metrics)
            checked: dict[str, float | None] = {}
            for name, value in values.items():
                checked[name] = check_own(name, value, () if name in _LOSSES else known)
                if name not in _LOSSES and name not in known:
                    known.append(name)
            for name, number in checked.items():
                target = self._losses if name in _LOSSES else self._user_metrics
                if number is None:
                    self._non_finite.add(name)
                    target.pop(name, None)
                else:
                    self._non_finite.discard(name)
                    target[name] = number

    def metrics(self, pace: Pace, now_s: float, *, reach: str = "") -> Metrics:
        """Return the metrics record of this moment."""
        with self._lock:
            idle_s = self._idle_s(now_s)
            return Metrics(
                at_s=now_s,
                since_s=self._since_s,
                every_s=1.0,  # overwritten by the publisher
                epoch=pace.epoch,
                samples_per_s=round(pace.samples_per_s, 3) if idle_s is None else 0.0,
                idle_s=idle_s,
                reach=reach,
                samples=self._samples,
                loss=self._losses.get("loss"),
                validation_loss=self._losses.get("validation_loss"),
                contributed_epoch=self._last_contribution[0] if self._last_contribution else None,
                contributed_at_s=self._last_contribution[1] if self._last_contribution else None,
                bytes_up=self._bytes_up,
                bytes_down=self._bytes_down,
                head=pace.head,
                line=pace.line,
                epochs_given_up=self._epochs_given_up,
                drift=self._drift,
                rounds_done=self._rounds_done,
                rounds_failed=self._rounds_failed,
                own=dict(self._user_metrics),
                broken=tuple(sorted(self._non_finite)),
                rounds=_rounds_to_publish(self._rounds, now_s),
                **self._texts,
            )

    def _idle_s(self, now_s: float) -> float | None:
        if self._stepping or self._stepped_s is None:
            return None
        idle_s = now_s - self._stepped_s
        return round(idle_s, 1) if idle_s > max(_IDLE_S, _IDLE_STEPS * self._usual_interval_s) else None

    def _round(self, kind: str, epoch: int, result: RoundResult, now_s: float) -> None:
        self._bytes_up += result.bytes_sent
        self._bytes_down += result.bytes_received
        if result.failed and result.reason == "alone":
            return
        del self._rounds[: -4 * ROUNDS_MAX]
        self._rounds.append(
            RoundReport(
                kind=kind,
                epoch=max(0, epoch),
                at_s=now_s,
                seconds=float(result.seconds.get("total", 0.0)),
                bytes=result.bytes_sent + result.bytes_received,
                members=len(result.peers),
                group=result.group_id,
                digest="" if result.failed else result.digest,
                reason=(result.reason or "failed") if result.failed else "",
                detail=result.detail,
                left=_blame(result.left_out),
                accused=_blame(result.accused),
            )
        )


def _rounds_to_publish(rounds: Sequence[RoundReport], now_s: float) -> tuple[RoundReport, ...]:
    """Return the latest rounds, oldest first. Recent failed rounds are kept where newer successes would
    push them out before anybody has read them.
    """
    failed = [entry for entry in rounds if entry.reason and now_s - entry.at_s < _FAILED_S][-_FAILED_MAX:]
    good = [entry for entry in rounds if not any(entry is one for one in failed)]
    return tuple(sorted([*failed, *good[len(failed) - ROUNDS_MAX :]], key=lambda entry: entry.at_s))


def _blame(reasons: Mapping[PeerId, str]) -> Blame:
    return tuple((str(peer), why) for peer, why in list(reasons.items())[:BLAME_MAX])


def device_name(parameters: Sequence[torch.Tensor]) -> str:
    """Return the name of the model's device for people."""
    device = parameters[0].device if parameters else torch.device("cpu")
    return f"{device.type} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type
