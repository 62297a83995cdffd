"""Rounds as reported by their members, merged. A liar can report rounds that never took place, but cannot
displace rounds that others report.
"""

from __future__ import annotations

import heapq
import statistics
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from swarm.core.ids import PeerId
from swarm.metrics.record import RoundReport
from swarm.monitor.logic.robust import median
from swarm.monitor.logic.view import RoundView

_AHEAD_MAX = 2  # epochs that a round may be ahead of the swarm
_ALONE_MAX = 4  # rounds that a single peer is the only one to report
_BLAME_MAX = 8
_SHOWN_MAX = 50
# kept: each peer reports its last four rounds again and again. Too small: rounds of a busy run displace one
# another, and seem new with every poll
_ROUNDS_MAX = 1024
_KNOWN_MAX = 4096  # keys of rounds that were seen; a round that was displaced is not new when it comes back

RoundKey = tuple[str, int, str]


@dataclass(slots=True)
class _Round:
    reports: dict[PeerId, RoundReport] = field(default_factory=dict)
    first_s: float = 0.0  # when the monitor learned of it


class RoundTable:
    """The latest rounds of a run."""

    def __init__(self) -> None:
        self._rounds: dict[RoundKey, _Round] = {}
        self._known: OrderedDict[RoundKey, None] = OrderedDict()

    def add_report(self, writer: PeerId, report: RoundReport, epoch: int, now_s: float) -> RoundKey | None:
        """Add one member's report. Return the round's key if this is its first report. `epoch` is the
        swarm's.
        """
        if report.epoch > epoch + _AHEAD_MAX or report.at_s > now_s + 60.0 or not report.kind:
            return None
        key = (report.kind, report.epoch, report.group or "-")
        known = self._rounds.get(key)
        if known is not None:
            known.reports[writer] = report
            return None
        self._make_room(writer)
        self._rounds[key] = _Round({writer: report}, now_s)
        is_new = key not in self._known
        self._known[key] = None
        self._known.move_to_end(key)
        if len(self._known) > _KNOWN_MAX:
            self._known.popitem(last=False)
        return key if is_new else None

    def view(self, key: RoundKey) -> RoundView | None:
        """Return the merged reports of one round, or None when it is unknown."""
        found = self._rounds.get(key)
        return _merged(key, found) if found is not None else None

    def latest(self) -> list[RoundView]:
        """Return the last rounds, the newest first."""
        newest = heapq.nlargest(_SHOWN_MAX, self._rounds.items(), key=_recency)
        views = [_merged(key, found) for key, found in newest]
        return sorted(views, key=lambda view: (view.at_s, view.epoch), reverse=True)

    def accusers(self) -> dict[str, set[PeerId]]:
        """Return for every peer that was caught lying as a reducer the peers that report this."""
        found: dict[str, set[PeerId]] = {}
        for one in self._rounds.values():
            for writer, report in one.reports.items():
                for peer, _ in report.accused:
                    found.setdefault(peer, set()).add(writer)
        return found

    def _make_room(self, writer: PeerId) -> None:
        alone = [key for key, one in self._rounds.items() if set(one.reports) == {writer}]
        for key in alone[: max(0, len(alone) - _ALONE_MAX + 1)]:
            del self._rounds[key]
        while len(self._rounds) >= _ROUNDS_MAX:
            del self._rounds[
                min(
                    self._rounds,
                    key=lambda key: (len(self._rounds[key].reports) > 1, self._rounds[key].first_s),
                )
            ]


def _recency(item: tuple[RoundKey, _Round]) -> tuple[float, int]:
    """Return by what rounds are ordered: the time of their end, and the epoch."""
    (_, epoch, _), one = item
    return statistics.median(report.at_s for report in one.reports.values()), epoch


def _merged(key: RoundKey, one: _Round) -> RoundView:
    reports = list(one.reports.values())
    failed = [one for one in reports if one.reason]
    members = round(median(one.members for one in reports) or 0)
    digests = Counter(one.digest for one in reports if one.digest)
    left, accused = (
        {peer: why for one in reports for peer, why in getattr(one, blame)} for blame in ("left", "accused")
    )
    reason = Counter(one.reason for one in failed).most_common(1)
    detail = Counter(one.detail for one in failed if one.detail).most_common(1)
    return RoundView(
        kind=key[0],
        epoch=key[1],
        at_s=statistics.median(one.at_s for one in reports),
        members=members,
        reported_by=len(reports),
        seconds=median(one.seconds for one in reports) or 0.0,
        bytes=(median(one.bytes for one in reports) or 0.0) * max(1, members),
        failed=2 * len(failed) > len(reports),
        failed_for=len(failed),
        reason=reason[0][0] if reason else "",
        detail=detail[0][0] if detail else "",
        left=dict(list(left.items())[:_BLAME_MAX]),
        accused=dict(list(accused.items())[:_BLAME_MAX]),
        digest=digests.most_common(1)[0][0] if digests else "",
        digests=len(digests),
    )
