"""The order of peers wherever a search has limited room or time: in its queries, in its table of peers, for
its leader, and in its group. Pure. Peers are ordered by their standing: electors of the head, which all peers
of a search know; other members of the run; peers that have contributed to a certified round; strangers. A
peer that this one passes over (`swarm.membership.ledger`) leads nothing that it follows, and follows nothing
that it leads.
"""

from __future__ import annotations

import functools
import hashlib
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from averaging.matchmaking.logic.group import Group, can_dial
from averaging.matchmaking.logic.messages import IsMember, PeerStatus, Precedence
from swarm.core.ids import PeerId

if TYPE_CHECKING:
    from averaging.matchmaking.logic.peer_table import PeerState

_Follower = TypeVar("_Follower")

# A contributor that is not an elector counts with at most this many times the electors' median weight. In a
# cell of the grid the limit applies to every contributor, relative to the median of all, if there are at
# least three
WEIGHT_RATIO_MAX = 3.0


def asking_order(peer_id: PeerId, round_key: str, is_member: IsMember) -> bytes:
    """Return the order in which peers are asked: members first, so that strangers do not come between them,
    then by a hash that all searches of a round have in common.
    """
    return (b"\0" if is_member(peer_id) else b"\1") + _hash_in_round(round_key, peer_id.public_key)


@functools.lru_cache(4096)  # cached, because every poll of a search sorts its peers
def _hash_in_round(round_key: str, public_key: bytes) -> bytes:
    return hashlib.sha256(round_key.encode() + b"\0" + public_key).digest()


def displaced_from_table(
    peers: Mapping[PeerId, PeerState], peer_id: PeerId, is_member: IsMember
) -> PeerId | None:
    """Return the stranger that is dropped from a full table for a member: one without a call in progress."""
    if not is_member(peer_id):
        return None
    for other, state in peers.items():
        idle = state.status in (None, PeerStatus.REFUSED, PeerStatus.IDLE) and not state.query_pending
        if idle and not is_member(other):
            return other
    return None


def displaced_from_group(
    followers: Mapping[PeerId, _Follower], peer_id: PeerId, is_member: IsMember
) -> PeerId | None:
    """Return the stranger that is dropped from a full group for a member: the one that came last."""
    strangers = [one for one in followers if not is_member(one)]
    return strangers[-1] if strangers and is_member(peer_id) else None


def seated(followers: Sequence[PeerId], group_size: int, precedence: Precedence) -> list[PeerId]:
    """Return the followers with which this peer begins its round. Strangers have at most half of the seats of
    a full group, in order of arrival, so that one elector can admit many newcomers at once. `group_size`:
    seats of a full group.
    """
    strangers = [peer for peer in followers if precedence.is_stranger(peer)]
    excess = strangers[max(group_size // 2, 1) :]
    return [peer for peer in followers if peer not in excess]


def with_standing(group: Group, precedence: Precedence) -> Group:
    """Return the group as all its members count it, who know the same electors of the head that it extends,
    with this member's strangers.

    A contributor that is no elector counts with at most `WEIGHT_RATIO_MAX` times the median weight of the
    electors, whatever number of samples it claims. Electors and auxiliary members reduce, if any elector can
    be dialed: a stranger that sends nothing holds up nobody's shard. Without electors that contribute, as
    before the first certificate of a run, the group is as it was. In a cell of the grid, where mostly no
    elector is, only weights are capped, by the median of all.
    """
    if precedence.is_cell:
        weights = [one.weight for one in group.members if one.weight > 0.0]
        return _capped(group, weights, frozenset()) if len(weights) >= 3 else group
    electors = precedence.electors
    deciding = [one for one in group.members if one.peer_id in electors and one.weight > 0.0]
    if not deciding:
        return group
    group = _capped(group, [one.weight for one in deciding], electors)
    reducers = frozenset(one.peer_id for one in group.members if one.peer_id in electors or one.auxiliary)
    dialed = any(can_dial(one) for one in deciding)
    strangers = frozenset(peer for peer in group.peer_ids if precedence.is_stranger(peer))
    doubted = frozenset(peer for peer in group.peer_ids if precedence.is_doubted(peer))
    return replace(group, reducers=reducers if dialed else None, strangers=strangers, doubted=doubted)


def _capped(group: Group, weights: Sequence[float], exempt: Collection[PeerId]) -> Group:
    """Return the group in which the weight of each member that is not `exempt` is at most `WEIGHT_RATIO_MAX`
    times the median of `weights`.
    """
    weight_max = WEIGHT_RATIO_MAX * statistics.median_low(weights)
    members = tuple(
        one if one.peer_id in exempt else replace(one, weight=min(one.weight, weight_max))
        for one in group.members
    )
    return replace(group, members=members)


def is_passed_over(peer_id: PeerId, own: PeerId, precedence: Precedence, answers: IsMember) -> bool:
    """Return whether the peer `own` forms no group with another one because of its faults. `answers` returns
    whether a peer can be there.

    That is so only while electors without such faults are there; one of them is passed over only while they
    are more than half of all, and not this peer alone. Where most others seem to be at fault, this peer is
    more likely the victim, and of two peers neither has anybody else.
    """
    if not precedence.is_passed_over(peer_id):
        return False
    rest = {
        elector
        for elector in precedence.electors
        if elector == own or (answers(elector) and not precedence.is_passed_over(elector))
    }
    if peer_id not in precedence.electors:
        return bool(rest)
    return 2 * len(rest) > len(precedence.electors) and len(rest | {own}) > 1
