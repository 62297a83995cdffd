"""Writes: store one record at its replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.core.errors import PeerError
from swarm.core.ids import Contact, PeerId
from swarm.dht.logic.constants import REPLICAS
from swarm.dht.logic.records import Record
from swarm.dht.service.overlay import FIND, STORE, Overlay
from swarm.dht.service.wire import id_to_wire, record_to_wire
from swarm.wire.dht_pb2 import DhtFindQuery, DhtFindRequest, DhtStoreRequest

_REFUSALS_MAX = 8
_REFUSAL_CHARACTERS_MAX = 200


@dataclass(frozen=True, slots=True)
class StoreResult:
    """The outcome of a write: whether at least one replica holds the record, how many do, and in `refusals`
    the reasons of those that do not.
    """

    ok: bool
    replicas: int
    refusals: tuple[str, ...] = ()


class Verdicts:
    """The answers of the replicas of one record."""

    def __init__(self) -> None:
        self.held: set[PeerId] = set()
        self.refusals: dict[PeerId, str] = {}

    def note(self, peer: PeerId, refusal: str) -> None:
        """Record that a replica holds the record (empty `refusal`), or why it does not."""
        if refusal:
            self.refusals[peer] = refusal[:_REFUSAL_CHARACTERS_MAX]
        else:
            self.held.add(peer)

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self.held or peer in self.refusals

    @property
    def result(self) -> StoreResult:
        return StoreResult(
            bool(self.held), len(self.held), tuple(dict.fromkeys(self.refusals.values()))[:_REFUSALS_MAX]
        )


class PendingWrite:
    """A write of a single record: one round of calls in a swarm that this peer knows completely, a search and
    one round in a larger one.
    """

    def __init__(self, overlay: Overlay, record: Record) -> None:
        self._overlay = overlay
        self._record = record
        self.verdicts = Verdicts()
        self.is_own_replica = False

    async def run(self) -> None:
        """Run until every replica has answered or failed."""
        overlay, target = self._overlay, self._record.key.dht_id
        # A peer that knows all peers asks the replicas first, and the question stores the record.
        lookup = overlay.lookup(target, wanted=REPLICAS, parallel=REPLICAS)
        nearest = await overlay.search(lookup, self._store_at if overlay.knows_all else self._find_at)
        self.is_own_replica = any(contact.peer_id == overlay.own_id for contact in nearest)
        async with asyncio.TaskGroup() as group:
            for contact in nearest:
                if contact.peer_id != overlay.own_id and contact.peer_id not in self.verdicts:
                    group.create_task(self._store_or_mark_failed(contact))

    async def _store_or_mark_failed(self, contact: Contact) -> None:
        try:
            await self._store_at(contact)
        except PeerError:
            self._overlay.on_failure(contact.peer_id, broke_protocol=True)

    async def _store_at(self, contact: Contact) -> Sequence[Contact] | None:
        overlay, record = self._overlay, self._record
        request = DhtStoreRequest(
            sender=overlay.sender,
            records=[record_to_wire(record)],
            target=id_to_wire(record.key.dht_id),
            nearest_max=REPLICAS,
            known=overlay.known_peers,
        )
        reply = await overlay.ask(contact, STORE, request)
        if reply is None or len(reply.refusals) != 1:
            return None
        self.verdicts.note(contact.peer_id, reply.refusals[0])
        return overlay.contacts_from_answer(reply.nearest)

    async def _find_at(self, contact: Contact) -> Sequence[Contact] | None:
        overlay = self._overlay
        query = DhtFindQuery(target=id_to_wire(self._record.key.dht_id))
        reply = await overlay.ask(contact, FIND, DhtFindRequest(sender=overlay.sender, queries=[query]))
        return (
            overlay.contacts_from_answer(reply.results[0].nearest)
            if reply is not None and len(reply.results) == 1
            else None
        )
