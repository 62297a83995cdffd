"""The facts that are fixed when a round begins: the group, this member's place in it, the division of the
vector, and the proposal to vote on.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass

from averaging.history.certificate import (
    NO_HEAD,
    SAMPLES_MAX,
    Proposal,
    RoundKind,
)
from averaging.history.electors import NEW_REGISTER, Register, electors_after, grants_hour, leaving
from averaging.history.round_lineage import RoundLineage
from averaging.matchmaking.logic.group import Group, can_dial
from averaging.reduction.partition import Plan
from swarm.compression import Codec
from swarm.core.ids import PeerId


def proposal_of(group: Group, history: RoundLineage | None) -> Proposal:
    """Return the proposal that the members of this group vote on; it does not contain the result."""
    contributors = tuple(member.peer_id for member in group.members if member.weight > 0.0)
    electors = history.electors if history is not None else ()
    register = history.register if history is not None else NEW_REGISTER
    is_break = history is not None and history.is_break
    agreeing = {member.peer_id for member in group.members if member.weight > 0.0 and member.new_hour}
    new_hour = not (register.at_once or is_break) and grants_hour(electors, agreeing)
    known = functools.reduce(operator.and_, (member.gone for member in group.members))
    gone = leaving(
        electors,
        register,
        contributors,
        [peer for place, peer in enumerate(electors) if known >> place & 1],
        is_break=is_break,
    )
    next_electors, next_register = electors_after(
        electors, register, contributors, gone=gone, is_break=is_break, new_hour=new_hour
    )
    if history is None or not history.extends:
        return Proposal(
            run="",
            head=NO_HEAD,
            epoch=0,
            kind=RoundKind.EPOCH,
            group_id=group.group_id,
            contributors=contributors,
            electors=next_electors,
            register=next_register,
        )
    return Proposal(
        run=history.run,
        head=history.head,
        epoch=history.epoch,
        kind=history.kind,
        group_id=group.group_id,
        contributors=contributors,
        electors=next_electors,
        register=next_register,
        gone=gone,
        new_hour=new_hour,
        is_break=is_break,
        grid_rounds=_grid_rounds(group),
        samples=_samples(group, history),
    )


def _samples(group: Group, history: RoundLineage) -> tuple[int, ...]:
    """Return the samples that the certificate credits to each contributor. A round over the state has none.
    In the electors' cell of the grid weights are those of whole cells, and members state their own samples.
    """
    if history.kind is RoundKind.STATE:
        return ()
    contributors = [member for member in group.members if member.weight > 0.0]
    if history.seats:
        return tuple(member.samples for member in contributors)
    return tuple(min(int(member.weight), SAMPLES_MAX) for member in contributors)


def _grid_rounds(group: Group) -> int:
    """Return how many rounds the next epoch has: the median of the contributors' numbers."""
    said = sorted(
        member.grid_rounds for member in group.members if member.weight > 0.0 and member.grid_rounds
    )
    return said[len(said) // 2] if said else 1


@dataclass(frozen=True, kw_only=True)
class RoundSetup:
    """A round as one member begins it. Members are places in the group. Derived values are cached, because
    they are used after every event of the round.
    """

    group: Group
    own: int
    plan: Plan
    codec: Codec
    weights: tuple[float, ...]  # relative
    proposal: Proposal
    electors: tuple[PeerId, ...]  # of the head that the round extends
    register: Register = NEW_REGISTER  # of the same head
    goodbyes: Mapping[PeerId, bytes]  # signatures of electors that have left
    audited: bool
    min_fraction: float  # fraction of the elements that need a contribution
    begun_s: float
    deadline_s: float

    @functools.cached_property
    def members(self) -> range:
        """Return all places."""
        return range(len(self.group.members))

    @functools.cached_property
    def contributors(self) -> list[int]:
        """Return the members whose weight is above 0: they vote."""
        return [place for place, member in enumerate(self.group.members) if member.weight > 0.0]

    @functools.cached_property
    def deciders(self) -> list[int]:
        """Return the contributors whose votes count for the result (`Proposal.deciders`)."""
        deciders = set(self.proposal.deciders)
        return [place for place in self.contributors if self.peer_id(place) in deciders]

    @functools.cached_property
    def own_auxiliary(self) -> bool:
        """Return whether this member takes no averages."""
        return self.group.members[self.own].auxiliary

    @functools.cached_property
    def _peer_ids(self) -> tuple[PeerId, ...]:
        return self.group.peer_ids

    @functools.cached_property
    def _dialable(self) -> tuple[bool, ...]:
        return tuple(can_dial(member) for member in self.group.members)

    def peer_id(self, place: int) -> PeerId:
        """Return the identity of a member."""
        return self._peer_ids[place]

    def name(self, place: int) -> str:
        """Return a member's name for sentences."""
        return f"peer {self._peer_ids[place]}"

    def can_dial(self, place: int) -> bool:
        """Return whether others can call this member."""
        return self._dialable[place]

    def calls(self, caller: int, called: int) -> bool:
        """Return whether `caller` sends votes and heartbeats to `called`: of two members that can be dialed
        the one earlier in group order calls; a member that cannot be dialed always calls.
        """
        return caller != called and self.can_dial(called) and (caller < called or not self.can_dial(caller))

    def due_s(self, share: float) -> float:
        """Return when this share of the round's time is over."""
        return self.begun_s + share * (self.deadline_s - self.begun_s)
