"""Polling of a run: reads its records at intervals and feeds the model. Runs on the network loop.

A poll reads all records of the run at once. A run without peers is distinguished from a monitor without a
connection by whether any peer answers: when a poll finds no records, peers are pinged; when none answers, the
view becomes "lost" and the monitor tries all peers that it has ever met until one answers. The peer through
which the monitor joined has no special role; it is only pinged to show whether it still answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from swarm.core.clock import Clock
from swarm.core.errors import SwarmError
from swarm.core.ids import Contact, Key, PeerId
from swarm.dht.service.dht_service import ManyAnswers
from swarm.monitor.logic.model import Model
from swarm.monitor.logic.reading import RunRecords, keys_of, read
from swarm.monitor.logic.robust import median
from swarm.monitor.logic.tracked import Poll
from swarm.monitor.logic.view import ExpertView, LinkStatus, LinkView, RunView
from swarm.monitor.relays import RelayWatch

_log = logging.getLogger(__name__)


# interval of polls in a small run; in larger runs peers publish less often, and polls follow their interval
_INTERVAL_S = 1.0
_SMALL_PEERS = 16
_INTERVAL_S_MAX = 12.0
_READ_TIMEOUT_S = 6.0
_ENTRY_INTERVAL_S = 10.0  # between two pings of the entry peers
_RUN_INTERVAL_S = 30.0  # between two reads of the specification
_EXPERTS_INTERVAL_S = 5.0  # between two reads of the experts
_DIAL_MAX = 2  # peers that are pinged per poll to see whether they can be dialed
_REJOIN_MAX = 20  # peers that are tried at once when no peer answers
_CONTACTS_MAX = 512  # remembered contacts


class Network(Protocol):
    """The part of a node's DHT that a collector needs."""

    async def get_many(
        self,
        keys: Sequence[Key],
        *,
        latest: bool = False,
        max_age_s: float | None = None,
        timeout_s: float = 30.0,
    ) -> ManyAnswers: ...
    async def ping(self, contact: Contact) -> bool: ...
    async def join(self, contacts: Sequence[Contact]) -> None: ...


@dataclass(slots=True, kw_only=True)
class Collector:
    """Poller of one run. `after` is awaited when a poll is over, answered or not."""

    dht: Network
    clock: Clock
    model: Model
    entry: tuple[Contact, ...]
    known: Callable[[], Sequence[Contact]]  # peers that answered recently, from the DHT's routing table
    remembered: Callable[[], Sequence[Contact]]  # all peers that this machine ever met
    specification: Callable[[], Awaitable[RunView | None]] | None = None  # None: the run has no specification
    experts: Callable[[], Awaitable[tuple[ExpertView, ...]]] | None = None
    members: Callable[[], Awaitable[None]] | None = None  # learns who the members are
    relays: RelayWatch | None = None
    after: Callable[[], Awaitable[None]] | None = None
    polls: int = 0  # polls with an answer
    donors: tuple[Contact, ...] = ()  # peers that offer the run's state, as of the last poll
    _contacts: OrderedDict[PeerId, Contact] = field(default_factory=OrderedDict)
    _entry_answers: bool | None = None
    _entry_asked_s: float = float("-inf")
    _run_asked_s: float = float("-inf")
    _experts_asked_s: float = float("-inf")
    _members_asked_s: float = float("-inf")
    _experts: tuple[ExpertView, ...] = ()

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            begun_s = self.clock.monotonic_s()
            interval_s = await self.poll()
            if self.after is not None:
                await self.after()
            await asyncio.sleep(max(interval_s - (self.clock.monotonic_s() - begun_s), 0.1 * interval_s))

    async def poll(self) -> float:
        """Poll once. Return how long to wait before the next poll, in seconds."""
        interval_s = _INTERVAL_S
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(self._read())
            group.create_task(self._ask_entry())
            group.create_task(self._refresh())
            if self.relays is not None:
                group.create_task(self.relays.ask(self.entry, [*self._contacts.values(), *self.known()]))
        run_records, answered = reading.result()
        now_s = self.clock.swarm_s()
        if answered or await self._anybody_answers():
            periods_s = [
                records.metrics.every_s
                for records in run_records.peers.values()
                if records.metrics is not None
            ]
            interval_s = min(
                max(
                    _INTERVAL_S,
                    0.8 * (median(periods_s) or 0.0) if len(periods_s) > _SMALL_PEERS else 0.0,
                ),
                _INTERVAL_S_MAX,
            )
            self._remember(run_records)
            self.polls += 1
            self.model.on_poll(
                Poll(
                    peers=run_records.peers,
                    refused=run_records.refused,
                    states=run_records.states,
                    total=run_records.total,
                    experts=self._experts,
                    relays=self.relays.views() if self.relays is not None else (),
                    interval_s=interval_s,
                ),
                now_s,
            )
            self._link("live", now_s)
            await self._dial(run_records)
        else:
            self._link("lost", now_s)
            await self._rejoin()
        return interval_s

    async def _read(self) -> tuple[RunRecords, bool]:
        """Return the records, and whether they alone prove that a peer answered."""
        run_id = self.model.run.run_id
        try:
            many = await self.dht.get_many(keys_of(run_id), timeout_s=_READ_TIMEOUT_S)
        except SwarmError as error:
            _log.info("a poll of run %s failed: %s", run_id, error)
            return RunRecords(), False
        run_records = read(run_id, many.answers, self.clock.swarm_s())
        return run_records, bool(run_records.peers) and not many.failures

    async def _anybody_answers(self) -> bool:
        """Return whether any peer answers. Without this check a run without peers looks like a lost
        connection.
        """
        candidates = self._candidates()[:_REJOIN_MAX]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.dht.ping(contact)) for contact in candidates]
        return any(task.result() for task in tasks)

    async def _rejoin(self) -> None:
        candidates = self._candidates()[:_REJOIN_MAX]
        if candidates:
            await self.dht.join(candidates)

    def _candidates(self) -> list[Contact]:
        """Return all peers that might answer: the entry peers, peers of the run (latest first), then the
        rest.
        """
        run_records = {contact.peer_id: contact for contact in self.entry}
        for contact in (*reversed(self._contacts.values()), *self.known(), *self.remembered()):
            if contact.addresses:
                run_records.setdefault(contact.peer_id, contact)
        return list(run_records.values())

    def _link(self, status: LinkStatus, now_s: float) -> None:
        known = {contact.peer_id for contact in self.known()}
        entry = self.entry[0] if self.entry else None
        others = (
            len(known - {contact.peer_id for contact in self.entry})
            if self._entry_answers is False
            else len(known)
        )
        text = f"Trying {len(self._candidates())} peers met before" if status == "lost" else ""
        where = (
            f"{entry.addresses[0].host}:{entry.addresses[0].port}"
            if entry is not None and entry.addresses
            else ""
        )
        self.model.on_link(
            LinkView(status=status, entry=where, entry_answers=self._entry_answers, known=others, text=text),
            now_s,
        )

    def _remember(self, run_records: RunRecords) -> None:
        self.donors = tuple(run_records.donors.values())
        for peer, contact in run_records.contacts.items():
            self._contacts[peer] = contact
            self._contacts.move_to_end(peer)
        while len(self._contacts) > _CONTACTS_MAX:
            self._contacts.popitem(last=False)

    async def _ask_entry(self) -> None:
        now_s = self.clock.monotonic_s()
        if not self.entry or now_s - self._entry_asked_s < _ENTRY_INTERVAL_S:
            return
        self._entry_asked_s = now_s
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.dht.ping(contact)) for contact in self.entry]
        self._entry_answers = any(task.result() for task in tasks)

    async def _refresh(self) -> None:
        """Read the specification, the experts and the members, if they are due."""
        now_s = self.clock.monotonic_s()
        try:
            if self.experts is not None and now_s - self._experts_asked_s >= _EXPERTS_INTERVAL_S:
                self._experts_asked_s = now_s
                self._experts = await self.experts()
            if self.specification is not None and now_s - self._run_asked_s >= _RUN_INTERVAL_S:
                self._run_asked_s = now_s
                newer = await self.specification()
                if newer is not None and newer.version > self.model.run.version:
                    self.model.on_run(newer, self.clock.swarm_s())
            if self.members is not None and now_s - self._members_asked_s >= _RUN_INTERVAL_S:
                self._members_asked_s = now_s
                await self.members()
        except SwarmError as error:
            _log.info(
                "the specification of run %s, or its experts, were not read: %s", self.model.run.run_id, error
            )

    async def _dial(self, run_records: RunRecords) -> None:
        """Ping a few peers of the run, in turn."""
        now_contacts = [self._contacts[peer] for peer in run_records.contacts]
        count = min(_DIAL_MAX, len(now_contacts))
        first = (self.polls * _DIAL_MAX) % len(now_contacts) if now_contacts else 0
        chosen = [now_contacts[(first + place) % len(now_contacts)] for place in range(count)]
        async with asyncio.TaskGroup() as group:
            tasks = {contact.peer_id: group.create_task(self.dht.ping(contact)) for contact in chosen}
        for peer, task in tasks.items():
            self.model.on_dialed(peer, task.result())
