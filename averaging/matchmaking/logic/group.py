"""The group: what the peers of one averaging round agree on before any tensor moves, namely its members,
their order and the codec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from averaging.history.certificate import GRID_ROUNDS_MAX, SAMPLES_MAX
from averaging.history.electors import ELECTORS_MAX
from swarm.core.errors import UsageError
from swarm.core.ids import Contact, PeerId

GROUP_ID_BYTES = 32
GROUP_MEMBERS_MAX = 256
# Per member: a round's metadata is a few numbers and names, not a payload. That of all members fits into one
# unary message.
GATHERED_BYTES_MAX = 7 << 10
# samples of one round: far above any honest claim, far below the point where float32 sums of weights overflow
WEIGHT_MAX = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One peer of a group, as it described itself when it joined."""

    contact: Contact
    weight: (
        float  # share in the average before normalisation, usually a number of samples; 0: it only receives
    )
    # bytes/s that it can send; the size of its shard follows from it. 0.0: it cannot be dialed and reduces
    # nothing (a client)
    bandwidth: float
    bandwidth_is_set: bool = False  # True: set by its user; False: measured, with errors
    auxiliary: bool = False  # it reduces but contributes no values
    # rounds that an epoch of the swarm needs, in this member's view; 0: not stated
    grid_rounds: int = 0
    # by this member's clock, an hour has passed since electors were last admitted (`GrowthClock`)
    new_hour: bool = False
    # electors of the head whose goodbyes this member knows: a bit for each, the lowest for the most senior
    gone: int = 0
    # in the electors' cell of the grid, where weights are those of whole cells: its own samples
    samples: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and 0.0 <= self.weight <= WEIGHT_MAX):
            raise UsageError(f"a weight is a finite number between 0 and {WEIGHT_MAX:g}, not {self.weight!r}")
        if not (math.isfinite(self.bandwidth) and self.bandwidth >= 0.0):
            raise UsageError(
                f"a bandwidth is a finite number of bytes per second, at least 0, not {self.bandwidth!r}"
            )
        if not 0 <= self.grid_rounds <= GRID_ROUNDS_MAX:
            raise UsageError(f"an epoch has at most {GRID_ROUNDS_MAX} rounds, not {self.grid_rounds}")
        if not 0 <= self.gone < 1 << ELECTORS_MAX:
            raise UsageError(f"a run has at most {ELECTORS_MAX} electors")
        if not 0 <= self.samples <= SAMPLES_MAX:
            raise UsageError(f"a member has at most {SAMPLES_MAX} samples in a round, not {self.samples}")
        if self.auxiliary and self.weight != 0.0:
            raise UsageError("an auxiliary peer contributes nothing: its weight is 0")

    @property
    def peer_id(self) -> PeerId:
        return self.contact.peer_id


def can_dial(member: Member) -> bool:
    """Return whether other peers can open connections to this member. A member that cannot be dialed cannot
    reduce.
    """
    return member.bandwidth > 0.0 and member.contact.is_callable


def with_roles(members: Sequence[Member], is_stranger: Callable[[PeerId], bool]) -> tuple[Member, ...]:
    """Return the members of a group as its leader announces them. If some members that are no strangers can
    be dialed directly, members that can be dialed only through relays open all connections themselves, so
    that relays carry no tensors.
    """
    if not any(can_dial(one) and one.contact.addresses and not is_stranger(one.peer_id) for one in members):
        return tuple(members)
    return tuple(_without_relays(one) for one in members)


def _without_relays(member: Member) -> Member:
    return replace(member, contact=replace(member.contact, relays=()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Result of matchmaking, the same on every member. Shards, sums and successors follow the order of the
    members.
    """

    group_id: (
        bytes  # 32 random bytes chosen by the leader; names the round in every message of the data plane
    )
    members: tuple[Member, ...]  # group order
    codec: str  # name of the codec of swarm.compression in which tensors are sent
    # per member, in group order: msgpack of the value that it passed as `gather` (b"" for none)
    gathered: tuple[bytes, ...]
    # members that may reduce, as each member concludes for itself; None: all that can be dialed
    reducers: frozenset[PeerId] | None = None
    # members that this member considers strangers to the run
    strangers: frozenset[PeerId] = frozenset()
    # members whose faults this member has not forgiven; their statements do not excuse delays
    doubted: frozenset[PeerId] = frozenset()

    def __post_init__(self) -> None:
        if len(self.group_id) != GROUP_ID_BYTES:
            raise UsageError(f"a group id has {GROUP_ID_BYTES} bytes, not {len(self.group_id)}")
        if not 1 <= len(self.members) <= GROUP_MEMBERS_MAX:
            raise UsageError(f"a group has 1 to {GROUP_MEMBERS_MAX} members, not {len(self.members)}")
        if len({member.peer_id for member in self.members}) != len(self.members):
            raise UsageError("a peer is in a group once")
        if len(self.gathered) != len(self.members):
            raise UsageError(f"{len(self.gathered)} gathered values for {len(self.members)} members")
        if any(len(value) > GATHERED_BYTES_MAX for value in self.gathered):
            raise UsageError(f"a gathered value has at most {GATHERED_BYTES_MAX} bytes")

    @property
    def peer_ids(self) -> tuple[PeerId, ...]:
        return tuple(member.peer_id for member in self.members)

    def index(self, peer_id: PeerId) -> int:
        """Return the place of `peer_id` in group order. Raise UsageError when it is not a member."""
        for place, member in enumerate(self.members):
            if member.peer_id == peer_id:
                return place
        raise UsageError(f"{peer_id} is not a member of this group")


def mismatch(group: Group, *, leader: PeerId, own: Member, gathered: bytes, codec: str) -> str:
    """Check a group that `leader` announced to the member `own`. Return a description of the first
    contradiction, or "" when there is none.
    """
    if leader not in group.peer_ids or own.peer_id not in group.peer_ids:
        return "it announced a group without itself or without this peer"
    place = group.index(own.peer_id)
    if group.members[place] not in (own, _without_relays(own)) or group.gathered[place] != gathered:
        return "it announced a group with other values of this peer than this peer had sent"
    if group.codec != codec:
        return f"it announced a group with codec {group.codec!r}, not {codec!r}"
    return ""
