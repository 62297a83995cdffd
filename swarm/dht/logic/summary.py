"""Summaries of 16 bytes per record, from which another peer computes exactly which records it lacks before
anything is sent.

An entry identifies its owner by 8 bytes of a hash (over key, writer and subkey) and its version by the issue
time. A replica that has the same or a later version, or a reserved slot for it, does not request it. Of two
records of one owner with the same issue time a replica keeps the one it has: readers, which see both, settle
that tie.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping

from swarm.core.ids import Key
from swarm.dht.logic.records import Owner, Record

ENTRY_BYTES = 16
_OWNER_BYTES = 8


@functools.lru_cache(maxsize=16384)
def _owner_mark(key: Key, owner: Owner) -> bytes:
    writer, subkey = owner
    text = (
        f"{key.namespace}\0{key.name}\0".encode()
        + writer.public_key
        + (b"" if subkey is None else b"\1" + subkey.encode())
    )
    return hashlib.sha256(text).digest()[:_OWNER_BYTES]


def summary(key: Key, records: Iterable[Record]) -> bytes:
    """Return the summary of some records of one key, in their order."""
    return b"".join(
        _owner_mark(key, record.owner) + record.issued_at_us.to_bytes(8, "big") for record in records
    )


def missing_entries(key: Key, entries: bytes, versions: Mapping[Owner, int]) -> list[int]:
    """Return the indices of the entries whose records are missing or later than `versions`, which are this
    peer's. An incomplete last entry is ignored.
    """
    held = {_owner_mark(key, owner): issued_at_us for owner, issued_at_us in versions.items()}
    found = []
    for number in range(len(entries) // ENTRY_BYTES):
        entry = entries[number * ENTRY_BYTES : (number + 1) * ENTRY_BYTES]
        issued_at_us = held.get(entry[:_OWNER_BYTES])
        if issued_at_us is None or issued_at_us < int.from_bytes(entry[_OWNER_BYTES:], "big"):
            found.append(number)
    return found
