"""The part of a node that the services of an optimizer use.

`swarm.Node` has all of it; simulations have one of their own (`swarm.testing.simulated_node`).
"""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import Executor
from typing import Protocol

from swarm.core.clock import Clock
from swarm.core.ids import Contact
from swarm.core.presets import Timings
from swarm.core.standing import PeerStanding
from swarm.dht.service.dht_service import DhtService
from swarm.net.peerbook import KnownPeer
from swarm.net.rpc import Caller
from swarm.runtime.waits import Waits


class HasDhtService(Protocol):
    """The DHT of a node."""

    @property
    def service(self) -> DhtService:
        """Return the service on the network thread."""
        ...


class HasLoop(Protocol):
    """The network thread of a node."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of the network thread."""
        ...

    @property
    def pool(self) -> Executor:
        """Return the threads for work that would hold up the event loop."""
        ...

    @property
    def waits(self) -> Waits:
        """Return the maker of what the trainer's thread waits for."""
        ...


class PeerNode(Protocol):
    """This process as a peer."""

    @property
    def contact(self) -> Contact:
        """Return this peer's present contact."""
        ...

    @property
    def channels(self) -> Caller:
        """Return the caller of other peers' methods."""
        ...

    @property
    def clock(self) -> Clock:
        """Return the clock of the swarm."""
        ...

    @property
    def rng(self) -> random.Random:
        """Return the source of random numbers that nobody else can predict."""
        ...

    @property
    def timings(self) -> Timings:
        """Return the times of the node's preset."""
        ...

    @property
    def standing(self) -> PeerStanding:
        """Return which peers are members of this node's runs."""
        ...

    @property
    def dht(self) -> HasDhtService:
        """Return the DHT."""
        ...

    @property
    def network(self) -> HasLoop:
        """Return the network thread."""
        ...

    def peers(self) -> list[KnownPeer]:
        """Return the peers that this node has met, or knew before."""
        ...


class HasReach(Protocol):
    """A node that knows how others call it."""

    @property
    def contact(self) -> Contact:
        """Return this peer's present contact."""
        ...

    @property
    def reach(self) -> str:
        """Return the verdict: "direct", "hidden", …"""
        ...


def reach_of(node: HasReach) -> str:
    """Return how others reach this peer, for its metrics: through which relays, or the verdict."""
    return node.contact.through or node.reach
