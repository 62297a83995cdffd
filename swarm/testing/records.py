"""Unvalidated DHT records, for tests and benchmarks of how replicas handle them."""

from __future__ import annotations

from swarm.core.ids import Key, PeerId
from swarm.dht.logic.records import Record
from swarm.dht.logic.storage import Storage


def made_record(
    key: Key, value: bytes, writer: PeerId, now_us: int, *, ttl_s: float = 3600.0, subkey: str | None = None
) -> Record:
    """Return a record with a signature of zeros. `value` is msgpack, valid or not; `now_us`: its time of
    issue.
    """
    return Record(
        key=key,
        subkey=subkey,
        value=value,
        issued_at_us=now_us,
        expiration_us=now_us + round(ttl_s * 1e6),
        writer=writer,
        signature=bytes(64),
    )


def fill(storage: Storage, key: Key, entries: int, value: bytes, now_us: int) -> None:
    """Store records of as many writers under a key as if they had been validated."""
    for number in range(entries):
        record = made_record(key, value, PeerId(number.to_bytes(32, "big")), now_us)
        refusal = storage.store(record, now_us)
        assert refusal is None, refusal
