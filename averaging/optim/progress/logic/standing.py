"""The reports that count, and their weights. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from swarm.core.ids import PeerId

if TYPE_CHECKING:
    from averaging.optim.progress.logic.reports import ProgressReport

_ReportT = TypeVar("_ReportT")
# A peer counts with at most this many times the median rate of the electors or, if there are at least three
# peers, of all peers.
RATE_RATIO_MAX = 3.0


@dataclass(frozen=True, slots=True)
class ReportStanding:
    """The standing of the peers whose reports one peer has. `own` is this peer."""

    own: PeerId
    electors: Collection[PeerId] = ()  # electors of this peer's head
    # whether a peer is a member of the run, or has contributed to a certified round
    is_proven: Callable[[PeerId], bool] = lambda peer: True
    # certificates say that the run is larger than a group, so that its members know only a part of it
    is_large: bool = False

    def counts(self, peer: PeerId) -> bool:
        """Return whether a peer's reports count for this one."""
        return not self.electors or peer in self.electors or self.is_proven(peer)

    def may_divide(self, peer: PeerId) -> bool:
        """Return whether a notice of this peer may send this one to a part of a divided run."""
        return self.is_large or self.counts(peer)

    def counted(self, reports: Mapping[PeerId, _ReportT]) -> dict[PeerId, _ReportT]:
        """Return the reports that count; all of them when no elector is present, for instance because all
        have died.
        """
        if not any(elector == self.own or elector in reports for elector in self.electors):
            return dict(reports)
        return {
            peer: report for peer, report in reports.items() if peer in self.electors or self.is_proven(peer)
        }

    def rate_max(self, counted: Mapping[PeerId, ProgressReport]) -> Callable[[PeerId], float]:
        """Return the highest rate in samples/s that counts for each peer."""
        # in any epoch: at the start of one no other peer has reported yet
        rates = {peer: report.rate for peer, report in counted.items() if report.rate > 0}
        electors = [rate for peer, rate in rates.items() if peer in self.electors]
        deciding = electors or list(rates.values())
        limit = RATE_RATIO_MAX * statistics.median_low(deciding) if deciding else math.inf
        if len(deciding) >= 3:
            return lambda peer: limit
        return lambda peer: limit if electors and peer not in self.electors else math.inf

    def peers(self, reports: Mapping[PeerId, ProgressReport]) -> tuple[int, list[PeerId]]:
        """Return how many peers the swarm has, this one included, and which of the others have a state.
        Strangers get as many seats as all others together: more of them make no larger swarm.
        """
        counted = self.counted(reports)
        there = [peer for peer, report in counted.items() if not report.joining]
        return min(1 + len(reports), 2 * (1 + len(counted))), there
