"""Publisher of a peer's metrics: periodically, less often in larger runs, and withdrawn when the peer
leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

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
    """Settings of the metrics that a trainer publishes about itself."""

    publish: bool = True  # False: monitors show this peer's progress only
    every_s: float = 2.0  # in a small run. Less is livelier, and costs every peer more calls
    every_s_per_peer: float = 0.25  # added for every known peer beyond `small_peers`
    every_s_max: float = 15.0  # in a large one
    small_peers: int = 8
    # a record lives for this many periods: a failed peer stays visible for that time
    ttl_periods: float = 4.0

    def __post_init__(self) -> None:
        if (
            not 0.1 <= self.every_s <= self.every_s_max <= 600
            or self.every_s_per_peer < 0
            or self.ttl_periods < 2
        ):
            raise UsageError(
                "a MetricsConfig needs 0.1 <= every_s <= every_s_max <= 600, every_s_per_peer >= 0 "
                "and ttl_periods >= 2"
            )

    def period_s(self, peers: int) -> float:
        """Return the time between two records in a run with `peers` known peers."""
        return min(self.every_s + self.every_s_per_peer * max(0, peers - self.small_peers), self.every_s_max)


class Records(Protocol):
    """The part of `DhtService` that a reporter uses. Tests have a simulated one."""

    async def store(
        self, key: Key, value: Value, *, ttl_s: float, subkey: str | None = None, timeout_s: float = 10.0
    ) -> StoreResult: ...
    async def delete(
        self, key: Key, *, subkey: str | None = None, timeout_s: float = 10.0
    ) -> StoreResult: ...


@dataclass(slots=True, kw_only=True)
class Reporter:
    """Publisher of one optimizer's metrics. Runs on the network thread.

    `source` returns the metrics of this moment; `peers` returns how many peers take part in the run.
    """

    dht: Records
    clock: Clock
    own: PeerId
    run_id: str
    source: Callable[[], Metrics]
    peers: Callable[[], int]
    config: MetricsConfig = field(default_factory=MetricsConfig)
    rng: random.Random = field(default_factory=random.Random)
    stored: int = 0  # records stored since the start
    _closed: bool = False

    async def run(self) -> None:
        """Publish until cancelled."""
        while self.config.publish and not self._closed:
            every_s = self.config.period_s(self.peers())
            await self._publish(every_s)
            await asyncio.sleep(every_s * self.rng.uniform(0.9, 1.1))

    async def close(self) -> None:
        """Withdraw the record, so that viewers can tell a peer that left from one that failed."""
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
