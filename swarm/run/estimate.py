"""Estimate the traffic of a run before joining it, from its specification and the progress that its members
report.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from averaging.optim.progress.logic.reports import ProgressReport, ProgressTotal
from averaging.optim.progress.logic.shards import AGGREGATORS, TreeNode, median_of
from averaging.reduction.lowrank import Factoring
from swarm.compression import resolve
from swarm.core.clock import Clock
from swarm.core.errors import PeerError
from swarm.core.ids import Contact, Key, PeerId
from swarm.dht.service.dht_service import Entry
from swarm.run.specification import RunSpecification
from swarm.run.task import TaskDescription

if TYPE_CHECKING:
    from swarm.dht.service.dht_service import DhtService


_READ_S = 5.0
# root of the progress tree: a small run's reports, or a large run's records of how it is divided
_WHOLE = TreeNode(0, 0, 0)


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """Size and throughput of a run, as its volunteers report them now."""

    peers: int
    samples_per_s: float
    epoch: int


async def estimate_run(dht: DhtService, run_id: str, own: PeerId, clock: Clock) -> RunEstimate:
    """Sum up the progress reports of a run, except this peer's own. If the reports are spread over shards,
    return the median of the aggregators' totals. Malformed reports are ignored.
    """
    entries = [one for one in await _progress(dht, run_id, _WHOLE) if one.writer != own]
    reports = []
    for entry in entries:
        with contextlib.suppress(PeerError):
            reports.append(ProgressReport.decode(entry.value, clock.swarm_s()))
    total = _total(entries, clock)
    if total is not None and total.peers > len(reports):
        return RunEstimate(total.peers, total.rate, total.epoch)
    return RunEstimate(
        len(reports),
        sum(report.rate for report in reports),
        max((report.epoch for report in reports), default=0),
    )


async def read_members(dht: DhtService, run_id: str, clock: Clock) -> list[Contact]:
    """Return the contacts of peers that train a run and accept calls: all of them, or those of one shard if
    the run's reports are spread over shards.
    """
    entries = await _progress(dht, run_id, _WHOLE)
    total = _total(entries, clock)
    if total is not None:
        entries += await _progress(dht, run_id, TreeNode(total.bits, 0, 0))
    contacts = []
    for entry in entries:
        if isinstance(entry.value, dict):
            with contextlib.suppress(PeerError):
                contacts.append(Contact.from_record(entry.writer, entry.value.get("addresses")))
    return [contact for contact in contacts if contact.is_callable]


async def _progress(dht: DhtService, run_id: str, node: TreeNode) -> list[Entry]:
    found = await dht.get(Key(f"run.{run_id}", node.name), latest=True, timeout_s=_READ_S)
    return list(found.values()) if isinstance(found, dict) else []


def _total(entries: Iterable[Entry], clock: Clock) -> ProgressTotal | None:
    """Return the median of the totals of a large run; None for a run with reports in one dictionary."""
    totals = []
    for entry in entries:
        if isinstance(entry.value, dict) and "total" in entry.value:
            with contextlib.suppress(PeerError):
                totals.append(ProgressTotal.decode(entry.value["total"], clock.swarm_s()))
    total = median_of(totals[:AGGREGATORS])
    return total if total is not None and total.bits else None


def round_bytes(specification: RunSpecification, description: TaskDescription, peers: int) -> int:
    """Return how many bytes one of `peers` volunteers sends in a mean epoch. It receives as much.

    An epoch is a butterfly all-reduce of the values that the mode averages, plus a share of the less frequent
    average of the state. A single peer would send nothing, so at least two peers are assumed.
    """
    mode, parameters = specification.mode, description.parameters
    members = 2 if mode.name == "gossip" else max(2, min(peers, specification.target_group_size))
    share = 2 * (members - 1) / members
    epochs = epoch_bytes(specification, description)
    every = specification.state_sync_epochs or mode.state_sync_epochs
    state = (
        parameters * 4 * (1 + mode.statistics(specification.optimizer.statistics)) / every
        if mode.state_sync_epochs and every
        else 0.0
    )
    return int(share * (epochs + state))


def epoch_bytes(specification: RunSpecification, description: TaskDescription) -> int:
    """Return the encoded size of the values that the mode averages in one epoch."""
    mode, strategy, codec, parameters = (
        specification.mode,
        specification.strategy,
        specification.codec,
        description.parameters,
    )
    if strategy is not None:
        factored = Factoring.of(description.shapes or [(parameters,)], strategy.build())
        vectors = (factored.first_numel, factored.second_numel)
        return sum(resolve(codec, "parameter", elements).encoded_bytes(elements) for elements in vectors)
    elements = 2 * parameters if mode.name == "gossip" else -(-parameters // (mode.streaming or 1))
    return resolve(codec, mode.role, elements).encoded_bytes(elements)


def bytes_per_hour(
    specification: RunSpecification, description: TaskDescription, run: RunEstimate
) -> float | None:
    """Return the expected traffic in each direction, or None if no peer reports a throughput.

    Assumes that this machine trains at the mean pace of the others.
    """
    if run.samples_per_s <= 0:
        return None
    rate = run.samples_per_s * (run.peers + 1) / run.peers
    return (
        3600 * rate / specification.target_batch_size * round_bytes(specification, description, run.peers + 1)
    )
