"""The blocklist of a run: peers that its owner has banned. All services of one optimizer share one object."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.core.errors import PeerError
from swarm.core.ids import PeerId


@dataclass(slots=True)
class Blocklist:
    """The peers that the run's owner has banned. `peers` is replaced as a whole, so that any thread may
    read it.
    """

    peers: frozenset[PeerId] = frozenset()
    own: bool = False  # this peer itself is banned: every donor would refuse it, so it does not ask

    def __contains__(self, peer: object) -> bool:
        return peer in self.peers

    def check(self, peer: PeerId) -> None:
        """Raise PeerError when this peer is banned."""
        if peer in self.peers:
            raise PeerError("the owner of this run has banned this peer")
