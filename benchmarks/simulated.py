"""The DHT in simulated swarms of 100 to 10,000 peers: hops, traffic at rest, reads under churn, healing of a split, an eclipse.

The production services run on virtual time (`swarm.testing`); the figures are properties of the protocol, the same on every machine.
A swarm begins as if it had run for long: every table is full of live peers drawn from the seed.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.results import Aim, Row, Series
from swarm.errors import SwarmError
from swarm.ids import Key
from swarm.testing.chance import Chance
from swarm.testing.checkers import OneSwarm, Violations
from swarm.testing.dht_swarm import DhtSwarm, Member, service_of, settle_lazily
from swarm.testing.hostile import Contacts, Hostile, fellows, invented, near
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.virtual_loop import run_virtual

Say = Callable[[str], None]
T = TypeVar("T")
CHURN_S = 600.0
CHURN_SHARE = 0.2
_TTL_S = 3600.0
_LINK = LinkConfig(delay_s=0.04, jitter=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured. The default is for the page; tests take less."""

    hops_peers: tuple[int, ...] = (100, 1_000, 10_000)
    lookups: int = 100
    rest_peers: tuple[int, ...] = (100, 1_000)
    rest_warm_up_s: float = 600.0
    rest_s: float = 900.0
    churn_peers: tuple[int, ...] = (100, 1_000)
    churn_keys: int = 500
    heal_peers: tuple[int, ...] = (100, 1_000)
    split_s: float = 600.0
    heal_s_max: float = 900.0
    hostile_peers: int = 500
    hostile_share: float = 0.2


def hops(peers: int, lookups: int, seed: int = 1) -> list[float]:
    """Reads of keys that nobody wrote, by peers drawn from the seed: how many calls follow one upon the other. All messages take the
    same time here, so that a read's duration tells.
    """

    async def scenario() -> list[float]:
        network = SimulatedNetwork(seed, LinkConfig(delay_s=0.05, jitter=0.0))
        everybody = settle_lazily(network, peers)
        chance, loop = Chance(seed, "hops"), asyncio.get_running_loop()
        found = []
        for number in range(lookups):
            peer = chance.choice(list(network.peers.values()))
            peer.handlers.find("")  # makes its service
            key = Key("public", f"hops-{number}")
            service = service_at(peer)
            begun_s = loop.time()
            await service.get(key)
            found.append(round((loop.time() - begun_s) / 0.1, 3))
        assert everybody
        return found

    return run_virtual(scenario())
