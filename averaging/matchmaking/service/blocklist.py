"""Blocklist of a node: peers with which it forms no group of a run, either because the run's owner banned
them or because they were proved here to have lied.
"""

from __future__ import annotations

import math

from swarm.core.clock import Clock
from swarm.core.errors import PeerError
from swarm.core.ids import PeerId

# after a lie: longer than a round is retried, and not for good, because another kind of processor may round
# differently
BLOCK_AFTER_LIE_S = 600.0
BLOCKED_MAX = 10_000


class PeerBlocklist:
    """Blocklist for all averagers of a node."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._banned: dict[str, frozenset[PeerId]] = {}  # by run
        self._blocked: dict[tuple[str, PeerId], tuple[float, str]] = {}  # until when, and why

    def ban(self, run: str, peers: frozenset[PeerId]) -> None:
        """Set the peers that the owner of the run has banned; earlier bans are replaced."""
        self._banned[run] = peers

    def block(self, peer: PeerId, run: str, reason: str, for_s: float = BLOCK_AFTER_LIE_S) -> None:
        """Form no group of the run with this peer for `for_s` seconds."""
        now_s = self._clock.monotonic_s()
        self._blocked = {key: entry for key, entry in self._blocked.items() if entry[0] > now_s}
        if len(self._blocked) < BLOCKED_MAX:
            self._blocked[run, peer] = (now_s + for_s, reason)

    def reason(self, run: str, peer: PeerId) -> str | None:
        """Return why no group is formed with this peer now, or None when it is permitted."""
        if peer in self._banned.get(run, ()):
            return "the owner of this run has banned this peer"
        until_s, reason = self._blocked.get((run, peer), (-math.inf, ""))
        left_s = until_s - self._clock.monotonic_s()
        return f"no group with this peer for another {left_s:.0f} s: {reason}" if left_s > 0 else None

    def check(self, run: str, peer: PeerId) -> None:
        """Raise PeerError when no group is formed with this peer now."""
        if (reason := self.reason(run, peer)) is not None:
            raise PeerError(reason)
