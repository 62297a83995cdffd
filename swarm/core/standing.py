"""Which peers this node knows from its runs, and which are strangers to it.

An identity costs nothing, so no limit per identity bounds what strangers take together. Members of a run have
done work that its certificates prove. Whatever a service spends is therefore divided: strangers together get
at most half, and members displace them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from swarm.core.ids import PeerId

MEMBERS_MAX = 4096  # remembered in each run; beyond this the one that was named longest ago is forgotten


@dataclass(frozen=True, slots=True)
class Founding:
    """How a run began, as its specification says. The default is that of a run without a specification."""

    owner: PeerId | None = None  # its first one
    is_invited: bool = False  # it is for invited peers: no stranger takes part


NO_SPECIFICATION: Final = Founding()


class PeerStanding:
    """The members of the runs that this node takes part in: peers that are or were electors, or owners, and
    in an invited run the holders of capabilities. All others are strangers.

    Any thread may ask, and one thread per run may change those that certificates name: they are replaced as a
    whole.
    """

    def __init__(self, holders: Mapping[str, Collection[PeerId]] | None = None) -> None:
        """`holders`: by run, the peers whose capabilities are admitted now (`Admission.holders`)."""
        self._members: dict[str, dict[PeerId, None]] = {}
        self._holders = dict(holders or {})
        # all tables of members, replaced as a whole: each call of each peer looks itself up in them
        self._tables: tuple[Collection[PeerId], ...] = tuple(self._holders.values())
        self._foundings: dict[str, Founding] = {}

    def set_founding(self, run: str, founding: Founding) -> None:
        """Remember how a run began, before this node takes part in it."""
        self._foundings[run] = founding

    def founding_of(self, run: str) -> Founding:
        """Return how a run began, as far as this node knows."""
        return self._foundings.get(run, NO_SPECIFICATION)

    def add_members(self, run: str, peers: Iterable[PeerId]) -> None:
        """Remember the members of a run that a certificate or its specification names."""
        named = dict.fromkeys(peers)
        if not named:
            return
        earlier = [peer for peer in self._members.get(run, ()) if peer not in named]
        self._members[run] = dict.fromkeys([*earlier, *named][-MEMBERS_MAX:])
        self._tables = (*self._members.values(), *self._holders.values())

    def forget_run(self, run: str) -> None:
        """Forget the members that certificates of a run named: this node has left it. Holders of capabilities
        stay members.
        """
        self._members.pop(run, None)
        self._tables = (*self._members.values(), *self._holders.values())

    def has_members(self, run: str | None = None) -> bool:
        """Return whether this node knows members of the run, or without one of any run."""
        if run is not None:
            return bool(self._members.get(run) or self._holders.get(run))
        return any(self._tables)

    def is_member(self, peer: PeerId, run: str | None = None) -> bool:
        """Return whether a peer is a member of the run, or without one of any run that this node knows."""
        if run is not None:
            return peer in self._members.get(run, ()) or peer in self._holders.get(run, ())
        for members in self._tables:  # noqa: SIM110 (no generator: each call of each peer asks this)
            if peer in members:
                return True
        return False

    def runs(self) -> list[str]:
        """Return the runs of which this node knows members."""
        return [run for run in dict.fromkeys([*self._members, *self._holders]) if self.has_members(run)]

    def members(self, run: str, count_max: int) -> tuple[PeerId, ...]:
        """Return the known members of a run, at most this many, those that certificates named last first."""
        named = self._members.get(run, {})
        found = list(itertools.islice(reversed(named), count_max))
        if len(found) < count_max:
            found += [peer for peer in list(self._holders.get(run, ())) if peer not in named]
        return tuple(found[:count_max])
