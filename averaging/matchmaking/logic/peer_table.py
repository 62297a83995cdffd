"""Table of the other peers during one search for a group: the expected peers, the status of each, possible
leaders, and how long to wait for each.

Bookkeeping for `averaging.matchmaking.logic.matchmaking`; time is a parameter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from averaging.matchmaking.logic.asking import FIRST_MAX, asked_again_s, is_given_up
from averaging.matchmaking.logic.grace_period import GracePeriod
from averaging.matchmaking.logic.grid import shape_of, split_key
from averaging.matchmaking.logic.messages import (
    NO_PRECEDENCE,
    Answer,
    Holder,
    Leader,
    LookForGroup,
    PeerStatus,
    Precedence,
    Rank,
    SearchFailed,
)
from averaging.matchmaking.logic.phrases import explain
from averaging.matchmaking.logic.precedence import (
    asking_order,
    displaced_from_table,
    is_passed_over,
)
from swarm.core.backoff import backoff_s
from swarm.core.ids import Contact, PeerId

PEERS_MAX = 1024  # peers in the table of one search
# holders that one search queries; they are the same in all searches of a round. Too small: groups split; too
# large: traffic grows with N²
QUERIED_PEERS_MAX = 64
_AVOID_FIRST_S = 0.02  # a leader that refused is asked again after this; doubled with each refusal
_AVOID_MAX_S = 1.0
# a searching peer that ranks after this one should join soon; it is waited for at most this long
_JOIN_WAIT_S = 1.0
# a follower notices within this that its leader is dead: ping interval, timeout of the ping, and a margin
_LEADER_LOSS_S = 2.0
_BUSY_MAX_S = 3600.0
_ENGAGED = (PeerStatus.BUSY, PeerStatus.FOLLOWING, PeerStatus.PASSED)  # in or after a round, or about to be


@dataclass(slots=True)
class PeerState:
    """State of one other peer, as this search knows it."""

    contact: Contact
    expected: bool = False  # according to its presence record, it holds the averager
    status: PeerStatus | None = None  # None: it has sent nothing in this search
    round_key: str = ""
    rank: Rank | None = None
    can_lead: bool = True
    follows: Leader | None = None
    busy_until_s: float = -math.inf
    turn: int = 0  # turn of its latest message; earlier messages may arrive later
    queried_s: float = -math.inf
    changed_s: float = math.inf  # when this search learned its present status and key
    query_pending: bool = False
    failed: str = ""  # why the last call to it failed; "" when it did not
    failures: int = 0  # consecutive failures, the first of them at `failed_since_s`
    failed_since_s: float = math.inf
    refusals: int = 0
    avoid_until_s: float = -math.inf
    was_searching: bool = False  # it was searching at some time during this search, under the same key
    arrived_s: float = math.inf  # when this search learned that the peer searches under the same key
    searching_since_s: float = -math.inf  # its rank in that search
    text: str = ""
    clock_off_s: float = 0.0


class PeerTable:
    """Other peers of one search, by PeerID. All times are monotonic seconds."""

    def __init__(
        self,
        *,
        query: LookForGroup,
        started_s: float,
        grace_period: GracePeriod,
        precedence: Precedence = NO_PRECEDENCE,
    ) -> None:
        self.query = query
        self._precedence, self._is_member = precedence, precedence.is_member
        self._order = functools.partial(asking_order, round_key=query.round_key, is_member=self._is_member)
        # a peer that looks for another round in this cell has finished this one, or visits another cell first
        self._in_cell = shape_of(split_key(query.round_key)[1]) is not None
        self.started_s = started_s
        self.free_since_s = started_s  # when this peer became free to lead
        self.peers: dict[PeerId, PeerState] = {}
        self._grace_period = grace_period

    # --- events

    def on_holders(self, holders: Mapping[PeerId, Holder], unreachable: Iterable[PeerId]) -> None:
        """Process the presence records. If there are more holders than `QUERIED_PEERS_MAX`, keep members,
        then those with this averager's schema, then those with the lowest selection hash, which all searches
        of a round choose alike. Peers in `unreachable` start as failed.
        """

        def order(peer_id: PeerId) -> tuple[bool, bool, bytes]:
            differs = holders[peer_id].schema != self.query.schema
            return not self._is_member(peer_id), differs, self._order(peer_id)

        chosen = sorted(holders, key=order)[:QUERIED_PEERS_MAX]
        recently_failed = set(unreachable)
        for peer_id in [one for one, peer in self.peers.items() if peer.expected and one not in holders]:
            self.peers[peer_id].expected = False
            if self.peers[peer_id].status is None:
                del self.peers[peer_id]
        for peer_id in chosen:
            holder = holders[peer_id]
            peer = self._find_or_add(holder.contact)
            if peer is None:
                return
            peer.expected = True
            if peer.contact != holder.contact and (peer.status is None or peer.failed):
                peer.contact, peer.failed, peer.failures = holder.contact, "", 0  # maybe through other relays
                peer.queried_s, peer.query_pending = -math.inf, False
                recently_failed.discard(peer_id)
            if peer.status is None:
                peer.can_lead = holder.contact.is_callable
                if holder.schema != self.query.schema:
                    peer.status, peer.text = PeerStatus.REFUSED, holder.schema_text
                elif peer_id in recently_failed and not peer.failed:
                    peer.failed = "it did not answer a moment ago"

    def on_query(self, query: LookForGroup, now_s: float) -> None:
        """Process a query: its sender is searching."""
        peer = self._find_or_add(query.contact)
        if peer is None:
            return
        peer.contact = query.contact
        if not self._on_message(peer, query.turn, query.clock_off_s):
            return
        peer.queried_s = max(peer.queried_s, now_s)  # the answer contains what a query would tell it
        if query.schema != self.query.schema:
            peer.status, peer.text = PeerStatus.REFUSED, query.schema_text
            return
        self._note_change(peer, PeerStatus.SEARCHING, query.round_key, now_s)
        self._set_searching(peer, query.rank, query.round_key, query.can_lead, now_s)

    def on_answer(self, peer_id: PeerId, answer: Answer, now_s: float) -> bool:
        """Process the status that a peer sent in reply to a query or a `Join`. Return False when the peer is
        unknown or a later message of it has arrived already.
        """
        peer = self.peers.get(peer_id)
        if peer is None:
            return False
        peer.query_pending = False
        if not self._on_message(peer, answer.turn, answer.clock_off_s):
            return False
        self._note_change(peer, answer.status, answer.round_key, now_s)
        peer.text, peer.round_key, peer.follows = answer.text, answer.round_key, None
        if answer.status is PeerStatus.SEARCHING:
            self._set_searching(
                peer, Rank(answer.deadline_s, peer_id), answer.round_key, answer.can_lead, now_s
            )
            return True
        peer.status = answer.status
        if answer.status is PeerStatus.BUSY:
            peer.busy_until_s = now_s + min(max(answer.expected_s, 0.0), _BUSY_MAX_S)
            for member in answer.members:
                self._mark_busy(self.peers.get(member), peer, answer.members)
        if answer.status is PeerStatus.FOLLOWING and answer.leader is not None:
            peer.follows = answer.leader
            if peer.rank is None or peer.rank.deadline_s != answer.deadline_s:
                peer.searching_since_s = now_s
            peer.rank = Rank(answer.deadline_s, peer_id)
            if answer.round_key == self.query.round_key and not peer.was_searching:
                peer.was_searching, peer.arrived_s = True, min(peer.arrived_s, now_s)
            if answer.round_key == self.query.round_key:
                self.on_report(answer.leader, now_s)
        return True

    def on_report(self, leader: Leader, now_s: float) -> None:
        """Process a report that `leader` looks for a group: another peer follows it, or it asked this one
        before the search. It is believed at once when nothing better is known; otherwise it is verified.
        """
        peer = self._find_or_add(leader.contact)
        if peer is None:
            return
        if peer.status is None and not peer.failed and not peer.query_pending:
            peer.status, peer.rank, peer.round_key = PeerStatus.SEARCHING, leader.rank, self.query.round_key
            peer.searching_since_s = now_s
        else:
            peer.queried_s = -math.inf

    def on_failure(self, peer_id: PeerId, text: str, now_s: float) -> None:
        """Record that a call to this peer failed, for the reason `text`."""
        if (peer := self.peers.get(peer_id)) is not None:
            peer.query_pending, peer.failed = False, text or "no answer"
            peer.failures += 1
            peer.failed_since_s = min(peer.failed_since_s, now_s)

    def forget_status(self, peer_id: PeerId) -> None:
        """Query the status of this peer again, and wait for it no longer than its reply takes."""
        if (peer := self.peers.get(peer_id)) is not None:
            peer.status, peer.was_searching = None, False
            peer.queried_s, peer.query_pending = -math.inf, False

    def on_refusal(self, peer_id: PeerId, now_s: float) -> None:
        """Record that the peer did not lead this one. It is not asked again at once, and all peers that may
        have joined it are queried again.
        """
        peer = self.peers[peer_id]
        peer.refusals += 1
        peer.avoid_until_s = now_s + backoff_s(peer.refusals, _AVOID_FIRST_S, _AVOID_MAX_S)
        for other in self.peers.values():
            if other.status in (PeerStatus.SEARCHING, PeerStatus.FOLLOWING):
                other.queried_s = -math.inf

    # --- conclusions

    def due_queries(
        self, now_s: float, needs_no_query: Callable[[PeerId], bool], *, first_only: bool
    ) -> list[PeerState]:
        """Return the peers to send a query to now, and mark them as queried.

        `needs_no_query` returns whether a peer needs no query; `first_only` restricts the result to peers
        that were never queried, and that all searches query first.
        """
        first, again = list[PeerState](), list[PeerState]()
        known = pending = 0
        for peer_id, peer in self.peers.items():
            known += peer.status is not None or bool(peer.failed)
            pending += peer.query_pending
            if (
                peer.contact.is_called_by(self.query.contact)
                and not peer.query_pending
                and not needs_no_query(peer_id)
                and now_s >= self._query_at_s(peer)
            ):
                (again if peer.queried_s > -math.inf else first).append(peer)
        first.sort(key=lambda peer: self._order(peer.contact.peer_id))
        if first_only:
            common = sorted(self.peers, key=self._order)[:FIRST_MAX] if first else []
            again, first = [], [peer for peer in first if peer.contact.peer_id in common]
        due = [*again, *first[: max(FIRST_MAX + known - pending, 0)]]
        for peer in due:
            peer.query_pending, peer.queried_s = True, now_s
        return due

    def next_query_s(self, needs_no_query: Callable[[PeerId], bool]) -> float:
        """Return when the next query is due; infinity when none is."""
        times = [
            self._query_at_s(p)
            for peer_id, p in self.peers.items()
            if p.contact.is_called_by(self.query.contact)
            and not p.query_pending
            and not needs_no_query(peer_id)
        ]
        return min(times, default=math.inf)

    def best_leader(self, now_s: float) -> PeerState | None:
        """Return the peer of the lowest rank among those that search under the same key, can lead, and rank
        before this one; None when there is none.
        """
        found = [one for one in self._leaders() if now_s >= one[1].avoid_until_s]
        return min(found, key=lambda one: one[0])[1] if found else None

    def next_leader_retry_s(self) -> float:
        """Return when a leader that refused may be asked again; infinity when there is none."""
        return min((peer.avoid_until_s for _, peer in self._leaders()), default=math.inf)

    def wait_until_s(self, peer: PeerState) -> float:
        """Return until when a group that is large enough waits for this peer; minus infinity when it does not
        wait.
        """
        until_s = self._wait_until_s(peer)
        if self._precedence.is_stranger(peer.contact.peer_id):
            until_s = min(until_s, self.started_s + self._grace_period.strangers_s)
        return until_s

    def _wait_until_s(self, peer: PeerState) -> float:
        peer_id = peer.contact.peer_id
        if not self.may_come(peer):
            return -math.inf
        grace_until_s = self.started_s + self._grace_period.grace_s(peer_id)
        if peer.status is None:  # a query is pending; a peer that cannot be dialed may still come by itself
            return math.inf if peer.contact.is_called_by(self.query.contact) else grace_until_s
        same_key = peer.round_key == self.query.round_key
        if peer.status is PeerStatus.SEARCHING and same_key:
            return max(peer.searching_since_s, self.free_since_s) + _JOIN_WAIT_S
        if peer.status is PeerStatus.FOLLOWING and same_key:
            return self._follower_until_s(peer)
        if peer.was_searching or (peer.status is PeerStatus.BUSY and same_key and peer.round_key):
            return -math.inf  # it has found a group for this round without this peer
        if peer.status is PeerStatus.BUSY:
            until_s = peer.busy_until_s + self._grace_period.grace_s(peer_id)
            longest_s = self.started_s + self._grace_period.busy_grace_s(peer_id)
            # a wait that ends before the peer is free would be in vain
            return min(until_s, longest_s) if peer.busy_until_s <= longest_s else -math.inf
        return grace_until_s

    def _follower_until_s(self, peer: PeerState) -> float:
        """Return by when a peer that follows another one would have come to this one."""
        # There are three cases. It follows this peer and its call is in transit. Or its leader learns of this
        # peer and redirects it here. Or its leader, which ranks before this peer, has a full group (otherwise
        # this peer would follow it, too) and sends it away; the members of that group are known to be busy.
        leader = self.peers.get(peer.follows.contact.peer_id) if peer.follows is not None else None
        return max(peer.searching_since_s, self.free_since_s) + (
            _LEADER_LOSS_S if leader is not None and leader.failed else _JOIN_WAIT_S
        )

    def may_come(self, peer: PeerState) -> bool:
        """Return whether this peer can still be in a group with this one."""
        searches = peer.status in (PeerStatus.SEARCHING, PeerStatus.FOLLOWING)
        if self._in_cell and searches and peer.round_key != self.query.round_key:
            return False
        return self._may_answer(peer) and not self.passes_over(peer.contact.peer_id)

    def _may_answer(self, peer: PeerState) -> bool:
        if not self.may_lead(peer.contact) and not self._leads_this(peer):
            return False  # two peers that cannot be dialed cannot meet
        return not peer.failed and peer.status not in (PeerStatus.REFUSED, PeerStatus.PASSED)

    def may_lead(self, other: Contact) -> bool:
        """Return whether this peer can lead another one, that then calls it."""
        return self.query.can_lead and self.query.contact.is_called_by(other)

    def _leads_this(self, peer: PeerState) -> bool:
        return peer.can_lead and peer.contact.is_called_by(self.query.contact)

    def passes_over(self, peer_id: PeerId) -> bool:
        """Return whether this peer forms no group with another one because of its faults."""
        return is_passed_over(peer_id, self.query.contact.peer_id, self._precedence, self._answers)

    def _answers(self, peer_id: PeerId) -> bool:
        return peer_id in self.peers and self._may_answer(self.peers[peer_id])

    def reachable_count(self) -> int:
        """Return the number of known peers that can still be in a group with this one."""
        return sum(self.may_come(peer) for peer in self.peers.values())

    def is_impossible(self, now_s: float) -> bool:
        """Return whether no known peer can be in a group with this one any more."""
        return not any(
            self.may_come(peer) or (peer.failed and not is_given_up(peer, now_s))
            for peer in self.peers.values()
        )

    def round_has_begun(self) -> bool:
        """Return whether a known peer is or was in a group for this round, which would have to fail first."""
        return any(
            peer.status in _ENGAGED
            and not peer.failed
            and peer.round_key == self.query.round_key
            and not self._precedence.is_stranger(peer_id)
            and not self.passes_over(peer_id)
            for peer_id, peer in self.peers.items()
        )

    def in_other_groups(self, *, committed: bool) -> set[PeerId]:
        """Return the peers that take part in this round with others and not with this peer, by their own
        word: they follow another leader, or their round has begun; with `committed`, it is over.
        """
        own = self.query.contact.peer_id
        states = (PeerStatus.PASSED,) if committed else _ENGAGED

        def is_engaged(peer: PeerState) -> bool:
            follows_this_peer = peer.follows is not None and peer.follows.contact.peer_id == own
            same_key = peer.round_key == self.query.round_key
            return peer.status in states and same_key and not peer.failed and not follows_this_peer

        return {peer_id for peer_id, peer in self.peers.items() if is_engaged(peer)}

    def missing_s(self, now_s: float) -> dict[PeerId, float]:
        """Return how long each peer that could come was missing in this search, which ends now."""
        return {
            peer_id: min(peer.arrived_s, now_s) - self.started_s
            for peer_id, peer in self.peers.items()
            if peer.was_searching
            or (
                self.may_come(peer)
                and (peer.status is not None or not peer.contact.is_called_by(self.query.contact))
            )
        }

    def on_round_began(self, members: frozenset[PeerId]) -> None:
        """Record, when a round begins with `members`, that idle peers missed it."""
        for peer_id, peer in self.peers.items():
            if (
                peer_id not in members
                and peer.status is PeerStatus.IDLE
                and not peer.failed
                and not peer.was_searching
            ):
                self._grace_period.record_miss(peer_id)

    def explain(self, deadline: bool) -> SearchFailed:
        """Describe why there is no group, for people. `deadline`: the search ended at its deadline."""
        coming = [peer for peer in self.peers.values() if self.may_come(peer)]
        return explain(list(self.peers.values()), coming, self.query, deadline=deadline)

    # --- inside

    def _find_or_add(self, contact: Contact) -> PeerState | None:
        peer = self.peers.get(contact.peer_id)
        if peer is None:
            if contact.peer_id == self.query.contact.peer_id:
                return None
            if len(self.peers) >= PEERS_MAX:
                displaced = displaced_from_table(self.peers, contact.peer_id, self._is_member)
                if displaced is None:
                    return None
                del self.peers[displaced]
            peer = self.peers[contact.peer_id] = PeerState(contact=contact)
        return peer

    def _on_message(self, peer: PeerState, turn: int, clock_off_s: float) -> bool:
        """Mark the peer as alive. Return whether its message is the latest by its turn."""
        peer.clock_off_s = clock_off_s
        peer.failed, peer.failures, peer.failed_since_s = "", 0, math.inf
        latest = turn >= peer.turn
        peer.turn = max(turn, peer.turn)
        return latest

    def _note_change(self, peer: PeerState, status: PeerStatus, round_key: str, now_s: float) -> None:
        if (peer.status, peer.round_key) != (status, round_key):
            peer.changed_s = now_s

    def _set_searching(
        self, peer: PeerState, rank: Rank, round_key: str, can_lead: bool, now_s: float
    ) -> None:
        # a peer that claims to follow this one without a pending call has lost that call; its pings do not
        # count as an arrival
        follows_this_peer = (
            peer.status is PeerStatus.FOLLOWING
            and peer.follows is not None
            and peer.follows.contact.peer_id == self.query.contact.peer_id
        )
        if (
            (peer.status is not PeerStatus.SEARCHING and not follows_this_peer)
            or peer.rank != rank
            or peer.round_key != round_key
        ):
            peer.refusals, peer.avoid_until_s, peer.searching_since_s = 0, -math.inf, now_s
        peer.status, peer.rank, peer.round_key, peer.can_lead = (
            PeerStatus.SEARCHING,
            rank,
            round_key,
            can_lead,
        )
        if round_key == self.query.round_key and not peer.was_searching:
            peer.was_searching, peer.arrived_s = True, min(peer.arrived_s, now_s)
            self._grace_period.record_arrival(peer.contact.peer_id, now_s - self.started_s)

    def _mark_busy(self, member: PeerState | None, reporter: PeerState, members: tuple[PeerId, ...]) -> None:
        """Mark `member` as busy: `reporter` reports that it is in a round with it, among `members`."""
        # the round of this peer is over here; without round keys nothing else tells it from the next one
        is_other = reporter.round_key != self.query.round_key or self.query.contact.peer_id in members
        if member is None or (
            member.status is not None and member.round_key == self.query.round_key and is_other
        ):
            return  # its own message says that it looks for this round: it ended the other one first
        if member.status in (None, PeerStatus.SEARCHING, PeerStatus.FOLLOWING):
            member.status, member.round_key, member.busy_until_s = (
                PeerStatus.BUSY,
                reporter.round_key,
                reporter.busy_until_s,
            )

    def _leaders(self) -> list[tuple[tuple[bool, tuple[bool, bytes, Rank]], PeerState]]:
        """Return the peers that may lead this one, with their order: peers that can be called directly first.
        One that this peer passes over may lead only if others follow it.
        """
        key = self.query.round_key
        order = functools.partial(self._precedence.order, round_key=key)
        followed = {
            peer.follows.contact.peer_id
            for peer_id, peer in self.peers.items()
            if peer.status is PeerStatus.FOLLOWING
            and peer.follows is not None
            and peer.round_key == key
            and not self.passes_over(peer_id)
            # its followers will find out themselves, at their deadlines
            and not self._precedence.is_holding(peer.follows.contact.peer_id)
        }
        return [
            ((not peer.contact.addresses, order(peer.rank)), peer)
            for peer_id, peer in self.peers.items()
            if peer.status is PeerStatus.SEARCHING
            and peer.rank is not None
            and peer.round_key == key
            and not peer.failed
            and self._leads_this(peer)
            and (order(peer.rank) < order(self.query.rank) or not self.may_lead(peer.contact))
            and (peer_id in followed or not self.passes_over(peer_id))
        ]

    def _query_at_s(self, peer: PeerState) -> float:
        return asked_again_s(peer, len(self.peers), self.started_s)
