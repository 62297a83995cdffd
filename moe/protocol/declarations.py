"""Declarations: DHT records with which servers announce their experts, one record for each prefix of the
experts' names.

A record belongs to (prefix, server), whatever the number of experts. Under `experts/ffn` a server lists the
coordinates below which it has experts; under `experts/ffn.3` it lists the experts it hosts there, with their
schemas, its addresses and its load. A search therefore goes down the grid level by level, servers that host
the same expert are alternatives, and a server of 256 experts in a grid of 16 × 16 renews 17 records. One more
record under `expert-grids/all` names the server's grids for readers that know none, such as a monitor.
Records are signed, expire when they are not renewed, and are deleted when a server leaves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe.protocol.names import COORDINATE_MAX, ExpertUid
from swarm.core.errors import DeadlineExceeded, NetworkError, PeerError, UsageError
from swarm.core.ids import ADDRESSES_MAX, Contact, Key, PeerId
from swarm.dht.keeper import RecordKeeper
from swarm.dht.logic.records import Entry
from swarm.dht.logic.rules import NamespaceRules
from swarm.dht.logic.schema import Binary, Many, Number, Table, Text
from swarm.dht.service.dht_service import DhtService, StoreItem

_log = logging.getLogger(__name__)

NAMESPACE = "experts"
REPLICAS_MAX = 64  # replicas of one expert; a reader ignores further ones
_SCHEMAS_MAX = 64  # schemas of one server's experts under one prefix
_DIGEST_BYTES = 16
_WAIT_S_MAX = 3600.0
_RATE_MAX = 1e9
_PARALLEL_DELETES = 16
_WITHDRAW_TIMEOUT_S = 0.8  # less than the time for which a closing node waits for its callbacks
_GRIDS_PER_SERVER_MAX = 64  # grids that a server lists; readers find further grids only by name
_GRID_CHARACTERS_MAX = 200

_COORDINATES = Many(Number(0, COORDINATE_MAX, whole=True), COORDINATE_MAX + 1)
RULES = NamespaceRules(
    subkey_is_writer=True,
    schema=Table(
        {
            "addresses": Many(Text(300), ADDRESSES_MAX),
            "deeper": _COORDINATES,
            "schemas": Many(Binary(_DIGEST_BYTES, _DIGEST_BYTES), _SCHEMAS_MAX),
            "experts": Many(_COORDINATES, _SCHEMAS_MAX),
            "wait": Number(0.0, _WAIT_S_MAX),
            "rate": Number(0.0, _RATE_MAX),
            "busy": Number(0.0, 1.0),
        }
    ),
    value_bytes_max=32 << 10,
    ttl_s_max=3600.0,
    entries_per_writer_max=1,
)

GRIDS = Key("expert-grids", "all")
GRIDS_RULES = NamespaceRules(
    subkey_is_writer=True,
    schema=Many(Text(_GRID_CHARACTERS_MAX), _GRIDS_PER_SERVER_MAX),
    value_bytes_max=16 << 10,
    ttl_s_max=RULES.ttl_s_max,
    entries_per_writer_max=1,
)


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """The load that a server reports."""

    wait_s: float = 0.0  # expected wait of a new request
    samples_per_s: float = 0.0  # recent throughput while busy, over all experts; 0: unknown
    busy: float = 0.0  # fraction of the last half minute in which it computed


@dataclass(frozen=True, slots=True)
class ExpertReplica:
    """An expert on one server. Replicas with the same expert and schema are alternatives."""

    contact: Contact
    schema: bytes  # the schema's digest
    load: ServerLoad = ServerLoad()
    expiration: float = 0.0  # swarm time; the declaration is renewed long before

    @property
    def peer_id(self) -> PeerId:
        return self.contact.peer_id


@dataclass(frozen=True, slots=True)
class GridBranch:
    """The experts and longer prefixes directly below a prefix."""

    experts: Mapping[int, tuple[ExpertReplica, ...]] = field(default_factory=dict)
    deeper: frozenset[int] = frozenset()  # coordinates of longer prefixes

    @property
    def coordinates(self) -> frozenset[int]:
        """Return all coordinates that are alive, whether they are experts or prefixes."""
        return self.deeper | self.experts.keys()


TTL_S = 45.0  # experts of a server that crashed are still found for this long
RENEW_S = 15.0  # two renewals may get lost
_RETRY_S = 1.0  # pause after a renewal that no peer stored; doubles up to RENEW_S
_STORE_TIMEOUT_S = 8.0  # about half the time between two renewals


class Directory:
    """Reads declarations. Lives on the network loop."""

    def __init__(self, dht: DhtService) -> None:
        self._dht = dht
        _register(dht)

    async def grids(self, *, timeout_s: float) -> list[ExpertUid]:
        """Return the names of the grids that servers have declared, the one with the most servers first.
        Raises NetworkError when nobody answers.
        """
        found = await self._dht.get_many([GRIDS], timeout_s=timeout_s)
        if GRIDS not in found.answers:
            raise DeadlineExceeded(
                f"the grids of experts cannot be read from the DHT: {found.failures.get(GRIDS)}"
            )
        servers: Counter[ExpertUid] = Counter()
        answer = found.answers[GRIDS]
        for entry in answer.values() if isinstance(answer, dict) else ():
            servers.update({ExpertUid.parse_prefix(name) for name in entry.value if _is_grid(name)})
        return sorted(servers, key=lambda grid: (-servers[grid], grid))

    async def branches(
        self, prefixes: Sequence[ExpertUid], *, timeout_s: float, max_age_s: float | None = None
    ) -> dict[ExpertUid, GridBranch]:
        """Return what lies below each of the prefixes, all read together; an empty branch where nothing is
        declared.

        `max_age_s` is the age up to which cached answers will do, as in `DhtService.get`. A prefix for which
        nobody answered in time is left out. Raises NetworkError when that happens to all of them.
        """
        keys = {_key(prefix): prefix for prefix in prefixes}
        found = await self._dht.get_many(list(keys), max_age_s=max_age_s, timeout_s=timeout_s)
        if keys and not found.answers:
            reason = next(iter(found.failures.values()), None)
            raise DeadlineExceeded(f"the experts below {prefixes[0]} cannot be read from the DHT: {reason}")
        return {keys[Key.parse(name)]: _branch(answer) for name, answer in found.answers.items()}

    async def live(self, prefix: ExpertUid, *, timeout_s: float) -> Mapping[int, tuple[ExpertReplica, ...]]:
        """Return the replicas of the experts directly below a prefix, by last coordinate, the replica with
        the shortest wait first.
        """
        return (await self.branches([prefix], timeout_s=timeout_s))[prefix].experts

    async def replicas(
        self, uids: Sequence[ExpertUid], *, timeout_s: float, max_age_s: float | None = None
    ) -> dict[ExpertUid, tuple[ExpertReplica, ...]]:
        """Return the replicas of each of these experts, the one with the shortest wait first; () for an
        expert that nobody hosts.
        """
        branches = await self.branches(
            list({uid.prefix for uid in uids}), timeout_s=timeout_s, max_age_s=max_age_s
        )
        nothing = GridBranch()
        return {uid: branches.get(uid.prefix, nothing).experts.get(uid.coordinates[-1], ()) for uid in uids}


class Declarations:
    """Stores, renews and withdraws one server's records. Lives on the network loop. `experts` maps the name
    of each expert to the digest of its schema.
    """

    def __init__(
        self,
        dht: DhtService,
        own_contact: Callable[[], Contact],
        experts: Mapping[ExpertUid, bytes],
        load: Callable[[], ServerLoad],
    ) -> None:
        self._dht, self._own_contact, self._load = dht, own_contact, load
        self._prefixes = _by_prefix(experts)
        self._is_declared = False
        self._grids = sorted({prefix.block for prefix in self._prefixes})[:_GRIDS_PER_SERVER_MAX]
        self._keeper = RecordKeeper(
            self.declare,
            "the declarations of this server's experts",
            renew_s=RENEW_S,
            retry_s=_RETRY_S,
        )
        # set when others can find this server, or the first attempt failed
        self.declared = self._keeper.attempted
        _register(dht)

    async def declare(self) -> bool:
        """Store every record once. Return False when some record was not stored by any other peer of the
        DHT, or nobody can call this server: then it declares nothing, and withdraws what it had declared.
        """
        contact, load = self._own_contact(), self._load()
        if not contact.is_callable:
            if self._is_declared:
                self._is_declared = False
                await self.withdraw()
            return False
        self._is_declared = True
        items = [
            StoreItem(key=_key(prefix), value=_record(contact, load, content), subkey=str(contact.peer_id))
            for prefix, content in self._prefixes.items()
        ] + [StoreItem(key=GRIDS, value=self._grids, subkey=str(contact.peer_id))]
        results = await self._dht.store_many(items, ttl_s=TTL_S, timeout_s=_STORE_TIMEOUT_S)
        own_copies = 1 if contact.addresses else 0
        return all(result.replicas > own_copies for result in results)

    def renew_soon(self) -> None:
        """Store the records again soon: this server has other addresses."""
        self._keeper.renew_soon()

    async def renew(self) -> None:
        """Store the records again and again, until cancelled."""
        await self._keeper.run()

    async def withdraw(self) -> None:
        """Delete the records, so that nobody finds these experts here any more."""
        slots = asyncio.Semaphore(_PARALLEL_DELETES)
        try:
            async with asyncio.timeout(_WITHDRAW_TIMEOUT_S), asyncio.TaskGroup() as tasks:
                for key in (GRIDS, *map(_key, self._prefixes)):
                    tasks.create_task(self._delete(key, slots))
        except TimeoutError:
            _log.debug("some declarations were not withdrawn in time, and expire")

    async def _delete(self, key: Key, slots: asyncio.Semaphore) -> None:
        async with slots:
            try:
                await self._dht.delete(
                    key, subkey=str(self._own_contact().peer_id), timeout_s=_WITHDRAW_TIMEOUT_S
                )
            except (NetworkError, UsageError) as error:
                _log.debug("the declaration under %s was not withdrawn: %s", key, error)


@dataclass(slots=True)
class _Content:
    """The experts that a server has below one prefix."""

    deeper: set[int] = field(default_factory=set)
    experts: dict[bytes, list[int]] = field(default_factory=dict)  # schema digest -> last coordinates


def _by_prefix(experts: Mapping[ExpertUid, bytes]) -> dict[ExpertUid, _Content]:
    found: dict[ExpertUid, _Content] = {}
    for uid, digest in sorted(experts.items()):
        for depth, prefix in enumerate(uid.prefixes):
            content = found.setdefault(prefix, _Content())
            if depth + 1 == len(uid.coordinates):
                content.experts.setdefault(digest, []).append(uid.coordinates[depth])
            else:
                content.deeper.add(uid.coordinates[depth])
    for prefix, content in found.items():
        if len(content.experts) > _SCHEMAS_MAX:
            raise UsageError(
                f"one server hosts experts of at most {_SCHEMAS_MAX} schemas directly below {prefix}"
            )
    return found


def _record(contact: Contact, load: ServerLoad, content: _Content) -> dict[str, Any]:
    return {
        "addresses": contact.published,
        "deeper": sorted(content.deeper),
        "schemas": list(content.experts),
        "experts": list(content.experts.values()),
        "wait": min(max(load.wait_s, 0.0), _WAIT_S_MAX),
        "rate": min(max(load.samples_per_s, 0.0), _RATE_MAX),
        "busy": min(max(load.busy, 0.0), 1.0),
    }


def _branch(answer: Entry | dict[str, Entry] | None) -> GridBranch:
    deeper: set[int] = set()
    experts: dict[int, list[ExpertReplica]] = {}
    for entry in answer.values() if isinstance(answer, dict) else ():
        # this cannot fail: this peer registered RULES, so only valid records are returned
        value = entry.value
        try:
            contact = Contact.from_record(entry.writer, value["addresses"])
        except PeerError:
            continue  # the writer's record is invalid; the others are used
        deeper.update(value["deeper"])
        load = ServerLoad(float(value["wait"]), float(value["rate"]), float(value["busy"]))
        known: set[int] = set()  # a server counts as one replica, even if it lists an expert twice
        for digest, coordinates in zip(value["schemas"], value["experts"], strict=False):
            replica = ExpertReplica(contact, digest, load, entry.expiration)
            for coordinate in set(coordinates) - known:
                experts.setdefault(coordinate, []).append(replica)
            known.update(coordinates)
    for coordinate, replicas in experts.items():
        replicas.sort(key=lambda replica: (replica.load.wait_s, replica.peer_id))
        experts[coordinate] = replicas[:REPLICAS_MAX]
    return GridBranch(
        {coordinate: tuple(experts[coordinate]) for coordinate in sorted(experts)}, frozenset(deeper)
    )


def _is_grid(name: str) -> bool:
    """Return whether `name` is a grid's name without coordinates, as servers publish it."""
    try:
        return not ExpertUid.parse_prefix(name).coordinates
    except UsageError:
        return False


def _register(dht: DhtService) -> None:
    dht.register(NAMESPACE, RULES)
    dht.register(GRIDS.namespace, GRIDS_RULES)


def _key(prefix: ExpertUid) -> Key:
    return Key(NAMESPACE, str(prefix))
