"""Who is not let in: the peers that the run's owner has banned. One object is shared by all that ask."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.core.errors import PeerError
from swarm.core.ids import PeerId


@dataclass(slots=True)
class Blocklist:
    """Replaced as a whole, so that any thread may read it."""

    peers: frozenset[PeerId] = frozenset()
    own: bool = False  # this peer itself: nobody will give it anything, so that it need not ask

    def __contains__(self, peer: object) -> bool:
        return peer in self.peers

    def check(self, peer: PeerId) -> None:
        """PeerError for a banned one."""
        if peer in self.peers:
            raise PeerError("the owner of this run has banned this peer")
