"""Members of a run come before strangers where a search has only so much room: in the places that it asks, in
its table of peers, and in its group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from averaging.matchmaking.logic.messages import PeerStatus
from swarm.core.ids import PeerId

if TYPE_CHECKING:
    from averaging.matchmaking.logic.peer_table import PeerState

IsMember = Callable[[PeerId], bool]
_Follower = TypeVar("_Follower")


def asking_order(peer_id: PeerId, round_key: str, is_member: IsMember) -> bytes:
    """Return the order in which peers are asked: members first, so that strangers do not come between them,
    then by a hash that all searches of a round have in common.
    """
    first = b"\0" if is_member(peer_id) else b"\1"
    return first + hashlib.sha256(round_key.encode() + b"\0" + peer_id.public_key).digest()


def displaced_from_table(
    peers: Mapping[PeerId, PeerState], peer_id: PeerId, is_member: IsMember
) -> PeerId | None:
    """Return the stranger that leaves a full table for a member, one with which nothing is under way."""
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
    """Return the stranger that leaves a full group for a member: the one that came last."""
    strangers = [one for one in followers if not is_member(one)]
    return strangers[-1] if strangers and is_member(peer_id) else None
