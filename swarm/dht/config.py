"""The DHT's settings, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.dht.routing import RoutingConfig
from swarm.dht.storage import StorageConfig
from swarm.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class DhtConfig:
    """Kademlia's parameters, timeouts and limits. All peers of a swarm should agree on `replicas` and `routing.bucket_max`."""

    replicas: int = 5  # peers that hold each record; fewer die together sooner, more cost every store
    parallel: int = 4  # calls in flight while searching for peers; reads and writes ask all replicas at once
    call_timeout_s: float = 3.0  # one call; a dead peer costs a background task this long
    stall_s: float = 1.0  # silence after which a search goes on without a peer; also a failure of that peer
    search_timeout_s: float = 10.0  # a search that nobody waits for any longer ends then
    share_s: float = 0.1  # a read joins a search for the same key that began at most this long ago: how stale a shared answer may be
    suspect_s: float = 5.0  # a peer that failed is not asked again for this long, twice as long after each further failure
    suspect_s_max: float = 300.0
    suspects_max: int = 1024
    rejoin_first_s: float = 0.25  # how soon a peer that knows nobody tries again; doubles up to rejoin_s_max
    rejoin_s_max: float = 10.0
    tend_s: float = 15.0  # how often the table is looked after: silent peers pinged, the clock's offset estimated, lost peers tried
    ping_after_s: float = 60.0  # a peer of the table that was silent for this long is pinged
    refresh_s: float = 900.0  # a bucket in which nothing was looked up for this long is refreshed
    newcomers_max: int = 256  # peers that wait for the records they should hold
    queries_per_call_max: int = 64
    records_per_call_max: int = 256
    record_bytes_per_call_max: int = 512 << 10  # of a hand-over; a request may have twice this
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= self.routing.bucket_max:
            raise UsageError(f"replicas must be 1 to {self.routing.bucket_max} (routing.bucket_max), not {self.replicas}")
        if self.stall_s > self.call_timeout_s:
            raise UsageError("stall_s must not exceed call_timeout_s")
