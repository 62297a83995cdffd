"""The rules that a namespace, or some names in it, can have."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.core.errors import UsageError
from swarm.core.ids import PeerId
from swarm.dht.logic.records import TTL_MAX_US, VALUE_BYTES_MAX
from swarm.dht.logic.schema import RecordSchema

ENTRIES_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceRules:
    """Restrictions on records; an omitted field allows everything that the DHT allows."""

    name: str = "*"  # names within the namespace that the rules apply to; * and ? as in a shell
    # allowed writers (the members of a run, its owner); None: anyone
    writers: frozenset[PeerId] | None = None
    # Every writer has one entry, under its own PeerID; this always holds in a run's namespaces.
    subkey_is_writer: bool = False
    schema: RecordSchema | None = None  # schema of values; tombstones have none
    value_bytes_max: int = VALUE_BYTES_MAX  # as msgpack
    ttl_s_max: float = TTL_MAX_US / 1e6
    # Per key; None: Quotas.entries_per_writer_and_key_max.
    entries_per_writer_max: int | None = None
    # Per key, of all writers; strangers have half of it where members are known. None:
    # Quotas.entries_per_key_max.
    entries_max: int | None = None

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > 256:
            raise UsageError("a rule's name is a pattern of 1 to 256 characters, like 'holders.*'")
        if not 0 < self.value_bytes_max <= VALUE_BYTES_MAX or not 0 < self.ttl_s_max <= TTL_MAX_US / 1e6:
            raise UsageError(f"a rule allows 1 to {VALUE_BYTES_MAX} bytes and lifetimes up to 24 hours")
        for name in ("entries_per_writer_max", "entries_max"):
            count = getattr(self, name)
            if count is not None and not 1 <= count <= ENTRIES_MAX:
                raise UsageError(f"{name} is 1 to {ENTRIES_MAX}")
