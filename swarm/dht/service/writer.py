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
from swarm.wire.dht_pb2 import DhtFindQuery, DhtFindRequest, DhtRecord, DhtStoreRequest

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
    """A write of a single record: one round of calls in a swarm of which this peer knows most peers, or when
    it has read or written the same key lately; otherwise a search and one round.
    """

    def __init__(
        self,
        overlay: Overlay,
        record: Record,
        companions: Sequence[Contact],
        previous_us: int,
    ) -> None:
        """`companions`: peers that hold it in addition to the replicas. `previous_us`: when this peer issued
        this entry last before; 0 for a record that is not its own.
        """
        self._overlay = overlay
        self._companions = companions
        self._at_companions: dict[PeerId, asyncio.Task[Sequence[Contact] | None]] = {}
        self._record = record
        self._previous_us = previous_us
        self._known = b""  # the peers that answers need not name
        self.held: list[
            DhtRecord
        ] = []  # later records of the same entry, which replicas held before this one
        self.verdicts = Verdicts()
        self.is_own_replica = False

    async def run(self) -> None:
        """Run until every replica has answered or failed."""
        async with asyncio.TaskGroup() as group:
            for contact in self._companions:
                task = group.create_task(self._store_or_mark_failed(contact))
                self._at_companions[contact.peer_id] = task
            await self._store_at_replicas()

    async def _store_at_replicas(self) -> None:
        overlay, target = self._overlay, self._record.key.dht_id
        self._known = overlay.known_peers
        near = [one for one in overlay.found.of(self._record.key) if not overlay.is_suspect(one.peer_id)]
        lookup = overlay.lookup(target, wanted=REPLICAS, parallel=REPLICAS, near=near)
        # A peer that knows the replicas asks them first, and the question stores the record. Their answers
        # name closer peers that have come since.
        nearest = await overlay.search(
            lookup, self._store_once if near or overlay.table.knows_most else self._find_at
        )
        overlay.found.note(self._record.key, nearest)
        self.is_own_replica = any(contact.peer_id == overlay.own_id for contact in nearest)
        async with asyncio.TaskGroup() as group:
            for contact in nearest:
                stored = contact.peer_id in self._at_companions or contact.peer_id in self.verdicts
                if contact.peer_id != overlay.own_id and not stored:
                    group.create_task(self._store_or_mark_failed(contact))

    async def _store_or_mark_failed(self, contact: Contact) -> Sequence[Contact] | None:
        try:
            return await self._store_at(contact)
        except PeerError:
            self._overlay.on_failure(contact.peer_id, broke_protocol=True)
            return None

    async def _store_once(self, contact: Contact) -> Sequence[Contact] | None:
        """Store the record at a peer, unless that is under way because it is a companion."""
        task = self._at_companions.get(contact.peer_id)
        return await asyncio.shield(task) if task is not None else await self._store_at(contact)

    async def _store_at(self, contact: Contact) -> Sequence[Contact] | None:
        overlay, record = self._overlay, self._record
        request = DhtStoreRequest(
            sender=overlay.sender,
            records=[record_to_wire(record)],
            target=id_to_wire(record.key.dht_id),
            nearest_max=REPLICAS,
            known=self._known,
            previous_us=self._previous_us,
        )
        reply = await overlay.ask(contact, STORE, request)
        if reply is None or len(reply.refusals) != 1:
            return None
        if reply.HasField("held") and reply.held not in self.held:
            self.held.append(reply.held)
        self.verdicts.note(contact.peer_id, reply.refusals[0])
        return overlay.contacts_from_answer(reply.nearest)

    async def _find_at(self, contact: Contact) -> Sequence[Contact] | None:
        overlay = self._overlay
        query = DhtFindQuery(target=id_to_wire(self._record.key.dht_id))
        request = DhtFindRequest(sender=overlay.sender, queries=[query], known=self._known)
        reply = await overlay.ask(contact, FIND, request)
        return (
            overlay.contacts_from_answer(reply.results[0].nearest)
            if reply is not None and len(reply.results) == 1
            else None
        )
