"""Peers outside the routing table that are worth a call from time to time: bootstrap peers, and a sample of
the lost ones.

A lost peer may be dead, or on the other side of a network partition. This memory lets the two halves merge
after the partition heals. It must neither fill up with peers lost to ordinary churn nor cost more than a few
calls per hour: it is a small random sample, and each peer in it is tried less and less often. Bootstrap peers
are never forgotten.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarm.core.backoff import backoff_s
from swarm.core.ids import Contact, PeerId

if TYPE_CHECKING:
    import random

BOOTSTRAP_MAX = 64
LOST_MAX = 24
PAUSE_FIRST_S = 15.0
PAUSE_MAX_S = 300.0
_LOST_S_MAX = 6 * 3600.0  # then a lost peer is forgotten; the peer book still has it


@dataclass(slots=True)
class _Candidate:
    contact: Contact
    due_s: float
    since_s: float
    calls: int = 0  # calls without success


class RejoinCandidates:
    """Peers to retry, each with its next due time. Time is a parameter: seconds of a monotonic clock."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._bootstrap: dict[PeerId, _Candidate] = {}
        self._lost: dict[PeerId, _Candidate] = {}

    def add_bootstrap(self, contacts: Iterable[Contact], now_s: float) -> None:
        """Add bootstrap peers. Beyond `BOOTSTRAP_MAX` the oldest are forgotten."""
        for contact in contacts:
            self._bootstrap.pop(contact.peer_id, None)
            self._bootstrap[contact.peer_id] = _Candidate(contact, now_s + PAUSE_FIRST_S, now_s)
        while len(self._bootstrap) > BOOTSTRAP_MAX:
            del self._bootstrap[next(iter(self._bootstrap))]

    def add_lost(self, contact: Contact, now_s: float) -> None:
        """Add a peer of the table that stopped answering. When full, a random lost peer makes room."""
        if contact.peer_id in self._lost or contact.peer_id in self._bootstrap:
            return
        if len(self._lost) >= LOST_MAX:
            del self._lost[self._rng.choice(list(self._lost))]
        self._lost[contact.peer_id] = _Candidate(
            contact, now_s + PAUSE_FIRST_S * self._rng.uniform(0.5, 1.5), now_s
        )

    def contacts(self) -> list[Contact]:
        """Return all candidates, bootstrap peers first."""
        return [candidate.contact for candidate in (*self._bootstrap.values(), *self._lost.values())]

    def due(self, now_s: float, known: Container[PeerId], count_max: int) -> list[Contact]:
        """Return up to `count_max` candidates that are due and not in the routing table, the longest due
        first.
        """
        for peer_id in [
            peer_id
            for peer_id, one in self._lost.items()
            if peer_id in known or now_s - one.since_s > _LOST_S_MAX
        ]:
            del self._lost[peer_id]
        waiting = [
            one
            for one in (*self._bootstrap.values(), *self._lost.values())
            if one.due_s <= now_s and one.contact.peer_id not in known
        ]
        return [one.contact for one in sorted(waiting, key=lambda one: one.due_s)[:count_max]]

    def on_called(self, peer_id: PeerId, now_s: float) -> None:
        """Record a call to a candidate, with any result: the pause until the next one doubles. A candidate
        that answered but has no room in the table belongs to this swarm and need not be called often either.
        """
        for candidate in filter(None, (self._bootstrap.get(peer_id), self._lost.get(peer_id))):
            candidate.calls += 1
            pause_s = backoff_s(candidate.calls, PAUSE_FIRST_S, PAUSE_MAX_S)
            candidate.due_s = now_s + pause_s * self._rng.uniform(0.8, 1.2)

    def retry_all_now(self, now_s: float) -> None:
        """Make all candidates due now, because a partition has healed."""
        for candidate in (*self._bootstrap.values(), *self._lost.values()):
            candidate.due_s, candidate.calls = now_s, 0
