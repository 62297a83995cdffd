"""The effects that a round asks for. Frozen values; members are places in the group, and tensors are named by
chunk, never carried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from averaging.allreduce.logic.values import InventoryQuestion, Statement
from averaging.allreduce.logic.versions import Version
from averaging.history.certificate import Certificate, Vote
from swarm.core.ids import PeerId

# ---- streams


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Open a stream to a reducer, send this member's values on it, take its averages."""

    reducer: int


@dataclass(frozen=True, slots=True)
class CloseStream:
    """End this member's stream to a reducer."""

    reducer: int


@dataclass(frozen=True, slots=True)
class StopSending:
    """Send a reducer no more of this member's values."""

    reducer: int


@dataclass(frozen=True, slots=True)
class RefuseSender:
    """Tell a member, on the stream that it opened, that its values are not taken any more."""

    sender: int
    reason: str


# ---- work


@dataclass(frozen=True, slots=True)
class CheckAverage:
    """Check and keep the bytes of an average that came."""

    chunk: int
    contributors: bytes
    clipped: bytes


@dataclass(frozen=True, slots=True)
class Reduce:
    """Average the values of these members, and this member's if `own`."""

    chunk: int
    places: tuple[int, ...]
    own: bool


@dataclass(frozen=True, slots=True)
class HaltReduction:
    """Reduce no more: others have taken over."""


@dataclass(frozen=True, slots=True)
class Audit:
    """Audit other reducers."""


@dataclass(frozen=True, slots=True)
class Sign:
    """Sign this member's vote for this result, if the run's history allows it; b"": for none."""

    result: bytes


# ---- calls


@dataclass(frozen=True, slots=True)
class Ping:
    """Send a heartbeat to a member; `probe`: its connection broke."""

    place: int
    timeout_s: float
    probe: bool = False


@dataclass(frozen=True, slots=True)
class AskVotes:
    """Send a member the votes that this one knows, and ask for those that it knows. This replaces an earlier
    call to the same member.
    """

    place: int
    statement: Statement


@dataclass(frozen=True, slots=True)
class AskInventory:
    """Ask a member for its inventory."""

    place: int
    question: InventoryQuestion


@dataclass(frozen=True, slots=True)
class FetchChunk:
    """Fetch an average from a member that holds it, check it and keep it."""

    place: int
    chunk: int
    version: Version


@dataclass(frozen=True, slots=True)
class FetchContribution:
    """Fetch a member's values of a chunk that this member takes over."""

    place: int
    chunk: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class OfferContribution:
    """Give this member's values of a chunk to the member that takes it over."""

    place: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Endorse:
    """Ask an elector outside of the group for its vote on this result."""

    elector: PeerId
    result: bytes
    votes: tuple[Vote, ...]


@dataclass(frozen=True, slots=True)
class CancelCalls:
    """A member failed: end this member's calls to it."""

    place: int


# ---- answers


@dataclass(frozen=True, slots=True)
class AnswerVotes:
    """Answer `VotesAsked`."""

    call: int
    statement: Statement


@dataclass(frozen=True, slots=True)
class AnswerInventory:
    """Answer `InventoryAsked`; its driver adds the table."""

    call: int
    sealed: bool
    wanted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """End the round for this member."""

    failure: str | None  # None: it is committed, and every average is in place
    certificate: Certificate | None  # also set for a failed round if the others committed it
    unresolved: bool = False  # others have committed what this member voted for, or may have


Effect: TypeAlias = (
    OpenStream
    | CloseStream
    | StopSending
    | RefuseSender
    | CheckAverage
    | Reduce
    | HaltReduction
    | Audit
    | Sign
    | Ping
    | AskVotes
    | AskInventory
    | FetchChunk
    | FetchContribution
    | OfferContribution
    | Endorse
    | CancelCalls
    | AnswerVotes
    | AnswerInventory
    | Finish
)
