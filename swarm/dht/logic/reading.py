"""Compute the answer of a read from the latest record of every owner.

A key may hold plain entries and sub-keyed entries of a dictionary side by side, since no writer can remove
another's. `get` answers in the form of the entry that was issued last: a plain entry, or a dictionary of the
sub-keyed ones. `get_all` answers with every live entry of both forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from swarm.core.ids import Key, PeerId
from swarm.dht.logic.records import Entry, Owner, Record, is_run_namespace


def live(latest: Mapping[Owner, Record], now_us: int) -> list[Record]:
    """Return the records that are neither tombstones nor expired; the record issued last comes first."""
    records = [record for record in latest.values() if not record.deleted and record.expiration_us > now_us]
    return sorted(records, key=lambda record: record.version, reverse=True)


def select(
    latest: Mapping[Owner, Record], key: Key, writer: PeerId | None, now_us: int
) -> Entry | dict[str, Entry] | None:
    """Return the answer to `get`. A writer has only one entry in a run's namespaces; with `writer` the answer
    there is that entry itself.
    """
    records = [record for record in live(latest, now_us) if writer is None or record.writer == writer]
    if not records:
        return None
    if records[0].subkey is None or (writer is not None and is_run_namespace(key.namespace)):
        return Entry.of(records[0])
    return dictionary(records)


def dictionary(records: Iterable[Record]) -> dict[str, Entry]:
    """Return the entry issued last for each subkey, sorted by subkey. `records` are sorted as `live` returns
    them.
    """
    newest: dict[str, Record] = {}
    for record in records:
        if record.subkey is not None:
            newest.setdefault(record.subkey, record)
    return {subkey: Entry.of(newest[subkey]) for subkey in sorted(newest)}
