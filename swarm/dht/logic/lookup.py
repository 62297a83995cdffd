"""The iterative lookup: find the live peers nearest to an id (Kademlia, section 2.3), as a state machine
without clock or network.

The caller calls `poll`, performs each `SendFind`, and reports with `on_reply` or `on_failure`, until `poll`
returns `LookupDone`. The lookup ends when the `wanted` nearest peers that are not known to have failed have
all answered. A peer that stays silent for `stall_s` may still answer, but the lookup asks other peers
meanwhile. The work is bounded for all possible answers: `queries_max` calls, `shortlist_max` candidates,
`closer_max` contacts taken from one answer, one call per peer.
"""

from __future__ import annotations

import bisect
import enum
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from swarm.core.ids import ADDRESSES_MAX, Address, Contact, PeerId
from swarm.core.presets import WAN
from swarm.dht.logic.constants import BUCKET_MAX, PARALLEL

_DISTANCE = operator.attrgetter("distance")


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupBreadth:
    """Breadth and limits of one lookup."""

    # Number of nearest peers that must have answered (Kademlia's k; a read wants the replicas only).
    wanted: int = BUCKET_MAX
    # Calls in flight that are not stalled (Kademlia's alpha); a read asks all replicas at once.
    parallel: int = PARALLEL
    # Silence after which another peer is asked as well. Less wastes calls on long links; more lets dead peers
    # delay every search.
    stall_s: float = WAN.dht_stall_s
    queries_max: int = 120  # calls in total
    shortlist_max: int = 100  # candidates kept
    closer_max: int = 20  # contacts taken from one answer


@dataclass(frozen=True, slots=True)
class SendFind:
    contact: Contact


@dataclass(frozen=True, slots=True)
class LookupDone:
    # Peers that answered, nearest first, at most `wanted`; includes this peer if it was a candidate.
    nearest: tuple[Contact, ...]


Effect: TypeAlias = SendFind | LookupDone


class _State(enum.Enum):
    FRESH = enum.auto()
    ASKED = enum.auto()
    STALLED = enum.auto()
    ANSWERED = enum.auto()
    FAILED = enum.auto()


# Bound once: access to enum members is slow, and every answer to a search visits all candidates.
_FRESH, _ASKED, _STALLED, _ANSWERED, _FAILED = _State


@dataclass(slots=True, eq=False)
class _Candidate:
    distance: int
    contact: Contact
    state: _State = _FRESH
    asked_s: float = 0.0
    hops: int = 1  # length of the chain of calls that led to this peer, including the call to it


class Lookup:
    """A search for the peers nearest to one id."""

    def __init__(
        self,
        target: int,
        seeds: Sequence[Contact],
        *,
        own: PeerId,
        own_contact: Contact | None = None,
        breadth: LookupBreadth | None = None,
    ) -> None:
        """Start a lookup from `seeds`. `own` is never asked; `own_contact`, when given, counts as a candidate
        that has answered.
        """
        self.breadth = breadth or LookupBreadth()
        self.target = target
        self.queries = 0
        self.answers = 0
        self._own = own
        self._candidates: dict[PeerId, _Candidate] = {}
        self._order: list[_Candidate] = []  # sorted by distance
        # Candidates in state ASKED, in the order in which they were asked.
        self._asked: dict[PeerId, _Candidate] = {}
        self._done = False
        self._deadline_s: float | None = None
        if own_contact is not None:
            self._insert(own_contact, _ANSWERED)
        for contact in seeds:
            self._learn(contact)
        self._trim()

    @property
    def stalled(self) -> list[PeerId]:
        """Return the peers that were silent for too long and have neither answered nor failed since."""
        return [candidate.contact.peer_id for candidate in self._order if candidate.state is _STALLED]

    def on_reply(self, peer: PeerId, closer: Sequence[Contact]) -> None:
        """Record the answer of a peer that was asked: the contacts nearest to the target that it knows."""
        candidate = self._candidates.get(peer)
        if candidate is None or candidate.state not in (_ASKED, _STALLED):
            return
        candidate.state = _ANSWERED
        self._asked.pop(peer, None)
        self.answers += 1
        for contact in closer[: self.breadth.closer_max]:
            self._learn(contact, candidate.hops + 1)
        self._trim()

    def on_failure(self, peer: PeerId) -> None:
        """Record that a peer that was asked could not be reached, refused, or broke the protocol."""
        candidate = self._candidates.get(peer)
        if candidate is not None and candidate.state in (_ASKED, _STALLED):
            candidate.state = _FAILED
            self._asked.pop(peer, None)

    def widen(self, wanted: int) -> None:
        """Continue until the `wanted` nearest peers have answered, asking none of them twice. Call this on a
        lookup that is done or about to be.
        """
        if wanted > self.breadth.wanted:
            self.breadth = replace(self.breadth, wanted=wanted)
            self._done = False

    def deadline_s(self) -> float | None:
        """Return when `poll` must be called again without an answer; None when only an answer changes
        anything.
        """
        return self._deadline_s

    def poll(self, now_s: float) -> list[Effect]:
        """Return the effects to perform now. `LookupDone` is returned once, and alone."""
        if self._done:
            return []
        breadth = self.breadth
        self._stall(now_s - breadth.stall_s)
        effects: list[Effect] = []
        counted = unsettled = 0
        for candidate in self._order:
            if counted == breadth.wanted:
                break
            state = candidate.state
            if state is _FAILED or state is _STALLED:
                continue
            if state is _FRESH:
                if self.queries >= breadth.queries_max:
                    continue
                if len(self._asked) < breadth.parallel:
                    candidate.state, candidate.asked_s = _ASKED, now_s
                    self._asked[candidate.contact.peer_id] = candidate
                    self.queries += 1
                    effects.append(SendFind(candidate.contact))
            counted += 1
            unsettled += state is not _ANSWERED
        # The peer that was asked first stalls first.
        self._deadline_s = next(iter(self._asked.values())).asked_s + breadth.stall_s if self._asked else None
        # Without any answer yet, waiting for a slow peer is better than returning nothing.
        if unsettled or (not self.answers and self._any_stalled()):
            return effects
        self._done = True
        self._deadline_s = None
        answered = [candidate.contact for candidate in self._order if candidate.state is _ANSWERED]
        return [LookupDone(tuple(answered[: breadth.wanted]))]

    def _stall(self, asked_before_s: float) -> None:
        while self._asked:
            peer_id, candidate = next(iter(self._asked.items()))
            if candidate.asked_s > asked_before_s:
                return
            candidate.state = _STALLED
            del self._asked[peer_id]

    def _any_stalled(self) -> bool:
        return any(candidate.state is _STALLED for candidate in self._order)

    @property
    def hops(self) -> int:
        """Return the length of the longest chain of calls that led to one of the nearest peers that have
        answered; 0 when none has.
        """
        answered = [candidate for candidate in self._order if candidate.state is _ANSWERED][
            : self.breadth.wanted
        ]
        return max(
            (candidate.hops for candidate in answered if candidate.contact.peer_id != self._own), default=0
        )

    def _learn(self, contact: Contact, hops: int = 1) -> None:
        if contact.peer_id == self._own or not contact.addresses:
            return
        known = self._candidates.get(contact.peer_id)
        if known is None:
            self._insert(contact, _FRESH, hops)
        elif known.state is _FRESH and known.contact.addresses != contact.addresses:
            # One of the peers that named it may have invented the address: keep both.
            addresses: tuple[Address, ...] = tuple(dict.fromkeys(known.contact.addresses + contact.addresses))
            known.contact = Contact(contact.peer_id, addresses[:ADDRESSES_MAX])

    def _insert(self, contact: Contact, state: _State, hops: int = 1) -> None:
        candidate = _Candidate(contact.peer_id.dht_id ^ self.target, contact, state, hops=hops)
        self._candidates[contact.peer_id] = candidate
        # Fast path: the seeds come in order of distance.
        if not self._order or candidate.distance >= self._order[-1].distance:
            self._order.append(candidate)
        else:
            bisect.insort(self._order, candidate, key=_DISTANCE)

    def _trim(self) -> None:
        """Drop the farthest candidates that were never asked. The others, at most `queries_max`, are kept so
        that no peer is asked twice.
        """
        excess = len(self._order) - self.breadth.shortlist_max
        for position in range(len(self._order) - 1, -1, -1):
            if excess <= 0:
                return
            if self._order[position].state is _FRESH:
                del self._candidates[self._order.pop(position).contact.peer_id]
                excess -= 1
