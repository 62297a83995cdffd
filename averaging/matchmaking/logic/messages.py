"""Messages that peers exchange while they look for a group, and effects that the matchmaking machine asks its
service for. Values only.

Two calls suffice for a swarm of one group. `LookForGroup` (a "query" in names here) announces a search with
its deadline; the reply is the other peer's status. `Join` asks a peer to lead; its reply is held back until
the group begins, or until it is clear that it will not, and is then that peer's status. In a swarm larger
than one group a third call, `CellLookup`, reports and asks which peers are in a cell of the grid.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias

from averaging.matchmaking.logic.group import Group
from swarm.core.ids import Contact, PeerId

SearchFailure: TypeAlias = Literal["alone", "deadline", "schema", "passed", "unreachable", "few", "cancelled"]

TEXT_MAX = 300  # characters of an explanation in a message
ROUND_KEY_MAX = 128  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragerName:
    """Name of an averager. Peers average with peers that hold an averager of the same name in the same
    run.
    """

    run: str
    averager: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSchema:
    """Properties that must be equal on all peers that average together."""

    digest: bytes  # hash over tensor shapes, dtypes, order, codec, aggregation
    text: str  # the same in words, for error messages
    codec: str


class PeerStatus(enum.IntEnum):
    """Status of a peer with respect to a round. The numbers are those on the wire."""

    IDLE = 1  # it holds this averager and is not averaging now
    SEARCHING = 2  # it looks for a group, and leads those who join it
    FOLLOWING = 3  # it follows another peer, and accepts no followers meanwhile
    BUSY = 4  # it is in a round, or without a round key in a training step
    PASSED = 5  # it has committed the round with this key, which is not repeated
    REFUSED = 6  # it can never average with the caller: tensors or codec differ


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """Order of leadership among peers of equal standing (`Precedence.order`): the searching peer with the
    lowest rank leads. A rank is fixed for the length of a search and a peer waits only for a lower one, so
    that peers never wait in a circle.
    """

    # swarm time; only compared, never waited for, so that a wrong clock changes only which peer leads
    deadline_s: float
    peer_id: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class LookForGroup:
    """Announcement that a peer looks for a group."""

    contact: Contact  # the sender; the service has checked that the peer id is the caller's
    round_key: str  # only peers with equal keys form a group; "" if the caller gave none
    schema: bytes  # hash over tensor shapes, dtypes, codec, aggregation
    schema_text: str  # the same in words, for the error message of the other peer
    deadline_s: float  # swarm time
    can_lead: bool  # it can be dialed
    turn: int = 0  # number of the sender's changes of status so far: orders two of its messages
    clock_off_s: float = 0.0  # the sender's clock minus this peer's, as measured by the service

    @property
    def rank(self) -> Rank:
        return Rank(self.deadline_s, self.contact.peer_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """A leading peer, as reported by one of its followers."""

    contact: Contact
    deadline_s: float

    @property
    def rank(self) -> Rank:
        return Rank(self.deadline_s, self.contact.peer_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Status of the asked peer: the reply to a `LookForGroup`, and to a `Join` that led to no group."""

    status: PeerStatus
    round_key: str = ""  # key of the search or round that it is in
    deadline_s: float = 0.0  # its rank, when it is searching or following
    can_lead: bool = True
    leader: Leader | None = None  # the peer that it follows
    expected_s: float = 0.0  # busy: estimated time until its round or step is over
    # busy: members of its round, as a hint that saves the caller queries
    members: tuple[PeerId, ...] = ()
    text: str = ""  # refused: why
    turn: int = 0  # as in `LookForGroup`, of the peer that replies
    clock_off_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Request of a peer to be led, with the values that it brings into the group."""

    query: LookForGroup
    weight: float
    bandwidth: float
    bandwidth_is_set: bool = False
    auxiliary: bool = False
    grid_rounds: int = 0
    new_hour: bool = False
    gone: int = 0
    samples: int = 0
    gathered: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A live peer that holds this averager, according to its presence record in the DHT."""

    contact: Contact
    schema: bytes
    schema_text: str = ""


IsMember = Callable[[PeerId], bool]


def _nobody(peer_id: PeerId) -> bool:
    return False


def _always(peers: Collection[PeerId]) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Precedence:
    """The standing of the other peers of one search, from this peer's point of view."""

    # electors of the head that the group extends, equal in all searches under one key; empty: all peers are
    # equal
    electors: frozenset[PeerId] = frozenset()
    is_member: IsMember = _nobody  # whether a peer is a member of the run
    is_proven: IsMember = _nobody  # whether it is a member or has contributed to a certified round
    is_passed_over: IsMember = _nobody  # whether this peer currently avoids groups with it
    is_holding: IsMember = _nobody  # whether the reason is that it led a group and did not begin
    # whether this peer observed faults of it recently, and therefore waits less for it
    is_doubted: IsMember = _nobody
    may_be_alone: bool = False  # a group of this peer alone is large enough
    # whether all electors but these peers are a quorum, without which no group commits the round
    is_quorum_without: Callable[[Collection[PeerId]], bool] = _always
    is_cell: bool = False  # a run larger than a group: rounds of the cell extend no head

    def is_stranger(self, peer_id: PeerId) -> bool:
        """Return whether a peer has no standing, in a run that has electors."""
        return bool(self.electors) and peer_id not in self.electors and not self.is_proven(peer_id)

    def order(self, rank: Rank, round_key: str) -> tuple[bool, bytes, Rank]:
        """Return the order in which peers lead: electors first, by a hash that differs for each head. A
        leader chooses the members of its round, and a deadline is only a claim: ordered by deadlines, one bad
        elector could lead every round and keep another peer out of all of them.
        """
        if rank.peer_id not in self.electors:
            return True, b"", rank
        turn = b"" if self.is_cell else hashlib.sha256(round_key.encode() + rank.peer_id.public_key).digest()
        return False, turn, rank


NO_PRECEDENCE = Precedence()  # the precedence in a group that has no history


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """Request of one caller for one search."""

    round_key: str
    deadline_s: float  # monotonic: when this search must have ended
    rank_deadline_s: float  # the same instant in swarm time, as sent to other peers
    gathered: bytes = b""
    precedence: Precedence = NO_PRECEDENCE
    may_be_alone: bool = False  # a group of this peer alone is large enough, once it has waited for others
    expected: int = 0  # in a grid: number of peers that should come, known or not, this one included
    # in a grid: after this, the search ends as soon as there is nobody left to wait for
    stay_until_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLookup:
    """Report of a peer to a host of a grid cell: it is in that cell, or leaves it. The hosts of a cell are
    holders that all peers choose in the same way.
    """

    contact: Contact
    schema: bytes
    place: str
    round_key: str  # key of its search, or ""
    turn: int
    leaves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLookupReply:
    """Reply of a host to a `CellLookup`."""

    members: tuple[Contact, ...]
    home: str  # cell of the host itself; "" without a grid
    passed: bool  # the host has committed the round of that key


# --- effects


@dataclass(frozen=True, slots=True, kw_only=True)
class SendLookForGroup:
    """Send a `LookForGroup` to this contact."""

    contact: Contact
    query: LookForGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class SendJoin:
    """Send a `Join` to this contact."""

    contact: Contact
    join: Join


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonJoin:
    """Cancel the pending call to this leader, which then removes this peer from its followers."""

    peer_id: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerJoin:
    """Answer a follower's call that was held back."""

    peer_id: PeerId
    ticket: int
    answer: Group | Answer


@dataclass(frozen=True, slots=True)
class ReadRecords:
    """Read the presence records from the DHT and report them with `on_holders`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFailed:
    """End of a search without a group."""

    reason: SearchFailure
    detail: str  # a sentence for people
    held_by: PeerId | None = None  # the leader that had not begun at this peer's deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFinished:
    """The search has ended, with a group or without one."""

    outcome: Group | SearchFailed


Effect = SendLookForGroup | SendJoin | AbandonJoin | AnswerJoin | ReadRecords | SearchFinished
