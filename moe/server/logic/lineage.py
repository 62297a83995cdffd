"""The lineage of an expert's parameters: the versions that it had in common with its replicas, newest last,
and the decision from which replicas a server takes over their state.

A version counts the optimizer steps and averages in the history of the parameters. Every average of replicas
is a version that they have in common, under a name that is equal on all of them. What a replica has learned
by itself is therefore the difference between its version and that of the last common one, and a checkpoint of
yesterday shows that it lies behind replicas that continued.

What others say about their lineage is not verified. It decides between states only where this server has no
better one: at its start, and until it has been averaged with the others. Then one liar is outvoted by two
honest replicas, here and by the median of the parameters; of two replicas nobody can tell which one lies.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarm.core.ids import PeerId

NAME_BYTES = 16
PAST_MAX = 64  # common versions that are remembered: an hour of averages
VERSION_MAX = 1 << 62


@dataclass(frozen=True, slots=True)
class CommonVersion:
    """The outcome of an average: its name, and the version that it has in the lineage of one replica."""

    name: bytes
    version: int


@dataclass(frozen=True, slots=True)
class ExpertLineage:
    """The version of an expert's parameters, and its common versions, oldest first."""

    version: int = 0
    past: tuple[CommonVersion, ...] = ()

    @property
    def head(self) -> bytes | None:
        """Return the name of the last common version; None when the expert was never averaged."""
        return self.past[-1].name if self.past else None

    def averaged(self, name: bytes, version: int) -> ExpertLineage:
        """Return the lineage after an average."""
        return ExpertLineage(version, (*self.past, CommonVersion(name, version))[-PAST_MAX:])

    def steps_since_common(self, other: ExpertLineage) -> int:
        """Return how far this lineage has come since the last version that it has in common with another;
        since the beginning when they have none.
        """
        theirs = {one.name for one in other.past}
        common = next((one.version for one in reversed(self.past) if one.name in theirs), 0)
        return max(self.version - common, 0)


def donors(
    own: ExpertLineage,
    others: Mapping[PeerId, ExpertLineage],
    own_id: PeerId,
    *,
    is_declared: bool,
    steps_jointly: bool = False,
) -> list[PeerId]:
    """Return the replicas from one of which a server should take over the state, the best one first; () when
    its own state is better.

    That is so when more than half of the other replicas have come further than this server since their last
    common version. A server that callers use already (`is_declared`) keeps its state when there are replicas
    with the same head: averaging brings those together. Of two that began alike, without a common version,
    the one with the larger PeerID takes over. Replicas that step jointly (`steps_jointly`) are not averaged,
    so there that holds for replicas with the same head, too.
    """
    ahead = {
        peer: theirs
        for peer, theirs in others.items()
        if _is_ahead(theirs, own, wins_ties=not is_declared or peer < own_id)
        and not (is_declared and not steps_jointly and own.head is not None and own.head == theirs.head)
    }
    if 2 * len(ahead) <= len(others):
        return []

    def support(peer: PeerId) -> int:
        return sum(_are_related(ahead[peer], theirs) for theirs in others.values())

    # the median, not the maximum: a liar can claim any version, but the median is an honest one's or close to
    # it
    middle = statistics.median_high(theirs.version for theirs in ahead.values())
    return sorted(ahead, key=lambda peer: (-support(peer), abs(ahead[peer].version - middle), peer))


def next_version(own: int, claimed: Iterable[object]) -> int:
    """Return the version of an average: above this replica's own, and above that of the middle member, so
    that one that claims too much moves it no further than an honest one does.
    """
    versions = [value for value in claimed if type(value) is int and 0 <= value < VERSION_MAX]
    return max(own, statistics.median_high(versions) if versions else 0) + 1


def _is_ahead(theirs: ExpertLineage, own: ExpertLineage, *, wins_ties: bool) -> bool:
    further, behind = theirs.steps_since_common(own), own.steps_since_common(theirs)
    return further > behind or (further == behind and wins_ties)


def _are_related(one: ExpertLineage, other: ExpertLineage) -> bool:
    """Return whether one of two lineages continues from the other's last common version."""
    if one.head is None or other.head is None:
        return one.head is other.head
    return any(past.name == other.head for past in one.past) or any(
        past.name == one.head for past in other.past
    )
