"""What a peer does for others: answers Ping, Find and Store, and keeps the records that are near to it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from swarm.dht.overlay import FIND, PING, STORE, Overlay
from swarm.dht.records import Record, RecordValidator
from swarm.dht.storage import Storage
from swarm.dht.wire import (
    contact_to_wire,
    id_from_wire,
    key_from_wire,
    record_from_wire,
    record_to_wire,
    sender_from_wire,
)
from swarm.errors import PeerError
from swarm.ids import PeerId
from swarm.net.rpc import Handlers
from swarm.wire.dht_pb2 import (
    DhtFindQuery,
    DhtFindReply,
    DhtFindRequest,
    DhtFindResult,
    DhtPingReply,
    DhtPingRequest,
    DhtRecord,
    DhtStoreReply,
    DhtStoreRequest,
)
from swarm.wire.peer_pb2 import Contact as WireContact

_REPLY_RECORD_BYTES_MAX = 3 << 20  # the rest of a Find reply is for contacts
_CHECKS_AT_ONCE = 16  # a signature costs 0.2 ms: other calls get their turn in between


class Replica:
    """The server side of the DHT."""

    def __init__(self, overlay: Overlay, storage: Storage, validator: RecordValidator, handlers: Handlers) -> None:
        self._overlay = overlay
        self._storage = storage
        self._validator = validator
        handlers.unary(PING, self._on_ping)
        handlers.unary(FIND, self._on_find)
        handlers.unary(STORE, self._on_store)

    async def accepted(self, messages: Iterable[DhtRecord]) -> list[Record | str]:
        """Each record, or why it is refused."""
        results: list[Record | str] = []
        for number, message in enumerate(messages, 1):
            try:
                record = record_from_wire(message)
            except PeerError as error:
                results.append(str(error))
                continue
            results.append(self._validator.refusal(record, self._overlay.now_us) or record)
            if number % _CHECKS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return results

    async def _on_ping(self, caller: PeerId, request: DhtPingRequest) -> DhtPingReply:
        time_us = self._overlay.raw_us
        self._overlay.met(sender_from_wire(request.sender, caller))
        return DhtPingReply(time_us=time_us, contact=self._overlay.sender)

    async def _on_find(self, caller: PeerId, request: DhtFindRequest) -> DhtFindReply:
        time_us = self._overlay.raw_us
        self._overlay.met(sender_from_wire(request.sender, caller))
        if len(request.queries) > self._overlay.config.queries_per_call_max:
            raise PeerError(f"a call may ask at most {self._overlay.config.queries_per_call_max} queries, not {len(request.queries)}")
        reply = DhtFindReply(time_us=time_us)
        room_bytes = _REPLY_RECORD_BYTES_MAX
        for query in request.queries:
            result, size_bytes = self._answer(query, caller, room_bytes)
            room_bytes -= size_bytes
            reply.results.append(result)
        return reply

    def _answer(self, query: DhtFindQuery, caller: PeerId, room_bytes: int) -> tuple[DhtFindResult, int]:
        if query.WhichOneof("what") == "target":
            return DhtFindResult(nearest=self._nearest(id_from_wire(query.target), caller)), 0
        key = key_from_wire(query.key)
        records = self._storage.records(key, self._overlay.now_us)
        size_bytes = sum(record.size_bytes for record in records)
        nearest = self._nearest(key.dht_id, caller)
        if size_bytes > room_bytes:
            return DhtFindResult(nearest=nearest, left_out=True), 0
        return DhtFindResult(records=map(record_to_wire, records), nearest=nearest), size_bytes

    async def _on_store(self, caller: PeerId, request: DhtStoreRequest) -> DhtStoreReply:
        time_us = self._overlay.raw_us
        self._overlay.met(sender_from_wire(request.sender, caller))
        if len(request.records) > self._overlay.config.records_per_call_max:
            raise PeerError(f"a call may store at most {self._overlay.config.records_per_call_max} records, not {len(request.records)}")
        nearest = self._nearest(id_from_wire(request.target), caller) if request.target else []
        refusals = []
        for record in await self.accepted(request.records):
            refusals.append(record if isinstance(record, str) else self._storage.store(record, self._overlay.now_us) or "")
        return DhtStoreReply(time_us=time_us, refusals=refusals, nearest=nearest)

    def _nearest(self, dht_id: int, caller: PeerId) -> list[WireContact]:
        count = self._overlay.config.routing.bucket_max
        return [contact_to_wire(contact) for contact in self._overlay.table.nearest(dht_id, count, exclude=caller)]
