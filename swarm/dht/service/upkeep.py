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
from collections import OrderedDict
from collections.abc import Sequence

from swarm.core.backoff import Backoff
from swarm.core.errors import PeerError
from swarm.core.ids import Contact, PeerId
from swarm.dht.logic.rejoin import RejoinCandidates
from swarm.dht.service.overlay import FIND, PING, Overlay
from swarm.dht.service.replication import Replication
from swarm.dht.service.wire import id_to_wire
from swarm.net.contacts import contact_from_wire
from swarm.net.peerbook import ADDRESSES_MAX
from swarm.runtime.supervise import Supervisor
from swarm.wire.dht_pb2 import DhtFindQuery, DhtFindRequest, DhtPingRequest

_log = logging.getLogger(__name__)

_TRIED_MAX = 32  # contacts tried per attempt to join
_CONTACTS_AT_ONCE = 8
_PINGS_MAX = 8  # per maintenance round
_CHECKS_MAX = 32  # concurrent pings that show whether a caller can be called back
_CHECKED_MAX = 1024
_CHECK_AGAIN_S = 10.0  # a peer that calls but does not answer is checked at most this often
_REFRESHES_MAX = 4
_REFRESH_WANTED = 4  # a refresh needs some peers of the bucket, not the nearest twenty
_STRANGERS_MAX = 2  # called per maintenance round
_BOOK_S = 300.0  # interval at which a random peer of the book is called
_HALVES_MAX = 8  # peers of the other side of a partition that are taken from one answer


class Upkeep:
    """The background tasks of a peer's DHT."""

    def __init__(
        self, overlay: Overlay, replication: Replication, supervisor: Supervisor, rng: random.Random
    ) -> None:
        self._overlay = overlay
        self._supervisor = supervisor
        self._rng = rng
        self._strangers = RejoinCandidates(rng)
        # peer -> when it was last pinged because it called
        self._checking: OrderedDict[PeerId, float] = OrderedDict()
        self._checks = 0
        self._book_s = self._neighbours_s = 0.0
        self._replication = replication
        self.settled = asyncio.Event()  # a peer is known, or no peer answered the first attempt
        self.clock_problem: str | None = None
        overlay.on_newcomer = self._on_newcomer
        overlay.on_lost = self._on_lost
        overlay.on_unproven = self._on_unproven
        supervisor.spawn("DHT upkeep", self._tend, restart=True)
        supervisor.spawn("DHT replication", replication.run, restart=True)

    async def join(self, contacts: Sequence[Contact]) -> None:
        """Try all of these contacts once, and find this peer's neighbours through the first that answers.
        They are retried later if necessary.
        """
        told = [
            contact for contact in contacts if contact.addresses and contact.peer_id != self._overlay.own_id
        ]
        self._strangers.told(told, self._overlay.clock.monotonic_s())
        await self._attempt(told)
        self.settled.set()

    async def _attempt(self, contacts: Sequence[Contact]) -> None:
        """Ping all contacts; the first that answers leads to the neighbours, without waiting for dead ones."""
        waiting = asyncio.Semaphore(_CONTACTS_AT_ONCE)
        reached: list[Contact] = []

        async def ping(contact: Contact) -> None:
            async with waiting:
                answered = await self.ping(contact)
            if answered:
                reached.append(contact)
                if len(reached) == 1:
                    await self.find(self._overlay.own_id_number)

        async with asyncio.TaskGroup() as group:
            for contact in contacts[:_TRIED_MAX]:
                group.create_task(ping(contact))
        self.set_clock()

    async def ping(self, contact: Contact) -> bool:
        """Return whether the peer answers."""
        reply = await self._overlay.ask(contact, PING, DhtPingRequest(sender=self._overlay.sender))
        if reply is None:
            return False
        try:
            told = contact_from_wire(reply.contact) if reply.HasField("contact") else contact
        except PeerError:
            self._overlay.failed(contact.peer_id, broke_protocol=True)
            return False
        if told.peer_id == contact.peer_id and told.addresses:
            # The dialed address works from here and goes first; the peer may know more of its own addresses.
            self._overlay.met(
                Contact(
                    told.peer_id, tuple(dict.fromkeys(contact.addresses + told.addresses))[:ADDRESSES_MAX]
                )
            )
        return True

    async def find(self, target: int, wanted: int | None = None) -> tuple[Contact, ...]:
        """Return the live peers nearest to an id."""
        overlay = self._overlay
        lookup = overlay.lookup(
            target, wanted=wanted or overlay.config.routing.bucket_max, parallel=overlay.config.parallel
        )
        return await overlay.search(lookup, lambda contact: self._ask_for(contact, target))

    async def _ask_for(self, contact: Contact, target: int) -> Sequence[Contact] | None:
        overlay = self._overlay
        request = DhtFindRequest(sender=overlay.sender, queries=[DhtFindQuery(target=id_to_wire(target))])
        reply = await overlay.ask(contact, FIND, request)
        return (
            overlay.heard_of(reply.results[0].nearest)
            if reply is not None and len(reply.results) == 1
            else None
        )

    def _on_newcomer(self, contact: Contact) -> None:
        self.settled.set()
        self._replication.came(contact)

    def _on_lost(self, contact: Contact, left: bool) -> None:
        if not left:
            self._strangers.lost(contact, self._overlay.clock.monotonic_s())
        self._replication.went(contact)

    def _on_unproven(self, contact: Contact) -> bool:
        """Ping a peer that called this one, or whose place in the table a newcomer waits for. Returns whether
        a ping was started.
        """
        now_s = self._overlay.clock.monotonic_s()
        if (
            self._checks >= _CHECKS_MAX
            or now_s < self._checking.get(contact.peer_id, -_CHECK_AGAIN_S) + _CHECK_AGAIN_S
        ):
            return False
        self._checking[contact.peer_id] = now_s
        self._checking.move_to_end(contact.peer_id)
        if len(self._checking) > _CHECKED_MAX:
            self._checking.popitem(last=False)
        self._checks += 1

        async def check() -> None:
            try:
                await self.ping(contact)
            finally:
                self._checks -= 1

        self._supervisor.spawn("DHT check of a caller", check)
        return True

    async def _tend(self) -> None:
        config = self._overlay.config
        backoff = Backoff(config.rejoin_first_s, config.rejoin_s_max, self._rng)
        while True:
            if not len(self._overlay.table):
                await self._attempt(self._everybody())
            if len(self._overlay.table):
                backoff.reset()
                await self._tend_once()
                await asyncio.sleep(config.tend_s * self._rng.uniform(0.8, 1.2))
            else:
                await asyncio.sleep(backoff.next_s())

    async def _tend_once(self) -> None:
        overlay, now_s = self._overlay, self._overlay.clock.monotonic_s()
        async with asyncio.TaskGroup() as group:
            for contact in overlay.table.to_ping(now_s)[:_PINGS_MAX]:
                group.create_task(self.ping(contact))
            for contact in self._worth_asking(now_s):
                group.create_task(self._ask_stranger(contact))
        if now_s - self._neighbours_s >= overlay.config.neighbours_s:
            self._neighbours_s = now_s
            await self.find(overlay.own_id_number)
        for target in overlay.table.stale_ids(now_s - overlay.config.refresh_s, self._rng)[:_REFRESHES_MAX]:
            await self.find(target, _REFRESH_WANTED)
        self.set_clock()

    def _worth_asking(self, now_s: float) -> list[Contact]:
        """Return the candidates for rejoining that are due, and occasionally a random peer of the book."""
        found = self._strangers.due(now_s, self._overlay.table, _STRANGERS_MAX)
        if now_s - self._book_s >= _BOOK_S:
            self._book_s = now_s
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

    async def _ask_stranger(self, stranger: Contact) -> None:
        """Ask a peer outside the table for this peer's neighbours.

        A lost peer may be back, or on the other side of a partition that has healed. In the same swarm it
        names known neighbours; in another one it names neighbours that this peer has not met.
        """
        overlay = self._overlay
        try:
            closer = await self._ask_for(stranger, overlay.own_id_number)
        except PeerError:
            overlay.failed(stranger.peer_id, broke_protocol=True)
            closer = None
        self._strangers.tried(stranger.peer_id, overlay.clock.monotonic_s())
        if closer is None:
            return
        near = overlay.table.nearest(overlay.own_id_number, overlay.config.routing.bucket_max)
        reach = (
            near[-1].peer_id.dht_id ^ overlay.own_id_number
            if len(near) >= overlay.config.routing.bucket_max
            else None
        )
        unmet = [contact for contact in closer if contact.addresses and contact.peer_id not in overlay.table]
        unmet = [
            contact
            for contact in unmet
            if reach is None or contact.peer_id.dht_id ^ overlay.own_id_number < reach
        ]
        if not unmet:
            return
        # A lookup alone is not enough: it would start among known peers, and may end there.
        async with asyncio.TaskGroup() as group:
            answers = [
                group.create_task(self.ping(contact))
                for contact in unmet[:_HALVES_MAX]
                if contact.peer_id != overlay.own_id
            ]
        if any(answer.result() for answer in answers):
            self._strangers.hurry(overlay.clock.monotonic_s())
            await self.find(overlay.own_id_number)

    def _everybody(self) -> list[Contact]:
        """Return all known contacts, for a peer that has lost the swarm."""
        told = {contact.peer_id: contact for contact in self._strangers.contacts()}
        known = {peer.peer_id: peer.contact for peer in self._overlay.book.known()[:_TRIED_MAX]}
        return [
            contact
            for contact in (told | known).values()
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
