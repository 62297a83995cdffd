"""A simulated node for the services of an optimizer, on the running event loop.

It has the parts of `swarm.Node` that `averaging.optim.peer_node.PeerNode` names.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from swarm.core.clock import Clock
from swarm.core.ids import Contact
from swarm.core.presets import WAN, Timings
from swarm.core.standing import PeerStanding
from swarm.net.peerbook import KnownPeer
from swarm.runtime.waits import ThreadWaits, Waits
from swarm.testing.chance import Chance


@dataclass(frozen=True, slots=True)
class SimulatedDht:
    """A DHT whose service is any object with the methods that the test needs."""

    service: Any


@dataclass(frozen=True, slots=True)
class SimulatedThread:
    """The event loop and the pool of a network thread, and how other threads wait for it."""

    loop: asyncio.AbstractEventLoop
    pool: Any = None
    waits: Waits = field(default_factory=ThreadWaits)


class SimulatedNode:
    """A peer whose services are given.

    `own` returns the peer's present contact. `dht` and `channels` have the methods that the test needs.
    `pool` runs blocking work; None for the event loop's own. The running event loop stands for the network
    thread, unless `loop` is given.
    """

    def __init__(
        self,
        own: Callable[[], Contact],
        clock: Clock,
        dht: Any,
        *,
        channels: Any = None,
        pool: Any = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._own, self.clock, self.channels = own, clock, channels
        self.timings: Timings = WAN
        self.standing = PeerStanding()
        self.rng: random.Random = Chance("node", own().peer_id)
        self.dht = SimulatedDht(dht)
        self.network = SimulatedThread(loop or asyncio.get_running_loop(), pool)

    @property
    def contact(self) -> Contact:
        """Return this peer's present contact."""
        return self._own()

    def peers(self) -> list[KnownPeer]:
        """Return nobody: there is no peer book."""
        return []
