"""Publish a peer's metrics periodically, less often in larger runs, and withdraw them when the peer
leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from swarm.core.clock import Clock
from swarm.core.errors import SwarmError
from swarm.core.ids import PeerId
from swarm.core.presets import WAN
from swarm.dht.keeper import RecordKeeper
from swarm.dht.service.dht_service import DhtService
from swarm.metrics.record import Metrics, metrics_key

_STORE_TIMEOUT_S = 5.0
_GOODBYE_S = 0.4


SMALL_PEERS = 8  # participants of a small run, in which every peer publishes at the shortest interval
EVERY_S_PER_PEER = 0.25  # added to the interval for each further known participant, up to EVERY_S_MAX
EVERY_S_MAX = 15.0
TTL_PERIODS = 4.0  # lifetime of a record in intervals: a peer that died stays visible for this long


def period_s(every_s: float, peers: int) -> float:
    """Return the publishing interval in a run with this many known peers, computed from the interval in a
    small run.
    """
    return min(every_s + EVERY_S_PER_PEER * max(0, peers - SMALL_PEERS), EVERY_S_MAX)


@dataclass(slots=True, kw_only=True)
class Reporter:
    """Publish the metrics of one optimizer, on the network thread. `source` returns the current metrics;
    `peers` the number of participants. `publish=False`: monitors see only this peer's progress. `every_s`:
    interval in a small run; a shorter one updates monitors faster, and costs every peer more calls.
    """

    dht: DhtService
    clock: Clock
    own: PeerId
    run_id: str
    source: Callable[[], Metrics]
    peers: Callable[[], int]
    publish: bool = True
    every_s: float = WAN.metrics_every_s
    rng: random.Random = field(default_factory=random.Random)
    stored: int = 0  # publications that at least one replica stored

    async def run(self) -> None:
        """Publish until cancelled; return at once if this peer publishes no metrics."""
        if self.publish:
            # A newcomer has nothing to report yet, and joining is more urgent. When many come at once, each
            # waits for the publishing interval of a run of their number.
            await asyncio.sleep(self.every_s)
            await asyncio.sleep(period_s(self.every_s, self.peers()) - self.every_s)
            await RecordKeeper(
                self._publish,
                f"the metrics of run {self.run_id}",
                renew_s=lambda: period_s(self.every_s, self.peers()) * self.rng.uniform(0.9, 1.1),
                retry_s=self.every_s,
            ).run()

    async def close(self) -> None:
        """Withdraw the record, so that monitors can tell leaving from failing. The caller has cancelled
        `run`.
        """
        if self.stored:
            with contextlib.suppress(SwarmError):  # it expires by itself
                await self.dht.delete(metrics_key(self.run_id, self.own), timeout_s=_GOODBYE_S)

    async def _publish(self) -> bool:
        """Store the record once. Return whether a replica stored it."""
        every_s = period_s(self.every_s, self.peers())
        metrics = replace(self.source(), every_s=round(every_s, 2))
        ttl_s = max(every_s, self.every_s) * TTL_PERIODS
        result = await self.dht.store(
            metrics_key(self.run_id, self.own),
            metrics.encode(),
            ttl_s=ttl_s,
            timeout_s=min(_STORE_TIMEOUT_S, max(every_s, 1.0)),
        )
        self.stored += bool(result.ok)
        return bool(result.ok)
