"""One averager's place in the grid of a large swarm, and how it finds those who share its cell.

Where peers go after a round only their group knows, so each tells it to a few holders that everybody chooses
for the cell (the lowest hashes of cell and PeerID), ahead of time, and asks them who else is there when it
begins to search. Messages per peer and round follow the size of a group, whatever the size of the swarm. In a
swarm that fits into one group none of this happens.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from averaging.matchmaking.logic.grid import AveragingGrid, Place, shape_of, split_key
from averaging.matchmaking.logic.group import Group
from averaging.matchmaking.logic.history import PassedRounds
from averaging.matchmaking.logic.messages import (
    AveragerName,
    CellLookup,
    CellLookupReply,
    Holder,
    VectorSchema,
)
from averaging.matchmaking.logic.roster import Roster
from averaging.matchmaking.service.presence import Presence
from averaging.matchmaking.service.wire import MEET, decode_met, encode_meet
from swarm.core.clock import Clock
from swarm.core.errors import SwarmError
from swarm.core.ids import Contact, PeerId
from swarm.net.rpc import Caller

_HOLDERS_MAX = 4096


class Background(Protocol):
    """What this needs of `swarm.runtime.supervise.Supervisor`."""

    def spawn(self, name: str, function: Callable[[], Awaitable[None]]) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CellsConfig:
    # holders that keep the list of one cell. Too small: when they die its peers do not find each other until
    # they meet as strays
    hosts: int = 3
    lifetime_s: float = 60.0  # of an entry in such a list
    # presence records older than this are read again at the next search. Too large: the grid follows the
    # swarm late
    view_max_s: float = 5.0
    again_s: float = 1.0  # a cell's list is read again during a search after this, at the earliest
    # a stray looks for other strays so long before it tries its own cell again; doubled each time,
    room_s: float = 1.0
    room_s_max: float = 4.0  # up to this
    call_timeout_s: float = 1.0
    lost_s: float = 10.0  # who did not answer does not count, and keeps no list, for so long


@dataclass(frozen=True, slots=True, kw_only=True)
class CellContext:
    """What a cell is part of: the averager, and the ways to others."""

    caller: Caller
    clock: Clock
    presence: Presence
    background: Background
    name: AveragerName
    schema: VectorSchema


class Cells:
    """On the network loop."""

    def __init__(self, around: CellContext, own: PeerId, group_size: int, config: CellsConfig) -> None:
        self.config = config
        self.grid = AveragingGrid(own, group_size)
        self.roster = Roster(config.lifetime_s)
        self.at: Place | None = None  # where the search in progress takes place
        self._around = around
        self._own = own
        self._contact: Contact | None = None  # as of the last search
        self._holders: dict[PeerId, Holder] = {}  # the others, of our schema
        self._view_s = -math.inf
        self._round_key = ""
        self._mates: dict[PeerId, Holder] = {}  # told in this search
        self._met_s = -math.inf
        self._past: dict[PeerId, bool] = {}  # whether those who answered in this search were past our round
        self._passed = PassedRounds()
        self._entered: dict[str, list[Contact]] = {}  # where we are expected, and whom we told
        self._lost: dict[PeerId, float] = {}  # who did not answer, until when they are taken to be gone
        self._turn = 0

    # --- who there is

    def saw(self, holders: Mapping[PeerId, Holder]) -> None:
        """The presence records, read afresh."""
        ours = ((peer_id, holder) for peer_id, holder in holders.items() if peer_id != self._own)
        self._holders = {
            peer_id: holder for peer_id, holder in ours if holder.schema == self._around.schema.digest
        }
        self._view_s = self._around.clock.monotonic_s()
        self._lost = {
            peer_id: until_s
            for peer_id, until_s in self._lost.items()
            if peer_id in self._holders and until_s > self._view_s
        }
        self.grid.saw(self._holders, self._lost)

    def met(self, holder: Holder) -> None:
        """A holder introduced itself."""
        if (
            holder.schema == self._around.schema.digest
            and holder.contact.peer_id != self._own
            and len(self._holders) < _HOLDERS_MAX
        ):
            self._holders[holder.contact.peer_id] = holder
            self._lost.pop(holder.contact.peer_id, None)
            self.grid.saw(self._holders, self._lost)

    def lost(self, peer_id: PeerId) -> None:
        """It did not answer a call."""
        if peer_id in self._holders:
            self._lost[peer_id] = self._around.clock.monotonic_s() + self.config.lost_s
            self.grid.saw(self._holders, self._lost)

    def heard(self, peer_id: PeerId) -> None:
        """It lives."""
        if self._lost.pop(peer_id, None) is not None:
            self.grid.saw(self._holders, self._lost)

    def hint(self, place: str) -> None:
        """Somebody is, or belongs, there."""
        shape = shape_of(place)
        if shape is not None and shape != self.grid.shape:
            self.grid.heard(shape)
            self._view_s = -math.inf  # one of us is not up to date

    def mates(self) -> dict[PeerId, Holder]:
        """Who may come to where we are, as far as is known; everybody where there is no grid."""
        if not self.grid.divided:
            return dict(self._holders)
        ranked = self.grid.ranked() if self.at == self.grid.home else []
        return {**{peer_id: self._holders[peer_id] for peer_id in ranked}, **self._mates}

    def concerns(self, key: str) -> bool:
        """Whether who searches under this key may meet us there: where we search; otherwise where we belong,
        or shall after our round, though not for the same round.
        """
        round_key, place = split_key(key)
        if place and round_key in self._passed:
            return False
        if self.at is not None:
            return place == self.at.text
        coming = self.grid.next
        later = (
            coming is not None and place == coming.text and (not round_key or round_key != self._round_key)
        )
        return later or place == self.grid.home.text

    # --- a search

    def arrive(self, place: Place, contact: Contact, round_key: str) -> None:
        """A search begins there."""
        self.at, self._contact, self._round_key = place, contact, round_key
        self._mates, self._met_s = {}, -math.inf

    async def look(self, report: Callable[[Mapping[PeerId, Holder]], None], timeout_s: float) -> None:
        """Find out who may come, and `report` it as it becomes known. NetworkError when the records are
        needed and cannot be read.
        """
        if not self.grid.divided:
            holders = await self._around.presence.look(timeout_s)
            self.saw(holders)
            if not self.grid.divided:
                report(holders)
            return
        stale = self._around.clock.monotonic_s() - self._view_s > self.config.view_max_s
        async with asyncio.TaskGroup() as tasks:
            if stale:
                tasks.create_task(self._refresh(timeout_s))
            tasks.create_task(self._meet(report))

    def passed(self) -> bool:
        """Whether most of those who answered have held the round of this search already."""
        return bool(self._round_key) and 2 * sum(self._past.values()) > len(self._past)

    def leave(self) -> None:
        """The search has ended."""
        self.at = None
        self._past.clear()

    def seated(self, group: Group) -> None:
        """The search has ended with a group: those in our next cell hear of us while the round runs."""
        if self.at is not None and self.grid.divided:
            self.grid.began(self.at, group.group_id, group.peer_ids)
            if (coming := self.grid.next) is not None:
                self._enrol(coming)
        self.at = None

    def over(self, *, committed: bool) -> None:
        """The round of the group has ended."""
        if committed:
            self._passed.add(self._round_key)
        self.grid.over(committed=committed)
        self._tidy()

    def stray(self) -> None:
        """Nobody is left to wait for in our cell."""
        self._view_s = -math.inf
        if self.at == self.grid.home:
            self.grid.stray()
            self._tidy()
            self._enrol(self.grid.home)

    def declare(self, contact: Contact) -> None:
        """We hold the averager from now on: those of our cell expect us."""
        self._contact = contact
        if self.grid.divided:
            self._enrol(self.grid.home)

    def _enrol(self, place: Place) -> None:
        self._around.background.spawn("into a cell", lambda: self._tell(place.text, self._hosts(place.text)))

    def _tidy(self) -> None:
        """Nobody need look for us where we do not belong any more."""
        gone = [place for place in self._entered if place != self.grid.home.text]
        for place in gone:
            told = self._entered.pop(place)
            leave = functools.partial(self._tell, place, told, leaves=True)
            self._around.background.spawn("out of a cell", leave)

    # --- a host

    def on_meet(self, meet: CellLookup) -> CellLookupReply:
        """A peer says where it is."""
        if meet.schema != self._around.schema.digest:
            return CellLookupReply(mates=(), home="", passed=False)
        now_s, peer_id = self._around.clock.monotonic_s(), meet.contact.peer_id
        if meet.leaves:
            self.roster.leave(peer_id, meet.place, meet.turn)
            return CellLookupReply(mates=(), home=self.grid.home.text, passed=False)
        self.roster.enter(meet.contact, meet.place, meet.turn, now_s)
        mates = self.roster.mates(meet.place, peer_id, now_s)
        return CellLookupReply(
            mates=tuple(mates), home=self.grid.home.text, passed=meet.round_key in self._passed
        )

    # --- inside

    async def _refresh(self, timeout_s: float) -> None:
        try:
            self.saw(await self._around.presence.look(timeout_s))
        except SwarmError:
            return  # those we know will do for now

    def _hosts(self, place: str) -> list[Contact]:
        """Who keeps the list of a place: of those who can be dialed, everybody chooses the same."""
        assert self._contact is not None
        contacts = [self._contact, *(holder.contact for holder in self._holders.values())]
        able = [one for one in contacts if one.addresses and one.peer_id not in self._lost]
        lot = place.encode() + b"\0"
        return sorted(able, key=lambda one: hashlib.sha256(lot + one.peer_id.public_key).digest())[
            : self.config.hosts
        ]

    def _next_turn(self) -> int:
        self._turn = max(self._turn + 1, int(self._around.clock.swarm_s() * 1e6))
        return self._turn

    async def _meet(self, report: Callable[[Mapping[PeerId, Holder]], None]) -> None:
        """Enter the place of the search, and hear who else is there."""
        at, now_s = self.at, self._around.clock.monotonic_s()
        if at is None:
            return
        if now_s - self._met_s < self.config.again_s:
            report(self.mates())
            return
        self._met_s = now_s

        def heard(host: PeerId, met: CellLookupReply) -> None:
            if self.at != at:
                return
            for contact in met.mates:
                known = self._holders.get(contact.peer_id) or Holder(
                    contact=contact, schema=self._around.schema.digest
                )
                self._mates[contact.peer_id] = known
            self.hint(met.home)
            self._past[host] = met.passed
            report(self.mates())

        await self._tell(at.text, self._hosts(at.text), heard)
        if self.at == at:  # whoever answered: the look is over
            report(self.mates())

    async def _tell(
        self,
        place: str,
        hosts: list[Contact],
        heard: Callable[[PeerId, CellLookupReply], None] | None = None,
        *,
        leaves: bool = False,
    ) -> None:
        """Say that we are in a place, or no longer, to the hosts of its list."""
        contact = self._contact
        assert contact is not None
        if not leaves:
            self._entered[place] = hosts
        key = self._round_key if heard is not None else ""
        meet = CellLookup(
            contact=contact,
            schema=self._around.schema.digest,
            place=place,
            round_key=key,
            turn=self._next_turn(),
            leaves=leaves,
        )
        request = encode_meet(meet, name=self._around.name)

        async def one(host: Contact) -> None:
            try:
                reply = await self._around.caller.call(
                    host, MEET, request, timeout_s=self.config.call_timeout_s
                )
                met = decode_met(reply)
            except SwarmError:
                self.lost(host.peer_id)
                return
            self.heard(host.peer_id)
            if heard is not None:
                heard(host.peer_id, met)

        async with asyncio.TaskGroup() as tasks:
            for host in hosts:
                if host.peer_id != self._own:
                    tasks.create_task(one(host))
                    continue
                met = self.on_meet(meet)
                if heard is not None and met.mates:
                    self._mates.update(
                        {
                            mate.peer_id: Holder(contact=mate, schema=self._around.schema.digest)
                            for mate in met.mates
                        }
                    )
