"""The swarm's shared state: store, get and delete signed, expiring records at the peers nearest to their key.

`DhtService` lives on the network loop; `Dht` is what users see as `node.dht`. What a key holds and who may write it is described in
`records` and `reading`. Each operation is a search for the key's replicas whose calls carry the question itself, so that in a swarm
that this peer knows whole it is one parallel round of calls.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from swarm.dht.config import DhtConfig
from swarm.dht.overlay import FIND, STORE, DhtClock, Overlay
from swarm.dht.reading import live, select
from swarm.dht.records import TTL_MAX_US, Entry, Owner, Record, RecordValidator, Signer, Value, encode_value, is_run_namespace, signed
from swarm.dht.replica import Replica
from swarm.dht.storage import Storage, latest_by_owner
from swarm.dht.upkeep import Upkeep
from swarm.dht.wire import id_to_wire, key_to_wire, record_to_wire
from swarm.errors import DeadlineExceeded, PeerError, UsageError
from swarm.ids import Contact, Key, PeerId
from swarm.net.rpc import Caller, Handlers
from swarm.peerbook import PeerBook
from swarm.runtime.supervise import Supervisor
from swarm.runtime.thread import NetworkThread
from swarm.wire.dht_pb2 import DhtFindQuery, DhtFindRequest, DhtStoreRequest

__all__ = ["Dht", "DhtConfig", "DhtService", "Entry", "StoreResult"]

T = TypeVar("T")
_WRITTEN_MAX = 4096
_REFUSALS_MAX = 8
_SETTLE_S_MAX = 3.0


@dataclass(frozen=True, slots=True)
class StoreResult:
    """Whether at least one replica holds the record, and how many do. `refusals`: what replicas that do not hold it said."""

    ok: bool
    replicas: int
    refusals: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class _Search:
    """A read in progress, shared by everybody who asks for the same meanwhile."""

    started_s: float
    latest: dict[Owner, Record] = field(default_factory=dict)
    asked: int = 0
    answers: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(kw_only=True, eq=False)
class DhtService:
    """A peer's DHT. Made on the network loop; its background tasks belong to `supervisor`. All of its methods are for that loop."""

    own: Callable[[], Contact]  # this peer as others should call it, as of now; without addresses it holds nothing for others
    identity: Signer
    caller: Caller
    handlers: Handlers
    book: PeerBook
    clock: DhtClock
    supervisor: Supervisor
    config: DhtConfig = field(default_factory=DhtConfig)
    rng: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self.overlay = Overlay(self.own, self.caller, self.book, self.clock, self.config)
        self.storage = Storage(self.config.storage)
        self._validator = RecordValidator()
        self._replica = Replica(self.overlay, self.storage, self._validator, self.handlers)
        self._upkeep = Upkeep(self.overlay, self.storage, self.supervisor, self.rng)
        self._searches: dict[tuple[Key, bool], _Search] = {}
        self._written: OrderedDict[tuple[Key, str | None], int] = OrderedDict()  # latest expiration of what this peer wrote
        self._last_issued_us = 0
        self._joins = 0

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    async def join(self, contacts: Sequence[Contact]) -> None:
        """Try all contacts once, together, and meet this peer's neighbours through those that answer. Raises for none that does not.

        What was tried in vain is tried again in the background, as are the peers of the book, until one is known, and now and then
        after that.
        """
        self._joins += 1
        try:
            await self._upkeep.join(contacts)
        finally:
            self._joins -= 1

    async def store(self, key: Key, value: Value, *, ttl_s: float, subkey: str | None = None, timeout_s: float = 10.0) -> StoreResult:
        """Sign and store a value (at most 64 KiB as msgpack) for `ttl_s` seconds (at most 24 h); replaces this peer's own entry of that
        subkey.

        In a run's namespace the subkey is this peer's id, and may be left out. UsageError: the value, the subkey or the time is not
        allowed. What replicas and the network do is in the result.
        """
        raw = encode_value(value)
        if not 0 < ttl_s <= TTL_MAX_US / 1e6:
            raise UsageError(f"ttl_s must be above 0 and at most {TTL_MAX_US // 1_000_000} (24 hours), not {ttl_s}")
        record = self._issue(key, self._subkey(key, subkey), raw, round(ttl_s * 1e6))
        return await self._store(record, timeout_s)

    async def delete(self, key: Key, *, subkey: str | None = None, timeout_s: float = 10.0) -> StoreResult:
        """Remove this peer's own entry: a tombstone takes its place until the entry would have expired."""
        subkey = self._subkey(key, subkey)
        deadline_s = self.clock.monotonic_s() + timeout_s
        expiration_us = self._written.get((key, subkey), 0)
        now_us = self.overlay.now_us
        if expiration_us <= now_us:  # not written by this process, perhaps by one before it
            search = await self._read(key, exhaustive=False, timeout_s=timeout_s / 2)
            found = search.latest.get((self.peer_id, subkey))
            expiration_us = found.expiration_us if found and found.expiration_us > now_us else now_us + TTL_MAX_US
        record = self._issue(key, subkey, b"", expiration_us - now_us, deleted=True)
        return await self._store(record, deadline_s - self.clock.monotonic_s())

    async def get(
        self, key: Key, *, writer: PeerId | None = None, latest: bool = False, timeout_s: float = 10.0
    ) -> Entry | dict[str, Entry] | None:
        """What is stored under a key: the entry issued last, or a dictionary {subkey: entry}; None when there is nothing.

        `writer`: only that peer's (in a run's namespace its one entry). `latest`: ask the 20 nearest peers instead of the replicas alone.
        DeadlineExceeded when no peer answered in time; what part of them answered is used otherwise.
        """
        search = await self._read(key, exhaustive=latest, timeout_s=timeout_s)
        return select(search.latest, key, writer, self.overlay.now_us)

    async def get_all(self, key: Key, *, latest: bool = False, timeout_s: float = 10.0) -> list[Entry]:
        """Every writer's live entries, plain and sub-keyed, the one issued last first."""
        search = await self._read(key, exhaustive=latest, timeout_s=timeout_s)
        return [Entry.of(record) for record in live(search.latest, self.overlay.now_us)]

    def _subkey(self, key: Key, subkey: str | None) -> str | None:
        if subkey is None and is_run_namespace(key.namespace):
            return str(self.peer_id)
        return subkey

    def _issue(self, key: Key, subkey: str | None, raw: bytes, ttl_us: int, *, deleted: bool = False) -> Record:
        """A record of this peer's, later than all it issued before."""
        issued_at_us = max(self.overlay.now_us, self._last_issued_us + 1)
        expiration_us = issued_at_us + min(max(ttl_us, 1), TTL_MAX_US)
        record = Record(
            key=key, subkey=subkey, value=raw, issued_at_us=issued_at_us, expiration_us=expiration_us, writer=self.peer_id, deleted=deleted
        )
        try:
            record = signed(record, self.identity)
            refusal = self._validator.refusal(record, self.overlay.now_us)
        except UnicodeEncodeError as error:
            raise UsageError(f"a subkey is text that can be encoded as UTF-8: {error}") from error
        if refusal:
            raise UsageError(f"cannot store under {key}: {refusal}")
        self._last_issued_us = issued_at_us
        self._written[key, subkey] = max(expiration_us, self._written.pop((key, subkey), 0))
        if len(self._written) > _WRITTEN_MAX:
            self._written.popitem(last=False)
        return record

    async def _settle(self, timeout_s: float) -> None:
        """While this peer is still joining, give it a moment to meet somebody: a read would find nothing, a write would stay here."""
        if self._joins and not len(self.overlay.table):
            try:
                async with asyncio.timeout(min(timeout_s, _SETTLE_S_MAX)):
                    await self._upkeep.settled.wait()
            except TimeoutError:
                return

    async def _store(self, record: Record, timeout_s: float) -> StoreResult:
        self._searches.pop((record.key, False), None)  # a read that begins now must see this write
        self._searches.pop((record.key, True), None)
        write = _Write(self.overlay, record)
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                await self._settle(timeout_s)
                await write.run()
        except TimeoutError:
            write.own_holds = write.own_holds or not write.held  # better here, from where newcomers get it, than nowhere
        if write.own_holds and self.own().addresses:
            write.note(self.peer_id, self.storage.store(record, self.overlay.now_us) or "")
        return StoreResult(bool(write.held), len(write.held), tuple(dict.fromkeys(write.refusals.values()))[:_REFUSALS_MAX])

    async def _read(self, key: Key, *, exhaustive: bool, timeout_s: float) -> _Search:
        deadline_s = self.clock.monotonic_s() + timeout_s
        await self._settle(timeout_s)
        search = self._searches.get((key, exhaustive))
        if search is None or self.clock.monotonic_s() > search.started_s + self.config.share_s:
            search = self._searches[key, exhaustive] = _Search(self.clock.monotonic_s())
            task = self.supervisor.spawn(f"DHT read of {key}", functools.partial(self._search, key, exhaustive, search))
            task.add_done_callback(lambda _: search.done.set())
        try:
            async with asyncio.timeout(max(deadline_s - self.clock.monotonic_s(), 0.0)):
                await search.done.wait()
        except TimeoutError:
            if search.asked and not search.answers and not search.latest:
                text = f"none of the {search.asked} peers asked for {key} answered within {timeout_s:g} s"
                raise DeadlineExceeded(f"{text}: see node.peers() for who is known") from None
        return search

    async def _search(self, key: Key, exhaustive: bool, search: _Search) -> None:
        """Ask the replicas and merge what they hold. Ends by `search_timeout_s`, whoever waits."""
        overlay, config = self.overlay, self.config
        request = DhtFindRequest(sender=overlay.sender, queries=[DhtFindQuery(key=key_to_wire(key))])

        async def ask(contact: Contact) -> Sequence[Contact] | None:
            search.asked += 1
            reply = await overlay.ask(contact, FIND, request)
            if reply is None or len(reply.results) != 1:
                return None
            closer = overlay.heard_of(reply.results[0].nearest)
            records = [record for record in await self._replica.accepted(reply.results[0].records) if isinstance(record, Record)]
            self._merge(search, [record for record in records if record.key == key])
            search.answers += 1
            return closer

        wanted = config.routing.bucket_max if exhaustive else config.replicas
        self._merge(search, self.storage.records(key, overlay.now_us))
        try:
            async with asyncio.timeout(config.search_timeout_s):
                nearest = await overlay.search(overlay.lookup(key.dht_id, wanted=wanted, parallel=config.replicas), ask)
            if any(contact.peer_id == self.peer_id for contact in nearest[: config.replicas]):
                for record in search.latest.values():  # this peer is a replica: what it did not know it keeps
                    self.storage.store(record, overlay.now_us)
        except TimeoutError:
            return
        finally:
            # Written here meanwhile, by this peer or by others.
            self._merge(search, self.storage.records(key, overlay.now_us))
            if self._searches.get((key, exhaustive)) is search:
                del self._searches[key, exhaustive]

    def _merge(self, search: _Search, records: Sequence[Record]) -> None:
        search.latest = latest_by_owner([*search.latest.values(), *records])


class _Write:
    """One record on its way to its replicas."""

    def __init__(self, overlay: Overlay, record: Record) -> None:
        self._overlay = overlay
        self._record = record
        self.held: set[PeerId] = set()
        self.refusals: dict[PeerId, str] = {}
        self.own_holds = False

    def note(self, peer: PeerId, refusal: str) -> None:
        if refusal:
            self.refusals[peer] = refusal[:200]
        else:
            self.held.add(peer)

    async def run(self) -> None:
        overlay, config, target = self._overlay, self._overlay.config, self._record.key.dht_id
        # A table that never filled a bucket probably knows everybody: then whom we ask first are the replicas, and asking is storing.
        small = len(overlay.table) < config.routing.bucket_max
        lookup = overlay.lookup(target, wanted=config.replicas, parallel=config.replicas)
        nearest = await overlay.search(lookup, self._store_at if small else self._find_at)
        self.own_holds = any(contact.peer_id == overlay.own_id for contact in nearest)
        async with asyncio.TaskGroup() as group:
            for contact in nearest:
                if contact.peer_id != overlay.own_id and contact.peer_id not in self.held | set(self.refusals):
                    group.create_task(self._place(contact))

    async def _place(self, contact: Contact) -> None:
        try:
            await self._store_at(contact)
        except PeerError:
            self._overlay.failed(contact.peer_id, broke_protocol=True)

    async def _store_at(self, contact: Contact) -> Sequence[Contact] | None:
        overlay, record = self._overlay, self._record
        target = id_to_wire(record.key.dht_id)
        reply = await overlay.ask(contact, STORE, DhtStoreRequest(sender=overlay.sender, records=[record_to_wire(record)], target=target))
        if reply is None or len(reply.refusals) != 1:
            return None
        self.note(contact.peer_id, reply.refusals[0])
        return overlay.heard_of(reply.nearest)

    async def _find_at(self, contact: Contact) -> Sequence[Contact] | None:
        overlay = self._overlay
        query = DhtFindQuery(target=id_to_wire(self._record.key.dht_id))
        reply = await overlay.ask(contact, FIND, DhtFindRequest(sender=overlay.sender, queries=[query]))
        return overlay.heard_of(reply.results[0].nearest) if reply is not None and len(reply.results) == 1 else None


class Dht:
    """`node.dht`: the same operations for any thread but the network's. A key may be given as text: `namespace/name`, or a name in
    `public`.
    """

    def __init__(self, service: DhtService, network: NetworkThread) -> None:
        self.service = service
        self._network = network

    def store(self, key: str | Key, value: Value, ttl_s: float, subkey: str | None = None, timeout_s: float = 10.0) -> StoreResult:
        """See `DhtService.store`."""
        return self._run(self.service.store(_key(key), value, ttl_s=ttl_s, subkey=subkey, timeout_s=timeout_s), timeout_s)

    def get(
        self, key: str | Key, writer: PeerId | str | None = None, latest: bool = False, timeout_s: float = 10.0
    ) -> Entry | dict[str, Entry] | None:
        """See `DhtService.get`."""
        who = PeerId.parse(writer) if isinstance(writer, str) else writer
        return self._run(self.service.get(_key(key), writer=who, latest=latest, timeout_s=timeout_s), timeout_s)

    def get_all(self, key: str | Key, latest: bool = False, timeout_s: float = 10.0) -> list[Entry]:
        """See `DhtService.get_all`."""
        return self._run(self.service.get_all(_key(key), latest=latest, timeout_s=timeout_s), timeout_s)

    def delete(self, key: str | Key, subkey: str | None = None, timeout_s: float = 10.0) -> StoreResult:
        """See `DhtService.delete`."""
        return self._run(self.service.delete(_key(key), subkey=subkey, timeout_s=timeout_s), timeout_s)

    def _run(self, operation: Coroutine[Any, Any, T], timeout_s: float) -> T:
        # The operation ends by its own timeout; the margin is for a loop that is busy.
        return self._network.run(operation, timeout_s + 1.0)


def _key(key: str | Key) -> Key:
    return Key.parse(key) if isinstance(key, str) else key
