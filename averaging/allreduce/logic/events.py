"""The events of a round. Frozen values; members are places in the group, and tensors are named by chunk,
never carried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from averaging.allreduce.logic.effects import AskInventory, AskVotes, Ping
from averaging.allreduce.logic.values import CallFailure, Inventory, InventoryQuestion, RoundState, Statement
from averaging.allreduce.logic.versions import Version
from averaging.history.certificate import Vote
from swarm.core.ids import PeerId

# ---- streams that this member opened to reducers


@dataclass(frozen=True, slots=True)
class AverageArrived:
    """A reducer's average of a chunk arrived. Its bytes are kept until they are checked."""

    reducer: int
    chunk: int
    contributors: bytes
    clipped: bytes
    size_bytes: int


@dataclass(frozen=True, slots=True)
class AverageChecked:
    """The bytes of an average were checked and kept; `digest` is None when they are invalid."""

    chunk: int
    digest: bytes | None
    flaw: str = ""


@dataclass(frozen=True, slots=True)
class RefusalArrived:
    """A reducer refuses further values of this member."""

    reducer: int
    reason: str


@dataclass(frozen=True, slots=True)
class WaitingArrived:
    """A reducer has no average to send because another member's values are missing."""

    reducer: int


@dataclass(frozen=True, slots=True)
class LeftOutTold:
    """A reducer says that it has left out the member at `place`, and why."""

    place: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReducerStreamEnded:
    """This member's stream to a reducer ended. `why` is "" when the reducer finished it; `broken`: by the
    network.
    """

    reducer: int
    why: str = ""
    broken: bool = False


@dataclass(frozen=True, slots=True)
class ContributionSent:
    """A reducer's stream took a chunk of this member's values."""

    reducer: int


# ---- streams that others opened to this member


@dataclass(frozen=True, slots=True)
class SenderOpened:
    """A member opened its stream to this member."""

    sender: int


@dataclass(frozen=True, slots=True)
class ContributionArrived:
    """A member's values of a chunk arrived and are kept."""

    sender: int
    chunk: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SenderFailed:
    """A member's values no longer count, because it broke the protocol or withdrew; its stream stays open."""

    sender: int
    reason: str


@dataclass(frozen=True, slots=True)
class SenderFinished:
    """A member has sent all that it wanted to send."""

    sender: int


@dataclass(frozen=True, slots=True)
class SenderStreamBroke:
    """The stream that a member had opened broke."""

    sender: int
    why: str


# ---- either kind of stream


@dataclass(frozen=True, slots=True)
class BytesArrived:
    """A message, or a frame of one, arrived from a member; `averages`: on a stream that this member
    opened.
    """

    place: int
    size_bytes: int
    averages: bool


@dataclass(frozen=True, slots=True)
class BytesSent:
    """Something was sent to a member."""

    place: int


# ---- this member's own work


@dataclass(frozen=True, slots=True)
class MemoryPrepared:
    """The memory that the round needs was allocated."""


@dataclass(frozen=True, slots=True)
class ChunkReduced:
    """A chunk was averaged here."""

    chunk: int
    contributors: bytes
    digest: bytes
    clipped: bytes


@dataclass(frozen=True, slots=True)
class ChunkSpoiled:
    """A chunk could not be averaged because of the values of these members; without any, the sum itself
    overflows.
    """

    chunk: int
    flaws: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class OwnValuesExcluded:
    """This member's own values cannot be sent, and no longer count."""

    reason: str


@dataclass(frozen=True, slots=True)
class Audited:
    """The audit of other reducers ended; `finding` is "" when nothing is wrong."""

    finding: str


@dataclass(frozen=True, slots=True)
class VoteSigned:
    """This member's vote was signed, as `Sign` asked."""

    vote: Vote


@dataclass(frozen=True, slots=True)
class SigningRefused:
    """The run's history does not allow this member's vote."""

    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """This member ends its part in the round."""

    reason: str


# ---- answers to this member's calls


@dataclass(frozen=True, slots=True)
class PingAnswered:
    """A member answered a heartbeat or a probe."""

    place: int
    state: RoundState
    reason: str
    round_trip_s: float


@dataclass(frozen=True, slots=True)
class VotesAnswered:
    """A member answered this member's votes with those that it knows."""

    place: int
    statement: Statement


@dataclass(frozen=True, slots=True)
class InventoryAnswered:
    """A member sent its inventory."""

    place: int
    question: InventoryQuestion
    inventory: Inventory


@dataclass(frozen=True, slots=True)
class ChunkFetched:
    """An average was fetched, checked and kept, or (`ok` False) could not be fetched."""

    place: int
    chunk: int
    version: Version
    ok: bool


@dataclass(frozen=True, slots=True)
class ContributionFetched:
    """A member's values of a chunk that this member takes over arrived, fetched or offered; with an `error`
    they did not arrive.
    """

    place: int
    chunk: int
    size_bytes: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class OfferEnded:
    """This member's offer of values was accepted or refused."""

    place: int
    chunk: int
    taken: bool


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A heartbeat, vote or question got no answer. `call` is the effect that asked for it."""

    call: Ping | AskVotes | AskInventory
    failure: CallFailure
    why: str


@dataclass(frozen=True, slots=True)
class Endorsed:
    """An elector outside of the group answered; its vote is None when it refuses or cannot be reached."""

    elector: PeerId
    vote: Vote | None


# ---- calls of others


@dataclass(frozen=True, slots=True)
class Heard:
    """A call of a member arrived."""

    place: int


@dataclass(frozen=True, slots=True)
class VotesAsked:
    """A member sends the votes that it knows, and asks for those that this one knows."""

    call: int
    place: int
    statement: Statement


@dataclass(frozen=True, slots=True)
class InventoryAsked:
    """A member asks for this member's inventory."""

    call: int
    place: int
    question: InventoryQuestion


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A member no longer waits for an answer."""

    call: int


Event: TypeAlias = (
    AverageArrived
    | AverageChecked
    | RefusalArrived
    | WaitingArrived
    | LeftOutTold
    | ReducerStreamEnded
    | ContributionSent
    | SenderOpened
    | ContributionArrived
    | SenderFailed
    | SenderFinished
    | SenderStreamBroke
    | BytesArrived
    | BytesSent
    | MemoryPrepared
    | ChunkReduced
    | ChunkSpoiled
    | OwnValuesExcluded
    | Audited
    | VoteSigned
    | SigningRefused
    | GiveUp
    | PingAnswered
    | VotesAnswered
    | InventoryAnswered
    | ChunkFetched
    | ContributionFetched
    | OfferEnded
    | CallFailed
    | Endorsed
    | Heard
    | VotesAsked
    | InventoryAsked
    | CallEnded
)

# Most events are frames of messages, which change nothing else. Received values and averages have no effect
# before they are reduced or checked, which is a separate event.
WITHOUT_CONSEQUENCES: Final = frozenset(
    (
        BytesArrived,
        BytesSent,
        ContributionSent,
        Heard,
        SenderOpened,
        AverageArrived,
        ContributionArrived,
        SenderFinished,
    )
)
