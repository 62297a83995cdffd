"""Several streams, each on a connection of its own, between a member and a reducer: what fills a long link.

A TCP connection that was idle begins again with some 14 kB per round trip, and loses half its speed with a
packet; several open their windows together, and share what one loses. A span's parts are dealt out to the
lanes in turn; the reducer returns a part's average on the lane that the part came on. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

LANES_MAX = 16  # that a reducer takes of one member
# round trips up to this are a local network's, where one connection is enough and more only cost
NEAR_S = 0.005
_PEERS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Lane:
    """One of `count`."""

    number: int
    count: int

    def carries(self, nth: int) -> bool:
        """Is the part at this place of the span this lane's?"""
        return nth % self.count == self.number

    def of(self, parts: Sequence[T]) -> Sequence[T]:
        """This lane's parts of a span, in order."""
        return parts[self.number :: self.count]


@dataclass(slots=True)
class RoundTrips:
    """The shortest round trip seen to each peer, the peers heard last; `K` is whatever names a peer."""

    _shortest_s: OrderedDict[object, float] = field(default_factory=OrderedDict)

    def answered(self, peer: object, round_trip_s: float) -> None:
        """A small call to it took so long."""
        self._shortest_s[peer] = min(self._shortest_s.get(peer, round_trip_s), round_trip_s)
        self._shortest_s.move_to_end(peer)
        if len(self._shortest_s) > _PEERS_MAX:
            self._shortest_s.popitem(last=False)

    def lanes(self, peer: object, lanes_max: int) -> int:
        """How many lanes to open to it: one where it is near, or its distance is not known yet."""
        return lanes_max if self._shortest_s.get(peer, 0.0) > NEAR_S else 1
