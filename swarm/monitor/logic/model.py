"""Model of a run: combines the records of peers into a view. It trusts no single peer, and knows the age of
every value.

Inputs are polls (`on_poll`: all records read at one moment) and the state of the monitor's link
(`on_link`); the output is `view(now_s)`. All times are swarm time, in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarm.core.ids import PeerId
from swarm.core.standing import PeerStanding
from swarm.core.wording import counted
from swarm.dht.logic.blobs import version_text
from swarm.monitor.logic.eventlog import EventLog
from swarm.monitor.logic.histories import EpochJumps, KnownLines, histories_of
from swarm.monitor.logic.leaders import Leaders
from swarm.monitor.logic.own_metrics import own_views
from swarm.monitor.logic.robust import capped, median, swarm_epoch
from swarm.monitor.logic.rounds import RoundKey, RoundTable
from swarm.monitor.logic.tracked import PeerAssessment, PeerRecords, Poll, TrackedPeer
from swarm.monitor.logic.view import (
    EventLevel,
    LinkStatus,
    LinkView,
    MonitorView,
    RunView,
    StateSummary,
)

_TOTAL_S = 15.0  # a total older than this is ignored
_FIRST_NAMED_MAX = 3  # peers that the event of the first poll names
_NAMED_MAX = 20  # the same for later polls
PEERS_MAX = 5000
_QUIET_PERIODS = 3.0  # renewals that a peer may miss before its values are stale
_QUIET_S_MIN = 8.0
_PERIOD_S_MAX = 30.0  # upper bound of the renewal period that a peer may claim
_GONE_POLLS = 2  # consecutive polls without records before a peer is taken to have left
_GONE_SHOWN_S = 90.0  # a peer that left or was lost stays in the table this long
_RATE_RATIO_MAX = 3.0  # a rate counts up to this multiple of the median; trainers use the same bound
_BEHIND_EPOCHS = 2
_LATE_INTERVALS = 3.0  # poll intervals without an answer after which the view is "late"
_LATE_S_MIN = 6.0


class Model:
    """One run, from the viewpoint of this monitor."""

    def __init__(
        self, run: RunView, events: EventLog | None = None, standing: PeerStanding | None = None
    ) -> None:
        """`standing` distinguishes members of the run from strangers. If no member is known, all peers count
        equally.
        """
        self.run = run
        self._standing = standing or PeerStanding()
        self.events = events or EventLog()
        self.checkpoint = ""
        self._peers: dict[PeerId, TrackedPeer] = {}
        self._strangers = 0  # number of strangers in the last poll
        self._rounds, self._lines, self._jumps = RoundTable(), KnownLines(), EpochJumps()
        # new rounds without a failure event so far -> time of the first report
        self._unreported: dict[RoundKey, float] = {}
        self._accused: dict[str, int] = {}
        self._differing: set[RoundKey] = set()
        self._poll: Poll | None = None
        self._poll_s: float | None = None
        self._link = LinkView()
        self._epoch, self.leaders = 0, Leaders()

    @property
    def epoch(self) -> int:
        """Return the epoch that the swarm has reached."""
        return self._epoch

    # inputs

    def on_poll(self, poll: Poll, now_s: float) -> None:
        """Process the records of one answered poll."""
        first = self._poll is None
        self._poll, self._poll_s = poll, now_s
        arrived = []
        self._strangers = sum(map(self._is_stranger, self._peers))
        for peer, records in poll.peers.items():
            if peer not in self._peers or self._peers[peer].gone_s is not None:
                if self._is_old_record(peer, records):
                    continue
                if peer not in self._peers and not self._has_room(peer):
                    continue
                self._strangers += peer not in self._peers and self._is_stranger(peer)
                self._peers[peer] = TrackedPeer(records, now_s)
                arrived.append(peer)
            self._update(peer, records, now_s)
        self.leaders.name(self._peers)
        for peer, known in self._peers.items():
            if peer not in poll.peers and known.gone_s is None:
                self._on_missing(peer, known, now_s)
        live = self._counted(self._live(now_s))
        self._epoch = swarm_epoch([known.pace[1] for known in live.values()]) or self._epoch
        if jump := self._jumps.text(self._epoch):
            self.events.add(now_s, "jump", "warning", jump)
        self._arrivals(arrived, first, now_s)
        self._mark_quiet(now_s)
        self._report_breaks(first, now_s)
        self._report_rounds(poll, now_s)
        old_s = now_s - _GONE_SHOWN_S
        self._peers = {
            peer: known for peer, known in self._peers.items() if known.gone_s is None or known.gone_s > old_s
        }

    def on_link(self, link: LinkView, now_s: float) -> None:
        """Process the state of the link. `status` is "lost" when no peer answered; any other status is
        derived here.
        """
        before, self._link = self._link, link
        if link.entry_answers is False and before.entry_answers is not False:
            self.events.add(
                now_s,
                "entry_lost",
                "warning",
                f"{link.entry} does not answer: watching through {counted(link.known, 'other peer')}",
            )
        elif link.entry_answers and before.entry_answers is False:
            self.events.add(now_s, "entry_back", "good", f"{link.entry} answers again")
        if link.status == "lost" and before.status != "lost":
            self.events.add(
                now_s, "link_lost", "bad", f"no peer answers: the values are old. {link.text}".strip()
            )
        elif before.status == "lost" and link.status != "lost":
            self.events.add(
                now_s,
                "link_back",
                "good",
                f"peers answer again: watching through {counted(link.known, 'peer')}",
            )

    def on_run(self, run: RunView, now_s: float) -> None:
        """Process a newer version of the specification."""
        if self.run.version:
            what = self.run.differences(run) or f"version {version_text(run.version)}"
            self.events.add(now_s, "run", "info", f"the owner changed the run: {what}")
        self.run = run

    def on_dialed(self, peer: PeerId, answered: bool) -> None:
        """Record whether the peer answered a call of this monitor."""
        if peer in self._peers:
            self._peers[peer].reached = answered

    # output

    def view(self, now_s: float) -> MonitorView:
        """Return the view at this moment. It contains ages, so that the same poll gives a different view
        later.
        """
        all_live = self._live(now_s)
        live = self._counted(all_live)
        claimed = {peer: known.pace[0] for peer, known in live.items()}
        rates = capped(claimed, _RATE_RATIO_MAX)
        published = [known.records.metrics for known in live.values() if known.records.metrics is not None]
        recent = [
            one
            for one in published
            if one.contributed_epoch is None or abs(self._epoch - one.contributed_epoch) <= _BEHIND_EPOCHS
        ]
        samples = self._samples(live, rates, now_s)
        target, rate = self.run.target, sum(rates.values())
        accusers = {peer: len(reporters) for peer, reporters in self._rounds.accusers().items()}
        shown = [
            known.view(
                peer,
                now_s,
                PeerAssessment(
                    fresh=peer in all_live,
                    stranger=self._is_stranger(peer),
                    behind=known.pace[1] + _BEHIND_EPOCHS <= self._epoch,
                    capped=rates.get(peer, 0.0) < claimed.get(peer, 0.0),
                    accused_by=accusers.get(str(peer), 0),
                ),
            )
            for peer, known in self._peers.items()
        ]
        live_now = self._status(now_s) == "live"
        return MonitorView(
            at_s=now_s,
            run=self.run.at(now_s),
            link=self._link_view(now_s),
            epoch=self._epoch,
            samples=samples,
            fraction=min(1.0, samples / target) if target and live else None,
            eta_s=max(0.0, target - samples) / rate if target and rate > 0 and live_now else None,
            samples_per_s=rate,
            loss=median(one.loss for one in recent),
            validation_loss=median(one.validation_loss for one in published),
            drift=median(one.drift for one in published),
            bytes_per_s=sum(capped({peer: known.up_per_s for peer, known in live.items()}, 10.0).values()),
            peers_live=len(live),
            peers_quiet=sum(peer.state in ("quiet", "lost") and not peer.stranger for peer in shown),
            strangers=sum(peer.stranger for peer in shown),
            refused=self._poll.refused if self._poll else 0,
            own=own_views(published),
            state=self._state(),
            histories=histories_of(published),
            peers=tuple(
                sorted(
                    shown,
                    key=lambda peer: (peer.stranger, not peer.fresh, -peer.samples_per_s, peer.peer_id),
                )
            ),
            rounds=tuple(self._rounds.latest()),
            events=self.events.latest,
            experts=self._poll.experts if self._poll else (),
            relays=self._poll.relays if self._poll else (),
            leaders=self.leaders.views,
            contributors=self.leaders.count,
            samples_given=self.leaders.samples,
            checkpoint=self.checkpoint,
        )

    def _status(self, now_s: float) -> LinkStatus:
        if self._link.status == "lost":
            return "lost"
        if self._poll_s is None or self._poll is None:
            return "joining"
        late_s = max(_LATE_S_MIN, _LATE_INTERVALS * self._poll.interval_s)
        return "late" if now_s - self._poll_s > late_s else "live"

    def _link_view(self, now_s: float) -> LinkView:
        link, status = self._link, self._status(now_s)
        age_s = max(0.0, now_s - self._poll_s) if self._poll_s is not None else None
        text = link.text
        if status == "live" and link.entry_answers is False:
            text = f"{link.entry} does not answer: watching through {counted(link.known, 'other peer')}"
        elif status == "late":
            text = f"no answer for {age_s:.0f} s: the values are old"
        return LinkView(
            status=status,
            age_s=age_s,
            entry=link.entry,
            entry_answers=link.entry_answers,
            known=link.known,
            text=text,
        )

    def _live(self, now_s: float) -> dict[PeerId, TrackedPeer]:
        return {
            peer: known
            for peer, known in self._peers.items()
            if known.gone_s is None and not self._is_quiet(known, now_s)
        }

    def _is_stranger(self, peer: PeerId) -> bool:
        run_id = self.run.run_id
        return self._standing.has_members(run_id) and not self._standing.is_member(peer, run_id)

    def _counted(self, live: dict[PeerId, TrackedPeer]) -> dict[PeerId, TrackedPeer]:
        """Return the peers whose values count in sums and medians: members, if there are any, else all
        peers.
        """
        members = {peer: known for peer, known in live.items() if not self._is_stranger(peer)}
        return members or live

    def _has_room(self, peer: PeerId) -> bool:
        """Return whether a new peer may enter the table. Strangers may take half of it, and are displaced by
        members.
        """
        if self._is_stranger(peer):
            return self._strangers < PEERS_MAX // 2 and len(self._peers) < PEERS_MAX
        if len(self._peers) >= PEERS_MAX and self._strangers:
            del self._peers[next(one for one in reversed(self._peers) if self._is_stranger(one))]
            self._strangers -= 1
        return len(self._peers) < PEERS_MAX

    def _add_event(self, now_s: float, kind: str, level: EventLevel, text: str, peer: PeerId) -> None:
        self.events.add(now_s, kind, level, text, str(peer), stranger=self._is_stranger(peer))

    def _is_quiet(self, known: TrackedPeer, now_s: float) -> bool:
        metrics = known.records.metrics
        period_s = min(metrics.every_s, _PERIOD_S_MAX) if metrics else 5.0
        return now_s - known.records.at_s > max(_QUIET_S_MIN, _QUIET_PERIODS * period_s)

    def _samples(
        self, live: Mapping[PeerId, TrackedPeer], rates: Mapping[PeerId, float], now_s: float
    ) -> float:
        """Return the samples of the swarm in its present epoch: the sum of the reports, each limited to what
        a believed rate yields since the epoch began.
        """
        reports = {
            peer: known.records.report for peer, known in live.items() if known.records.report is not None
        }
        present = {
            peer: report
            for peer, report in reports.items()
            if report is not None and report.epoch == self._epoch
        }
        since_s = median(report.since_s for report in present.values()) or now_s
        total_of_shards = self._poll.total if self._poll else None
        if (
            total_of_shards is not None
            and total_of_shards.epoch == self._epoch
            and 2 * len(present) < len(live)
            and now_s - total_of_shards.at_s < _TOTAL_S
        ):
            samples = total_of_shards.samples_at(now_s)
            return min(samples, float(self.run.target)) if self.run.target else samples
        total = 0.0
        for peer, report in present.items():
            rate = rates.get(peer, 0.0)
            counted = (
                min(float(report.samples), rate * max(0.0, report.at_s - since_s) + rate)
                if len(present) > 2
                else float(report.samples)
            )
            total += counted + min(rate * min(3.0, max(0.0, now_s - report.at_s)), counted)
        return min(total, float(self.run.target)) if self.run.target else total

    def _state(self) -> StateSummary | None:
        states = self._poll.states if self._poll else {}
        states = {peer: one for peer, one in states.items() if not self._is_stranger(peer)} or states
        epochs = [epoch for epoch, _ in states.values() if epoch <= self._epoch + _BEHIND_EPOCHS]
        if not epochs:
            return None
        epoch = swarm_epoch(epochs)
        digests = [digest for its_epoch, digest in states.values() if its_epoch == epoch]
        if not digests:
            return None
        most = max(sorted(set(digests)), key=digests.count)
        return StateSummary(
            epoch=epoch, digest=most, donors=digests.count(most), others=len(digests) - digests.count(most)
        )

    # events

    def _is_old_record(self, peer: PeerId, records: PeerRecords) -> bool:
        """Return whether these are old records of a peer that has left and has published nothing since."""
        known = self._peers.get(peer)
        return known is not None and records.at_s <= known.records.at_s

    def _update(self, peer: PeerId, records: PeerRecords, now_s: float) -> None:
        known = self._peers[peer]
        old, new = known.records.metrics, records.metrics
        known.update(records)
        given_up = new.epochs_given_up - old.epochs_given_up if old is not None and new is not None else 0
        if given_up > 0:
            text = f"{self._name_of(peer)} is in the history of the others again"
            epochs = counted(given_up, "epoch")
            self._add_event(
                now_s, "reunion", "warning", f"{text}: it gave up {epochs} made without them", peer
            )
        broken = frozenset(new.broken) if new is not None else known.broken
        for name in sorted(broken - known.broken):
            self._add_event(
                now_s,
                "not_finite",
                "warning",
                f"{self._name_of(peer)}: {name} is not a finite number",
                peer,
            )
        known.broken = broken

    def _on_missing(self, peer: PeerId, known: TrackedPeer, now_s: float) -> None:
        """Record that a peer's records are gone. The peer has left if they had not expired yet."""
        known.missing += 1
        expired = known.records.expires_s <= now_s
        if not expired and known.missing < _GONE_POLLS:
            return
        known.gone_s, known.left = now_s, not expired
        if expired:
            self._add_event(
                now_s,
                "lost",
                "warning",
                f"{self._name_of(peer)} was lost: it disappeared without leaving the run",
                peer,
            )
        else:
            self._add_event(now_s, "left", "info", f"{self._name_of(peer)} left", peer)

    def _arrivals(self, arrived: list[PeerId], first: bool, now_s: float) -> None:
        if first and len(arrived) > _FIRST_NAMED_MAX:
            self.events.add(
                now_s, "watching", "info", f"watching {self.run.full_name}: {len(arrived)} peers take part"
            )
            return
        if len(arrived) > _NAMED_MAX:
            all_strangers = all(map(self._is_stranger, arrived))
            text = f"{len(arrived)} {'strangers' if all_strangers else 'peers'} joined"
            self.events.add(now_s, "joined", "good", text, stranger=all_strangers)
            return
        for peer in arrived:
            what = "takes part" if first else "joined"
            metrics = self._peers[peer].records.metrics
            device = metrics.device if metrics is not None else ""
            self._add_event(
                now_s,
                "joined",
                "good",
                f"{self._name_of(peer)} {what}{f' on {device}' if device else ''}",
                peer,
            )

    def _mark_quiet(self, now_s: float) -> None:
        for peer, known in self._peers.items():
            quiet = known.gone_s is None and self._is_quiet(known, now_s)
            if quiet and not known.quiet:
                self._add_event(
                    now_s,
                    "quiet",
                    "warning",
                    f"{self._name_of(peer)} has published nothing for a while",
                    peer,
                )
            elif known.quiet and not quiet and known.gone_s is None:
                self._add_event(now_s, "back", "good", f"{self._name_of(peer)} publishes again", peer)
            known.quiet = quiet

    def _report_breaks(self, first: bool, now_s: float) -> None:
        """Add an event for each history that began with a break since the last poll."""
        found: dict[str, list[PeerId]] = {}
        for peer, known in self._counted(self._live(now_s)).items():
            if known.records.metrics is not None:
                found.setdefault(known.records.metrics.line, []).append(peer)
        for line, peers in found.items():
            if not self._lines.is_new(line) or first:
                continue
            names = ", ".join(self._name_of(peer) for peer in peers[:_FIRST_NAMED_MAX])
            more = f" and {len(peers) - _FIRST_NAMED_MAX} more" if len(peers) > _FIRST_NAMED_MAX else ""
            text = f"{names}{more} continued without a majority of the electors: history {line[:8]}"
            self.events.add(now_s, "break", "warning", text, str(peers[0]))

    def _report_rounds(self, poll: Poll, now_s: float) -> None:
        for peer, records in poll.peers.items():
            if self._is_stranger(peer):  # a stranger contributed to no round
                continue
            for report in records.metrics.rounds if records.metrics else ():
                key = self._rounds.add_report(peer, report, self._epoch, now_s)
                if key is not None and now_s - report.at_s < 120.0:
                    self._unreported[key] = now_s
        for key, since_s in list(self._unreported.items()):
            view = self._rounds.view(key)
            if view is None or now_s - since_s > 30.0:
                del self._unreported[key]
                continue
            if view.failed_for:
                del self._unreported[key]
                share = (
                    f" for {view.failed_for} of {view.reported_by} members" if view.reported_by > 1 else ""
                )
                what = "round" if view.kind == "epoch" else "round of the state"
                self.events.add(
                    now_s,
                    "round_failed",
                    "warning",
                    f"a {what} of epoch {view.epoch} failed{share}: {view.detail or view.reason}",
                )
        self._report_accusations(now_s)

    def _report_accusations(self, now_s: float) -> None:
        for accused, accusers in self._rounds.accusers().items():
            known = self._accused.get(accused, 0)
            if len(accusers) > known and known in (0, 1):
                who = next((peer for peer in self._peers if str(peer) == accused), None)
                name = self._name_of(who) if who is not None else accused[-8:]
                text = f"{name} was caught lying as a reducer, by {counted(len(accusers), 'peer')}"
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

    def _name_of(self, peer: PeerId) -> str:
        known = self._peers.get(peer)
        name = known.records.metrics.name if known is not None and known.records.metrics is not None else ""
        return f"{name} ({peer.short})" if name else peer.short
