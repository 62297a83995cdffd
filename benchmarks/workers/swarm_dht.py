"""A peer of the DHT of swarm.

All timed work runs on its network loop, as hivemind's runs in its DHT process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import swarm
from benchmarks.dht_load import TTL_S, Operations, value_of
from benchmarks.worker_channel import WorkerChannel
from swarm.core.ids import Key
from swarm.dht.logic.constants import REPLICAS
from swarm.dht.service.dht_service import DhtService, StoreItem

TIMEOUT_S = 60.0


def main() -> None:
    channel = WorkerChannel()
    settings = channel.configuration
    bootstrap = [] if settings["rank"] == 0 else [channel.published("address")]
    with swarm.Node(bootstrap=bootstrap, listen="127.0.0.1:0") as node:
        if settings["rank"] == 0:
            channel.publish("address", node.addresses[0])
        service = node.dht.service
        wanted = min(REPLICAS, settings["peers"])
        channel.send("ready")
        while True:
            order = channel.receive()
            if order["do"] == "known":
                channel.send("known", peers=len(service.overlay.table))
            elif order["do"] in ("store", "get"):
                channel.send("done", **node.network.run(perform(service, order, wanted)))


async def perform(service: DhtService, order: dict[str, Any], replicas: int) -> dict[str, Any]:
    """Perform one order. A store is right when as many replicas hold it as there should be."""

    async def store(key: str) -> str:
        result = await service.store(Key.parse(key), value_of(key), ttl_s=TTL_S, timeout_s=TIMEOUT_S)
        return (
            ""
            if result.ok and result.replicas >= replicas
            else f"a store reached {result.replicas} replicas, not {replicas}"
        )

    async def get(key: str) -> str:
        return fault(key, await service.get(Key.parse(key), timeout_s=TIMEOUT_S))

    async def store_many(keys: Sequence[str]) -> list[str]:
        items = [StoreItem(key=Key.parse(key), value=value_of(key)) for key in keys]
        results = await service.store_many(items, ttl_s=TTL_S, timeout_s=TIMEOUT_S)
        return [
            "" if result.ok and result.replicas >= replicas else f"a store reached {result.replicas} replicas"
            for result in results
        ]

    async def get_many(keys: Sequence[str]) -> list[str]:
        found = await service.get_many(keys, timeout_s=TIMEOUT_S)
        return [fault(key, found.answers.get(key)) for key in keys]

    def held(key: str) -> bool:
        return bool(service.storage.records(Key.parse(key), service.overlay.now_us))

    return await Operations(
        store=store, get=get, store_many=store_many, get_many=get_many, held=held
    ).perform(order)


def fault(key: str, found: Any) -> str:
    if found is None:
        return "a stored value was not found"
    return "" if not isinstance(found, dict) and found.value == value_of(key) else "a wrong value was found"


if __name__ == "__main__":
    main()
