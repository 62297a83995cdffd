"""Shared helpers of the DHT scenarios: services on simulated peers, swarms of them, and the records that they
hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from swarm.core.ids import Key
from swarm.dht.logic.constants import BUCKET_MAX
from swarm.dht.logic.records import Record, encode_value, signed
from swarm.dht.service.dht_service import DhtService, Entry
from swarm.testing.dht_swarm import service_of as service_of
from swarm.testing.network import LinkConfig, SimulatedNetwork, SimulatedPeer
from swarm.testing.virtual_loop import run_virtual


async def swarm_of(
    network: SimulatedNetwork, count: int, bucket_max: int = BUCKET_MAX, **how: Any
) -> list[DhtService]:
    """Return peers that joined one after the other, each through an earlier one, once the swarm has
    settled.
    """
    services: list[DhtService] = []
    for _ in range(count):
        service = service_of(network.peer(), bucket_max, **how)
        if services:
            await service.join([network.rng.choice(services).own()])
        services.append(service)
    await asyncio.sleep(5)
    return services


def peer_of(network: SimulatedNetwork, service: DhtService) -> SimulatedPeer:
    return network.peers[service.peer_id]


async def value_at(service: DhtService, key: Key, **how: Any) -> object:
    entry = await service.get(key, **how)
    assert entry is None or isinstance(entry, Entry)
    return entry.value if entry else None


def holders(services: Iterable[DhtService], key: Key) -> list[DhtService]:
    return [service for service in services if service.storage.records(key, service.overlay.now_us)]


def nearest(services: Iterable[DhtService], key: Key, count: int = 5) -> list[DhtService]:
    return sorted(services, key=lambda service: service.peer_id.dht_id ^ key.dht_id)[:count]


def record_by(writer: SimulatedPeer, value: Any, **changes: Any) -> Record:
    now_us = int(writer.clock.swarm_s() * 1e6)
    fields: dict[str, Any] = {
        "key": Key("public", "thing"),
        "subkey": None,
        "value": encode_value(value),
        "issued_at_us": now_us,
        "expiration_us": now_us + 60_000_000,
        "writer": writer.peer_id,
    }
    return signed(Record(**{**fields, **changes}), writer.identity)


def play(
    scenario: Callable[[SimulatedNetwork], Awaitable[None]], *, seed: int, link: LinkConfig | None = None
) -> SimulatedNetwork:
    """Run a scenario to its end, and check that no handler has failed."""
    network = SimulatedNetwork(seed=seed, config=link)

    async def run() -> None:
        try:
            await scenario(network)
            assert not network.errors, network.errors
        finally:
            await network.close()

    run_virtual(run())
    return network
