"""What peers tell one another while they look for a group, and what the matchmaking machine asks its service
to do. Values only.

Two calls carry it all. `LookForGroup` says "I am looking, with this deadline" and is answered with where the
other stands. `Join` asks a peer to lead; its answer is held back until the group begins, or until it is clear
that it will not: then it says where that peer stands, as an answer to a `LookForGroup` does. In a swarm
larger than a group a third, `CellLookup`, tells and asks who is in which cell of the grid.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from averaging.matchmaking.logic.group import Group
from swarm.core.ids import Contact, PeerId

TEXT_MAX = 300  # characters of an explanation that travels
ROUND_KEY_MAX = 128  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragerName:
    """Which averager: peers average with those that hold one of the same name in the same run."""

    run: str
    averager: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSchema:
    """What must agree between peers that average together."""

    digest: bytes  # over tensor shapes, dtypes, order, codec, aggregation
    text: str  # the same in words, for error messages
    codec: str


class PeerStatus(enum.IntEnum):
    """Where a peer stands with respect to a round; the numbers are the wire's."""

    IDLE = 1  # it holds this averager and is not averaging now
    SEEKING = 2  # it looks for a group, and leads those who join it
    FOLLOWING = 3  # it has asked somebody else to lead, and accepts nobody meanwhile
    BUSY = 4  # it is in a round
    PASSED = 5  # the round of this key is over there: it will not be held again
    REFUSED = 6  # it will never average with the asker: its tensors or codec differ


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """Who leads: the lowest. It is fixed for the length of a search and a peer waits only for a lower one:
    nobody waits in a circle.
    """

    # swarm time; only compared, never waited for, so that a wrong clock changes who leads and nothing else
    deadline_s: float
    peer_id: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class LookForGroup:
    """A peer looks for a group."""

    contact: Contact  # the asker; the service has checked that the peer id is the caller's
    round_key: str  # only equal keys meet; "" when the caller gave none
    schema: bytes  # hash over tensor shapes, dtypes, codec, aggregation
    schema_text: str  # the same in words, for the other's error message
    deadline_s: float  # swarm time
    can_lead: bool  # it can be dialed
    turn: int = 0  # the asker's count of its changes of standing: of two of its words, which is the later
    clock_off_s: float = 0.0  # its clock minus ours, as the service measured it

    @property
    def rank(self) -> Rank:
        return Rank(self.deadline_s, self.contact.peer_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """Somebody who leads, by hearsay."""

    contact: Contact
    deadline_s: float

    @property
    def rank(self) -> Rank:
        return Rank(self.deadline_s, self.contact.peer_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Where the asked peer stands: the answer to a `LookForGroup`, and to a `Join` that led to no group."""

    standing: PeerStatus
    round_key: str = ""  # of the search or round it is in
    deadline_s: float = 0.0  # its rank, when it is seeking or following
    can_lead: bool = True
    leader: Leader | None = None  # whom it follows
    expected_s: float = 0.0  # busy: until its round is over, about
    # busy: with whom; a hint, so that the asker need not try them one by one
    members: tuple[PeerId, ...] = ()
    text: str = ""  # refused: why
    turn: int = 0  # as in `LookForGroup`, of the peer that answers
    clock_off_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A peer asks to be led, and describes what it brings."""

    seek: LookForGroup
    weight: float
    bandwidth: float
    auxiliary: bool = False
    gathered: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A live peer that holds this averager, by its presence record in the DHT."""

    contact: Contact
    schema: bytes
    schema_text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """What the caller of one step wants."""

    round_key: str
    deadline_s: float  # monotonic: when this search must have ended
    rank_s: float  # the same instant in swarm time: what others see
    weight: float
    gathered: bytes = b""
    expected: int = 0  # in one cell of several: how many should come, known or not, ourselves included
    # in one cell of several: after this, whoever has nobody left to wait for ends its search
    stays_until_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLookup:
    """A peer says in which cell of the grid it is, to one of the holders that everybody chooses for that
    cell.
    """

    contact: Contact
    schema: bytes
    place: str
    round_key: str  # that it is looking under, or ""
    turn: int
    leaves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLookupReply:
    """The answer."""

    mates: tuple[Contact, ...]
    home: str  # where the asked peer belongs; "" without a grid
    passed: bool  # the round of that key is over for the asked peer


# --- what the machine asks its service to do


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSeek:
    contact: Contact
    seek: LookForGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class SendJoin:
    contact: Contact
    join: Join


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonJoin:
    """Cancel our call to this leader; it notices, and counts us out."""

    peer_id: PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerJoin:
    """Answer a follower's call that was held back."""

    peer_id: PeerId
    ticket: int
    answer: Group | Answer


@dataclass(frozen=True, slots=True)
class LookUp:
    """Read the presence records afresh, and tell with `on_holders`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFailed:
    """The search is over without a group."""

    reason: str  # one word: alone, deadline, schema, passed, unreachable, few, cancelled
    detail: str  # a sentence for people


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFinished:
    outcome: Group | SearchFailed


Effect = SendSeek | SendJoin | AbandonJoin | AnswerJoin | LookUp | SearchFinished
