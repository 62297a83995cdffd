"""The monitor's knowledge of one peer: its last records, their age, and the rates of its counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from averaging.optim.progress.logic.reports import ProgressReport, ProgressTotal
from swarm.core.ids import PeerId
from swarm.metrics.record import Metrics
from swarm.monitor.logic.view import ExpertView, PeerActivity, PeerView, RelayReport

_BURST_S = 5.0  # time constant of the rates, because bytes come in bursts, round by round
_SECONDS_MIN = 0.5  # shortest time between two records for a rate; shorter ones give noise


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecords:
    """Records of one peer, of which at least one is present."""

    metrics: Metrics | None = None
    report: ProgressReport | None = None
    expires_s: float = 0.0  # expiration of the later record

    @property
    def at_s(self) -> float:
        """Return the time at which the newest record was true."""
        return max(self.metrics.at_s if self.metrics else 0.0, self.report.at_s if self.report else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """All records that were read at one moment."""

    peers: Mapping[PeerId, PeerRecords]
    refused: int = 0
    # the epoch and digest that donors declare
    states: Mapping[PeerId, tuple[int, str]] = field(default_factory=dict)
    total: ProgressTotal | None = None  # only if the run's reports are spread over shards
    experts: tuple[ExpertView, ...] = ()
    relays: tuple[RelayReport, ...] = ()
    interval_s: float = 2.0  # until the next poll


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAssessment:
    """Assessment of one peer by comparison with all others."""

    fresh: bool
    behind: bool
    capped: bool
    accused_by: int
    stranger: bool = False


@dataclass(slots=True)
class TrackedPeer:
    """State of one peer in the model."""

    records: PeerRecords
    seen_s: float  # when the first record was read
    missing: int = 0
    gone_s: float | None = None
    left: bool = False  # True: it left; False: it was lost or is present
    quiet: bool = False
    up_per_s: float = 0.0
    down_per_s: float = 0.0
    reached: bool | None = None
    broken: frozenset[str] = frozenset()

    @property
    def pace(self) -> tuple[float, int]:
        """Return samples/s and epoch from the newer of the two records."""
        metrics, report = self.records.metrics, self.records.report
        if report is not None and (metrics is None or report.at_s >= metrics.at_s - 1.0):
            return report.rate, report.epoch
        return (metrics.samples_per_s, metrics.epoch) if metrics is not None else (0.0, 0)

    def update(self, records: PeerRecords) -> None:
        """Take in the records of one poll. If they hold no metrics, the earlier metrics are kept, because
        they were true at the time of their record.
        """
        old, new = self.records.metrics, records.metrics
        if old is not None and new is not None and new.at_s > old.at_s:
            seconds = max(new.at_s - old.at_s, _SECONDS_MIN)
            share = min(1.0, seconds / _BURST_S)
            self.up_per_s += share * (max(0, new.bytes_up - old.bytes_up) / seconds - self.up_per_s)
            self.down_per_s += share * (max(0, new.bytes_down - old.bytes_down) / seconds - self.down_per_s)
        self.records = records if new is not None or old is None else replace(records, metrics=old)
        self.missing = 0

    def view(self, peer: PeerId, now_s: float, assessment: PeerAssessment) -> PeerView:
        """Return the view of this peer. Rates of a peer that publishes nothing are shown as zero."""
        metrics, report, fresh = self.records.metrics, self.records.report, assessment.fresh
        rate, epoch = self.pace
        state: PeerActivity = "behind" if assessment.behind else "training"
        if self.gone_s is not None:
            state = "left" if self.left else "lost"
        elif not fresh:
            state = "quiet"
        elif metrics is not None and metrics.idle_s is not None:
            state = "idle"
        published = metrics or Metrics(at_s=0.0, since_s=0.0, every_s=1.0, epoch=0, samples_per_s=0.0)
        return PeerView(
            peer_id=str(peer),
            short=peer.short,
            state=state,
            age_s=max(0.0, now_s - self.records.at_s),
            fresh=fresh,
            idle_s=published.idle_s + max(0.0, now_s - published.at_s)
            if state == "idle" and published.idle_s is not None
            else None,
            since_s=min(published.since_s, now_s) if metrics else None,
            name=published.name,
            device=published.device,
            reach=published.reach,
            reached=self.reached,
            agent=published.agent,
            samples_per_s=rate if fresh else 0.0,
            capped=assessment.capped,
            epoch=epoch,
            samples=report.samples if report and fresh else 0,
            samples_given=published.samples,
            loss=published.loss,
            validation_loss=published.validation_loss,
            contributed_epoch=published.contributed_epoch,
            contributed_ago_s=max(0.0, now_s - published.contributed_at_s)
            if published.contributed_at_s is not None
            else None,
            up_bytes=published.bytes_up,
            down_bytes=published.bytes_down,
            up_bytes_per_s=self.up_per_s if fresh else 0.0,
            down_bytes_per_s=self.down_per_s if fresh else 0.0,
            drift=published.drift,
            head=published.head,
            line=published.line,
            epochs_given_up=published.epochs_given_up,
            rounds_done=published.rounds_done,
            rounds_failed=published.rounds_failed,
            accused_by=assessment.accused_by,
            stranger=assessment.stranger,
            own=dict(published.own),
            broken=published.broken,
        )
