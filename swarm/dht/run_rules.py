"""The rules of a run's own names. Every peer knows them, so that a replica keeps no stranger's nonsense for a run that it is no member of.

They bound types and sizes, and let pass what a newer version may add; what the values mean is checked by those who read them. Names of a
run that are not listed here are open. `specification` holds the owner's blob alone (`blobs`).
"""

from __future__ import annotations

from swarm.dht.rules import NamespaceRules
from swarm.dht.schema import Binary, Flag, Many, Number, Table, Text

_ADDRESSES = Many(Text(300), 8)
_COUNT_MAX = 1 << 40
_TIME_S_MAX = 1e12
_TTL_S_MAX = 3600.0  # all of these are renewed within seconds; a record that outlives its writer by a day would be a ghost
_SUM = Many(Number(0.0, 1e16), 8)
_PROGRESS = Table(
    {
        "epoch": Number(0, _COUNT_MAX, whole=True),
        "samples": Number(0, _COUNT_MAX, whole=True),
        "rate": Number(0.0, 1e12),
        "at": Number(0.0, _TIME_S_MAX),
        "since": Number(0.0, _TIME_S_MAX),
    },
    optional={"addresses": _ADDRESSES, "total": _SUM},
)

RUN_RULES: tuple[NamespaceRules, ...] = (
    # who is there; nobody reads more than the writer's name out of it, so that only its size is bounded
    NamespaceRules(name="presence", value_bytes_max=4096, ttl_s_max=_TTL_S_MAX, entries_per_writer_max=1),
    # averaging.groups.presence: who holds an averager
    NamespaceRules(
        name="holders.*",
        schema=Table({"addresses": _ADDRESSES, "schema": Binary(64), "text": Text(300)}),
        value_bytes_max=8192,
        ttl_s_max=_TTL_S_MAX,
        entries_per_writer_max=1,
    ),
    # averaging.training.progress: how far each trainer is; `shards`: in a large run, a dictionary for each shard of it
    *(
        NamespaceRules(name=name, schema=_PROGRESS, value_bytes_max=8192, ttl_s_max=_TTL_S_MAX, entries_per_writer_max=1)
        for name in ("progress", "progress.*")
    ),
    # averaging.training.shards: what the parts of a large run add up to
    NamespaceRules(
        name="sums.*",
        schema=Table({"child": Number(0, _COUNT_MAX, whole=True), "sum": _SUM}, optional={"total": _SUM}),
        value_bytes_max=1024,
        ttl_s_max=_TTL_S_MAX,
        entries_per_writer_max=1,
    ),
    # averaging.training.donor: who gives its state to joiners
    NamespaceRules(
        name="donors",
        schema=Table(
            {"epoch": Number(0, _COUNT_MAX, whole=True), "addresses": _ADDRESSES},
            optional={"canonical": Flag(), "digest": Binary(64), "bytes": Number(0, 1 << 50, whole=True)},
        ),
        value_bytes_max=8192,
        ttl_s_max=_TTL_S_MAX,
        entries_per_writer_max=1,
    ),
)
