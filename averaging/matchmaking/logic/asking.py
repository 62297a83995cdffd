"""The queries of a search for a group: how many peers it queries first, and when it queries a peer again.
Pure; times are monotonic seconds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from averaging.matchmaking.logic.messages import PeerStatus

if TYPE_CHECKING:
    from averaging.matchmaking.logic.peer_table import PeerState

# Peers that a search queries first. They are the same in all searches of a round, so that each search learns
# the leader from them. A search queries further peers, more with each answer, only if it finds no leader to
# follow. Smaller: a failed one matters more; larger: more calls in large groups
FIRST_MAX = 8
# A peer that does not search yet is queried again after this; later in proportion if the search knows more
# than FIRST_MAX peers, and then later after each equal answer. A peer announces the start of its search, so
# this only compensates for lost messages
_QUERY_INTERVAL_S = 0.5
_FAILED_QUERY_INTERVAL_S = 2.0  # the same for a peer that failed to answer at least twice
_REFUSED_QUERY_INTERVAL_S = 16.0  # the same for one with other tensors
# largest factor on the interval for equal answers. Larger: a late peer of a cell that does not know this one
# is found late
_CROWD_MAX = 4.0
# A peer that is called through relays may be silent because its relay was lost: after 4 s callers use another
# one. Shorter: peers behind a lost relay give each other up; longer: a peer that is alone learns it later
_RELAY_LOSS_S = 6.0
_FIRST_RETRY_S = 0.2  # the same after a single failure: one failed call does not prove that a peer is dead


def is_given_up(peer: PeerState, now_s: float) -> bool:
    """Return whether the failed calls to a peer prove that it takes part in no group. A single one does not,
    nor do several while a lost relay may be the reason.
    """
    return peer.failures > 1 and not (peer.contact.relays and now_s < peer.failed_since_s + _RELAY_LOSS_S)


def asked_again_s(peer: PeerState, known: int, started_s: float) -> float:
    """Return when a search is to query a peer; minus infinity when it has not done so yet.

    `known`: peers that the search knows. `started_s`: when it began.
    """
    if peer.status is PeerStatus.REFUSED:
        return peer.queried_s + _REFUSED_QUERY_INTERVAL_S if peer.queried_s > -math.inf else started_s
    if peer.failed:
        return peer.queried_s + (_FIRST_RETRY_S if peer.failures <= 1 else _FAILED_QUERY_INTERVAL_S)
    crowd = max(1.0, known / FIRST_MAX)
    shortest_s = _QUERY_INTERVAL_S * crowd
    if peer.status is PeerStatus.PASSED:
        # in a grid it may be moving to this peer's cell without knowing this peer
        return peer.queried_s + shortest_s
    longest_s = shortest_s * min(crowd, _CROWD_MAX)
    again_s = peer.queried_s + min(max(peer.queried_s - peer.changed_s, shortest_s), longest_s)
    if peer.status is PeerStatus.BUSY:
        again_s = max(again_s, min(peer.busy_until_s, peer.queried_s + longest_s))
    return again_s
