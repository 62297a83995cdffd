"""Progress of the swarm within its epoch, computed from the peers' reports: a pure state machine, one per
peer. In runs of up to 64 peers it has the reports of all, in larger ones those of its shard and the total of
the run (`averaging.optim.progress.logic.shards`). All times are seconds of the swarm's clock, passed in.

An epoch is full when the reported samples of all live peers reach the target. Reports are not trusted. Where
a run has electors, those of strangers are displayed and count for nothing: a peer counts from its first
certified round on. Each is limited by the others: a reported rate counts up to `RATE_RATIO_MAX` times the
median (of the electors, where there are any), and reported samples up to what such a rate yields since the
epoch began. Every peer applies the same rule to the same reports, its own included, so that views agree up to
messages in transit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from averaging.history.certificate import DIGEST_BYTES
from averaging.optim.progress.logic.epoch_reached import epoch_of
from averaging.optim.progress.logic.standing import ReportStanding
from averaging.optim.progress.logic.view import PeerProgress, ProgressView
from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import PeerId
from swarm.core.presets import WAN

EPOCH_MAX = 1 << 40
SAMPLES_MAX = 1 << 40
RATE_MAX = 1e12  # samples/s
BITS_MAX = 24  # bits of the number of shards of a run
_PEERS_MAX = 1 << 32

# A peer may have begun the epoch this much earlier than this peer estimates; larger: liars can claim more in
# short epochs.
SLACK_S = 0.25
# How long a report is extrapolated at its rate, at most to twice its samples. Larger: a failed peer's samples
# are counted that were never computed.
EXTRAPOLATION_S_MAX = 3.0
# An announcement of a full epoch is believed if this peer's own view has reached this fraction of the target.
BEGIN_FRACTION = 0.75
# A peer that is silent for this long is considered gone. It exceeds the longest time between two reads of the
# others' reports, or live peers would expire between two reads.
REPORT_TTL_S = 15.0
REFRESH_S_MIN = 0.25  # interval of reads of the DHT when the epoch is about to be full
# In a run with more peers the interval is longer in proportion: each peer's unreported work matters less, and
# the total rate of reads and writes stays equal
REFRESH_MIN_PEERS = 8
# Replaces it in a run of several shards, whose totals take longer anyway.
REFRESH_S_LARGE = 1.0
# Reports kept; beyond it the oldest is dropped. Well above the size of one dictionary, so that an overfull
# one is noticed.
PEERS_MAX = 256
# A peer that reports without any progress for this long does not count: its trainer hangs. Must exceed the
# longest step.
STALLED_S_MAX = 300.0
CLOCK_AHEAD_S_MAX = 10.0  # a report from further in the future is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressReport:
    """One peer's report about itself."""

    epoch: int
    samples: int  # accumulated in this epoch
    rate: float  # samples/s while it trains; 0: not known yet
    at_s: float  # time of these values
    since_s: float  # beginning of the epoch
    # the peer lacks the state of the swarm's epoch, because it is new or downloading it, so its epoch says
    # nothing about the swarm's
    joining: bool = False
    head: bytes = b""  # head of the history of its state, 32 bytes; empty in modes without a common state
    # it abstains on this head, because it was restored and may have voted on it before
    abstains: bool = False

    @classmethod
    def decode(cls, value: Any, now_s: float) -> ProgressReport:
        """Parse and check a report. Raise PeerError with the reason when it is invalid."""
        if not isinstance(value, Mapping):
            raise PeerError("a progress record is a map")
        epoch, samples = value.get("epoch"), value.get("samples")
        if not is_count(epoch, EPOCH_MAX) or not is_count(samples, SAMPLES_MAX):
            raise PeerError("epoch and samples are whole numbers within bounds")
        rate, at_s, since_s = value.get("rate"), value.get("at"), value.get("since")
        if (
            not is_number(rate, RATE_MAX)
            or not is_number(at_s, now_s + CLOCK_AHEAD_S_MAX)
            or not is_number(since_s, at_s)
        ):
            raise PeerError("rate, at and since are finite numbers, since <= at <= now")
        joining = value.get("joining", False)
        if not isinstance(joining, bool):
            raise PeerError("joining is true or false")
        head, abstains = value.get("head", b""), value.get("abstains", False)
        if (
            not isinstance(head, bytes)
            or len(head) not in (0, DIGEST_BYTES)
            or not isinstance(abstains, bool)
        ):
            raise PeerError(f"a head has {DIGEST_BYTES} bytes, abstains is true or false")
        return cls(
            epoch=epoch,
            samples=samples,
            rate=float(rate),
            at_s=float(at_s),
            since_s=float(since_s),
            joining=joining,
            head=head,
            abstains=abstains,
        )

    def encode(self) -> dict[str, Any]:
        """Return the report as a dictionary for a DHT record."""
        return {
            "epoch": self.epoch,
            "samples": self.samples,
            "rate": self.rate,
            "at": self.at_s,
            "since": self.since_s,
            **({"joining": True} if self.joining else {}),
            **({"head": self.head} if self.head else {}),
            **({"abstains": True} if self.abstains else {}),
        }


@dataclass(slots=True)
class _Entry:
    report: ProgressReport
    issued_s: float  # only reports newer than this are accepted
    expires_s: float
    changed_s: float  # when its epoch or samples changed last
    suspect: bool = False  # did not answer; counts again after a newer report
    is_refused: bool = False  # nothing listens at its addresses
    has_left: bool = False  # it said goodbye; counts again after a newer report
    # latest epoch that it is known to have begun, even if its reports do not show this yet
    epoch_min: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressTotal:
    """Sum of the reports of a part of the run, or of all of it."""

    epoch: int
    samples: float  # accumulated in `epoch`
    rate: float  # samples/s of all peers
    peers: int
    median_rate: float  # median rate of the peers; 0: no peer has a rate yet
    at_s: float
    since_s: float  # beginning of the epoch
    bits: int = 0  # in a total: the division of the run from now on

    def encode(self) -> list[Any]:
        """Return the total as a list for a DHT record."""
        counted = [self.epoch, self.samples, self.rate, self.peers]
        return [*counted, self.median_rate, self.at_s, self.since_s, self.bits]

    @classmethod
    def decode(cls, value: Any, now_s: float) -> ProgressTotal:
        """Parse and check a total. Raise PeerError with the reason when it is invalid."""
        if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) != 8:
            raise PeerError("a sum is a list of eight numbers")
        epoch, samples, rate, peers, median_rate, at_s, since_s, bits = value
        whole = is_count(epoch, EPOCH_MAX) and is_count(peers, _PEERS_MAX) and is_count(bits, BITS_MAX)
        amounts = (
            is_number(samples, float(SAMPLES_MAX))
            and is_number(rate, RATE_MAX * 1e3)
            and is_number(median_rate, RATE_MAX)
        )
        if (
            not whole
            or not amounts
            or not is_number(at_s, now_s + CLOCK_AHEAD_S_MAX)
            or not is_number(since_s, at_s)
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

    def samples_at(self, now_s: float) -> float:
        """Return the samples extrapolated to `now_s` at the total's rate: for a limited time, and at most
        to twice the reported samples.
        """
        silent_s = min(max(0.0, now_s - self.at_s), EXTRAPOLATION_S_MAX)
        return self.samples + min(self.rate * silent_s, self.samples)


class EpochProgress:
    """State machine of the epoch's progress. `own` is this peer; its report never expires."""

    def __init__(
        self, own: PeerId, target: int, now_s: float, refresh_s_max: float = WAN.progress_refresh_s_max
    ) -> None:
        if not 1 <= target <= SAMPLES_MAX:
            raise UsageError(f"target_batch_size is a positive number of samples, not {target}")
        self.own, self.target, self._refresh_s_max = own, target, refresh_s_max
        self._own_report = ProgressReport(
            epoch=0, samples=0, rate=0.0, at_s=now_s, since_s=now_s, joining=True
        )
        self._others: dict[PeerId, _Entry] = {}
        # total of a run of several shards; the reports are then those of this peer's shard
        self.total: ProgressTotal | None = None
        self.head = b""  # head of this peer's history; empty without one
        self.abstains = False  # this peer abstains from decisions on that head
        self.standing = ReportStanding(own)
        self._members = frozenset[PeerId]()  # members of the round that led to the head `_members_head`
        self._members_head = b""
        # the epoch that certificates prove; None: it follows from the reports
        self.certified_epoch: int | None = None

    # --- this peer

    @property
    def epoch(self) -> int:
        return self._own_report.epoch

    @property
    def own_report(self) -> ProgressReport:
        """Return this peer's own report."""
        return replace(self._own_report, head=self.head, abstains=self.abstains)

    def begin_epoch(
        self,
        epoch: int,
        now_s: float,
        *,
        late: bool = False,
        joining: bool = False,
        began_ago_s: float = 0.0,
    ) -> None:
        """Enter `epoch` with no samples in it. `late`: this peer was absent when the others began, and takes
        the beginning of the epoch from their reports. `joining`: it has not got the state of the epoch.
        `began_ago_s`: the time that it has trained in the epoch already, while the round before was running.
        """
        others = self.standing.counted(self.others(now_s))
        # a peer that returns to a shorter history may find peers there with which it was in later epochs
        for entry in self._others.values():
            entry.epoch_min = min(entry.epoch_min, epoch)
        began_s = [report.since_s for report in others.values() if late and report.epoch == epoch]
        since_s = min(now_s, statistics.median_low(began_s)) if began_s else now_s - began_ago_s
        self._own_report = replace(
            self._own_report, epoch=epoch, samples=0, at_s=now_s, since_s=since_s, joining=joining
        )

    def update_own(self, samples: int, rate: float, now_s: float) -> None:
        """Update this peer's own report: `samples` accumulated in its epoch, at `rate` samples/s. A peer that
        accumulates samples has a state.
        """
        self._own_report = replace(
            self._own_report,
            samples=samples,
            rate=min(rate, RATE_MAX),
            at_s=max(now_s, self._own_report.since_s),  # a clock correction may move time backwards
            joining=self._own_report.joining and samples == 0,
        )

    # --- other peers

    def on_report(
        self, peer: PeerId, report: ProgressReport, now_s: float, expires_s: float | None = None
    ) -> bool:
        """Process a report, from a record or from the peer itself. Return False when it is not new: older
        than the known one, expired, or this peer's own.
        """
        expires_s = min(expires_s if expires_s is not None else math.inf, report.at_s + REPORT_TTL_S)
        known = self._others.get(peer)
        if peer == self.own or expires_s <= now_s or (known is not None and known.issued_s >= report.at_s):
            return False
        if known is None and len(self._others) >= PEERS_MAX:
            # strangers displace only strangers; otherwise reports dated in the future would displace all
            # others
            outside = [other for other in self._others if other not in self._members] or list(self._others)
            outside = [other for other in outside if not self.standing.counts(other)] or outside
            del self._others[min(outside, key=lambda other: self._others[other].issued_s)]
        epoch_min = known.epoch_min if known is not None else 0
        # the report was sent before the end of that round, and must not make the peer appear to be in an
        # earlier epoch
        if report.epoch < epoch_min:
            report = replace(report, epoch=epoch_min, samples=0, since_s=report.at_s)
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
        self._members, self._members_head = frozenset(peers), self.head
        for peer in self._members:
            entry = self._others.get(peer)
            if entry is not None:
                entry.epoch_min = max(entry.epoch_min, epoch)
            if entry is not None and entry.report.epoch < epoch and not entry.has_left:
                entry.report = replace(entry.report, epoch=epoch, samples=0, at_s=now_s, since_s=now_s)
                entry.changed_s, entry.suspect = now_s, False
                entry.expires_s = max(entry.expires_s, now_s + REPORT_TTL_S)

    def on_goodbye(self, peer: PeerId) -> None:
        """Remove a peer that leaves, until it reports again: its record may be read after its goodbye."""
        if peer in self._others:
            self._others[peer].has_left = True

    def on_unreachable(self, peer: PeerId, *, refused: bool) -> None:
        """Mark a peer that did not answer: it does not count until it sends a newer report. `refused`: it
        cannot be there; otherwise it may be busy.
        """
        if peer in self._others:
            self._others[peer].suspect = True
            self._others[peer].is_refused = refused

    def on_resumed(self, now_s: float) -> None:
        """Clear the hang detection of all peers: the run's owner had paused them."""
        for entry in self._others.values():
            entry.changed_s = now_s

    # --- results

    def others_at_head(self, now_s: float) -> dict[PeerId, ProgressReport]:
        """Return the reports of the live peers with this peer's history: those that report its head, and
        members of the round that led to it whose reports do not say so yet.
        """
        together = self._members if self._members_head == self.head else frozenset[PeerId]()
        return {
            peer: report
            for peer, report in self.others(now_s).items()
            if report.head == self.head or (peer in together and report.epoch <= self.epoch)
        }

    def others(self, now_s: float) -> dict[PeerId, ProgressReport]:
        """Return the reports of the live peers, without this one."""
        self._others = {peer: entry for peer, entry in self._others.items() if entry.expires_s > now_s}
        return {
            peer: entry.report
            for peer, entry in self._others.items()
            if not (entry.suspect or entry.has_left or self._hangs(entry, now_s))
        }

    def is_alone(self, now_s: float) -> bool:
        """Return whether no other peer takes part in the run, as far as is known. A peer that does not answer
        in time may be busy.
        """
        return not self._present(now_s)

    def has_begun(self, now_s: float, believed: Collection[PeerId] | None = None) -> bool:
        """Return whether the run has completed an epoch that this peer has not: by a certificate, or by a
        report of another peer, even one that does not answer in time. One report is enough: without a state
        of the run it is better to wait in vain than to begin the run a second time. `believed`: the peers
        whose reports count without a certificate; None: all.
        """
        return self.swarm_epoch(now_s) > self.epoch or any(
            one.epoch > self.epoch or (self.certified_epoch == 0 and one.head not in (b"", self.head))
            for peer, one in self._present(now_s).items()
            if believed is None or peer in believed
        )

    def _present(self, now_s: float) -> dict[PeerId, ProgressReport]:
        """Return the latest reports of the others that may be there, busy ones included."""
        return {
            peer: entry.report
            for peer, entry in self._others.items()
            if entry.expires_s > now_s
            and not (entry.is_refused or entry.has_left or self._hangs(entry, now_s))
        }

    def _hangs(self, entry: _Entry, now_s: float) -> bool:
        return entry.changed_s <= now_s - STALLED_S_MAX

    def counted(self, now_s: float) -> dict[PeerId, float]:
        """Return how many samples of each live peer count towards this peer's epoch now."""
        live = self.standing.counted({self.own: self._own_report, **self.others(now_s)})
        return self._counted(live, self.standing.rate_max(live), now_s)

    def _counted(
        self, live: Mapping[PeerId, ProgressReport], rate_max: Callable[[PeerId], float], now_s: float
    ) -> dict[PeerId, float]:
        return {
            peer: self._count(peer, report, rate_max(peer), now_s)
            for peer, report in live.items()
            # samples of another history belong to another model
            if report.epoch == self._own_report.epoch and (peer == self.own or report.head == self.head)
        }

    def _count(self, peer: PeerId, report: ProgressReport, rate_max: float, now_s: float) -> float:
        training_s = max(0.0, report.at_s - self._own_report.since_s) + SLACK_S
        counted = min(float(report.samples), rate_max * training_s, float(self.target))
        # this peer's own number is exact; in short epochs rates do not predict the time of a round
        if peer != self.own:
            silent_s = min(max(0.0, now_s - report.at_s), EXTRAPOLATION_S_MAX)
            counted += min(min(report.rate, rate_max) * silent_s, counted)
        return counted

    def is_full(self, now_s: float) -> bool:
        """Return whether the epoch's batch is complete in this peer's view."""
        return self.samples_counted(now_s) >= self.target

    def fraction(self, now_s: float) -> float:
        """Return the fraction of the target that the epoch has reached, at most 1."""
        return min(1.0, self.samples_counted(now_s) / self.target)

    def samples_counted(self, now_s: float) -> float:
        """Return the samples of the whole swarm that count towards this peer's epoch."""
        return self._samples_of(self.counted(now_s) if self.total is None else {}, now_s)

    def _samples_of(self, counted: Mapping[PeerId, float], now_s: float) -> float:
        if self.total is None:
            return sum(counted.values())
        return self.total.samples_at(now_s) if self.total.epoch == self._own_report.epoch else 0.0

    def is_plausibly_full(self, epoch: int, now_s: float) -> bool:
        """Return whether another peer's announcement that `epoch` is full is plausible in this peer's view.
        If not, ask again after a fresh read of the reports.
        """
        return epoch == self._own_report.epoch and self.samples_counted(now_s) >= self.target * BEGIN_FRACTION

    def swarm_epoch(self, now_s: float) -> int:
        """Return the epoch that the swarm has reached: the highest reported by enough other peers that a
        single liar cannot move it, and never below this peer's own. Peers that are joining are not counted:
        they only repeat what they have heard. Where states have a history, only certificates count.
        """
        if self.certified_epoch is not None:
            return max(self._own_report.epoch, self.certified_epoch)
        reached = (
            self.total.epoch
            if self.total is not None
            else epoch_of((report.epoch, 1) for report in self.others(now_s).values() if not report.joining)
        )
        return max(self._own_report.epoch, reached)

    def view(self, now_s: float) -> ProgressView:
        """Return a snapshot of the progress."""
        reports = {self.own: self._own_report, **self.others(now_s)}
        standing = self.standing.counted(reports)
        rate_max = self.standing.rate_max(standing)
        counted = self._counted(standing, rate_max, now_s)
        peers = {
            peer: PeerProgress(
                epoch=report.epoch,
                samples=report.samples,
                samples_per_s=report.rate,
                counted=counted.get(peer, 0.0),
                age_s=max(0.0, now_s - report.at_s),
                has_standing=peer in standing,
            )
            for peer, report in reports.items()
        }
        return ProgressView(
            epoch=self._own_report.epoch,
            swarm_epoch=self.swarm_epoch(now_s),
            samples=self._samples_of(counted, now_s),
            target=self.target,
            samples_per_s=self.total.rate
            if self.total is not None
            else sum(min(report.rate, rate_max(peer)) for peer, report in standing.items()),
            peers=peers,
            peers_total=self.total.peers if self.total is not None else len(peers),
        )

    def refresh_s(self, now_s: float) -> float:
        """Return the interval to the next read of the others' reports; strangers make it no longer."""
        view = self.view(now_s)
        crowd = max(sum(one.has_standing for one in view.peers.values()) / REFRESH_MIN_PEERS, 1.0)
        shortest_s = min(REFRESH_S_MIN * crowd, REFRESH_S_LARGE) if self.total is None else REFRESH_S_LARGE
        return min(max(view.eta_s / 4, shortest_s), max(self._refresh_s_max, shortest_s))


def with_state(reports: Mapping[PeerId, ProgressReport]) -> list[PeerId]:
    """Return the peers that have a state of the run."""
    return [peer for peer, report in reports.items() if not report.joining]


def is_count(value: Any, maximum: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= maximum


def is_number(value: Any, maximum: float) -> TypeGuard[float]:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and 0.0 <= value <= maximum
    )
