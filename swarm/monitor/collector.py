"""Looking at a run again and again, through whoever answers: feeds the model. Lives on the network loop.

A look reads every record of the run in one go. What tells a quiet run from a monitor that sees nothing any
more is whether somebody answers: when a look finds nobody, peers are pinged, and when none answers, the view
says so, and the monitor knocks at every peer that it has ever met until one does. The peer that it came in by
has no special part in this; it is only asked whether it still is there, to say so.
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
from swarm.monitor.logic.model import Look, Model
from swarm.monitor.logic.reading import Found, keys_of, read
from swarm.monitor.logic.robust import median
from swarm.monitor.logic.view import ExpertView, LinkView, RunView

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorConfig:
    """How often the monitor looks, in seconds."""

    # in a small run; in larger ones peers tell less often, and are read about as often as that
    every_s: float = 1.0
    small_peers: int = 16
    every_s_max: float = 12.0
    read_timeout_s: float = 6.0
    entry_every_s: float = 10.0  # between two questions whether the way in still is there
    run_every_s: float = 30.0  # between two looks at the specification
    experts_every_s: float = 5.0  # and at the experts
    dial_max: int = 2  # peers per look that are called to see whether they can be
    knock_max: int = 20  # peers that are tried at once when nobody answers
    contacts_max: int = 512  # that are remembered for this


class Network(Protocol):
    """What a collector needs of a node's DHT."""

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
    """One run, watched. `after` is awaited when a look is over, answered or not."""

    dht: Network
    clock: Clock
    model: Model
    entry: tuple[Contact, ...]
    known: Callable[[], Sequence[Contact]]  # peers that answered lately: the DHT's table
    remembered: Callable[[], Sequence[Contact]]  # all that this machine ever met
    specification: Callable[[], Awaitable[RunView | None]] | None = None  # None: a run without one
    experts: Callable[[], Awaitable[tuple[ExpertView, ...]]] | None = None
    after: Callable[[], Awaitable[None]] | None = None
    config: CollectorConfig = field(default_factory=CollectorConfig)
    looks: int = 0  # that were answered
    donors: tuple[Contact, ...] = ()  # who gives the run's state, as of the last look
    _contacts: OrderedDict[PeerId, Contact] = field(default_factory=OrderedDict)
    _entry_answers: bool | None = None
    _entry_asked_s: float = float("-inf")
    _run_asked_s: float = float("-inf")
    _experts_asked_s: float = float("-inf")
    _experts: tuple[ExpertView, ...] = ()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            begun_s = self.clock.monotonic_s()
            interval_s = await self.look()
            if self.after is not None:
                await self.after()
            await asyncio.sleep(max(interval_s - (self.clock.monotonic_s() - begun_s), 0.1 * interval_s))

    async def look(self) -> float:
        """Look once; returns how long to wait before the next one."""
        found, interval_s = Found(), self.config.every_s
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(self._read())
            group.create_task(self._ask_entry())
            group.create_task(self._refresh())
        found, answered = reading.result()
        now_s = self.clock.swarm_s()
        if answered or await self._somebody():
            told = [heard.metrics.every_s for heard in found.peers.values() if heard.metrics is not None]
            interval_s = min(
                max(
                    self.config.every_s,
                    0.8 * (median(told) or 0.0) if len(told) > self.config.small_peers else 0.0,
                ),
                self.config.every_s_max,
            )
            self._remember(found)
            self.looks += 1
            self.model.on_look(
                Look(
                    peers=found.peers,
                    refused=found.refused,
                    states=found.states,
                    total=found.total,
                    experts=self._experts,
                    interval_s=interval_s,
                ),
                now_s,
            )
            self._link("", now_s)
            await self._dial(found)
        else:
            self._link("lost", now_s)
            await self._knock()
        return interval_s

    async def _read(self) -> tuple[Found, bool]:
        """What was found, and whether that alone shows that somebody answered."""
        run_id = self.model.run.run_id
        try:
            many = await self.dht.get_many(keys_of(run_id), timeout_s=self.config.read_timeout_s)
        except SwarmError as error:
            _log.info("a look at run %s failed: %s", run_id, error)
            return Found(), False
        found = read(run_id, many.answers, self.clock.swarm_s())
        return found, bool(found.peers) and not many.failures

    async def _somebody(self) -> bool:
        """Does any peer answer? A run that nobody takes part in looks like one that cannot be seen."""
        candidates = self._candidates()[: self.config.knock_max]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.dht.ping(contact)) for contact in candidates]
        return any(task.result() for task in tasks)

    async def _knock(self) -> None:
        candidates = self._candidates()[: self.config.knock_max]
        if candidates:
            await self.dht.join(candidates)

    def _candidates(self) -> list[Contact]:
        """Everybody who might answer: the way in, peers of the run, those heard of last first, then the rest."""
        found = {contact.peer_id: contact for contact in self.entry}
        for contact in (*reversed(self._contacts.values()), *self.known(), *self.remembered()):
            if contact.addresses:
                found.setdefault(contact.peer_id, contact)
        return list(found.values())

    def _link(self, status: str, now_s: float) -> None:
        known = {contact.peer_id for contact in self.known()}
        entry = self.entry[0] if self.entry else None
        others = (
            len(known - {contact.peer_id for contact in self.entry})
            if self._entry_answers is False
            else len(known)
        )
        text = f"Knocking at {len(self._candidates())} peers met before" if status == "lost" else ""
        where = (
            f"{entry.addresses[0].host}:{entry.addresses[0].port}"
            if entry is not None and entry.addresses
            else ""
        )
        self.model.on_link(
            LinkView(status=status, entry=where, entry_answers=self._entry_answers, known=others, text=text),
            now_s,
        )

    def _remember(self, found: Found) -> None:
        self.donors = tuple(found.donors.values())
        for peer, contact in found.contacts.items():
            self._contacts[peer] = contact
            self._contacts.move_to_end(peer)
        while len(self._contacts) > self.config.contacts_max:
            self._contacts.popitem(last=False)

    async def _ask_entry(self) -> None:
        now_s = self.clock.monotonic_s()
        if not self.entry or now_s - self._entry_asked_s < self.config.entry_every_s:
            return
        self._entry_asked_s = now_s
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.dht.ping(contact)) for contact in self.entry]
        self._entry_answers = any(task.result() for task in tasks)

    async def _refresh(self) -> None:
        """The specification, and what experts there are."""
        now_s = self.clock.monotonic_s()
        try:
            if self.experts is not None and now_s - self._experts_asked_s >= self.config.experts_every_s:
                self._experts_asked_s = now_s
                self._experts = await self.experts()
            if self.specification is not None and now_s - self._run_asked_s >= self.config.run_every_s:
                self._run_asked_s = now_s
                newer = await self.specification()
                if newer is not None and newer.version > self.model.run.version:
                    self.model.on_run(newer, self.clock.swarm_s())
        except SwarmError as error:
            _log.info(
                "the specification of run %s, or its experts, were not read: %s", self.model.run.run_id, error
            )

    async def _dial(self, found: Found) -> None:
        """Call a few of the peers, each in its turn."""
        now_contacts = [self._contacts[peer] for peer in found.contacts]
        count = min(self.config.dial_max, len(now_contacts))
        first = (self.looks * self.config.dial_max) % len(now_contacts) if now_contacts else 0
        turn = [now_contacts[(first + place) % len(now_contacts)] for place in range(count)]
        async with asyncio.TaskGroup() as group:
            tasks = {contact.peer_id: group.create_task(self.dht.ping(contact)) for contact in turn}
        for peer, task in tasks.items():
            self.model.on_dialed(peer, task.result())
