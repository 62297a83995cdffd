"""Background maintenance of the DHT: joining and rejoining, the routing table, merging after a network
partition, clock correction.

An idle swarm causes little traffic: a peer that calls or answers for any other reason is not pinged, far
peers are pinged less often the longer they live, and a peer outside the table gets one query whose answer
shows whether it belongs to the same swarm.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence

from swarm.core.backoff import Backoff
from swarm.core.errors import PeerError
from swarm.core.ids import Contact, PeerId
from swarm.dht.logic.constants import (
    BUCKET_REFRESH_S,
    MAINTENANCE_INTERVAL_S,
    NEIGHBOUR_LOOKUP_INTERVAL_S,
    PARALLEL,
    REJOIN_S_FIRST,
    REJOIN_S_MAX,
)
from swarm.dht.logic.rejoin import RejoinCandidates
from swarm.dht.service.overlay import FIND, Overlay
from swarm.dht.service.replication import Replication
from swarm.dht.service.wire import id_to_wire
from swarm.runtime.supervise import Supervisor
from swarm.wire.dht_pb2 import DhtFindQuery, DhtFindRequest

_log = logging.getLogger(__name__)

_ATTEMPT_CONTACTS_MAX = 32  # contacts tried per attempt to join
_CONTACTS_AT_ONCE = 8
_PINGS_MAX = 8  # per maintenance round
_REFRESHES_MAX = 4
_REFRESH_WANTED = 4  # a refresh needs some peers of the bucket, not the nearest twenty
_CANDIDATES_MAX = 2  # called per maintenance round
_BOOK_SAMPLE_INTERVAL_S = 300.0  # interval at which a random peer of the book is called
_UNMET_MAX = 8  # peers of the other side of a partition that are taken from one answer


class Upkeep:
    """The background tasks of a peer's DHT."""

    def __init__(
        self, overlay: Overlay, replication: Replication, supervisor: Supervisor, rng: random.Random
    ) -> None:
        self._overlay = overlay
        self._rng = rng
        self._rejoin_candidates = RejoinCandidates(rng)
        self._remembered = frozenset[PeerId]()  # contacts of an earlier run, which may be gone
        self._attempts = 0  # attempts to join in progress
        self._book_sampled_s = self._neighbours_looked_up_s = 0.0
        self.join_attempted = asyncio.Event()  # a peer is known, or no peer answered the first attempt
        self.clock_problem: str | None = None
        overlay.observe(self)
        overlay.observe(replication)
        supervisor.spawn("DHT upkeep", self._maintain, restart=True)
        supervisor.spawn("DHT replication", replication.run, restart=True)

    @property
    def is_cut_off(self) -> bool:
        """Return whether this peer is in contact with nobody, while a peer that it was to join by, or has
        met, is silent and may be alive.
        """
        overlay = self._overlay
        return not len(overlay.table) and any(
            contact.peer_id not in self._remembered and not overlay.has_refused(contact.peer_id)
            for contact in self._rejoin_candidates.contacts()
        )

    async def join(self, contacts: Sequence[Contact], *, remembered: bool) -> None:
        """Try all of these contacts once, and find this peer's neighbours through the first that answers.
        They are retried later if necessary.
        """
        dialable = [
            contact for contact in contacts if contact.addresses and contact.peer_id != self._overlay.own_id
        ]
        if remembered:
            self._remembered = frozenset(contact.peer_id for contact in dialable)
        self._rejoin_candidates.add_bootstrap(dialable, self._overlay.clock.monotonic_s())
        await self._attempt(dialable)
        self.join_attempted.set()

    async def _attempt(self, contacts: Sequence[Contact]) -> None:
        """Ping all contacts; the first that answers leads to the neighbours, without waiting for dead
        ones.
        """
        self._attempts += 1
        limit = asyncio.Semaphore(_CONTACTS_AT_ONCE)
        reached: list[Contact] = []

        async def ping(contact: Contact) -> None:
            async with limit:
                answered = await self._overlay.ping(contact)
            if answered:
                reached.append(contact)
                if len(reached) == 1:
                    self._neighbours_looked_up_s = self._overlay.clock.monotonic_s()
                    await self.find(self._overlay.own_id_number)

        try:
            async with asyncio.TaskGroup() as group:
                for contact in contacts[:_ATTEMPT_CONTACTS_MAX]:
                    group.create_task(ping(contact))
        finally:
            self._attempts -= 1
        self.set_clock()

    async def find(self, target: int, wanted: int | None = None) -> tuple[Contact, ...]:
        """Return the live peers nearest to an id."""
        overlay, known = self._overlay, self._overlay.known_peers
        lookup = overlay.lookup(target, wanted=wanted or overlay.bucket_max, parallel=PARALLEL)
        return await overlay.search(lookup, lambda contact: self._find_closer(contact, target, known))

    async def _find_closer(
        self, contact: Contact, target: int, known: bytes = b""
    ) -> Sequence[Contact] | None:
        """Return the peers that a contact names as nearest to the target, without those `known`."""
        overlay, queries = self._overlay, [DhtFindQuery(target=id_to_wire(target))]
        request = DhtFindRequest(sender=overlay.sender, queries=queries, known=known)
        reply = await overlay.ask(contact, FIND, request)
        return (
            overlay.contacts_from_answer(reply.results[0].nearest)
            if reply is not None and len(reply.results) == 1
            else None
        )

    def on_peer_joined(self, contact: Contact) -> None:
        """Record that this peer has a contact."""
        self.join_attempted.set()

    def on_peer_left(self, contact: Contact, *, said_goodbye: bool) -> None:
        """Try a peer that was lost without a goodbye again later."""
        if not said_goodbye:
            self._rejoin_candidates.add_lost(contact, self._overlay.clock.monotonic_s())

    async def _maintain(self) -> None:
        backoff = Backoff(REJOIN_S_FIRST, REJOIN_S_MAX, self._rng)
        while True:
            if not len(self._overlay.table) and not self._attempts:
                await self._attempt(self._all_known_contacts())
            if len(self._overlay.table):
                backoff.reset()
                await self._maintain_once()
                await asyncio.sleep(MAINTENANCE_INTERVAL_S * self._rng.uniform(0.8, 1.2))
            else:
                await asyncio.sleep(backoff.next_s())

    async def _maintain_once(self) -> None:
        overlay, now_s = self._overlay, self._overlay.clock.monotonic_s()
        async with asyncio.TaskGroup() as group:
            for contact in overlay.table.to_ping(now_s)[:_PINGS_MAX]:
                group.create_task(self._overlay.ping(contact))
            for contact in self._due_candidates(now_s):
                group.create_task(self._query_candidate(contact))
        if now_s - self._neighbours_looked_up_s >= NEIGHBOUR_LOOKUP_INTERVAL_S:
            self._neighbours_looked_up_s = now_s
            await self.find(overlay.own_id_number)
        for target in overlay.table.stale_ids(now_s - BUCKET_REFRESH_S, self._rng)[:_REFRESHES_MAX]:
            await self.find(target, _REFRESH_WANTED)
        self.set_clock()

    def _due_candidates(self, now_s: float) -> list[Contact]:
        """Return the candidates for rejoining that are due, and occasionally a random peer of the book."""
        found = self._rejoin_candidates.due(now_s, self._overlay.table, _CANDIDATES_MAX)
        if now_s - self._book_sampled_s >= _BOOK_SAMPLE_INTERVAL_S:
            self._book_sampled_s = now_s
            table = self._overlay.table
            known = [
                peer.contact
                for peer in self._overlay.book.known()
                if peer.contact.addresses and peer.peer_id not in table
            ]
            known = [
                contact
                for contact in known
                if contact not in found and contact.peer_id != self._overlay.own_id
            ]
            if known:
                found.append(self._rng.choice(known))
        return found

    async def _query_candidate(self, candidate: Contact) -> None:
        """Ask a peer outside the table for this peer's neighbours.

        A lost peer may be back, or on the other side of a partition that has healed. In the same swarm it
        names known neighbours; in another one it names neighbours that this peer has not met.
        """
        overlay = self._overlay
        try:
            closer = await self._find_closer(candidate, overlay.own_id_number)
        except PeerError:
            overlay.on_failure(candidate.peer_id, broke_protocol=True)
            closer = None
        self._rejoin_candidates.on_called(candidate.peer_id, overlay.clock.monotonic_s())
        if closer is None:
            return
        near = overlay.table.nearest(overlay.own_id_number, overlay.bucket_max)
        range_end = (
            near[-1].peer_id.dht_id ^ overlay.own_id_number if len(near) >= overlay.bucket_max else None
        )
        unmet = [contact for contact in closer if contact.addresses and contact.peer_id not in overlay.table]
        unmet = [
            contact
            for contact in unmet
            if range_end is None or contact.peer_id.dht_id ^ overlay.own_id_number < range_end
        ]
        if not unmet:
            return
        # A lookup alone is not enough: it would start among known peers, and may end there.
        async with asyncio.TaskGroup() as group:
            answers = [
                group.create_task(self._overlay.ping(contact))
                for contact in unmet[:_UNMET_MAX]
                if contact.peer_id != overlay.own_id
            ]
        if any(answer.result() for answer in answers):
            self._rejoin_candidates.retry_all_now(overlay.clock.monotonic_s())
            await self.find(overlay.own_id_number)

    def _all_known_contacts(self) -> list[Contact]:
        """Return all known contacts, for a peer that has lost the swarm."""
        candidates = {contact.peer_id: contact for contact in self._rejoin_candidates.contacts()}
        known = {peer.peer_id: peer.contact for peer in self._overlay.book.known()[:_ATTEMPT_CONTACTS_MAX]}
        return [
            contact
            for contact in (candidates | known).values()
            if contact.addresses and contact.peer_id != self._overlay.own_id
        ]

    def set_clock(self) -> None:
        """Apply the clock offset estimated from the peers' clocks, and warn the user when this clock is far
        off.
        """
        overlay = self._overlay
        raw_s = overlay.raw_us / 1e6
        problem = overlay.offset.problem(overlay.own_id, raw_s)
        if problem and not self.clock_problem:
            _log.warning("%s", problem)
        self.clock_problem = problem
        offset_s = overlay.offset.offset_s(raw_s)
        if offset_s is not None:
            overlay.clock.offset_s = offset_s
