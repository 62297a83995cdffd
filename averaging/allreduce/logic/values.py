"""Values that events and effects of a round carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from averaging.allreduce.logic.versions import Version
from averaging.history.certificate import Vote


class CallFailure(Enum):
    """Why a call to a member failed."""

    REFUSED = "refused"  # it answered with a refusal
    SILENT = "silent"  # no answer in time
    BROKEN = "broken"  # the connection broke, or could not be made


class RoundState(Enum):
    """The state of a round, as a member reports it."""

    UNKNOWN = 0  # it has not begun, or ended long ago
    RUNNING = 1
    COMMITTED = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class Statement:
    """The knowledge of a member about the end of a round, as it is sent to another member. Only votes decide.
    An intent is the result that its member would vote for; after repairs, members compare intents before they
    vote, because each votes once.
    """

    votes: tuple[Vote, ...] = ()
    intents: Mapping[int, bytes] = field(default_factory=dict)  # by place; of members that can vote
    left_out: Mapping[int, str] = field(default_factory=dict)  # by place: members that were left out, and why
    gave_up: str = ""  # why the sender left the round; "": it did not


@dataclass(frozen=True, slots=True)
class InventoryQuestion:
    """A question for the averages that a member holds: of one reducer's shard, or (`reducer` None) all."""

    reducer: int | None = None
    wait: bool = False  # wait until there is news
    known: int = 0  # how many averages of the shard the member is known to hold
    known_sealed: bool = False


@dataclass(frozen=True, slots=True)
class Inventory:
    """The answer to an `InventoryQuestion`."""

    versions: Mapping[int, Version]
    sealed: bool  # the member will accept no average of this reducer any more
    wanted: tuple[int, ...] = ()  # chunks for which it wants the values of a caller that cannot be dialed
