"""The search for a group that is in progress: what it wants, whom it knows, who has joined it, whom it
follows.

State of `averaging.matchmaking.logic.matchmaking`, which decides; time is a parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from averaging.matchmaking.logic.group import GROUP_ID_BYTES, Group, Member
from averaging.matchmaking.logic.messages import LookForGroup, SearchRequest
from averaging.matchmaking.logic.peer_table import PeerTable
from swarm.core.ids import PeerId

if TYPE_CHECKING:
    import random


@dataclass(slots=True)
class GroupFollower:
    """A peer whose call to be led is held back here."""

    member: Member
    gathered: bytes
    ticket: int


@dataclass(slots=True)
class Search:
    want: SearchRequest
    member: Member
    seek: LookForGroup
    book: PeerTable
    started_s: float
    act_by_s: float  # when we, leading, make do with who is there
    followers: dict[PeerId, GroupFollower] = field(default_factory=dict)
    following: PeerId | None = None
    pinged_s: float = -math.inf
    pinged: bool = False  # since we follow this leader
    odd_answers: int = 0  # of the leader to our pings, in a row: it no longer leads this round
    looked: bool = False  # the records were read since the search began
    looking: bool = False
    look_s: float = -math.inf

    def speak(self, turn: int) -> LookForGroup:
        """What we tell others, as of this turn."""
        self.seek = replace(self.seek, turn=turn)
        return self.seek

    def follow(self, leader: PeerId, now_s: float) -> None:
        self.following, self.pinged_s, self.pinged, self.odd_answers = leader, now_s, False, 0

    def leave(self, now_s: float) -> None:
        """Follow nobody any more."""
        self.following, self.book.free_s = None, now_s

    def group(self, codec: str, rng: random.Random) -> Group:
        """We and our followers, in the order of the PeerIDs: the same peers have the same spans in every
        round.
        """
        everybody = [(self.member, self.want.gathered)]
        everybody += [(follower.member, follower.gathered) for follower in self.followers.values()]
        everybody.sort(key=lambda one: one[0].peer_id)
        return Group(
            group_id=rng.randbytes(GROUP_ID_BYTES),
            members=tuple(member for member, _ in everybody),
            codec=codec,
            gathered=tuple(gathered for _, gathered in everybody),
        )
