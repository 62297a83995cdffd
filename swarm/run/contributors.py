"""Read what each peer has given to a run, from the receipts and certificates that its members keep."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from averaging.history.chain import Chain
from averaging.history.receipts import Receipt, Totals, read_totals
from averaging.optim.exchange import fetch_history, fetch_receipt
from swarm.core.errors import PeerError, SwarmError
from swarm.core.ids import Contact, PeerId
from swarm.dht.logic.records import Entry
from swarm.metrics.record import Metrics, metrics_keys
from swarm.net.rpc import Caller

if TYPE_CHECKING:
    from swarm.dht.service.dht_service import DhtService

ASKED_MAX = 6  # members that are asked
_NAMES_READ_S = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributor:
    """One peer's contribution to a run since it began."""

    peer_id: PeerId
    samples: int
    rounds: int
    name: str = ""  # chosen by the peer, without control characters; "": it gives none, or is offline


def ranked(totals: Totals, names: Mapping[PeerId, str]) -> list[Contributor]:
    """Return the contributors, the one with the most samples first."""
    found = [
        Contributor(peer_id=peer, samples=credit.samples, rounds=credit.rounds, name=names.get(peer, ""))
        for peer, credit in totals.by_peer.items()
    ]
    return sorted(found, key=lambda one: (-one.samples, -one.rounds, one.peer_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """The samples that were given to a run, as far as its members sign them."""

    totals: Totals
    # some of the epochs that members still know had several groups: each credits only the peers that decided
    # it
    is_partial: bool


async def fetch_totals(caller: Caller, run_id: str, contacts: Iterable[Contact]) -> RunTotals:
    """Return the totals of a run from the first few members that answer. Runs on the network thread.

    The totals come from the history that most of these members share. Raises PeerError that says why there
    are no totals.
    """
    return await totals_of(caller, run_id, await fetch_chains(caller, run_id, contacts))


async def fetch_chains(
    caller: Caller, run_id: str, contacts: Iterable[Contact]
) -> dict[Contact, Chain | SwarmError]:
    """Return the valid histories of the first few of these peers, or the reason for which there is none. Runs
    on the network thread.
    """

    async def ask(contact: Contact) -> Chain | SwarmError:
        try:
            chain = (await fetch_history(caller, run_id, contact, [])).chain
            await asyncio.get_running_loop().run_in_executor(None, chain.check, run_id)
        except SwarmError as error:
            return error
        return chain

    async with asyncio.TaskGroup() as group:
        asked = {one: group.create_task(ask(one)) for one in list(contacts)[:ASKED_MAX]}
    return {contact: task.result() for contact, task in asked.items()}


async def totals_of(
    caller: Caller, run_id: str, histories: Mapping[Contact, Chain | SwarmError]
) -> RunTotals:
    """Return the totals of a run from the result of `fetch_chains`, whose peers are asked for their receipts.
    Runs on the network thread. Raises PeerError that says why there are no totals.
    """
    chains = {contact: chain for contact, chain in histories.items() if isinstance(chain, Chain)}
    if not chains:
        reasons = [str(one) for one in histories.values()] or ["no member of the run is known"]
        raise PeerError(f"the contributions to run {run_id} could not be read: {reasons[-1]}")

    async def ask(contact: Contact) -> Receipt | None:
        with contextlib.suppress(SwarmError):
            return await fetch_receipt(caller, run_id, contact)
        return None

    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(contact)) for contact in chains]
    receipts = [receipt for task in asked if (receipt := task.result()) is not None]
    chain = _shared(list(chains.values()))
    totals = await asyncio.get_running_loop().run_in_executor(None, read_totals, chain, run_id, receipts)
    return RunTotals(
        totals=totals,
        is_partial=chain.root_grid_rounds > 1
        or any(one.proposal.grid_rounds > 1 for one in chain.certificates),
    )


def _shared(chains: Sequence[Chain]) -> Chain:
    """Return the chain whose history most of the others share, the longest of these."""
    heads = [{chain.head, *(one.head for one in chain.certificates)} for chain in chains]

    def agreement(place: int) -> tuple[int, int, int]:
        supporters = sum(
            chains[other].last_head in heads[place] or chains[place].last_head in heads[other]
            for other in range(len(chains))
        )
        return supporters, chains[place].epoch, -place

    return chains[max(range(len(chains)), key=agreement)]


async def read_names(dht: DhtService, run_id: str, peers: Collection[PeerId]) -> dict[PeerId, str]:
    """Return the names that these peers give themselves in their metrics, without control characters."""
    names = {}
    with contextlib.suppress(SwarmError):
        many = await dht.get_many(metrics_keys(run_id), timeout_s=_NAMES_READ_S)
        for answer in many.answers.values():
            for entry in answer.values() if isinstance(answer, Mapping) else ():
                if isinstance(entry, Entry) and entry.writer in peers:
                    with contextlib.suppress(PeerError):
                        names[entry.writer] = Metrics.decode(entry.value).name
    return names
