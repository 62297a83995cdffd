"""Publish a peer's metrics periodically, less often in larger runs, and withdraw them when the peer
leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

from swarm.core.clock import Clock
from swarm.core.errors import SwarmError, UsageError
from swarm.core.ids import Key, PeerId
from swarm.dht.logic.records import Value
from swarm.dht.service.writer import StoreResult
from swarm.metrics.record import Metrics, metrics_key

_log = logging.getLogger(__name__)

_STORE_TIMEOUT_S = 5.0
_GOODBYE_S = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Settings of the metrics that a trainer publishes."""

    # False: monitors see only this peer's progress.
    publish: bool = True
    # Interval in a small run, up to `small_peers` participants. Less is livelier, and costs every peer more
    # calls.
    every_s: float = 2.0
    small_peers: ClassVar[int] = 8
    # Added to the interval for every known participant beyond `small_peers`, up to `every_s_max`.
    every_s_per_peer: ClassVar[float] = 0.25
    every_s_max: float = 15.0
    # Lifetime of a record in intervals: a peer that died stays visible for this long.
    ttl_periods: ClassVar[float] = 4.0

    def __post_init__(self) -> None:
        if not 0.1 <= self.every_s <= self.every_s_max <= 600:
            raise UsageError("a MetricsConfig needs 0.1 <= every_s <= every_s_max <= 600")

    def period_s(self, peers: int) -> float:
        """Return the publishing interval in a run with this many known peers."""
        return min(self.every_s + self.every_s_per_peer * max(0, peers - self.small_peers), self.every_s_max)


class Records(Protocol):
    """The operations of the DHT that a reporter needs; implemented by `DhtService`."""

    async def store(
        self, key: Key, value: Value, *, ttl_s: float, subkey: str | None = None, timeout_s: float = 10.0
    ) -> StoreResult: ...
    async def delete(
        self, key: Key, *, subkey: str | None = None, timeout_s: float = 10.0
    ) -> StoreResult: ...


@dataclass(slots=True, kw_only=True)
class Reporter:
    """Publish the metrics of one optimizer, on the network thread. `source` returns the current metrics;
    `peers` the number of participants.
    """

    dht: Records
    clock: Clock
    own: PeerId
    run_id: str
    source: Callable[[], Metrics]
    peers: Callable[[], int]
    config: MetricsConfig = field(default_factory=MetricsConfig)
    rng: random.Random = field(default_factory=random.Random)
    stored: int = 0  # publications that at least one replica stored
    _closed: bool = False

    async def run(self) -> None:
        """Publish until cancelled."""
        while self.config.publish and not self._closed:
            every_s = self.config.period_s(self.peers())
            await self._publish(every_s)
            await asyncio.sleep(every_s * self.rng.uniform(0.9, 1.1))

    async def close(self) -> None:
        """Withdraw the record, so that monitors see that this peer left and did not die."""
        self._closed = True
        if self.stored:
            with contextlib.suppress(SwarmError):  # it expires by itself
                await self.dht.delete(metrics_key(self.run_id, self.own), timeout_s=_GOODBYE_S)

    async def _publish(self, every_s: float) -> None:
        metrics = replace(self.source(), every_s=round(every_s, 2))
        ttl_s = max(every_s, self.config.every_s) * self.config.ttl_periods
        try:
            result = await self.dht.store(
                metrics_key(self.run_id, self.own),
                metrics.encode(),
                ttl_s=ttl_s,
                timeout_s=min(_STORE_TIMEOUT_S, max(every_s, 1.0)),
            )
        except UsageError:
            raise
        except SwarmError as error:
            _log.debug("the metrics of run %s were not published: %s", self.run_id, error)
            return
        self.stored += bool(result.ok)
