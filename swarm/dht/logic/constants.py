"""Kademlia's parameters and the limits of the DHT. All peers of a swarm agree on `REPLICAS` and
`BUCKET_MAX`.
"""

from __future__ import annotations

# Peers that hold each record. Too few may all die together; more make every store cost more.
REPLICAS = 5
# Peers in a bucket of the routing table (Kademlia's k), and in the neighbourhood of a key; at least REPLICAS.
BUCKET_MAX = 20
# Calls in flight while searching for peers; reads and writes ask all replicas at once.
PARALLEL = 4
# A read joins a search for the same key that began at most this long ago. This is how stale a shared
# answer can be.
SEARCH_JOIN_WINDOW_S = 0.1
# While its neighbourhood is stable, a replica serves its own reads from memory for this long after the
# last comparison with the other replicas, because writes reach it directly. 0: every read asks all
# replicas.
LOCAL_READ_TTL_S = 30.0
# Time without a change of the neighbourhood after which it counts as stable.
STABLE_AFTER_S = 2.0
# Cached answers, for `max_age_s` and for reads on replicas.
CACHED_MAX = 1024
CACHED_BYTES_MAX = 16 << 20
# A peer that failed is not asked again for this long, doubled after each further failure.
SUSPECT_S = 5.0
SUSPECT_S_MAX = 300.0
SUSPECTS_MAX = 1024
# First pause of a peer without contacts before it tries again; doubles up to REJOIN_S_MAX.
REJOIN_S_FIRST = 0.25
REJOIN_S_MAX = 10.0
# Interval of maintenance: silent peers are pinged, the clock offset is estimated, lost peers are tried.
MAINTENANCE_INTERVAL_S = 15.0
# A bucket with room is refreshed when it saw no lookup for this long.
BUCKET_REFRESH_S = 3600.0
# Interval at which a peer looks up its own id to learn its neighbours.
NEIGHBOUR_LOOKUP_INTERVAL_S = 900.0
# Peers waiting for the records they should hold, and departed peers whose records wait for a new replica.
NEWCOMERS_MAX = 256
# Interval at which the holders of a key make sure that all of its replicas have it.
REPLICATION_INTERVAL_S = 900.0
# The second nearest holder of a key waits this much longer than the nearest before it hands over too.
SECOND_HOLDER_DELAY_S = 3.0
QUERIES_PER_CALL_MAX = 64
RECORDS_PER_CALL_MAX = 256
# Bytes of records in one call; the limit of a request leaves room for their other fields.
RECORD_BYTES_PER_CALL_MAX = 512 << 10
# Entries of 16 bytes, and keys, in one call that compares the records of two peers.
ENTRIES_PER_SUMMARY_MAX = 2048
KEYS_PER_SUMMARY_MAX = 256
# Keys per call of `get_many` or `store_many`, keys that it processes at once, and its calls in flight.
BULK_KEYS_MAX = 4096
BULK_ACTIVE_MAX = 256
BULK_CALLS_MAX = 16
