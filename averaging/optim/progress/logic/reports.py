"""Progress of the swarm within its epoch, computed from the peers' reports: a pure state machine, one per
peer. In runs of up to 64 peers it has the reports of all peers, in larger ones those of its shard and
the total of the run (`averaging.optim.progress.logic.shards`).

An epoch is full when the reported samples of all live peers reach the target. Reports are not trusted; each
is limited by the others: a reported rate counts up to `rate_ratio_max` times the median, and reported
samples up to what such a rate yields since the epoch began. Every peer applies the same rule to the same
reports, its own included, so that views agree up to messages in transit. All times are seconds of the
swarm's clock, passed in.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import PeerId

EPOCH_MAX = 1 << 40
SAMPLES_MAX = 1 << 40
RATE_MAX = 1e12  # samples/s
BITS_MAX = 24  # bits of the number of shards of a run
_PEERS_MAX = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressConfig:
    """How reports are counted and how often they are exchanged."""

    # a peer counts at most this many times the median rate; from three peers on, since two have no majority
    rate_ratio_max: float = 3.0
    # a peer may have begun the epoch this much earlier than this peer thinks; larger lets liars claim more in
    # short epochs
    slack_s: ClassVar[float] = 0.25
    # how long a report is extrapolated at its rate, at most to twice its samples; 0: never
    extrapolation_s_max: float = 3.0
    # fraction of the target, in this peer's own view, from which an announcement of a full epoch is believed
    begin_fraction: ClassVar[float] = 0.75
    report_ttl_s: float = 15.0  # a peer that is silent for this long is considered gone
    refresh_s_min: float = 0.25  # between two reads of the DHT when the epoch is about to be full
    refresh_s_max: float = 3.0  # between two reads when the epoch is far from full
    # reports kept; beyond it the oldest is dropped. Well above the size of one dictionary, so that an
    # overfull one is noticed
    peers_max: int = 256
    # instead of refresh_s_min in a run of several shards, where totals take longer than that anyway
    refresh_s_large: ClassVar[float] = 1.0
    # a peer that reports without any progress for this long does not count: its trainer hangs. Must exceed
    # the longest step
    stalled_s_max: float = 300.0
    clock_ahead_s_max: ClassVar[float] = 10.0  # a report from further in the future is refused

    def __post_init__(self) -> None:
        if self.rate_ratio_max < 1 or not 0 < self.refresh_s_min <= self.refresh_s_max:
            raise UsageError(
                "a ProgressConfig needs rate_ratio_max >= 1 and 0 < refresh_s_min <= refresh_s_max"
            )
        if self.report_ttl_s <= self.refresh_s_max:
            raise UsageError(
                "report_ttl_s must exceed refresh_s_max, or live peers would expire between two reports"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressReport:
    """One peer's report about itself."""

    epoch: int
    samples: int  # accumulated in this epoch
    rate: float  # samples/s while it trains; 0: not known yet
    at_s: float  # time of these values
    since_s: float  # beginning of the epoch

    @classmethod
    def decode(cls, value: Any, now_s: float, config: ProgressConfig) -> ProgressReport:
        """Parse and check a report. Raise PeerError with the reason when it is invalid."""
        if not isinstance(value, Mapping):
            raise PeerError("a progress record is a map")
        epoch, samples = value.get("epoch"), value.get("samples")
        if not is_count(epoch, EPOCH_MAX) or not is_count(samples, SAMPLES_MAX):
            raise PeerError("epoch and samples are whole numbers within bounds")
        rate, at_s, since_s = value.get("rate"), value.get("at"), value.get("since")
        if (
            not is_number(rate, 0.0, RATE_MAX)
            or not is_number(at_s, 0.0, now_s + config.clock_ahead_s_max)
            or not is_number(since_s, 0.0, at_s)
        ):
            raise PeerError("rate, at and since are finite numbers, since <= at <= now")
        return cls(epoch=epoch, samples=samples, rate=float(rate), at_s=float(at_s), since_s=float(since_s))

    def encode(self) -> dict[str, Any]:
        """Return the report as a dictionary for a DHT record."""
        return {
            "epoch": self.epoch,
            "samples": self.samples,
            "rate": self.rate,
            "at": self.at_s,
            "since": self.since_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerProgress:
    """One peer in a snapshot: its own report, and how much of it counts."""

    epoch: int
    samples: int
    samples_per_s: float
    counted: float  # samples that count towards this epoch now; 0 for a peer in another epoch
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressView:
    """A snapshot of the progress for people and programs: `opt.progress`."""

    epoch: int
    swarm_epoch: int
    samples: float  # counted over the swarm
    target: int
    samples_per_s: float
    peers: dict[PeerId, PeerProgress]  # this peer included; in a run of several shards those of its own
    peers_total: int = 0  # in the whole run

    @property
    def fraction(self) -> float:
        """Return the reached fraction of the target, at most 1."""
        return min(1.0, self.samples / self.target)

    @property
    def eta_s(self) -> float:
        """Return the seconds until the epoch is full; infinity while nobody trains."""
        missing = max(0.0, self.target - self.samples)
        return missing / self.samples_per_s if self.samples_per_s > 0 else (math.inf if missing else 0.0)


@dataclass(slots=True)
class _Entry:
    report: ProgressReport
    issued_s: float  # only reports newer than this are accepted
    expires_s: float
    changed_s: float  # when its epoch or samples changed last
    suspect: bool = False  # did not answer; counts again after a newer report
    epoch_min: int = 0  # epoch whose beginning it took part in, even if its reports do not say so yet


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressTotal:
    """Sum of the reports of a part of the run, or of all of it."""

    epoch: int
    samples: float  # accumulated in `epoch`
    rate: float  # samples/s of all peers
    peers: int
    median_rate: float  # of one peer; 0: no peer has one yet
    at_s: float
    since_s: float  # beginning of the epoch
    bits: int = 0  # of a total: the division of the run from now on

    def encode(self) -> list[Any]:
        """Return the total as a list for a DHT record."""
        return [
            self.epoch,
            self.samples,
            self.rate,
            self.peers,
            self.median_rate,
            self.at_s,
            self.since_s,
            self.bits,
        ]

    @classmethod
    def decode(cls, value: Any, now_s: float, config: ProgressConfig) -> ProgressTotal:
        """Parse and check a total. Raise PeerError with the reason when it is invalid."""
        if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) != 8:
            raise PeerError("a sum is a list of eight numbers")
        epoch, samples, rate, peers, median_rate, at_s, since_s, bits = value
        whole = is_count(epoch, EPOCH_MAX) and is_count(peers, _PEERS_MAX) and is_count(bits, BITS_MAX)
        amounts = (
            is_number(samples, 0.0, float(SAMPLES_MAX))
            and is_number(rate, 0.0, RATE_MAX * 1e3)
            and is_number(median_rate, 0.0, RATE_MAX)
        )
        if (
            not whole
            or not amounts
            or not is_number(at_s, 0.0, now_s + config.clock_ahead_s_max)
            or not is_number(since_s, 0.0, at_s)
        ):
            raise PeerError("a sum is of numbers within bounds, since <= at <= now")
        return cls(
            epoch=epoch,
            samples=float(samples),
            rate=float(rate),
            peers=peers,
            median_rate=float(median_rate),
            at_s=float(at_s),
            since_s=float(since_s),
            bits=bits,
        )

    def samples_at(self, now_s: float, config: ProgressConfig) -> float:
        """Return the samples extrapolated to `now_s` at the total's rate: for a limited time, and at most
        to twice the reported samples.
        """
        silent_s = min(max(0.0, now_s - self.at_s), config.extrapolation_s_max)
        return self.samples + min(self.rate * silent_s, self.samples)


class EpochProgress:
    """State machine of the epoch's progress. `own` is this peer; its report never expires."""

    def __init__(self, own: PeerId, target: int, config: ProgressConfig, now_s: float) -> None:
        if not 1 <= target <= SAMPLES_MAX:
            raise UsageError(f"target_batch_size is a positive number of samples, not {target}")
        self.own, self.target, self.config = own, target, config
        self._own_report = ProgressReport(epoch=0, samples=0, rate=0.0, at_s=now_s, since_s=now_s)
        self._others: dict[PeerId, _Entry] = {}
        # total of a run of several shards; the reports are then those of this peer's shard
        self.total: ProgressTotal | None = None

    # --- this peer

    @property
    def epoch(self) -> int:
        return self._own_report.epoch

    @property
    def own_report(self) -> ProgressReport:
        """Return this peer's own report."""
        return self._own_report

    def begin_epoch(
        self, epoch: int, now_s: float, *, joining: bool = False, began_ago_s: float = 0.0
    ) -> None:
        """Enter `epoch` with no samples in it.

        `joining`: this peer was absent when the others began, and takes the beginning of the epoch from
        their reports. `began_ago_s`: the time that it has trained in the epoch already, while the previous
        round was running.
        """
        began_s = [
            report.since_s for report in self.others(now_s).values() if joining and report.epoch == epoch
        ]
        since_s = min(now_s, statistics.median_low(began_s)) if began_s else now_s - began_ago_s
        self._own_report = ProgressReport(
            epoch=epoch, samples=0, rate=self._own_report.rate, at_s=now_s, since_s=since_s
        )

    def update_own(self, samples: int, rate: float, now_s: float) -> None:
        """Update this peer's own report: `samples` accumulated in its epoch, at `rate` samples/s."""
        now_s = max(now_s, self._own_report.since_s)  # a clock correction may move time backwards
        self._own_report = ProgressReport(
            epoch=self._own_report.epoch,
            samples=samples,
            rate=min(rate, RATE_MAX),
            at_s=now_s,
            since_s=self._own_report.since_s,
        )

    # --- other peers

    def on_report(
        self, peer: PeerId, report: ProgressReport, now_s: float, expires_s: float | None = None
    ) -> bool:
        """Take a report, from a record or from the peer itself. Return False when it is not new: older than
        the known one, expired, or this peer's own.
        """
        expires_s = min(
            expires_s if expires_s is not None else math.inf, report.at_s + self.config.report_ttl_s
        )
        known = self._others.get(peer)
        if peer == self.own or expires_s <= now_s or (known is not None and known.issued_s >= report.at_s):
            return False
        if known is None and len(self._others) >= self.config.peers_max:
            oldest = min(self._others, key=lambda other: self._others[other].issued_s)
            del self._others[oldest]
        epoch_min = known.epoch_min if known is not None else 0
        # sent before the end of that round: the peer must not appear to be in an earlier epoch
        if report.epoch < epoch_min:
            report = ProgressReport(
                epoch=epoch_min, samples=0, rate=report.rate, at_s=report.at_s, since_s=report.at_s
            )
        moved = known is None or (known.report.epoch, known.report.samples) != (report.epoch, report.samples)
        self._others[peer] = _Entry(
            report,
            report.at_s,
            expires_s,
            now_s if moved or known is None else known.changed_s,
            epoch_min=epoch_min,
        )
        return True

    def on_round(self, peers: Iterable[PeerId], epoch: int, now_s: float) -> None:
        """Record that these peers completed a round with this one: they are in `epoch` now, even if they
        have not reported it yet.
        """
        for peer in peers:
            entry = self._others.get(peer)
            if entry is not None:
                entry.epoch_min = max(entry.epoch_min, epoch)
            if entry is not None and entry.report.epoch < epoch:
                entry.report = ProgressReport(
                    epoch=epoch, samples=0, rate=entry.report.rate, at_s=now_s, since_s=now_s
                )
                entry.changed_s, entry.suspect = now_s, False
                entry.expires_s = max(entry.expires_s, now_s + self.config.report_ttl_s)

    def on_goodbye(self, peer: PeerId) -> None:
        """Remove a peer that withdrew its record."""
        self._others.pop(peer, None)

    def on_unreachable(self, peer: PeerId) -> None:
        """Mark a peer that did not answer: it does not count until it sends a newer report."""
        if peer in self._others:
            self._others[peer].suspect = True

    def on_resumed(self, now_s: float) -> None:
        """Clear the hang detection of all peers: the run's owner had paused them."""
        for entry in self._others.values():
            entry.changed_s = now_s

    # --- results

    def others(self, now_s: float) -> dict[PeerId, ProgressReport]:
        """Return the reports of the live peers, without this one."""
        self._others = {peer: entry for peer, entry in self._others.items() if entry.expires_s > now_s}
        oldest_s = now_s - self.config.stalled_s_max
        return {
            peer: entry.report
            for peer, entry in self._others.items()
            if not entry.suspect and entry.changed_s > oldest_s
        }

    def counted(self, now_s: float) -> dict[PeerId, float]:
        """Return how many samples of each live peer count towards this peer's epoch now."""
        live = {self.own: self._own_report, **self.others(now_s)}
        # in any epoch: at the start of one no other peer has reported yet
        rates = [report.rate for report in live.values() if report.rate > 0]
        rate_max = self.config.rate_ratio_max * statistics.median_low(rates) if len(rates) >= 3 else math.inf
        return {
            peer: self._count(peer, report, rate_max, now_s)
            for peer, report in live.items()
            if report.epoch == self._own_report.epoch
        }

    def _count(self, peer: PeerId, report: ProgressReport, rate_max: float, now_s: float) -> float:
        training_s = max(0.0, report.at_s - self._own_report.since_s) + self.config.slack_s
        counted = min(float(report.samples), rate_max * training_s, float(self.target))
        if peer != self.own:  # this peer's own number is exact
            silent_s = min(max(0.0, now_s - report.at_s), self.config.extrapolation_s_max)
            # in short epochs rates do not show how long a round takes
            counted += min(min(report.rate, rate_max) * silent_s, counted)
        return counted

    def is_full(self, now_s: float) -> bool:
        """Return whether the epoch's batch is complete in this peer's view."""
        return self.samples_counted(now_s) >= self.target

    def samples_counted(self, now_s: float) -> float:
        """Return the samples of the whole swarm that count towards this peer's epoch."""
        if self.total is None:
            return sum(self.counted(now_s).values())
        return (
            self.total.samples_at(now_s, self.config) if self.total.epoch == self._own_report.epoch else 0.0
        )

    def is_plausibly_full(self, epoch: int, now_s: float) -> bool:
        """Return whether another peer's announcement that `epoch` is full is plausible in this peer's view.
        If not, ask again after a fresh read of the reports.
        """
        return (
            epoch == self._own_report.epoch
            and self.samples_counted(now_s) >= self.target * self.config.begin_fraction
        )

    def swarm_epoch(self, now_s: float) -> int:
        """Return the epoch that the swarm has reached: the highest reported by enough other peers that a
        single liar cannot move it, and never below this peer's own.
        """
        if self.total is not None:
            return max(self._own_report.epoch, self.total.epoch)
        epochs = sorted((report.epoch for report in self.others(now_s).values()), reverse=True)
        if not epochs:
            return self._own_report.epoch
        enough = 1 if len(epochs) <= 2 else max(2, math.ceil(len(epochs) / 3))
        return max(self._own_report.epoch, epochs[enough - 1])

    def view(self, now_s: float) -> ProgressView:
        """Return a snapshot of the progress."""
        counted, others = self.counted(now_s), self.others(now_s)
        peers = {
            peer: PeerProgress(
                epoch=report.epoch,
                samples=report.samples,
                samples_per_s=report.rate,
                counted=counted.get(peer, 0.0),
                age_s=max(0.0, now_s - report.at_s),
            )
            for peer, report in {self.own: self._own_report, **others}.items()
        }
        return ProgressView(
            epoch=self._own_report.epoch,
            swarm_epoch=self.swarm_epoch(now_s),
            samples=self.samples_counted(now_s),
            target=self.target,
            samples_per_s=self.total.rate
            if self.total is not None
            else sum(peer.samples_per_s for peer in peers.values()),
            peers=peers,
            peers_total=self.total.peers if self.total is not None else len(peers),
        )

    def refresh_s(self, now_s: float) -> float:
        """Return how long to wait before the others' reports are read again."""
        eta_s = self.view(now_s).eta_s
        shortest_s = self.config.refresh_s_min if self.total is None else self.config.refresh_s_large
        return min(max(eta_s / 4, shortest_s), self.config.refresh_s_max)


def is_count(value: Any, maximum: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= maximum


def is_number(value: Any, minimum: float, maximum: float) -> TypeGuard[float]:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and minimum <= value <= maximum
    )
