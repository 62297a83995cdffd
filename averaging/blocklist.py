"""Blocklist of a run on one node: peers that its owner has banned, and peers that this node has proved to be
liars.

All services of the run on a node share one object: matchmaking, progress, donors and downloads. Peers that
only fail to answer are in `swarm.core.avoidance`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from swarm.core.clock import Clock
from swarm.core.errors import PeerError
from swarm.core.ids import PeerId

# pause after a lie: longer than retries of a round, but not permanent, because another kind of processor may
# round differently
BLOCK_AFTER_LIE_S = 600.0
BLOCKED_MAX = 10_000
_BANNED = "the owner of this run has banned this peer"


EXCLUDED = "the owner of this run has banned this peer, or revoked its invite"


class PeerBlocklist:
    """The blocklist of one run on the node of the peer `own`. `ban` may be called from any thread."""

    def __init__(self, own: PeerId, clock: Clock) -> None:
        self._own, self._clock = own, clock
        self.banned: frozenset[PeerId] = frozenset()  # without this peer itself; replaced as a whole
        self.own_is_banned = False  # every donor would refuse this peer, so it does not ask
        self._blocked: dict[PeerId, tuple[float, str]] = {}  # blocked peers -> (end, reason)

    def ban(self, peers: Iterable[PeerId]) -> None:
        """Set the peers that the owner of the run has banned; earlier bans are replaced."""
        banned = frozenset(peers)
        self.own_is_banned = self._own in banned
        self.banned = banned - {self._own}

    def block(self, peer: PeerId, reason: str) -> None:
        """Form no group with this peer for a while, because it lied: `reason`."""
        now_s = self._clock.monotonic_s()
        self._blocked = {key: entry for key, entry in self._blocked.items() if entry[0] > now_s}
        if len(self._blocked) < BLOCKED_MAX:
            self._blocked[peer] = (now_s + BLOCK_AFTER_LIE_S, reason)

    def reason(self, peer: PeerId) -> str | None:
        """Return why no group is formed with this peer now, or None when it is permitted."""
        if peer in self.banned:
            return _BANNED
        until_s, reason = self._blocked.get(peer, (-math.inf, ""))
        left_s = until_s - self._clock.monotonic_s()
        return f"no group with this peer for another {left_s:.0f} s: {reason}" if left_s > 0 else None

    def check(self, peer: PeerId) -> None:
        """Raise PeerError when no group is formed with this peer now."""
        if (reason := self.reason(peer)) is not None:
            raise PeerError(reason)

    def check_not_banned(self, peer: PeerId) -> None:
        """Raise PeerError when the owner of the run has banned this peer."""
        if peer in self.banned:
            raise PeerError(_BANNED)
