"""What peers tell, folded into a view: a pure machine. It believes nobody alone, and knows the age of
everything that it shows.

Fed with looks (`on_look`: all records that were found at once) and with how well the monitor sees
(`on_link`); asked for `view(now_s)`. All times are the swarm's, in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from averaging.optim.progress.logic.reports import ProgressConfig, ProgressTotal
from swarm.core.ids import PeerId
from swarm.metrics.record import Metrics
from swarm.monitor.logic.eventlog import EventLog
from swarm.monitor.logic.robust import capped, median, reached
from swarm.monitor.logic.rounds import RoundBook, RoundKey
from swarm.monitor.logic.tracked import Heard, Judgement, Tracked
from swarm.monitor.logic.view import ExpertView, LinkView, MonitorView, OwnView, RunView, StateSummary

_PROGRESS = ProgressConfig()
_TOTAL_S = 15.0  # a total older than this says nothing
_FIRST_TOLD_MAX = 3  # peers that a first look names one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What counts, and for how long things are shown."""

    peers_max: int = 5000
    quiet_periods: float = 3.0  # of its own renewals that a peer may miss before its numbers are stale
    quiet_s_min: float = 8.0
    period_s_max: float = 30.0  # a peer that says it renews less often than this is quiet after some of these
    gone_looks: int = 2  # looks in a row without a record, before its peer is taken to have left
    gone_shown_s: float = 90.0  # how long who left or was lost stays in the table
    rate_ratio_max: float = 3.0  # a pace counts up to so many times the median; as trainers count
    behind_epochs: int = 2
    own_max: int = 24  # names of users' metrics over all peers
    looks_late: float = 3.0  # intervals without an answered look, before the whole view is late
    late_s_min: float = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """All that was found in one look."""

    peers: Mapping[PeerId, Heard]
    refused: int = 0
    # the epoch and digest that donors declare
    states: Mapping[PeerId, tuple[int, str]] = field(default_factory=dict)
    total: ProgressTotal | None = None  # of a run so large that its claims are spread over shards
    experts: tuple[ExpertView, ...] = ()
    interval_s: float = 2.0  # to the next one


class Model:
    """One run, as this monitor sees it."""

    def __init__(
        self, run: RunView, config: ModelConfig | None = None, events: EventLog | None = None
    ) -> None:
        self.run = run
        self.config = config or ModelConfig()
        self.events = events or EventLog()
        self.checkpoint = ""
        self._peers: dict[PeerId, Tracked] = {}
        self._rounds = RoundBook()
        self._untold: dict[RoundKey, float] = {}  # rounds whose failure has not been told yet, and since when
        self._accused: dict[str, int] = {}
        self._differing: set[RoundKey] = set()
        self._look: Look | None = None
        self._looked_s: float | None = None
        self._link = LinkView()
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """That the swarm has reached."""
        return self._epoch

    # what comes in

    def on_look(self, look: Look, now_s: float) -> None:
        """Fold one answered look in."""
        first = self._look is None
        self._look, self._looked_s = look, now_s
        arrived = []
        for peer, heard in look.peers.items():
            if peer not in self._peers or self._peers[peer].gone_s is not None:
                if self._gone(peer, heard):
                    continue
                if peer not in self._peers and len(self._peers) >= self.config.peers_max:
                    continue
                self._peers[peer] = Tracked(heard, now_s)
                arrived.append(peer)
            self._update(peer, heard, now_s)
        for peer, known in self._peers.items():
            if peer not in look.peers and known.gone_s is None:
                self._miss(peer, known, now_s)
        self._epoch = reached([known.pace[1] for known in self._live(now_s).values()]) or self._epoch
        self._arrivals(arrived, first, now_s)
        self._mark_quiet(now_s)
        self._tell_rounds(look, now_s)
        old_s = now_s - self.config.gone_shown_s
        self._peers = {
            peer: known for peer, known in self._peers.items() if known.gone_s is None or known.gone_s > old_s
        }

    def on_link(self, link: LinkView, now_s: float) -> None:
        """How well the monitor sees; `status` is "lost" when nobody answered, else ours to say."""
        before, self._link = self._link, link
        if link.entry_answers is False and before.entry_answers is not False:
            self.events.add(
                now_s,
                "entry_lost",
                "warning",
                f"{link.entry} does not answer: watching through {_count(link.known, 'other peer')}",
            )
        elif link.entry_answers and before.entry_answers is False:
            self.events.add(now_s, "entry_back", "good", f"{link.entry} answers again")
        if link.status == "lost" and before.status != "lost":
            self.events.add(
                now_s, "link_lost", "bad", f"nobody answers: what is shown is old. {link.text}".strip()
            )
        elif before.status == "lost" and link.status != "lost":
            self.events.add(now_s, "link_back", "good", f"seeing again, through {_count(link.known, 'peer')}")

    def on_run(self, run: RunView, now_s: float) -> None:
        """A newer version of the specification."""
        if self.run.version:
            self.events.add(now_s, "run", "info", f"the owner changed the run: version {run.version}")
        self.run = run

    def on_dialed(self, peer: PeerId, answered: bool) -> None:
        """This monitor called the peer itself."""
        if peer in self._peers:
            self._peers[peer].reached = answered

    # what follows from it

    def view(self, now_s: float) -> MonitorView:
        """Everything at this moment; ages included, so that the same look makes another view later."""
        live, config = self._live(now_s), self.config
        claimed = {peer: known.pace[0] for peer, known in live.items()}
        rates = capped(claimed, config.rate_ratio_max)
        told = [known.heard.metrics for known in live.values() if known.heard.metrics is not None]
        recent = [
            one
            for one in told
            if one.contributed_epoch is None
            or abs(self._epoch - one.contributed_epoch) <= config.behind_epochs
        ]
        samples = self._samples(live, rates, now_s)
        target, rate = self.run.target, sum(rates.values())
        accusers = {peer: len(found) for peer, found in self._rounds.accusers().items()}
        shown = [
            known.view(
                peer,
                now_s,
                Judgement(
                    fresh=peer in live,
                    behind=known.pace[1] + config.behind_epochs <= self._epoch,
                    capped=rates.get(peer, 0.0) < claimed.get(peer, 0.0),
                    accused_by=accusers.get(str(peer), 0),
                ),
            )
            for peer, known in self._peers.items()
        ]
        live_now = self._status(now_s) == "live"
        return MonitorView(
            at_s=now_s,
            run=self.run,
            link=self._link_view(now_s),
            epoch=self._epoch,
            samples=samples,
            fraction=min(1.0, samples / target) if target and live else None,
            eta_s=max(0.0, target - samples) / rate if target and rate > 0 and live_now else None,
            samples_per_s=rate,
            loss=median(one.loss for one in recent),
            validation_loss=median(one.validation_loss for one in told),
            drift=median(one.drift for one in told),
            bytes_per_s=sum(capped({peer: known.up_per_s for peer, known in live.items()}, 10.0).values()),
            peers_live=len(live),
            peers_quiet=sum(peer.state in ("quiet", "lost") for peer in shown),
            refused=self._look.refused if self._look else 0,
            own=self._own(told),
            state=self._state(),
            peers=tuple(sorted(shown, key=lambda peer: (not peer.fresh, -peer.samples_per_s, peer.peer_id))),
            rounds=tuple(self._rounds.latest()),
            events=self.events.latest,
            experts=self._look.experts if self._look else (),
            checkpoint=self.checkpoint,
        )

    def _status(self, now_s: float) -> str:
        if self._link.status == "lost":
            return "lost"
        if self._looked_s is None or self._look is None:
            return "joining"
        late_s = max(self.config.late_s_min, self.config.looks_late * self._look.interval_s)
        return "late" if now_s - self._looked_s > late_s else "live"

    def _link_view(self, now_s: float) -> LinkView:
        link, status = self._link, self._status(now_s)
        age_s = max(0.0, now_s - self._looked_s) if self._looked_s is not None else None
        text = link.text
        if status == "live" and link.entry_answers is False:
            text = f"{link.entry} does not answer: watching through {_count(link.known, 'other peer')}"
        elif status == "late":
            text = f"no answer for {age_s:.0f} s: what is shown is old"
        return LinkView(
            status=status,
            age_s=age_s,
            entry=link.entry,
            entry_answers=link.entry_answers,
            known=link.known,
            text=text,
        )

    def _live(self, now_s: float) -> dict[PeerId, Tracked]:
        return {
            peer: known
            for peer, known in self._peers.items()
            if known.gone_s is None and not self._is_quiet(known, now_s)
        }

    def _is_quiet(self, known: Tracked, now_s: float) -> bool:
        metrics = known.heard.metrics
        period_s = min(metrics.every_s, self.config.period_s_max) if metrics else 5.0
        return now_s - known.heard.at_s > max(self.config.quiet_s_min, self.config.quiet_periods * period_s)

    def _samples(self, live: Mapping[PeerId, Tracked], rates: Mapping[PeerId, float], now_s: float) -> float:
        """Of the swarm in its present epoch: claims, each held to what a believed pace gives since the epoch
        began.
        """
        claims = {peer: known.heard.claim for peer, known in live.items() if known.heard.claim is not None}
        present = {
            peer: claim for peer, claim in claims.items() if claim is not None and claim.epoch == self._epoch
        }
        since_s = median(claim.since_s for claim in present.values()) or now_s
        told = self._look.total if self._look else None
        if (
            told is not None
            and told.epoch == self._epoch
            and 2 * len(present) < len(live)
            and now_s - told.at_s < _TOTAL_S
        ):
            sofar = told.samples_at(now_s, _PROGRESS)
            return min(sofar, float(self.run.target)) if self.run.target else sofar
        total = 0.0
        for peer, claim in present.items():
            rate = rates.get(peer, 0.0)
            counted = (
                min(float(claim.samples), rate * max(0.0, claim.at_s - since_s) + rate)
                if len(present) > 2
                else float(claim.samples)
            )
            total += counted + min(rate * min(3.0, max(0.0, now_s - claim.at_s)), counted)
        return min(total, float(self.run.target)) if self.run.target else total

    def _own(self, told: list[Metrics]) -> dict[str, OwnView]:
        values: dict[str, list[float]] = {}
        for one in told:
            for name, value in one.own.items():
                values.setdefault(name, []).append(value)
        # a liar can invent names: those that most peers report come first
        names = sorted(values, key=lambda name: (-len(values[name]), name))[: self.config.own_max]
        return {
            name: OwnView(
                median=median(values[name]) or 0.0,
                least=min(values[name]),
                most=max(values[name]),
                peers=len(values[name]),
            )
            for name in sorted(names)
        }

    def _state(self) -> StateSummary | None:
        states = self._look.states if self._look else {}
        epochs = [epoch for epoch, _ in states.values() if epoch <= self._epoch + self.config.behind_epochs]
        if not epochs:
            return None
        epoch = reached(epochs)
        digests = [digest for told, digest in states.values() if told == epoch]
        if not digests:
            return None
        most = max(sorted(set(digests)), key=digests.count)
        return StateSummary(
            epoch=epoch, digest=most, donors=digests.count(most), others=len(digests) - digests.count(most)
        )

    # events

    def _gone(self, peer: PeerId, heard: Heard) -> bool:
        """A record of one that has gone and told nothing since."""
        known = self._peers.get(peer)
        return known is not None and heard.at_s <= known.heard.at_s

    def _update(self, peer: PeerId, heard: Heard, now_s: float) -> None:
        known = self._peers[peer]
        known.hear(heard)
        new = heard.metrics
        broken = frozenset(new.broken) if new is not None else known.broken
        for name in sorted(broken - known.broken):
            self.events.add(
                now_s,
                "not_finite",
                "warning",
                f"{self._named(peer)}: {name} is not a finite number",
                str(peer),
            )
        known.broken = broken

    def _miss(self, peer: PeerId, known: Tracked, now_s: float) -> None:
        """No record of it any more: withdrawn, if it could have lived on."""
        known.missing += 1
        expired = known.heard.expires_s <= now_s
        if not expired and known.missing < self.config.gone_looks:
            return
        known.gone_s, known.left = now_s, not expired
        if expired:
            self.events.add(
                now_s,
                "lost",
                "warning",
                f"{self._named(peer)} went silent: it did not say goodbye",
                str(peer),
            )
        else:
            self.events.add(now_s, "left", "info", f"{self._named(peer)} left", str(peer))

    def _arrivals(self, arrived: list[PeerId], first: bool, now_s: float) -> None:
        if first and len(arrived) > _FIRST_TOLD_MAX:
            self.events.add(
                now_s, "watching", "info", f"watching {self.run.full_name}: {len(arrived)} peers take part"
            )
            return
        for peer in arrived:
            what = "takes part" if first else "joined"
            device = self._peers[peer].heard.metrics.device if self._peers[peer].heard.metrics else ""  # type: ignore[union-attr]
            self.events.add(
                now_s,
                "joined",
                "good",
                f"{self._named(peer)} {what}{f' on {device}' if device else ''}",
                str(peer),
            )

    def _mark_quiet(self, now_s: float) -> None:
        for peer, known in self._peers.items():
            quiet = known.gone_s is None and self._is_quiet(known, now_s)
            if quiet and not known.quiet:
                self.events.add(
                    now_s, "quiet", "warning", f"{self._named(peer)} has told nothing for a while", str(peer)
                )
            elif known.quiet and not quiet and known.gone_s is None:
                self.events.add(now_s, "back", "good", f"{self._named(peer)} is heard again", str(peer))
            known.quiet = quiet

    def _tell_rounds(self, look: Look, now_s: float) -> None:
        for peer, heard in look.peers.items():
            for told in heard.metrics.rounds if heard.metrics else ():
                key = self._rounds.tell(peer, told, self._epoch, now_s)
                if key is not None and now_s - told.at_s < 120.0:
                    self._untold[key] = now_s
        for key, since_s in list(self._untold.items()):
            view = self._rounds.view(key)
            if view is None or now_s - since_s > 30.0:
                del self._untold[key]
                continue
            if view.failed_for:
                del self._untold[key]
                whom = f" for {view.failed_for} of {view.told_by} that told of it" if view.told_by > 1 else ""
                what = "round" if view.kind == "epoch" else "round of the state"
                self.events.add(
                    now_s,
                    "round_failed",
                    "warning",
                    f"a {what} of epoch {view.epoch} failed{whom}: {view.detail or view.reason}",
                )
        self._tell_lies(now_s)

    def _tell_lies(self, now_s: float) -> None:
        for accused, accusers in self._rounds.accusers().items():
            known = self._accused.get(accused, 0)
            if len(accusers) > known and (known == 0 or known == 1):
                who = next((peer for peer in self._peers if str(peer) == accused), None)
                name = self._named(who) if who is not None else accused[-8:]
                text = f"{name} was caught lying as a reducer, by {_count(len(accusers), 'peer')}"
                self.events.add(now_s, "lied", "bad", text, accused)
            self._accused[accused] = max(known, len(accusers))
        for one in self._rounds.latest():
            key = (one.kind, one.epoch, one.digest)
            if one.digests > 1 and key not in self._differing and len(self._differing) < 1000:
                self._differing.add(key)
                self.events.add(
                    now_s,
                    "differs",
                    "bad",
                    f"members of a round of epoch {one.epoch} hold different averages: {one.digests} digests",
                )

    def _named(self, peer: PeerId) -> str:
        known = self._peers.get(peer)
        name = known.heard.metrics.name if known is not None and known.heard.metrics is not None else ""
        return f"{name} ({peer.short})" if name else peer.short


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
