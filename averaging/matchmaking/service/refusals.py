"""With whom this node is in no group of a run: those whom the run's owner has banned, and those who were
proved here to have lied.
"""

from __future__ import annotations

import math

from swarm.core.clock import Clock
from swarm.core.errors import PeerError
from swarm.core.ids import PeerId

# after a lie; longer than a round is tried again, and not for good: another kind of processor may round
# otherwise
SHUNNED_S = 600.0
SHUNNED_MAX = 10_000


class Refusals:
    """For all averagers of a node."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._banned: dict[str, frozenset[PeerId]] = {}  # by run
        self._shunned: dict[tuple[str, PeerId], tuple[float, str]] = {}  # until when, and why

    def ban(self, run: str, peers: frozenset[PeerId]) -> None:
        """The owner has banned these, and nobody else."""
        self._banned[run] = peers

    def shun(self, run: str, peer: PeerId, lie: str) -> None:
        """This peer was proved to have lied: no group with it for `SHUNNED_S`."""
        now_s = self._clock.monotonic_s()
        self._shunned = {key: entry for key, entry in self._shunned.items() if entry[0] > now_s}
        if len(self._shunned) < SHUNNED_MAX:
            self._shunned[run, peer] = (now_s + SHUNNED_S, lie)

    def reason(self, run: str, peer: PeerId) -> str | None:
        """Why there is no group with this peer now; None: there may be."""
        if peer in self._banned.get(run, ()):
            return "the owner of this run has banned this peer"
        until_s, lie = self._shunned.get((run, peer), (-math.inf, ""))
        left_s = until_s - self._clock.monotonic_s()
        return f"no group with this peer for another {left_s:.0f} s: {lie}" if left_s > 0 else None

    def check(self, run: str, peer: PeerId) -> None:
        """PeerError when there is a reason."""
        if (reason := self.reason(run, peer)) is not None:
            raise PeerError(reason)
