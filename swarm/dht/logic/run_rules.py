"""Rules for the names that a run itself uses. Every peer knows them, so replicas reject malformed records
even for runs that they are not members of.

The rules bound types and sizes, and accept additional fields of newer versions; readers check what the values
mean. Names of a run that are not listed here are open. `specification` holds the owner's blob only (`blobs`).
"""

from __future__ import annotations

from swarm.dht.logic.rules import NamespaceRules
from swarm.dht.logic.schema import Binary, Flag, Many, Named, Number, Table, Text

_ADDRESSES = Many(Text(300), 8)
_COUNT_MAX = 1 << 40
_TIME_S_MAX = 1e12
# The longest addresses with the other fields; a record that is larger carries something else.
_CONTACT_BYTES_MAX = 3072
# All of these are renewed within seconds; a record must not outlive its writer by a day.
_TTL_S_MAX = 3600.0
# Every peer of a run reads the dictionary of progress up to four times a second, and keeps this many reports.
# Too large: a crowd of identities makes these reads expensive. Runs of more than 64 peers are divided.
_PROGRESS_ENTRIES_MAX = 256
_SUM = Many(Number(0.0, 1e16), 8)
_PROGRESS = Table(
    {
        "epoch": Number(0, _COUNT_MAX, whole=True),
        "samples": Number(0, _COUNT_MAX, whole=True),
        "rate": Number(0.0, 1e12),
        "at": Number(0.0, _TIME_S_MAX),
        "since": Number(0.0, _TIME_S_MAX),
    },
    optional={"addresses": _ADDRESSES, "total": _SUM, "joining": Flag()},
)

_COUNT = Number(0, _COUNT_MAX, whole=True)
_BYTES = Number(0, 1 << 60, whole=True)
_TIME_S = Number(0.0, _TIME_S_MAX)
_LOSS = Number(-1e30, 1e30)
_BLAME = Many(Many(Text(200), 2), 4)  # [PeerID, reason]

METRICS_BYTES_MAX = 4096
# swarm.metrics.record: the metrics that a trainer publishes.
METRICS = Table(
    {
        "at": _TIME_S,
        "since": _TIME_S,
        "every": Number(0.1, 600.0),
        "epoch": _COUNT,
        "rate": Number(0.0, 1e12),
    },
    optional={
        "name": Text(40),
        "device": Text(60),
        "reach": Text(16),
        "agent": Text(40),
        "samples": _COUNT,
        "loss": _LOSS,
        "validation": _LOSS,
        "given_epoch": _COUNT,
        "given_at": _TIME_S,
        "up": _BYTES,
        "down": _BYTES,
        "head": Binary(8),
        "line": Binary(8),
        "given_up": _COUNT,
        "drift": Number(0.0, 1e12),
        "idle": Number(0.0, 1e9),
        "done": _COUNT,
        "failed": _COUNT,
        "own": Named(Number(-1e300, 1e300), count_max=16, name_characters_max=32),
        "broken": Many(Text(32), 18),
        "rounds": Many(
            # kind, epoch, time, seconds, bytes, members; group, digest, reason, its details, departed
            # members, accused members
            Table(
                {
                    "k": Text(8),
                    "e": _COUNT,
                    "t": _TIME_S,
                    "s": Number(0.0, 1e6),
                    "b": _BYTES,
                    "n": Number(0, 4096, whole=True),
                },
                optional={
                    "g": Binary(8),
                    "d": Binary(8),
                    "r": Text(16),
                    "x": Text(160),
                    "l": _BLAME,
                    "a": _BLAME,
                },
            ),
            4,
        ),
    },
)

RUN_RULES: tuple[NamespaceRules, ...] = (
    # Announcements of present peers. Readers use only the writer's name, so only the size is bounded.
    NamespaceRules(
        name="presence", value_bytes_max=_CONTACT_BYTES_MAX, ttl_s_max=_TTL_S_MAX, entries_per_writer_max=1
    ),
    # averaging.matchmaking.service.presence: peers that run an averager.
    NamespaceRules(
        name="holders.*",
        schema=Table(
            {"addresses": _ADDRESSES, "schema": Binary(64), "text": Text(300)},
            optional={"bits": Number(0, 64, whole=True)},
        ),
        value_bytes_max=_CONTACT_BYTES_MAX,
        ttl_s_max=_TTL_S_MAX,
        entries_per_writer_max=1,
    ),
    # averaging.optim.progress.logic.reports: the progress of each trainer; `shards`: in a large run, one
    # dictionary per shard.
    *(
        NamespaceRules(
            name=name,
            schema=_PROGRESS,
            value_bytes_max=_CONTACT_BYTES_MAX,
            ttl_s_max=_TTL_S_MAX,
            entries_per_writer_max=1,
            entries_max=_PROGRESS_ENTRIES_MAX,
        )
        for name in ("progress", "progress.*")
    ),
    # averaging.optim.progress.logic.shards: totals of each shard of a large run.
    NamespaceRules(
        name="sums.*",
        schema=Table({"child": Number(0, _COUNT_MAX, whole=True), "sum": _SUM}, optional={"total": _SUM}),
        value_bytes_max=1024,
        ttl_s_max=_TTL_S_MAX,
        entries_per_writer_max=1,
    ),
    # averaging.optim.state.donor: peers that offer their state to joiners; in a large run, by shard.
    *(
        NamespaceRules(
            name=name,
            schema=Table(
                {"epoch": Number(0, _COUNT_MAX, whole=True), "addresses": _ADDRESSES},
                optional={"canonical": Flag(), "digest": Binary(64), "bytes": Number(0, 1 << 50, whole=True)},
            ),
            value_bytes_max=_CONTACT_BYTES_MAX,
            ttl_s_max=_TTL_S_MAX,
            entries_per_writer_max=1,
        )
        for name in ("donors", "donors.*")
    ),
    # swarm.metrics: the metrics that trainers publish, spread over several keys.
    NamespaceRules(
        name="metrics.*",
        schema=METRICS,
        value_bytes_max=METRICS_BYTES_MAX,
        ttl_s_max=_TTL_S_MAX,
        entries_per_writer_max=1,
    ),
)

CATALOGUE = "catalogue"  # the namespace in which members of open runs list them
CATALOGUE_SHARDS = 16  # its keys: a constant of the protocol
# swarm.run.catalogue: for each run one entry of a member, under the run's id.
CATALOGUE_RULES = NamespaceRules(
    schema=Table(
        {"name": Text(63), "owner": Binary(64), "addresses": _ADDRESSES},
        optional={"recovery_key": Binary(64)},
    ),
    value_bytes_max=_CONTACT_BYTES_MAX,
    ttl_s_max=_TTL_S_MAX,
    entries_per_writer_max=4,
    entries_max=256,
)
