"""The catalogue of open runs: entries in the DHT by which strangers find runs, and the choice of those to
show.

An entry names a run, its founder and the member that lists it. The run's id follows from it, and what is
shown of the run is its specification, which its owner has signed. Entries are spread over the keys of the
namespace by their founder.

Identities are free, so nothing here depends on their number. Replicas never drop an entry in favour of a
later one, so a flood of entries cannot hide a run whose members renew its entry. A reader takes entries in
turn from the networks of the addresses that their members claim. It drops entries whose member does not
answer at its address, so an attacker gets as many turns as it has networks.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from swarm.core.errors import NetworkError, PeerError, UsageError
from swarm.core.ids import RUN_NAME, Contact, Key, PeerId
from swarm.dht.logic.records import Entry
from swarm.dht.logic.run_rules import CATALOGUE, CATALOGUE_SHARDS
from swarm.net.scope import prefix_of
from swarm.run.signed import SignedSpecification, run_id_of

if TYPE_CHECKING:
    from swarm.dht.service.dht_service import DhtService

SHOWN_MAX: Final = 100  # runs that a reader looks at
_DIALED_MAX: Final = 300  # members that a reader calls at most to find these runs
_AT_ONCE: Final = 32
_READ_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One entry that could be read. Its id follows from founder, name and recovery key."""

    name: str
    run_id: str
    founder: PeerId
    member: Contact  # the member that lists the run


def catalogue_key(founder: PeerId) -> Key:
    """Return the key under which the runs of an owner are listed."""
    shard = int.from_bytes(hashlib.sha256(founder.to_bytes()).digest()[:4], "big") % CATALOGUE_SHARDS
    return Key(CATALOGUE, str(shard))


def entry_value(signed: SignedSpecification, member: Contact) -> dict[str, object]:
    """Return the value with which a member lists a run."""
    value: dict[str, object] = {
        "name": signed.name,
        "owner": signed.founder.to_bytes(),
        "addresses": list(member.published),
    }
    if signed.specification.recovery_peer is not None:
        value["recovery_key"] = signed.specification.recovery_peer.to_bytes()
    return value


def is_listed(signed: SignedSpecification) -> bool:
    """Return whether the catalogue lists a run: an open one that has not ended."""
    return signed.specification.members == "open" and not signed.specification.ended


def read_entry(key: Key, entry: Entry) -> CatalogueEntry:
    """Return an entry under a key of the DHT. Raise PeerError when it is not valid."""
    value = entry.value
    try:
        if not isinstance(value, dict) or not RUN_NAME.fullmatch(value["name"]):
            raise PeerError("an entry of the catalogue without a run's name")
        founder, recovery = PeerId.from_bytes(value["owner"]), value.get("recovery_key")
        run_id = run_id_of(
            founder, value["name"], PeerId.from_bytes(recovery) if recovery is not None else None
        )
        member = Contact.from_record(entry.writer, value.get("addresses"))
    except (UsageError, TypeError, KeyError) as error:
        raise PeerError(f"an entry of the catalogue that cannot be read: {error}") from None
    if entry.subkey != run_id or key != catalogue_key(founder):
        raise PeerError("an entry of the catalogue under the key of another owner")
    return CatalogueEntry(name=value["name"], run_id=run_id, founder=founder, member=member)


def by_turns(entries: Iterable[CatalogueEntry], known: Collection[PeerId] = ()) -> list[CatalogueEntry]:
    """Return the entries in the order in which to check them: first those of members that are `known` to this
    peer, then one entry of each network in turn. Within a network, founders take turns.
    """
    networks: OrderedDict[str, OrderedDict[PeerId, list[CatalogueEntry]]] = OrderedDict()
    for one in sorted(entries, key=lambda one: (one.member.peer_id not in known, one.run_id)):
        host = one.member.addresses[0].host if one.member.addresses else ""
        network = "" if one.member.peer_id in known else prefix_of(host) or "relayed"
        networks.setdefault(network, OrderedDict()).setdefault(one.founder, []).append(one)
    order = [_by_turns(list(founders.values())) for founders in networks.values()]
    of_known = [entries for network, entries in zip(networks, order, strict=True) if not network]
    others = [entries for network, entries in zip(networks, order, strict=True) if network]
    return [*_by_turns(of_known), *_by_turns(others)]


def _by_turns(lists: Sequence[Sequence[CatalogueEntry]]) -> list[CatalogueEntry]:
    longest = max(map(len, lists), default=0)
    return [one[place] for place in range(longest) for one in lists if place < len(one)]


async def read_catalogue(
    dht: DhtService, answers: Callable[[Contact], Awaitable[bool]], known: Collection[PeerId] = ()
) -> list[CatalogueEntry]:
    """Return at most `SHOWN_MAX` runs of the catalogue, each listed by a member that answers. Runs on the
    network thread.

    `answers` returns whether a peer answers a call now; `known`: peers that this one has met before.
    """
    keys = [Key(CATALOGUE, str(shard)) for shard in range(CATALOGUE_SHARDS)]
    async with asyncio.TaskGroup() as group:
        read = [(key, group.create_task(_read_key(dht, key))) for key in keys]
    entries = []
    for key, task in read:
        for entry in task.result():
            with contextlib.suppress(PeerError):
                entries.append(read_entry(key, entry))
    found: dict[str, CatalogueEntry] = {}
    waiting = by_turns(entries, known)[:_DIALED_MAX]
    while waiting and len(found) < SHOWN_MAX:
        asked = [one for one in waiting[:_AT_ONCE] if one.run_id not in found]
        waiting = waiting[_AT_ONCE:]
        async with asyncio.TaskGroup() as group:
            calls = [(one, group.create_task(_answers(answers, one.member))) for one in asked]
        for one, call in calls:
            if call.result():
                found.setdefault(one.run_id, one)
    return list(found.values())[:SHOWN_MAX]


async def _read_key(dht: DhtService, key: Key) -> list[Entry]:
    try:
        return await dht.get_all(key, latest=True, timeout_s=_READ_S)
    except NetworkError:
        return []


async def _answers(answers: Callable[[Contact], Awaitable[bool]], member: Contact) -> bool:
    return await answers(member)
