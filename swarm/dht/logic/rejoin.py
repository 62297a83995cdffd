"""Peers outside the table that are worth a call now and then: those that this peer was told to join by, and
some of those it has lost.

A lost peer may be dead, or on the other side of a network cut. After the cut this memory is what makes two
swarms one again, so that it must not fill with the dead of ordinary churn, nor cost more than a few calls an
hour: it is a small sample, each of it tried ever more seldom. Those one was told to join by are never
forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from swarm.core.backoff import backoff_s
from swarm.core.ids import Contact, PeerId

if TYPE_CHECKING:
    import random

TOLD_MAX = 64
LOST_MAX = 24
PAUSE_FIRST_S = 15.0
PAUSE_MAX_S = 300.0
_LOST_S_MAX = 6 * 3600.0  # then a lost peer is given up; the peer book still has it


class Known(Protocol):
    """The routing table."""

    def __contains__(self, peer_id: PeerId) -> bool: ...


@dataclass(slots=True)
class _Stranger:
    contact: Contact
    due_s: float
    since_s: float
    calls: int = 0  # in vain


class RejoinCandidates:
    """Time is a parameter, in seconds that never jump."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._told: dict[PeerId, _Stranger] = {}
        self._lost: dict[PeerId, _Stranger] = {}

    def told(self, contacts: Iterable[Contact], now_s: float) -> None:
        """This peer is to join by these. Of more than `TOLD_MAX`, those told first are forgotten."""
        for contact in contacts:
            self._told.pop(contact.peer_id, None)
            self._told[contact.peer_id] = _Stranger(contact, now_s + PAUSE_FIRST_S, now_s)
        while len(self._told) > TOLD_MAX:
            del self._told[next(iter(self._told))]

    def lost(self, contact: Contact, now_s: float) -> None:
        """A peer of the table stopped answering. A full memory lets one go by chance."""
        if contact.peer_id in self._lost or contact.peer_id in self._told:
            return
        if len(self._lost) >= LOST_MAX:
            del self._lost[self._rng.choice(list(self._lost))]
        self._lost[contact.peer_id] = _Stranger(
            contact, now_s + PAUSE_FIRST_S * self._rng.uniform(0.5, 1.5), now_s
        )

    def contacts(self) -> list[Contact]:
        """All of them, those told first."""
        return [stranger.contact for stranger in (*self._told.values(), *self._lost.values())]

    def due(self, now_s: float, known: Known, count_max: int) -> list[Contact]:
        """Whom to call now: nobody that the table knows; the longest due first."""
        for peer_id in [
            peer_id
            for peer_id, one in self._lost.items()
            if peer_id in known or now_s - one.since_s > _LOST_S_MAX
        ]:
            del self._lost[peer_id]
        waiting = [
            one
            for one in (*self._told.values(), *self._lost.values())
            if one.due_s <= now_s and one.contact.peer_id not in known
        ]
        return [one.contact for one in sorted(waiting, key=lambda one: one.due_s)[:count_max]]

    def tried(self, peer_id: PeerId, now_s: float) -> None:
        """It was called, with whatever result: leave it alone, twice as long each time. One that answered and
        has no room in the table is of this swarm, and just as little to be called often.
        """
        for stranger in filter(None, (self._told.get(peer_id), self._lost.get(peer_id))):
            stranger.calls += 1
            pause_s = backoff_s(stranger.calls, PAUSE_FIRST_S, PAUSE_MAX_S)
            stranger.due_s = now_s + pause_s * self._rng.uniform(0.8, 1.2)

    def hurry(self, now_s: float) -> None:
        """A cut has healed: all of them are worth a call at once."""
        for stranger in (*self._told.values(), *self._lost.values()):
            stranger.due_s, stranger.calls = now_s, 0
