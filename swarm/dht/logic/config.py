"""The DHT's settings, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.core.errors import UsageError
from swarm.dht.logic.routing import RoutingConfig
from swarm.dht.logic.storage import StorageConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DhtConfig:
    """Kademlia's parameters, timeouts and limits. All peers of a swarm should agree on `replicas` and
    `routing.bucket_max`.
    """

    replicas: int = 5  # peers that hold each record; fewer die together sooner, more cost every store
    parallel: int = 4  # calls in flight while searching for peers; reads and writes ask all replicas at once
    call_timeout_s: float = 3.0  # one call; a dead peer costs a background task this long
    stall_s: float = 1.0  # silence after which a search goes on without a peer; also a failure of that peer
    search_timeout_s: float = 10.0  # a search that nobody waits for any longer ends then
    # a read joins a search for the same key that began at most this long ago: how stale a shared answer may
    # be
    share_s: float = 0.1
    # a replica that nobody around it joined or left answers this peer's own reads for so long after it last
    local_s: float = 30.0
    # compared with the others: writes reach it meanwhile. 0: every read asks all replicas
    settled_s: float = 2.0  # how long the neighbourhood must not have changed for that
    cached_max: int = 1024  # keys whose answers are remembered, for `max_age_s` and for replicas
    cached_bytes_max: int = 16 << 20
    # a peer that failed is not asked again for this long, twice as long after each further failure
    suspect_s: float = 5.0
    suspect_s_max: float = 300.0
    suspects_max: int = 1024
    rejoin_first_s: float = 0.25  # how soon a peer that knows nobody tries again; doubles up to rejoin_s_max
    rejoin_s_max: float = 10.0
    # how often the table is looked after: silent peers pinged, the clock's offset estimated, lost peers tried
    tend_s: float = 15.0
    refresh_s: float = 3600.0  # a bucket with room in which nothing was looked up for this long is refreshed
    neighbours_s: float = 900.0  # how often a peer looks up its own place, so that it knows its neighbours
    # peers that wait for the records they should hold; also departed ones whose records wait
    newcomers_max: int = 256
    replicate_s: float = 900.0  # how often each key's holders make sure that all its replicas have it
    # a key's second nearest holder waits this much longer than the nearest before it hands over too
    backup_s: float = 3.0
    queries_per_call_max: int = 64
    records_per_call_max: int = 256
    record_bytes_per_call_max: int = 512 << 10  # of one call; a request may have twice this
    entries_per_summary_max: int = 2048  # 16 bytes each, in one call that compares what two peers hold
    keys_per_summary_max: int = 256
    bulk_keys_max: int = 4096  # of one call of `get_many` or `store_many`
    bulk_active_max: int = 256  # keys that such a call works on at once
    bulk_calls_max: int = 16  # calls that it has in flight
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= self.routing.bucket_max:
            raise UsageError(
                f"replicas must be 1 to {self.routing.bucket_max} (routing.bucket_max), not {self.replicas}"
            )
        if self.stall_s > self.call_timeout_s:
            raise UsageError("stall_s must not exceed call_timeout_s")
