"""What taking part will mean: who trains a run already, at what pace, and what traffic follows from it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from averaging.optim.contacts import contact_of
from averaging.optim.progress.logic.reports import ProgressConfig, ProgressReport
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


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """The pace of a run, from what its volunteers claim at the moment."""

    peers: int
    samples_per_s: float
    epoch: int


async def look(
    dht: DhtService, run_id: str, own: PeerId, clock: Clock, *, timeout_s: float = 5.0
) -> RunEstimate:
    """Read the progress records of a run; malformed ones are passed over."""
    found = await dht.get(Key(f"run.{run_id}", "progress"), latest=True, timeout_s=timeout_s)
    claims = []
    for entry in found.values() if isinstance(found, dict) else ():
        if isinstance(entry, Entry) and entry.writer != own:
            try:
                claims.append(ProgressReport.decode(entry.value, clock.swarm_s(), ProgressConfig()))
            except PeerError:
                continue
    return RunEstimate(
        len(claims), sum(claim.rate for claim in claims), max((claim.epoch for claim in claims), default=0)
    )


async def members(dht: DhtService, run_id: str, *, timeout_s: float = 5.0) -> list[Contact]:
    """Peers that train a run and can be called."""
    found = await dht.get(Key(f"run.{run_id}", "progress"), latest=True, timeout_s=timeout_s)
    contacts = []
    for entry in found.values() if isinstance(found, dict) else ():
        if isinstance(entry.value, dict):
            with contextlib.suppress(PeerError):
                contacts.append(contact_of(entry.writer, entry.value.get("addresses")))
    return [contact for contact in contacts if contact.addresses]


def round_bytes(specification: RunSpecification, described: TaskDescription, peers: int) -> int:
    """What one of `peers` volunteers sends in an average epoch, and as much receives.

    That is a butterfly all-reduce of what the mode averages, and now and then of the state. A lone peer sends
    nothing: two are assumed at least.
    """
    mode, parameters = specification.mode, described.parameters
    members = 2 if mode.name == "gossip" else max(2, min(peers, specification.target_group_size))
    share = 2 * (members - 1) / members
    epochs = epoch_bytes(specification, described)
    every = specification.state_sync_epochs or mode.state_sync_epochs
    state = (
        parameters * 4 * (1 + mode.statistics(specification.optimizer.name)) / every
        if mode.state_sync_epochs and every
        else 0.0
    )
    return int(share * (epochs + state))


def epoch_bytes(specification: RunSpecification, described: TaskDescription) -> int:
    """Return the size of what the mode averages in one epoch, encoded."""
    mode, strategy, codec, parameters = (
        specification.mode,
        specification.strategy,
        specification.codec,
        described.parameters,
    )
    if strategy is not None:
        factored = Factoring.of(described.shapes or [(parameters,)], strategy.build())
        vectors = (factored.first_numel, factored.second_numel)
        return sum(resolve(codec, "parameter", elements).encoded_bytes(elements) for elements in vectors)
    elements = 2 * parameters if mode.name == "gossip" else -(-parameters // (mode.streaming or 1))
    return resolve(codec, mode.role, elements).encoded_bytes(elements)


def bytes_per_hour(
    specification: RunSpecification, described: TaskDescription, outlook: RunEstimate
) -> float | None:
    """Expected traffic each way, if this machine adds as much as the others do on average; None when nobody's
    pace is known.
    """
    if outlook.samples_per_s <= 0:
        return None
    rate = outlook.samples_per_s * (outlook.peers + 1) / outlook.peers
    return (
        3600
        * rate
        / specification.target_batch_size
        * round_bytes(specification, described, outlook.peers + 1)
    )
