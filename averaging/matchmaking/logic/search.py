"""State of the search for a group that is in progress: its request, the known peers, the followers, and the
leader.

`averaging.matchmaking.logic.matchmaking` decides; this module only keeps the state. Time is a parameter.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from averaging.matchmaking.logic.group import GROUP_ID_BYTES, Group, Member, with_roles
from averaging.matchmaking.logic.messages import (
    Answer,
    AnswerJoin,
    Join,
    Leader,
    LookForGroup,
    PeerStatus,
    SearchRequest,
)
from averaging.matchmaking.logic.peer_table import PeerTable
from averaging.matchmaking.logic.precedence import displaced_from_group, seated
from swarm.core.ids import PeerId

if TYPE_CHECKING:
    import random


@dataclass(slots=True)
class GroupFollower:
    """A peer that asked to be led and whose call is held back here."""

    member: Member
    gathered: bytes
    ticket: int


@dataclass(slots=True)
class Search:
    """One search in progress. All times are monotonic seconds."""

    request: SearchRequest
    member: Member
    query: LookForGroup
    table: PeerTable
    group_size: int  # size of a full group
    started_s: float
    begin_by_s: float  # when this peer, as leader, begins with the followers it has
    followers: dict[PeerId, GroupFollower] = field(default_factory=dict)
    following: PeerId | None = None
    pinged_s: float = -math.inf
    pinged: bool = False  # whether the leader was pinged since this peer follows it
    contrary_answers: int = (
        0  # consecutive replies of the leader to pings that say it does not lead this round
    )
    records_read: bool = False  # the presence records were read since the search began
    reading_records: bool = False
    read_started_s: float = -math.inf
    held_by: PeerId | None = None  # the leader that had not begun at this peer's deadline

    @property
    def size(self) -> int:
        """Return how many members a group of this peer would have now."""
        return 1 + len(seated(list(self.followers), self.group_size, self.request.precedence))

    def leads(self, query: LookForGroup) -> bool:
        """Return whether this peer leads the one that sent this query, rather than following it."""
        order = functools.partial(self.request.precedence.order, round_key=self.request.round_key)
        peer_id = query.contact.peer_id
        leads_this = query.can_lead and query.contact.is_called_by(self.query.contact)
        ranks_first = not leads_this or order(self.query.rank) < order(query.rank)
        return self.table.may_lead(query.contact) and ranks_first and not self.table.passes_over(peer_id)

    def can_commit(self) -> bool:
        """Return whether a group of this peer and its followers has a quorum of the electors, if those that
        are in no other group for this round sign from outside.
        """
        taken = self.table.in_other_groups(committed=False).difference(self.followers)
        return self.request.precedence.is_quorum_without(taken)

    def is_committed_elsewhere(self) -> bool:
        """Return whether the electors that have not committed this round yet are no quorum any more."""
        passed = self.table.in_other_groups(committed=True)
        return bool(passed) and not self.request.precedence.is_quorum_without(passed)

    def unseated(self) -> dict[PeerId, GroupFollower]:
        """Remove the followers that have no seat in the group, and return them."""
        seats = seated(list(self.followers), self.group_size, self.request.precedence)
        return {peer_id: self.followers.pop(peer_id) for peer_id in [*self.followers] if peer_id not in seats}

    def displace_stranger(self, peer_id: PeerId, answer: Answer) -> AnswerJoin | None:
        """Make room for a member in the full group. Return the answer to the stranger that is dropped, or
        None when nobody is.
        """
        displaced = displaced_from_group(self.followers, peer_id, self.request.precedence.is_member)
        if displaced is None:
            return None
        self.table.forget_status(displaced)
        return AnswerJoin(peer_id=displaced, ticket=self.followers.pop(displaced).ticket, answer=answer)

    def stamped_query(self, turn: int) -> LookForGroup:
        """Return the query to send to other peers, stamped with this turn."""
        self.query = replace(self.query, turn=turn)
        return self.query

    def follow(self, leader: PeerId, now_s: float) -> None:
        """Begin to follow `leader`."""
        self.following, self.pinged_s, self.pinged, self.contrary_answers = leader, now_s, False, 0

    def stop_following(self, now_s: float) -> None:
        """Stop following."""
        self.following, self.table.free_since_s = None, now_s

    def status(self) -> Answer:
        """Return this peer's status during the search: searching, or following its leader."""
        leader: Leader | None = None
        if self.following is not None:
            peer = self.table.peers[self.following]
            if peer.rank is not None:
                leader = Leader(contact=peer.contact, deadline_s=peer.rank.deadline_s)
        return Answer(
            status=PeerStatus.SEARCHING if self.following is None else PeerStatus.FOLLOWING,
            round_key=self.request.round_key,
            deadline_s=self.query.deadline_s,
            can_lead=self.query.can_lead,
            leader=leader,
        )

    def join(self, turn: int) -> Join:
        """Return the request to be led, as of this turn."""
        return Join(
            query=self.stamped_query(turn),
            weight=self.member.weight,
            bandwidth=self.member.bandwidth,
            bandwidth_is_set=self.member.bandwidth_is_set,
            auxiliary=self.member.auxiliary,
            grid_rounds=self.member.grid_rounds,
            new_hour=self.member.new_hour,
            gone=self.member.gone,
            samples=self.member.samples,
            gathered=self.request.gathered,
        )

    def group(self, codec: str, rng: random.Random) -> Group:
        """Build the group of this peer and its followers. Members are in the order of their PeerIDs, so that
        the same peers reduce the same shards in every round.
        """
        everybody = [(self.member, self.request.gathered)]
        everybody += [(follower.member, follower.gathered) for follower in self.followers.values()]
        everybody.sort(key=lambda one: one[0].peer_id)
        return Group(
            group_id=rng.randbytes(GROUP_ID_BYTES),
            members=with_roles([member for member, _ in everybody], self.request.precedence.is_stranger),
            codec=codec,
            gathered=tuple(gathered for _, gathered in everybody),
        )
