"""The peers that have given most to a run, with the names by which a monitor has seen them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from averaging.history.receipts import Totals
from swarm.core.ids import PeerId
from swarm.monitor.logic.tracked import TrackedPeer
from swarm.monitor.logic.view import LeaderView

LEADERS_MAX = 100


class Leaders:
    """The totals of a run, and the names of the peers with the most samples."""

    def __init__(self) -> None:
        self._first: list[PeerId] = []
        self._names: dict[PeerId, str] = {}  # names of these peers only: other peers' names are not kept
        self._totals = Totals()

    @property
    def count(self) -> int:
        """Return how many peers have given something."""
        return len(self._totals.by_peer)

    @property
    def samples(self) -> int:
        """Return how many samples all of them have given."""
        return self._totals.samples

    @property
    def views(self) -> tuple[LeaderView, ...]:
        """Return the peers with the most samples, in descending order."""
        given = self._totals.by_peer
        return tuple(
            LeaderView(
                peer_id=str(peer),
                short=peer.short,
                name=self._names.get(peer, ""),
                samples=given[peer].samples,
                rounds=given[peer].rounds,
            )
            for peer in self._first
        )

    def take(self, totals: Totals) -> None:
        """Store the totals of the run."""
        given = totals.by_peer
        order = sorted(given, key=lambda peer: (-given[peer].samples, -given[peer].rounds, peer))
        self._totals, self._first = totals, order[:LEADERS_MAX]
        self._names = {peer: self._names[peer] for peer in self._first if peer in self._names}

    def name(self, peers: Mapping[PeerId, TrackedPeer]) -> None:
        """Store the names of the leaders among these peers."""
        for peer in self._first:
            metrics = peers[peer].records.metrics if peer in peers else None
            if metrics is not None and metrics.name:
                self._names[peer] = metrics.name
