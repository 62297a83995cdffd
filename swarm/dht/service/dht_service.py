"""The DHT of one peer: store, get and delete signed, expiring records at the peers nearest to their key.

`DhtService` runs on the network loop; users see it as `node.dht` (`Dht` in `handle`). `records`, `reading`
and `namespaces` describe the content of a key and its permitted writers. Each operation is a search for the
key's replicas whose calls carry the question itself. In a swarm that this peer knows completely it is
therefore one parallel round of calls.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from swarm.core.errors import DeadlineExceeded, NetworkError, UsageError
from swarm.core.identity import Signer
from swarm.core.ids import Contact, Key, PeerId
from swarm.core.notify import wait_until_set
from swarm.core.presets import WAN, Timings
from swarm.core.standing import PeerStanding
from swarm.dht.logic.cache import ReadCache
from swarm.dht.logic.companions import Companions
from swarm.dht.logic.constants import BULK_KEYS_MAX, CACHED_BYTES_MAX, CACHED_MAX
from swarm.dht.logic.issued import IssuedRecords
from swarm.dht.logic.namespaces import Namespaces
from swarm.dht.logic.reading import live, select
from swarm.dht.logic.records import (
    TTL_MAX_US,
    Entry,
    Record,
    RecordValidator,
    Value,
    encode_value,
    is_run_namespace,
    record_of_blob,
    signed,
)
from swarm.dht.logic.routing import ID_BITS
from swarm.dht.logic.rules import NamespaceRules
from swarm.dht.logic.storage import PRODUCTION_QUOTAS, Quotas, Storage
from swarm.dht.service.bulk import ManyReads, ManyWrites
from swarm.dht.service.overlay import DhtClock, Overlay
from swarm.dht.service.reader import Reader, RecordSearch
from swarm.dht.service.replica import ReplicaStore
from swarm.dht.service.replication import Replication
from swarm.dht.service.upkeep import Upkeep
from swarm.dht.service.writer import PendingWrite, StoreResult
from swarm.net.peerbook import PeerBook
from swarm.net.rpc import Caller, Handlers
from swarm.runtime.supervise import Supervisor

__all__ = ["DhtService", "Entry", "ManyAnswers", "NamespaceRules", "StoreItem", "StoreResult"]

_SIGNED_AT_ONCE = 16
_FIRST_CONTACT_S_MAX = 3.0
_MET_WANTED = 4  # peers around an id, as in a refresh


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreItem:
    """One entry for `store_many`."""

    key: str | Key
    value: Value
    subkey: str | None = None
    ttl_s: float | None = None  # None: the `ttl_s` of the call


@dataclass(frozen=True, slots=True)
class ManyAnswers:
    """The result of `get_many`: an answer, as `get` returns it, or a failure for every key, under the name it
    was asked by.
    """

    answers: dict[str | Key, Entry | dict[str, Entry] | None]
    failures: dict[str | Key, NetworkError]


@dataclass(kw_only=True, eq=False)
class DhtService:
    """The DHT of a peer. It is created on the network loop, and its background tasks belong to `supervisor`.
    All methods must be called on that loop.
    """

    # This peer as others should call it, evaluated on every use; without addresses it stores nothing for
    # others.
    own: Callable[[], Contact]
    identity: Signer
    caller: Caller
    handlers: Handlers
    book: PeerBook
    clock: DhtClock
    supervisor: Supervisor
    timings: Timings = WAN
    quotas: Quotas = PRODUCTION_QUOTAS
    rng: random.Random = field(default_factory=random.Random)
    standing: PeerStanding = field(default_factory=PeerStanding)

    def __post_init__(self) -> None:
        self.overlay = Overlay(
            self.own,
            self.caller,
            self.book,
            self.clock,
            self.supervisor,
            self.timings,
        )
        # members that the records of runs are written to and read from, in addition to the replicas
        self.companions = Companions(self.peer_id, self.standing, self.overlay.find_contact)
        self.namespaces = Namespaces()
        self.storage = Storage(
            self.quotas, self.namespaces.entries_per_writer_max, self.standing, self.namespaces.entries_max
        )
        self._validator = RecordValidator(self.namespaces)
        self.replication = Replication(self.overlay, self.storage, self.rng, self.companions)
        self._cache = ReadCache(CACHED_MAX, CACHED_BYTES_MAX)
        self._issued = IssuedRecords(self.peer_id, self.overlay.now_us)
        self._replica = ReplicaStore(
            self.overlay,
            self.storage,
            self._validator,
            self.replication,
            self._cache,
            self._issued,
        )
        self._replica.serve(self.handlers)
        self.reader = Reader(
            self.overlay,
            self.storage,
            self._replica,
            self.replication,
            self._cache,
            self.supervisor,
        )
        self.upkeep = Upkeep(self.overlay, self.replication, self.supervisor, self.rng)
        self._joins = 0

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    async def join(self, contacts: Sequence[Contact], *, remembered: bool = False) -> None:
        """Try all contacts once, concurrently, and find this peer's neighbours through those that answer. A
        contact that does not answer raises no error. `remembered`: they are of an earlier run, and need not
        be peers of this swarm (`get_confirmed`).

        Contacts that did not answer are retried in the background, as are the peers of the book: until one
        peer is known, and occasionally after that.
        """
        self._joins += 1
        if not remembered:
            self.companions.add_introducers(contacts)
        try:
            await self.upkeep.join(contacts, remembered=remembered)
        finally:
            self._joins -= 1

    async def announce(self) -> None:
        """Let this peer's neighbours know its addresses, after these have changed."""
        await self.upkeep.find(self.overlay.own_id_number)

    async def meet(self) -> None:
        """Look for peers around a random id, and so meet some that have come since this peer did."""
        await self.upkeep.find(self.rng.getrandbits(ID_BITS), _MET_WANTED)

    async def ping(self, contact: Contact) -> bool:
        """Return whether the peer answers now."""
        return await self.overlay.ping(contact)

    @property
    def clock_problem(self) -> str | None:
        """Return by how much this machine's clock is wrong and what to do about it, as a sentence; None when
        no problem is known.
        """
        return self.upkeep.clock_problem

    @property
    def identity_problem(self) -> str | None:
        """Return that another process uses this peer's identity and what to do about it, as a sentence; None
        when no problem is known.
        """
        return self._issued.problem(self.overlay.now_us)

    def register(self, namespace: str, rules: NamespaceRules) -> None:
        """Enforce rules for a namespace on this peer: see `swarm.dht.logic.namespaces`. Stored records that
        break them are dropped.
        """
        self.namespaces.register(namespace, rules)
        self.storage.discard(lambda record: self.namespaces.refusal(record) is not None)
        self._cache.clear()

    async def leave(self, *, timeout_s: float = 0.5) -> None:
        """Send a goodbye to the neighbours, and hand over records that they lack, as far as `timeout_s`
        allows.
        """
        if not len(self.overlay.table):
            return
        for share, step in ((0.6, self.replication.hand_over), (0.4, self.replication.say_goodbye)):
            try:
                async with asyncio.timeout(share * timeout_s):
                    await step()
            except TimeoutError:
                continue

    async def store(
        self, key: Key, value: Value, *, ttl_s: float, subkey: str | None = None, timeout_s: float = 10.0
    ) -> StoreResult:
        """Sign and store a value (at most 64 KiB as msgpack) for `ttl_s` seconds (at most 24 h); it replaces
        this peer's own entry of that subkey.

        In a run's namespace the subkey is this peer's id, and may be omitted. Raises UsageError when the
        value, the subkey or the time is not allowed. Failures of replicas and of the network are reported in
        the result.
        """
        return await self._store(
            self._entry(StoreItem(key=key, value=value, subkey=subkey, ttl_s=ttl_s), ttl_s), timeout_s
        )

    async def store_many(
        self, items: Sequence[StoreItem], *, ttl_s: float, timeout_s: float = 30.0
    ) -> list[StoreResult]:
        """Store many entries together, with as many records per call to a replica as fit into it. The results
        are in the items' order.

        Raises UsageError before anything is sent when an item is not allowed or there are more than
        `BULK_KEYS_MAX`.
        """
        if len(items) > BULK_KEYS_MAX:
            raise UsageError(f"store_many takes at most {BULK_KEYS_MAX} entries, not {len(items)}")
        records = []
        for number, item in enumerate(items, 1):
            records.append(self._entry(item, ttl_s))
            if number % _SIGNED_AT_ONCE == 0:
                await asyncio.sleep(0)
        for record in records:
            self.reader.invalidate(record.key)
        writes = ManyWrites(self.overlay, self._replica, records, self.companions)
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                await self._wait_for_contact(timeout_s)
                await writes.run()
        except TimeoutError:
            pass  # the verdicts say which replicas were reached
        writes.store_unplaced()
        return [verdicts.result for verdicts in writes.verdicts]

    async def store_blob(
        self, key: Key, blob: bytes, *, ttl_s: float, timeout_s: float = 10.0
    ) -> StoreResult:
        """Store a blob that its owner signed (a run's specification); any peer may do this. A higher version
        replaces it, and storing the same version again prolongs its life. Raises UsageError when it is
        malformed or belongs to another key.
        """
        record = record_of_blob(key, blob, self.overlay.now_us + round(min(ttl_s * 1e6, TTL_MAX_US)))
        refusal = self._validator.refusal(record, self.overlay.now_us)
        if refusal:
            raise UsageError(f"cannot store under {key}: {refusal}")
        return await self._store(record, timeout_s)

    async def delete(self, key: Key, *, subkey: str | None = None, timeout_s: float = 10.0) -> StoreResult:
        """Remove this peer's own entry: a tombstone takes its place until the entry would have expired."""
        subkey = self._subkey(key, subkey)
        deadline_s = self.clock.monotonic_s() + timeout_s
        expiration_us, _ = self._issued.latest(key, subkey)
        now_us = self.overlay.now_us
        if expiration_us <= now_us:  # not written by this process, perhaps by a previous one
            search = await self.reader.read(key, exhaustive=False, max_age_s=0.0, timeout_s=timeout_s / 2)
            found = search.latest.get((self.peer_id, subkey))
            expiration_us = (
                found.expiration_us if found and found.expiration_us > now_us else now_us + TTL_MAX_US
            )
        record = self._issue(key, subkey, b"", expiration_us - now_us, deleted=True)
        return await self._store(record, deadline_s - self.clock.monotonic_s())

    async def get(
        self,
        key: Key,
        *,
        writer: PeerId | None = None,
        latest: bool = False,
        max_age_s: float | None = None,
        timeout_s: float = 10.0,
    ) -> Entry | dict[str, Entry] | None:
        """Return what is stored under a key: the entry issued last, or a dictionary {subkey: entry}; None
        when there is nothing.

        - `writer`: return that peer's entries only (in a run's namespace its single entry).
        - `latest`: ask the 20 nearest peers instead of the replicas only.
        - `max_age_s`: accept an answer of up to this age, so that a read can be served from the cache or
          share a search; 0: always ask; None: ask, unless this peer is itself one of the key's replicas,
          which every write reaches.

        An answer of any age contains nothing that has expired or that this peer knows to be deleted. Raises
        NetworkError when no peer answered (DeadlineExceeded: in time); a partial set of answers is used.
        """
        search = await self._read(key, latest, max_age_s, timeout_s)
        return select(search.latest, key, writer, self.overlay.now_us)

    async def get_confirmed(self, key: Key, *, timeout_s: float = 10.0) -> Entry | dict[str, Entry] | None:
        """Return the latest records under a key, as `get` does, when it is certain that others were asked.
        Raises NetworkError when no other peer has answered, and some that this one was to join by, or has
        met, may be alive. A peer that knows of nobody reads its own records.
        """
        search = await self._read(key, True, 0.0, timeout_s, confirmed=True)
        if self.upkeep.is_cut_off:
            raise NetworkError("no peer has answered yet, and those that this one was to join by are silent")
        return select(search.latest, key, None, self.overlay.now_us)

    async def get_all(
        self, key: Key, *, latest: bool = False, max_age_s: float | None = None, timeout_s: float = 10.0
    ) -> list[Entry]:
        """Return every writer's live entries, plain and sub-keyed, the one issued last first. `max_age_s` is
        as in `get`.
        """
        search = await self._read(key, latest, max_age_s, timeout_s)
        return [Entry.of(record) for record in live(search.latest, self.overlay.now_us)]

    async def get_many(
        self,
        keys: Iterable[str | Key],
        *,
        latest: bool = False,
        max_age_s: float | None = None,
        timeout_s: float = 30.0,
    ) -> ManyAnswers:
        """Read many keys together, with as many keys per call to a peer as it can answer. The arguments are
        those of `get`.

        A key for which no peer answered in time is among the failures. Raises UsageError for more than
        `BULK_KEYS_MAX` keys.
        """
        key_by_name = {key: Key.parse(key) for key in keys}
        if len(key_by_name) > BULK_KEYS_MAX:
            raise UsageError(f"get_many takes at most {BULK_KEYS_MAX} keys, not {len(key_by_name)}")
        _check_age(max_age_s)
        reads = ManyReads(self.overlay, self.reader, self.storage.records)
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                await self._wait_for_contact(timeout_s)
                await reads.run(key_by_name.values(), exhaustive=latest, max_age_s=max_age_s)
        except TimeoutError:
            pass  # the answers found so far are used
        answers: dict[str | Key, Entry | dict[str, Entry] | None] = {}
        failures: dict[str | Key, NetworkError] = {}
        for name, key in key_by_name.items():
            search = reads.searches.get(key) or RecordSearch(key, 0.0)
            error = search.failure(timeout_s)
            if error is None and not (search.is_done or search.answers or search.latest):
                error = DeadlineExceeded(
                    f"{key} was not asked for within {timeout_s:g} s: ask for fewer keys, or give it more "
                    "time"
                )
            if error is not None:
                failures[name] = error
            else:
                answers[name] = select(search.latest, key, None, self.overlay.now_us)
        return ManyAnswers(answers, failures)

    def _entry(self, item: StoreItem, ttl_s: float) -> Record:
        """Return the signed record of an item. Raises UsageError when the item is not allowed."""
        key = Key.parse(item.key)
        raw = encode_value(item.value)
        ttl_s = ttl_s if item.ttl_s is None else item.ttl_s
        if not 0 < ttl_s <= TTL_MAX_US / 1e6:
            raise UsageError(
                f"ttl_s must be above 0 and at most {TTL_MAX_US // 1_000_000} (24 hours), not {ttl_s}"
            )
        return self._issue(key, self._subkey(key, item.subkey), raw, round(ttl_s * 1e6))

    def _subkey(self, key: Key, subkey: str | None) -> str | None:
        if subkey is None and is_run_namespace(key.namespace):
            return str(self.peer_id)
        if subkey is not None and not isinstance(subkey, str):
            raise UsageError(f"a subkey is text, not {subkey!r:.60}")
        return subkey

    def _issue(
        self, key: Key, subkey: str | None, raw: bytes, ttl_us: int, *, deleted: bool = False
    ) -> Record:
        """Sign a record of this peer, later than all that it issued for this entry before.

        Raises UsageError when the last one was issued while this machine's clock was far ahead: the swarm
        refuses earlier records of this entry until that time has passed. Other entries are not affected.
        """
        _, issued_us = self._issued.latest(key, subkey)
        issued_at_us = max(self.overlay.now_us, issued_us + 1)
        expiration_us = issued_at_us + min(max(ttl_us, 1), TTL_MAX_US)
        record = Record(
            key=key,
            subkey=subkey,
            value=raw,
            issued_at_us=issued_at_us,
            expiration_us=expiration_us,
            writer=self.peer_id,
            deleted=deleted,
        )
        try:
            record = signed(record, self.identity)
            refusal = self._validator.refusal(record, self.overlay.now_us)
        except UnicodeEncodeError as error:
            raise UsageError(f"a subkey is text that can be encoded as UTF-8: {error}") from error
        if refusal:
            raise UsageError(f"cannot store under {key}: {refusal}")
        self._issued.add(record)
        return record

    async def _wait_for_contact(self, timeout_s: float) -> None:
        """Wait briefly for a first contact while this peer is still joining: a read would find nothing, and a
        write would stay here.
        """
        if self._joins and not len(self.overlay.table):
            await wait_until_set(self.upkeep.join_attempted, min(timeout_s, _FIRST_CONTACT_S_MAX))

    async def _store(self, record: Record, timeout_s: float) -> StoreResult:
        self.reader.invalidate(record.key)
        previous_us = 0 if record.is_blob else self._issued.previous_us(record)
        companions = self.companions.holders(record.key, self.overlay.clock.monotonic_s())
        write = PendingWrite(self.overlay, record, companions, previous_us)
        verdicts = write.verdicts
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                await self._wait_for_contact(timeout_s)
                await write.run()
        except TimeoutError:
            # Newcomers get it from here, which is better than from nowhere.
            write.is_own_replica = write.is_own_replica or not verdicts.held
        if (write.is_own_replica or self.companions.is_holder(record.key)) and self.own().addresses:
            verdicts.note(self.peer_id, self._replica.store_record(record, direct=True))
        await self._replica.validate(write.held)  # which notices records that another process has issued
        return verdicts.result

    async def _read(
        self,
        key: Key,
        exhaustive: bool,
        max_age_s: float | None,
        timeout_s: float,
        *,
        confirmed: bool = False,
    ) -> RecordSearch:
        _check_age(max_age_s)
        deadline_s = self.clock.monotonic_s() + timeout_s
        await self._wait_for_contact(timeout_s)
        remaining_s = deadline_s - self.clock.monotonic_s()
        return await self.reader.read(
            key, exhaustive=exhaustive, max_age_s=max_age_s, timeout_s=remaining_s, confirmed=confirmed
        )


def _check_age(max_age_s: float | None) -> None:
    if max_age_s is not None and not max_age_s >= 0:
        raise UsageError(f"max_age_s is a number of seconds from 0 up, or None, not {max_age_s}")
