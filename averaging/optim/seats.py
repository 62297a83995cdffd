"""The size of a swarm: the number of rounds that its epochs need, and the peers with a seat in the electors'
cell. Pure.

The electors of the head have a seat. Free seats go to other peers, by a hash of head and PeerID: every head
draws different peers, and all peers compute the same draw. A peer that contributes there is an elector of the
next head.
"""

from __future__ import annotations

from collections.abc import Collection

from blake3 import blake3

from averaging.history.certificate import GRID_ROUNDS_MAX
from averaging.history.chain import Chain
from averaging.matchmaking.logic.grid import shape_for
from swarm.core.ids import PeerId


class SwarmSize:
    """One peer's view of the size of its swarm."""

    def __init__(self, own: PeerId, group_size_max: int) -> None:
        """`group_size_max`: peers in one round."""
        self._own, self._group_size_max = own, group_size_max
        self.peers = 1  # in the whole swarm, this one included
        self._known = frozenset[PeerId]()

    def update(self, peers: int, known: Collection[PeerId]) -> None:
        """Set the number of peers in the whole swarm, this one included, and the other live ones that have a
        state: in a large swarm those of this peer's part of it.
        """
        self.peers, self._known = peers, frozenset(known)

    @property
    def rounds_wanted(self) -> int:
        """Return how many rounds an epoch needs, as this peer sees the swarm; 1: one group is enough."""
        return min(shape_for(self.peers, self._group_size_max).rounds_to_mix, GRID_ROUNDS_MAX)

    def rounds(self, root: Chain) -> int:
        """Return how many rounds the epoch after this head has: as its certificate says, so that all peers
        agree. A swarm that has outgrown its group since then follows its own count.
        """
        return root.root_grid_rounds if root.root_grid_rounds > 1 else self.rounds_wanted

    def seats(self, root: Chain, *, is_break: bool) -> int:
        """Return how many peers are expected in the electors' cell after this head, if this peer has a seat
        there; 0: it has none. `is_break`: the electors were waited for in vain.

        A peer that knows only a part of the swarm fills that part's share of the free seats, and expects an
        elector that missed the last certificate only if it knows that it is there.
        """
        here = {self._own, *self._known}
        absent = {*(root.electors if is_break else root.root_register.absent(root.electors))}
        electors = [peer for peer in root.electors if peer not in absent or peer in here]
        others = sorted(
            here.difference(electors), key=lambda peer: blake3(root.head + peer.public_key).digest()
        )
        newcomers = max(self.peers - len(electors), len(others))
        free = max(min(self._group_size_max - len(electors), newcomers), 0)
        share = free * len(others) // max(newcomers, 1)
        if not electors:
            share = max(share, 1)  # at least one peer must begin
        return len(electors) + share if self._own in electors or self._own in others[:share] else 0
