"""Which peers this node knows from its runs, and which are strangers to it.

An identity costs nothing, so no limit per identity bounds what strangers take together. Members of a run have
done work that its certificates prove. Whatever a service spends is therefore divided: strangers together get
at most half, and members displace them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from swarm.core.ids import PeerId

MEMBERS_MAX = 4096  # remembered in each run; beyond this the one that was named longest ago is forgotten


class PeerStanding:
    """The members of the runs that this node takes part in: peers that are or were electors, owners, and in
    an invited run holders of a capability. All others are strangers.

    Any thread may ask, and one thread per run may change its members: they are replaced as a whole.
    """

    def __init__(self, is_admitted: Callable[[PeerId], bool] = lambda peer: False) -> None:
        """`is_admitted` returns whether a peer has shown a capability of the invited run of this node."""
        self._is_admitted = is_admitted
        self._members: dict[str, dict[PeerId, None]] = {}

    def add_members(self, run: str, peers: Iterable[PeerId]) -> None:
        """Remember the members of a run that a certificate or its specification names."""
        named = dict.fromkeys(peers)
        if not named:
            return
        earlier = [peer for peer in self._members.get(run, ()) if peer not in named]
        self._members[run] = dict.fromkeys([*earlier, *named][-MEMBERS_MAX:])

    def forget_run(self, run: str) -> None:
        """Forget the members of a run that this node has left."""
        self._members.pop(run, None)

    def has_members(self, run: str | None = None) -> bool:
        """Return whether this node knows members of the run, or without one of any run."""
        return bool(self._members if run is None else self._members.get(run))

    def is_member(self, peer: PeerId, run: str | None = None) -> bool:
        """Return whether a peer is a member of the run, or without one of any run that this node knows."""
        if self._is_admitted(peer):
            return True
        if run is not None:
            return peer in self._members.get(run, ())
        return any(peer in members for members in list(self._members.values()))
