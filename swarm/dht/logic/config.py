"""The settings of the DHT."""

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

    # peers that hold each record; too few may all die together, more make every store cost more
    replicas: int = 5
    parallel: int = 4  # calls in flight while searching for peers; reads and writes ask all replicas at once
    call_timeout_s: float = 3.0  # timeout of one call; a dead peer costs a background task this long
    # a search continues without a peer that is silent this long, and counts a failure of it
    stall_s: float = 1.0
    search_timeout_s: float = 10.0  # a search that no reader waits for any more ends after this time
    # A read joins a search for the same key that began at most this long ago. This is how stale a shared
    # answer can be.
    search_join_window_s: float = 0.1
    # While its neighbourhood is stable, a replica serves its own reads from memory for this long after the
    # last comparison with the other replicas, because writes reach it directly. 0: every read asks all
    # replicas.
    local_read_ttl_s: float = 30.0
    stable_after_s: float = 2.0  # time without a change of the neighbourhood after which it counts as stable
    cached_max: int = 1024  # cached answers, for `max_age_s` and for reads on replicas
    cached_bytes_max: int = 16 << 20
    # A peer that failed is not asked again for this long, doubled after each further failure.
    suspect_s: float = 5.0
    suspect_s_max: float = 300.0
    suspects_max: int = 1024
    # first pause of a peer without contacts before it tries again; doubles up to rejoin_s_max
    rejoin_s_first: float = 0.25
    rejoin_s_max: float = 10.0
    # Interval of maintenance: silent peers are pinged, the clock offset is estimated, lost peers are tried.
    maintenance_interval_s: float = 15.0
    bucket_refresh_s: float = 3600.0  # a bucket with room is refreshed when it saw no lookup for this long
    neighbour_lookup_interval_s: float = (
        900.0  # interval at which a peer looks up its own id to learn its neighbours
    )
    # Peers waiting for the records they should hold, and departed peers whose records wait for a new replica.
    newcomers_max: int = 256
    # interval at which the holders of a key make sure that all of its replicas have it
    replication_interval_s: float = 900.0
    # The second nearest holder of a key waits this much longer than the nearest before it hands over too.
    second_holder_delay_s: float = 3.0
    queries_per_call_max: int = 64
    records_per_call_max: int = 256
    record_bytes_per_call_max: int = 512 << 10  # of records; a request may have twice as many bytes
    entries_per_summary_max: int = 2048  # 16 bytes each, in one call that compares the records of two peers
    keys_per_summary_max: int = 256
    bulk_keys_max: int = 4096  # per call of `get_many` or `store_many`
    bulk_active_max: int = 256  # keys that such a call processes at once
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
