"""What a read answers, given the latest record of every owner.

A key may hold plain entries and a dictionary's entries side by side, since nobody can remove another
writer's. `get` answers in the form of the entry that was issued last: a plain entry, or the dictionary made
of the sub-keyed ones. `get_all` answers with every live entry of both forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from swarm.core.ids import Key, PeerId
from swarm.dht.logic.records import Entry, Owner, Record, is_run_namespace


def live(latest: Mapping[Owner, Record], now_us: int) -> list[Record]:
    """Without tombstones and expired records; the record issued last comes first."""
    records = [record for record in latest.values() if not record.deleted and record.expiration_us > now_us]
    return sorted(records, key=lambda record: record.version, reverse=True)


def select(
    latest: Mapping[Owner, Record], key: Key, writer: PeerId | None, now_us: int
) -> Entry | dict[str, Entry] | None:
    """The answer to `get`. In a run's namespaces a writer has one entry, so that with `writer` the entry
    itself is the answer.
    """
    records = [record for record in live(latest, now_us) if writer is None or record.writer == writer]
    if not records:
        return None
    if records[0].subkey is None or (writer is not None and is_run_namespace(key.namespace)):
        return Entry.of(records[0])
    return dictionary(records)


def dictionary(records: Iterable[Record]) -> dict[str, Entry]:
    """Per subkey the entry issued last, by whomever; in the order of the subkeys. `records` as from `live`."""
    newest: dict[str, Record] = {}
    for record in records:
        if record.subkey is not None:
            newest.setdefault(record.subkey, record)
    return {subkey: Entry.of(newest[subkey]) for subkey in sorted(newest)}
