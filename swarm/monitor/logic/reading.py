"""Decoding of a run's DHT records. Malformed records are counted and skipped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from averaging.optim.progress.logic.reports import ProgressReport, ProgressTotal
from averaging.optim.progress.logic.shards import median_of
from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import ADDRESSES_MAX, Address, Contact, Key, PeerId
from swarm.dht.logic.records import Entry
from swarm.metrics.record import Metrics, metrics_keys
from swarm.monitor.logic.tracked import PeerRecords

_TOTALS_MAX = 3  # totals of the root's aggregators; trainers read as many


@dataclass(slots=True)
class RunRecords:
    """Result of one read of a run's records."""

    peers: dict[PeerId, PeerRecords] = field(default_factory=dict)
    contacts: dict[PeerId, Contact] = field(default_factory=dict)
    states: dict[PeerId, tuple[int, str]] = field(default_factory=dict)
    donors: dict[PeerId, Contact] = field(default_factory=dict)  # peers that offer their state
    refused: int = 0
    # median of the aggregators' totals, if the run's reports are spread over shards
    total: ProgressTotal | None = None


def keys_of(run_id: str) -> list[Key]:
    """Return the keys of all records that a monitor reads in one poll."""
    return [*metrics_keys(run_id), progress_key(run_id), donors_key(run_id)]


def progress_key(run_id: str) -> Key:
    return Key(f"run.{run_id}", "progress")


def donors_key(run_id: str) -> Key:
    return Key(f"run.{run_id}", "donors")


def read(run_id: str, answers: Mapping[Any, Any], now_s: float) -> RunRecords:
    """Decode the `answers` of `get_many(keys_of(run_id))`. Times of records are limited to `now_s`, the
    current swarm time.
    """
    run_records = RunRecords()
    for key in metrics_keys(run_id):
        for entry in _entries(answers.get(key)):
            try:
                metrics = Metrics.decode(entry.value)
            except PeerError:
                run_records.refused += 1
                continue
            at_s = min(metrics.at_s, entry.issued_at, now_s)
            _merge(
                run_records,
                entry,
                PeerRecords(metrics=replace(metrics, at_s=at_s), expires_s=entry.expiration),
            )
    totals: list[ProgressTotal] = []
    for entry in _entries(answers.get(progress_key(run_id))):
        try:
            if isinstance(entry.value, Mapping) and "total" in entry.value:
                totals.append(ProgressTotal.decode(entry.value["total"], now_s))
            report = ProgressReport.decode(entry.value, now_s)
        except PeerError:
            run_records.refused += 1
            continue
        _merge(
            run_records,
            entry,
            PeerRecords(report=replace(report, at_s=min(report.at_s, now_s)), expires_s=entry.expiration),
        )
        contact = _contact(entry)
        if contact is not None:
            run_records.contacts[entry.writer] = contact
    run_records.total = median_of(totals[:_TOTALS_MAX]) if len(totals) > 1 else None
    for entry in _entries(answers.get(donors_key(run_id))):
        value = entry.value if isinstance(entry.value, Mapping) else {}
        epoch, digest = value.get("epoch"), value.get("digest")
        if value.get("canonical") and isinstance(epoch, int) and isinstance(digest, bytes) and digest:
            run_records.states[entry.writer] = (epoch, digest.hex())
        contact = _contact(entry)
        if contact is not None:
            run_records.donors[entry.writer] = contact
    return run_records


def _entries(answer: Any) -> Iterable[Entry]:
    return (
        [entry for entry in answer.values() if isinstance(entry, Entry)]
        if isinstance(answer, Mapping)
        else ()
    )


def _merge(run_records: RunRecords, entry: Entry, records: PeerRecords) -> None:
    known = run_records.peers.get(entry.writer)
    if known is not None:
        records = PeerRecords(
            metrics=records.metrics or known.metrics,
            report=records.report or known.report,
            expires_s=max(records.expires_s, known.expires_s),
        )
    run_records.peers[entry.writer] = records


def _contact(entry: Entry) -> Contact | None:
    addresses = entry.value.get("addresses") if isinstance(entry.value, Mapping) else None
    if not isinstance(addresses, list) or not all(isinstance(one, str) for one in addresses):
        return None
    try:
        parsed = tuple(Address.parse(one) for one in addresses[:ADDRESSES_MAX])
    except UsageError:
        return None
    return Contact(entry.writer, parsed) if parsed else None
