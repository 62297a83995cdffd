"""The server side of the DHT: answers Ping, Find, Store and Holds, and keeps the records of keys that are
near this peer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from swarm.core.errors import PeerError
from swarm.core.ids import Key, PeerId
from swarm.dht.logic.cache import CachedAnswer, ReadCache
from swarm.dht.logic.companions import circle_of
from swarm.dht.logic.constants import (
    ENTRIES_PER_SUMMARY_MAX,
    KEYS_PER_SUMMARY_MAX,
    QUERIES_PER_CALL_MAX,
    RECORDS_PER_CALL_MAX,
)
from swarm.dht.logic.issued import IssuedRecords
from swarm.dht.logic.records import FORGED, Record, RecordValidator
from swarm.dht.logic.storage import Storage
from swarm.dht.logic.summary import ENTRY_BYTES, summary
from swarm.dht.service.overlay import FIND, HOLDS, PING, STORE, Overlay
from swarm.dht.service.replication import Replication
from swarm.dht.service.wire import (
    id_from_wire,
    key_from_wire,
    record_from_wire,
    record_to_wire,
    without_known,
)
from swarm.net.callers import caller_host
from swarm.net.contacts import contact_to_wire, sender_from_wire
from swarm.net.rpc import Handlers
from swarm.net.scope import prefix_of
from swarm.wire.dht_pb2 import (
    DhtFindQuery,
    DhtFindReply,
    DhtFindRequest,
    DhtFindResult,
    DhtHoldsReply,
    DhtHoldsRequest,
    DhtPingReply,
    DhtPingRequest,
    DhtRecord,
    DhtStoreReply,
    DhtStoreRequest,
)
from swarm.wire.peer_pb2 import Contact as WireContact

_log = logging.getLogger(__name__)

_REPLY_RECORD_BYTES_MAX = 1 << 20  # the rest of a Find reply is for contacts
_CONTACTS_MAX = 384  # per reply, over all queries; less than a megabyte with the longest addresses
_CONTACTS_MIN = 6  # per query
# A Find within these limits is answered without a task, in well under a millisecond.
_QUERIES_NOW_MAX = 8
_RECORDS_NOW_MAX = 32
_RECORD_BYTES_NOW_MAX = 16 << 10
_RECORDS_PER_TURN = 512  # encoded in a few milliseconds
# Other calls are served between checks. Checking a signature takes 0.2 ms, as long as decoding a value
# of this many bytes.
_CHECK_COST_BYTES = 1024
_HELD_COST_BYTES = 256  # a record that this peer already holds is only decoded and compared
_KNOWN_COST_BYTES = 32  # a record that is known by its bytes is only looked up
_TURN_COST_BYTES = 16 << 10
_STORES_PER_TURN = 64
_FORGED_MAX = 8  # forged records in one call, after which its other records are not checked
# Accepted records that are known again by their bytes. A reader gets each record from several replicas, and
# again with every read: decoding and checking it each time took a quarter of a busy peer's network thread.
RECEIVED_MAX = 2048
_RECEIVED_BYTES_MAX = 1024  # size of one of them


class ReplicaStore:
    """Answer the calls of other peers and store their records."""

    def __init__(
        self,
        overlay: Overlay,
        storage: Storage,
        validator: RecordValidator,
        replication: Replication,
        cache: ReadCache,
        issued: IssuedRecords,
    ) -> None:
        self._overlay = overlay
        self._issued = issued
        self._storage = storage
        self._validator = validator
        self._replication = replication
        self._cache = cache
        self._companions = replication.companions
        # by its bytes: a record that was accepted, and `Namespaces.changes` at that time
        self._received: OrderedDict[bytes, tuple[Record, int]] = OrderedDict()

    def serve(self, handlers: Handlers) -> None:
        """Register the handlers of the DHT's calls."""
        handlers.direct(PING, self._on_ping)
        handlers.quick(FIND, self._find_now, self._on_find)
        handlers.unary(STORE, self._on_store)  # checking signatures takes time
        handlers.direct(HOLDS, self._on_holds)

    def store_record(self, record: Record, *, direct: bool) -> str:
        """Store a valid record on this peer. Returns why it was refused, or an empty string. `direct`: it
        comes from its writer, not from another holder.
        """
        if not self._overlay.own().addresses:
            return "a client peer holds nothing for others"
        dht_id, first = record.key.dht_id, record.key not in self._storage
        is_replica = self._overlay.is_replica(dht_id)
        far = not (is_replica or self._companions.is_holder(record.key))
        refusal = self._storage.store(record, self._overlay.now_us, far=far) or ""
        if first and direct and is_replica and not refusal:
            self._cache_empty_answer(record.key)
        return refusal

    def _cache_empty_answer(self, key: Key) -> None:
        """Cache that this peer, a replica of the key, held nothing under it before its writer stored the
        first record.
        """
        if self._overlay.is_stable:
            self._cache.put(
                key,
                CachedAnswer(
                    self._overlay.clock.monotonic_s(),
                    self._overlay.now_us,
                    self._overlay.neighbourhood_version,
                    {},
                ),
            )

    async def validate(self, messages: Iterable[DhtRecord]) -> list[Record | str]:
        """Return each record, or why it is refused."""
        results: list[Record | str] = []
        forged = cost_bytes = 0
        for message in messages:
            if cost_bytes >= _TURN_COST_BYTES:
                cost_bytes = 0
                await asyncio.sleep(0)
            raw = message.SerializeToString()
            if (known := self._received_before(raw)) is not None:
                results.append(known)
                cost_bytes += _KNOWN_COST_BYTES
                continue
            try:
                record = record_from_wire(message)
            except PeerError as error:
                results.append(str(error))
                continue
            if forged >= _FORGED_MAX:
                results.append("its sender forges records")
                continue
            now_us = self._overlay.now_us
            if self._is_held(record, now_us):
                results.append(record)
                cost_bytes += _HELD_COST_BYTES
            else:
                refusal = self._validator.refusal(record, now_us)
                results.append(refusal or record)
                forged += refusal == FORGED
                if not refusal:
                    self._on_accepted(raw, record, now_us)
                cost_bytes += _CHECK_COST_BYTES + len(record.value)
        return results

    def _received_before(self, raw: bytes) -> Record | None:
        """Return the record with these bytes if it was accepted before, and would be now."""
        record, changes = self._received.get(raw, (None, 0))
        if (
            record is None
            or changes != self._validator.changes
            or record.expiration_us <= self._overlay.now_us
        ):
            return None
        return record

    def _on_accepted(self, raw: bytes, record: Record, now_us: int) -> None:
        if self._issued.on_received(record, now_us):
            _log.warning("%s", self._issued.problem(now_us))
        if len(raw) <= _RECEIVED_BYTES_MAX:
            self._received[raw] = record, self._validator.changes
            if len(self._received) > RECEIVED_MAX:
                self._received.popitem(last=False)

    def _is_held(self, record: Record, now_us: int) -> bool:
        """Return whether this peer holds another writer's record, and therefore has checked it before."""
        return (
            record.writer != self._overlay.own_id
            and record.expiration_us > now_us
            and record == self._storage.record_of(record.key, record.owner)
        )

    def _on_ping(self, caller: PeerId, request: DhtPingRequest) -> DhtPingReply:
        time_us = self._overlay.raw_us
        sender = sender_from_wire(request.sender, caller)
        if request.leaving:
            self._overlay.on_goodbye(caller)
        else:
            self._overlay.on_call(sender)
        return DhtPingReply(time_us=time_us, contact=self._overlay.sender)

    def _find_now(self, caller: PeerId, request: DhtFindRequest) -> DhtFindReply | None:
        """Answer a request at once when the answer is small; return None otherwise."""
        if len(request.queries) > _QUERIES_NOW_MAX:
            return None
        count = size_bytes = 0
        for query in request.queries:
            if query.WhichOneof("what") != "target":
                usage = self._storage.usage(key_from_wire(query.key))
                count, size_bytes = count + usage.entries, size_bytes + usage.size_bytes
        if count > _RECORDS_NOW_MAX or size_bytes > _RECORD_BYTES_NOW_MAX:
            return None
        reply, free_bytes = self._begin_find(caller, request), _REPLY_RECORD_BYTES_MAX
        for query in request.queries:
            result, records = self._answer(query, caller, free_bytes, request)
            result.records.extend(map(record_to_wire, records))
            free_bytes -= sum(record.size_bytes for record in records)
            reply.results.append(result)
        return reply

    async def _on_find(self, caller: PeerId, request: DhtFindRequest) -> DhtFindReply:
        reply, free_bytes = self._begin_find(caller, request), _REPLY_RECORD_BYTES_MAX
        for query in request.queries:
            result, records = self._answer(query, caller, free_bytes, request)
            for begin in range(0, len(records), _RECORDS_PER_TURN):
                part = records[begin : begin + _RECORDS_PER_TURN]
                result.records.extend(map(record_to_wire, part))
                free_bytes -= sum(record.size_bytes for record in part)
                await asyncio.sleep(0)
            reply.results.append(result)
            await asyncio.sleep(0)
        return reply

    def _begin_find(self, caller: PeerId, request: DhtFindRequest) -> DhtFindReply:
        """Return the empty reply to a request. Raises PeerError when the request asks too much."""
        time_us = self._overlay.raw_us
        self._overlay.on_call(sender_from_wire(request.sender, caller))
        if len(request.queries) > QUERIES_PER_CALL_MAX:
            raise PeerError(
                f"a call may ask at most {QUERIES_PER_CALL_MAX} queries, not {len(request.queries)}"
            )
        if len(request.have) > ENTRIES_PER_SUMMARY_MAX * ENTRY_BYTES:
            raise PeerError(f"a call may name at most {ENTRIES_PER_SUMMARY_MAX} records that the caller has")
        if len(request.queries) > 1:
            asked = {query.SerializeToString(deterministic=True) for query in request.queries}
            if len(asked) < len(request.queries):
                raise PeerError("a call asks the same query twice")
        return DhtFindReply(time_us=time_us)

    def _answer(
        self, query: DhtFindQuery, caller: PeerId, free_bytes: int, request: DhtFindRequest
    ) -> tuple[DhtFindResult, list[Record]]:
        """Return the result of a query without its records, and the records."""
        count_max = max(_CONTACTS_MAX // len(request.queries), _CONTACTS_MIN)
        count_max = min(request.nearest_max or count_max, count_max)
        if query.WhichOneof("what") == "target":
            target = id_from_wire(query.target)
            return DhtFindResult(nearest=self._nearest(target, caller, count_max, request.known)), []
        key = key_from_wire(query.key)
        nearest = self._nearest(key.dht_id, caller, count_max, request.known)
        members = self._members_for(key, caller) if request.members else []
        if self._storage.usage(key).size_bytes > free_bytes:
            return DhtFindResult(nearest=nearest, members=members, left_out=True), []
        records = self._storage.records(key, self._overlay.now_us)
        if request.have:
            have = {request.have[at : at + ENTRY_BYTES] for at in range(0, len(request.have), ENTRY_BYTES)}
            records = [record for record in records if summary(key, [record]) not in have]
        return DhtFindResult(nearest=nearest, members=members), records

    def _members_for(self, key: Key, caller: PeerId) -> list[WireContact]:
        """Return members of a run to name to a caller, who takes part in the run from now on."""
        now_s, run = self._overlay.clock.monotonic_s(), circle_of(key)
        if run is not None:
            self._companions.on_question(run, caller, now_s, prefix_of(caller_host()))
        return [contact_to_wire(one) for one in self._companions.members_for(key, caller, now_s)]

    async def _on_store(self, caller: PeerId, request: DhtStoreRequest) -> DhtStoreReply:
        time_us = self._overlay.raw_us
        self._overlay.on_call(sender_from_wire(request.sender, caller))
        if len(request.records) > RECORDS_PER_CALL_MAX:
            raise PeerError(
                f"a call may store at most {RECORDS_PER_CALL_MAX} records, not {len(request.records)}"
            )
        nearest = (
            self._nearest(id_from_wire(request.target), caller, request.nearest_max, request.known)
            if request.target
            else []
        )
        refusals, records = [], await self.validate(request.records)
        held = self._held_before(caller, records, request.previous_us)
        for number, record in enumerate(records, 1):
            if number % _STORES_PER_TURN == 0:
                await asyncio.sleep(0)
            refusals.append(
                record
                if isinstance(record, str)
                else self.store_record(record, direct=record.writer == caller)
            )
        return DhtStoreReply(time_us=time_us, refusals=refusals, nearest=nearest, held=held)

    def _held_before(
        self, caller: PeerId, records: Sequence[Record | str], previous_us: int
    ) -> DhtRecord | None:
        """Return what this peer holds of the caller's entry, if that was issued after all that the caller
        remembers to have issued: another process has its identity.
        """
        if not previous_us or len(records) != 1 or isinstance(records[0], str) or records[0].writer != caller:
            return None
        held = self._storage.record_of(records[0].key, records[0].owner)
        if held is None or held.issued_at_us <= previous_us or held.version == records[0].version:
            return None
        return record_to_wire(held)

    def _on_holds(self, caller: PeerId, request: DhtHoldsRequest) -> DhtHoldsReply:
        time_us = self._overlay.raw_us
        self._overlay.on_call(sender_from_wire(request.sender, caller))
        entries = sum(len(held.entries) // ENTRY_BYTES for held in request.keys)
        if len(request.keys) > KEYS_PER_SUMMARY_MAX or entries > ENTRIES_PER_SUMMARY_MAX:
            raise PeerError(
                f"a call may compare at most {KEYS_PER_SUMMARY_MAX} keys and "
                f"{ENTRIES_PER_SUMMARY_MAX} records, "
                f"not {len(request.keys)} and {entries}"
            )
        wanted: list[int] = []
        before = 0
        for held in request.keys:
            if self._overlay.own().addresses:  # otherwise this peer stores nothing for others
                wanted.extend(
                    before + number
                    for number in self._replication.on_summary(caller, key_from_wire(held.key), held.entries)
                )
            before += len(held.entries) // ENTRY_BYTES
        return DhtHoldsReply(time_us=time_us, wanted=wanted)

    def _nearest(self, dht_id: int, caller: PeerId, count_max: int, known: bytes) -> list[WireContact]:
        count = min(count_max or self._overlay.bucket_max, self._overlay.bucket_max)
        nearest = self._overlay.table.nearest(dht_id, count, exclude=caller)
        return [contact_to_wire(contact) for contact in without_known(nearest, known)]
