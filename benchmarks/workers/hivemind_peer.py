"""Joining for all workers of hivemind: the first publishes its address, the others use it. Runs in hivemind's
environment.
"""

from __future__ import annotations

from typing import Any

import hivemind  # type: ignore[import-not-found,unused-ignore]

from benchmarks.worker_channel import WorkerChannel


def joined(channel: WorkerChannel, **settings: Any) -> Any:
    """Return a running hivemind.DHT in this launch's swarm."""
    if channel.configuration["rank"] == 0:
        dht = hivemind.DHT(start=True, **settings)
        channel.publish("address", str(dht.get_visible_maddrs()[0]))
        return dht
    return hivemind.DHT(initial_peers=[channel.published("address")], start=True, **settings)
