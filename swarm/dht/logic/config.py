"""The settings of the DHT."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from swarm.core.errors import UsageError
from swarm.dht.logic.routing import RoutingConfig
from swarm.dht.logic.storage import StorageConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DhtConfig:
    """Kademlia's parameters, timeouts and limits.

    Class variables are constants of the protocol or of the implementation; the fields can be set. All peers
    of a swarm should agree on `replicas` and `routing.bucket_max`.
    """

    # Peers that hold each record. Too few may all die together; more make every store cost more.
    replicas: ClassVar[int] = 5
    # Calls in flight while searching for peers; reads and writes ask all replicas at once.
    parallel: ClassVar[int] = 4
    # Timeout of one call. A dead peer costs a background task this long.
    call_timeout_s: ClassVar[float] = 3.0
    # A search continues without a peer that is silent this long, and counts a failure of it.
    stall_s: ClassVar[float] = 1.0
    # A search that no reader waits for any more ends after this time.
    search_timeout_s: float = 10.0
    # A read joins a search for the same key that began at most this long ago. This is how stale a shared
    # answer can be.
    search_join_window_s: ClassVar[float] = 0.1
    # While its neighbourhood is stable, a replica serves its own reads from memory for this long after the
    # last comparison with the other replicas, because writes reach it directly. 0: every read asks all
    # replicas.
    local_read_ttl_s: ClassVar[float] = 30.0
    # Time without a change of the neighbourhood after which it counts as stable.
    stable_after_s: ClassVar[float] = 2.0
    # Cached answers, for `max_age_s` and for reads on replicas.
    cached_max: ClassVar[int] = 1024
    cached_bytes_max: ClassVar[int] = 16 << 20
    # A peer that failed is not asked again for this long, doubled after each further failure.
    suspect_s: ClassVar[float] = 5.0
    suspect_s_max: ClassVar[float] = 300.0
    suspects_max: ClassVar[int] = 1024
    # First pause of a peer without contacts before it tries again; doubles up to rejoin_s_max.
    rejoin_s_first: ClassVar[float] = 0.25
    rejoin_s_max: ClassVar[float] = 10.0
    # Interval of maintenance: silent peers are pinged, the clock offset is estimated, lost peers are tried.
    maintenance_interval_s: ClassVar[float] = 15.0
    # A bucket with room is refreshed when it saw no lookup for this long.
    bucket_refresh_s: ClassVar[float] = 3600.0
    # Interval at which a peer looks up its own id to learn its neighbours.
    neighbour_lookup_interval_s: ClassVar[float] = 900.0
    # Peers waiting for the records they should hold, and departed peers whose records wait for a new replica.
    newcomers_max: ClassVar[int] = 256
    # Interval at which the holders of a key make sure that all of its replicas have it.
    replication_interval_s: ClassVar[float] = 900.0
    # The second nearest holder of a key waits this much longer than the nearest before it hands over too.
    second_holder_delay_s: ClassVar[float] = 3.0
    queries_per_call_max: ClassVar[int] = 64
    records_per_call_max: ClassVar[int] = 256
    # Bytes of records in one call; the limit of a request is twice as high.
    record_bytes_per_call_max: ClassVar[int] = 512 << 10
    # Entries of 16 bytes, and keys, in one call that compares the records of two peers.
    entries_per_summary_max: ClassVar[int] = 2048
    keys_per_summary_max: ClassVar[int] = 256
    # Keys per call of `get_many` or `store_many`, keys that it processes at once, and its calls in flight.
    bulk_keys_max: int = 4096
    bulk_active_max: ClassVar[int] = 256
    bulk_calls_max: ClassVar[int] = 16
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)

    def __post_init__(self) -> None:
        if self.routing.bucket_max < self.replicas:
            raise UsageError(
                f"routing.bucket_max must be at least {self.replicas} (replicas), "
                f"not {self.routing.bucket_max}"
            )
