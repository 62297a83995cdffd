"""One peer as the monitor knows it: what it told last, how old that is, and how its counters move."""

from __future__ import annotations

from dataclasses import dataclass, replace

from averaging.optim.progress.logic.reports import ProgressReport
from swarm.core.ids import PeerId
from swarm.metrics.record import Metrics
from swarm.monitor.logic.view import PeerView

_BURST_S = 5.0  # bytes come in rounds: a pace is taken over about so long
_SECONDS_MIN = 0.5  # between two records; closer ones would make a pace out of noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What one peer's records say; one of the two at least."""

    metrics: Metrics | None = None
    claim: ProgressReport | None = None
    expires_s: float = 0.0  # the later of the two

    @property
    def at_s(self) -> float:
        """When it was true."""
        return max(self.metrics.at_s if self.metrics else 0.0, self.claim.at_s if self.claim else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What follows for one peer from what all of them say."""

    fresh: bool
    behind: bool
    capped: bool
    accused_by: int


@dataclass(slots=True)
class Tracked:
    """A peer in the model."""

    heard: Heard
    seen_s: float  # first heard of
    missing: int = 0
    gone_s: float | None = None
    left: bool = False  # said goodbye, as against lost
    quiet: bool = False
    up_per_s: float = 0.0
    down_per_s: float = 0.0
    reached: bool | None = None
    broken: frozenset[str] = frozenset()

    @property
    def pace(self) -> tuple[float, int]:
        """Samples/s and epoch, from whichever record is newer."""
        metrics, claim = self.heard.metrics, self.heard.claim
        if claim is not None and (metrics is None or claim.at_s >= metrics.at_s - 1.0):
            return claim.rate, claim.epoch
        return (metrics.samples_per_s, metrics.epoch) if metrics is not None else (0.0, 0)

    def hear(self, heard: Heard) -> None:
        """Its records of this look. One that holds no metrics leaves what was told before: it was true then."""
        old, new = self.heard.metrics, heard.metrics
        if old is not None and new is not None and new.at_s > old.at_s:
            seconds = max(new.at_s - old.at_s, _SECONDS_MIN)
            share = min(1.0, seconds / _BURST_S)
            self.up_per_s += share * (max(0, new.bytes_up - old.bytes_up) / seconds - self.up_per_s)
            self.down_per_s += share * (max(0, new.bytes_down - old.bytes_down) / seconds - self.down_per_s)
        self.heard = heard if new is not None or old is None else replace(heard, metrics=old)
        self.missing = 0

    def view(self, peer: PeerId, now_s: float, judged: Judgement) -> PeerView:
        """As it is shown; paces of who is silent are nought, not old."""
        metrics, claim, fresh = self.heard.metrics, self.heard.claim, judged.fresh
        rate, epoch = self.pace
        state = "behind" if judged.behind else "training"
        if self.gone_s is not None:
            state = "left" if self.left else "lost"
        elif not fresh:
            state = "quiet"
        elif metrics is not None and metrics.idle_s is not None:
            state = "idle"
        told = metrics or Metrics(at_s=0.0, since_s=0.0, every_s=1.0, epoch=0, samples_per_s=0.0)
        return PeerView(
            peer_id=str(peer),
            short=peer.short,
            state=state,
            age_s=max(0.0, now_s - self.heard.at_s),
            fresh=fresh,
            idle_s=told.idle_s + max(0.0, now_s - told.at_s)
            if state == "idle" and told.idle_s is not None
            else None,
            since_s=min(told.since_s, now_s) if metrics else None,
            name=told.name,
            device=told.device,
            reach=told.reach,
            reached=self.reached,
            agent=told.agent,
            samples_per_s=rate if fresh else 0.0,
            capped=judged.capped,
            epoch=epoch,
            samples=claim.samples if claim and fresh else 0,
            samples_given=told.samples,
            loss=told.loss,
            validation_loss=told.validation_loss,
            contributed_epoch=told.contributed_epoch,
            contributed_ago_s=max(0.0, now_s - told.contributed_at_s)
            if told.contributed_at_s is not None
            else None,
            up_bytes=told.bytes_up,
            down_bytes=told.bytes_down,
            up_bytes_per_s=self.up_per_s if fresh else 0.0,
            down_bytes_per_s=self.down_per_s if fresh else 0.0,
            drift=told.drift,
            rounds_done=told.rounds_done,
            rounds_failed=told.rounds_failed,
            accused_by=judged.accused_by,
            own=dict(told.own),
            broken=told.broken,
        )
