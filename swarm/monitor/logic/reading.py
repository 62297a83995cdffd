"""From a run's records in the DHT to a look: what is malformed in them is its writer's fault, counted and
passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from averaging.optim.progress.logic.reports import ProgressConfig, ProgressReport, ProgressTotal
from averaging.optim.progress.logic.shards import median_of
from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import Address, Contact, Key, PeerId
from swarm.dht.logic.records import Entry
from swarm.metrics.record import Metrics, metrics_keys
from swarm.monitor.logic.tracked import Heard

_ADDRESSES_MAX = 8
_TOTALS_MAX = 3  # of the root's aggregators, as trainers read them
_PROGRESS = ProgressConfig()


@dataclass(slots=True)
class Found:
    """What one look found."""

    peers: dict[PeerId, Heard] = field(default_factory=dict)
    contacts: dict[PeerId, Contact] = field(default_factory=dict)
    states: dict[PeerId, tuple[int, str]] = field(default_factory=dict)
    donors: dict[PeerId, Contact] = field(default_factory=dict)  # who gives its state
    refused: int = 0
    # of a run that is divided into shards: the middle one of those who add it up
    total: ProgressTotal | None = None


def keys_of(run_id: str) -> list[Key]:
    """Everything that a monitor reads in one look."""
    return [*metrics_keys(run_id), progress_key(run_id), donors_key(run_id)]


def progress_key(run_id: str) -> Key:
    return Key(f"run.{run_id}", "progress")


def donors_key(run_id: str) -> Key:
    return Key(f"run.{run_id}", "donors")


def read(run_id: str, answers: Mapping[Any, Any], now_s: float) -> Found:
    """`answers`: of `get_many(keys_of(run_id))`; `now_s`: swarm time, which no record is let run ahead of."""
    found = Found()
    for key in metrics_keys(run_id):
        for entry in _entries(answers.get(key)):
            try:
                metrics = Metrics.decode(entry.value)
            except PeerError:
                found.refused += 1
                continue
            at_s = min(metrics.at_s, entry.issued_at, now_s)
            _merge(found, entry, Heard(metrics=replace(metrics, at_s=at_s), expires_s=entry.expiration))
    totals: list[ProgressTotal] = []
    for entry in _entries(answers.get(progress_key(run_id))):
        try:
            if isinstance(entry.value, Mapping) and "total" in entry.value:
                totals.append(ProgressTotal.decode(entry.value["total"], now_s, _PROGRESS))
            claim = ProgressReport.decode(entry.value, now_s, _PROGRESS)
        except PeerError:
            found.refused += 1
            continue
        _merge(
            found, entry, Heard(claim=replace(claim, at_s=min(claim.at_s, now_s)), expires_s=entry.expiration)
        )
        contact = _contact(entry)
        if contact is not None:
            found.contacts[entry.writer] = contact
    found.total = median_of(totals[:_TOTALS_MAX]) if len(totals) > 1 else None
    for entry in _entries(answers.get(donors_key(run_id))):
        value = entry.value if isinstance(entry.value, Mapping) else {}
        epoch, digest = value.get("epoch"), value.get("digest")
        if value.get("canonical") and isinstance(epoch, int) and isinstance(digest, bytes) and digest:
            found.states[entry.writer] = (epoch, digest.hex())
        contact = _contact(entry)
        if contact is not None:
            found.donors[entry.writer] = contact
    return found


def _entries(answer: Any) -> Iterable[Entry]:
    return (
        [entry for entry in answer.values() if isinstance(entry, Entry)]
        if isinstance(answer, Mapping)
        else ()
    )


def _merge(found: Found, entry: Entry, heard: Heard) -> None:
    known = found.peers.get(entry.writer)
    if known is not None:
        heard = Heard(
            metrics=heard.metrics or known.metrics,
            claim=heard.claim or known.claim,
            expires_s=max(heard.expires_s, known.expires_s),
        )
    found.peers[entry.writer] = heard


def _contact(entry: Entry) -> Contact | None:
    addresses = entry.value.get("addresses") if isinstance(entry.value, Mapping) else None
    if not isinstance(addresses, list) or not all(isinstance(one, str) for one in addresses):
        return None
    try:
        found = tuple(Address.parse(one) for one in addresses[:_ADDRESSES_MAX])
    except UsageError:
        return None
    return Contact(entry.writer, found) if found else None
