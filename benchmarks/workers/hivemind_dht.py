"""A peer of hivemind's DHT. Runs in hivemind's environment.

All timed work runs inside its DHT process, where it is fastest.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import hivemind  # type: ignore[import-not-found,unused-ignore]

from benchmarks.dht_load import TTL_S, Operations, value_of
from benchmarks.worker_channel import WorkerChannel
from benchmarks.workers.hivemind_peer import joined


def main() -> None:
    channel = WorkerChannel()
    dht = joined(channel)
    channel.send("ready")
    while True:
        order = channel.receive()
        if order["do"] == "known":
            channel.send("known", peers=dht.run_coroutine(known))
        elif order["do"] in ("store", "get"):
            channel.send("done", **dht.run_coroutine(functools.partial(perform, order=order)))


async def known(_dht: Any, node: Any) -> int:
    return len(node.protocol.routing_table.uid_to_peer_id)


async def perform(_dht: Any, node: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Perform one order in the DHT's process, concurrently with the node."""
    expiration = hivemind.utils.get_dht_time() + TTL_S

    async def store(key: str) -> str:
        return "" if await node.store(key, value_of(key), expiration) else "a store was not accepted"

    async def get(key: str) -> str:
        return fault(key, await node.get(key))

    async def store_many(keys: Sequence[str]) -> list[str]:
        accepted = await node.store_many(list(keys), [value_of(key) for key in keys], expiration)
        return ["" if accepted[key] else "a store was not accepted" for key in keys]

    async def get_many(keys: Sequence[str]) -> list[str]:
        found = await node.get_many(list(keys))
        return [fault(key, found[key]) for key in keys]

    def held(key: str) -> bool:
        place = hivemind.dht.routing.DHTID.generate(source=key)
        return node.protocol.storage.get(place) is not None or node.protocol.cache.get(place) is not None

    return await Operations(
        store=store, get=get, store_many=store_many, get_many=get_many, held=held
    ).perform(order)


def fault(key: str, found: Any) -> str:
    if found is None:
        return "a stored value was not found"
    return "" if found.value == value_of(key) else "a wrong value was found"


if __name__ == "__main__":
    main()
