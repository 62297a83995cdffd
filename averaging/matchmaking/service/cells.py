"""One averager's position in the grid of a large swarm, and how it finds the peers in its cell.

Only its group knows where a peer goes after a round. Each peer therefore reports its next cell ahead of time
to the hosts of that cell, a few holders that everybody chooses alike (the lowest hashes of cell and PeerID),
and asks them for the other members when it begins to search. Messages per peer and round grow with the size
of a group, not with the size of the swarm. A swarm that fits into one group uses none of this.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from averaging.matchmaking.logic.cell_members import CellMembers, is_over_by_word
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
from averaging.matchmaking.logic.presence_shards import HolderShard, nearest, place_of
from averaging.matchmaking.service.presence import Presence
from averaging.matchmaking.service.wire import (
    CELL_LOOKUP,
    decode_cell_lookup_reply,
    encode_cell_lookup,
)
from swarm.core.errors import SwarmError
from swarm.core.ids import Contact, PeerId
from swarm.runtime.supervise import Supervisor

if TYPE_CHECKING:
    from averaging.matchmaking.service.exchange import GroupExchange

LOBBY_S = 1.0  # an unmatched peer waits this long in the lobby before it retries its own cell; doubles
LOBBY_S_MAX = 4.0  # upper limit of the doubled wait
# holders that keep the member list of one cell. Too small: when they die, members find each other only in the
# lobby
_HOSTS_PER_CELL = 3
_ENTRY_TTL_S = 60.0  # lifetime of an entry in such a list
# presence records older than this are read again at the next search. Too large: the grid follows changes late
_RECORDS_AGE_S_MAX = 5.0
_LOOKUP_INTERVAL_S = 1.0  # the hosts of a cell are asked again during a search after this, at the earliest
_CALL_TIMEOUT_S = 1.0
_READ_TIMEOUT_S = 2.0  # for the records of a place's hosts
_LOST_S = 10.0  # for this long, a peer that did not answer is not counted and hosts no list
_HOLDERS_MAX = 4096


class Cells:
    """Client and host of the grid's cells for one averager. Runs on the network loop."""

    def __init__(
        self,
        exchange: GroupExchange,
        presence: Presence,
        supervisor: Supervisor,
        *,
        name: AveragerName,
        schema: VectorSchema,
        group_size: int,
    ) -> None:
        own = exchange.own
        self.grid = AveragingGrid(own, group_size)
        self.members = CellMembers(_ENTRY_TTL_S)
        self.place: Place | None = None  # place in the search in progress
        self._own, self._name, self._schema = own, name, schema
        self._group_size, self._ledger = group_size, exchange.ledger_of(name.run)
        self._presence, self._caller, self._clock = presence, exchange.caller, exchange.clock
        self._supervisor = supervisor
        self._contact: Contact | None = None  # contact of this peer at the last search
        # other holders with the same schema; in a large swarm only those of this peer's shard
        self._holders: dict[PeerId, Holder] = {}
        self._shard = HolderShard()  # shard of these holders
        self._records_read_s = -math.inf
        self._round_key = ""
        self._reported: dict[PeerId, Holder] = {}  # members reported by hosts during this search
        self._lookup_s = -math.inf
        self._round_passed: dict[PeerId, bool] = {}  # per host that replied in this search
        self._passed = PassedRounds()
        self._entered: dict[str, list[Contact]] = {}  # reported places, and the hosts of each
        # peers that did not answer -> time until which they count as lost
        self._lost: dict[PeerId, float] = {}
        self._turn = 0

    # --- known peers

    def on_records(self, holders: Mapping[PeerId, Holder]) -> None:
        """Take in presence records that were just read."""
        others = ((peer_id, holder) for peer_id, holder in holders.items() if peer_id != self._own)
        self._holders = {
            peer_id: holder for peer_id, holder in others if holder.schema == self._schema.digest
        }
        self._records_read_s = self._clock.monotonic_s()
        self._shard = self._presence.shard
        self._lost = {
            peer_id: until_s
            for peer_id, until_s in self._lost.items()
            if (peer_id in self._holders or self._shard.bits) and until_s > self._records_read_s
        }
        self._update_grid()

    def _update_grid(self) -> None:
        peers = [self._own, *self._holders]
        may_divide = len(peers) <= self._group_size or self._ledger.may_divide(peers, self._group_size)
        total = self._presence.total if self._shard.bits else len(peers)
        self.grid.on_records(self._holders, self._lost, self._shard, total=total, may_divide=may_divide)

    def on_announcement(self, holder: Holder) -> None:
        """Add a holder that introduced itself."""
        if (
            holder.schema == self._schema.digest
            and holder.contact.peer_id != self._own
            and len(self._holders) < _HOLDERS_MAX
            and self._shard.holds(place_of(holder.contact.peer_id.to_bytes()))
        ):
            self._holders[holder.contact.peer_id] = holder
            self._lost.pop(holder.contact.peer_id, None)
            self._update_grid()

    def mark_lost(self, peer_id: PeerId) -> None:
        """Record that the peer did not answer a call."""
        if peer_id in self._holders or self._shard.bits:
            self._lost[peer_id] = self._clock.monotonic_s() + _LOST_S
            self._update_grid()

    def mark_alive(self, peer_id: PeerId) -> None:
        """Record that the peer sent a message."""
        if self._lost.pop(peer_id, None) is not None:
            self._update_grid()

    def on_reported_place(self, place: str) -> None:
        """Record the place that another peer reports; its shape may differ from this peer's."""
        shape = shape_of(place)
        if shape is not None and shape != self.grid.shape:
            self.grid.adopt_shape(shape)
            self._records_read_s = -math.inf  # one of the two peers has outdated records

    def candidates(self) -> dict[PeerId, Holder]:
        """Return the peers that may come to the place of the search, as far as known; all holders without a
        grid.
        """
        if not (self.grid.divided or self.among_electors):
            return dict(self._holders)
        ranked = self.grid.initial_members() if self.place == self.grid.home else []
        return {**{peer_id: self._holders[peer_id] for peer_id in ranked}, **self._reported}

    def is_relevant(self, key: str) -> bool:
        """Return whether a peer that searches under this key may meet this one: at the place of this peer's
        search; otherwise in its cell, or in its next cell unless the search is for the round in progress.
        """
        round_key, place = split_key(key)
        if place and round_key in self._passed:
            return False
        if self.place is not None:
            return place == self.place.text
        coming = self.grid.next
        later = (
            coming is not None and place == coming.text and (not round_key or round_key != self._round_key)
        )
        return later or place == self.grid.home.text

    @property
    def among_electors(self) -> bool:
        """Return whether this peer searches in the electors' cell, which needs no grid."""
        return self.place == self.grid.electors

    # --- a search

    def begin_search(self, place: Place, contact: Contact, round_key: str) -> None:
        """Record that a search begins at `place`."""
        self.place, self._contact, self._round_key = place, contact, round_key
        self._reported, self._lookup_s = {}, -math.inf

    async def find_candidates(
        self, report: Callable[[Mapping[PeerId, Holder]], None], timeout_s: float
    ) -> None:
        """Find the peers that may come, and `report` them as they become known. Raise NetworkError when the
        presence records are needed and cannot be read.
        """
        if not (self.grid.divided or self.among_electors):
            holders = await self._presence.read(timeout_s)
            self.on_records(holders)
            if not self.grid.divided:
                report(holders)
            return
        stale = self._clock.monotonic_s() - self._records_read_s > _RECORDS_AGE_S_MAX
        async with asyncio.TaskGroup() as tasks:
            if stale:
                tasks.create_task(self._refresh(timeout_s))
            tasks.create_task(self._ask_hosts(report))

    def round_has_passed(self) -> bool:
        """Return whether the round of this search is over without this peer, by the word of its hosts."""
        return bool(self._round_key) and is_over_by_word(self._round_passed, self._ledger.has_standing)

    def on_round_passed(self) -> None:
        """Record that this peer gives up the round of this search, which is over. As a host it says so, too:
        where a peer is left over in every round, few hosts of a cell have completed it themselves.
        """
        self._passed.add(self._round_key)

    def end_search(self) -> None:
        """Record the end of the search."""
        self.place = None
        self._round_passed.clear()

    def on_group_formed(self, group: Group) -> None:
        """Record that the search found a group. The next cell is reported to its hosts while the round
        runs.
        """
        if self.place is not None and self.grid.divided and not self.among_electors:
            self.grid.on_group_formed(self.place, group.group_id, group.peer_ids)
            if (coming := self.grid.next) is not None:
                self._enter(coming)
        self.place = None

    def on_round_over(self, *, committed: bool) -> None:
        """Record the end of the group's round."""
        if committed:
            self._passed.add(self._round_key)
        self.grid.on_round_over(committed=committed)
        self._leave_old_places()

    def on_unmatched(self) -> None:
        """Record that nobody is left to wait for at the place of the search; move on if it was this peer's
        cell.
        """
        self._records_read_s = -math.inf
        if self.place == self.grid.home:
            self.grid.move_to_other_cell()
            self._leave_old_places()
            self._enter(self.grid.home)

    def enter_home(self, contact: Contact) -> None:
        """Report to the hosts of this peer's cell that it holds the averager from now on."""
        self._contact = contact
        if self.grid.divided:
            self._enter(self.grid.home)

    def _enter(self, place: Place) -> None:
        self._supervisor.spawn("into a cell", lambda: self._call_hosts_of(place.text))

    def _leave_old_places(self) -> None:
        for place in [place for place in self._entered if place != self.grid.home.text]:
            hosts = self._entered.pop(place)
            leave = functools.partial(self._call_hosts, place, hosts, leaves=True)
            self._supervisor.spawn("out of a cell", leave)

    # --- as a host

    def on_cell_lookup(self, lookup: CellLookup) -> CellLookupReply:
        """Record where a peer is, and return the other members of that place."""
        if lookup.schema != self._schema.digest:
            return CellLookupReply(members=(), home="", passed=False)
        now_s, peer_id = self._clock.monotonic_s(), lookup.contact.peer_id
        if lookup.leaves:
            self.members.leave(peer_id, lookup.place, lookup.turn)
            return CellLookupReply(members=(), home=self.grid.home.text, passed=False)
        self.members.enter(lookup.contact, lookup.place, lookup.turn, now_s)
        members = self.members.members_at(lookup.place, peer_id, now_s)
        return CellLookupReply(
            members=tuple(members), home=self.grid.home.text, passed=lookup.round_key in self._passed
        )

    # --- inside

    async def _refresh(self, timeout_s: float) -> None:
        try:
            self.on_records(await self._presence.read(timeout_s))
        except SwarmError:
            return  # the known holders are enough for now

    async def _hosts_of(self, place: str) -> list[Contact]:
        """Return the hosts of a place: of the holders that can be dialed, the same ones on every peer. In a
        large swarm, where no peer knows all holders, they are those whose hashes are nearest to the place's.
        """
        assert self._contact is not None
        contacts = [self._contact, *(holder.contact for holder in self._holders.values())]
        if self._shard.bits:
            return await self._hosts_near(place)
        able = [one for one in contacts if one.is_callable and one.peer_id not in self._lost]
        prefix = place.encode() + b"\0"
        return sorted(able, key=lambda one: hashlib.sha256(prefix + one.peer_id.public_key).digest())[
            :_HOSTS_PER_CELL
        ]

    async def _hosts_near(self, place: str) -> list[Contact]:
        """Return the hosts of a place in a large swarm; none when the records cannot be read."""
        try:
            found = await self._presence.read_at(place, _READ_TIMEOUT_S)
        except SwarmError:
            return []  # the other members are met in the lobby, or by their own search
        able = {
            peer_id: one.contact
            for peer_id, one in found.items()
            if one.contact.is_callable and one.schema == self._schema.digest and peer_id not in self._lost
        }
        return [able[peer_id] for peer_id in nearest(place, able, _HOSTS_PER_CELL)]

    def _next_turn(self) -> int:
        self._turn = max(self._turn + 1, int(self._clock.swarm_s() * 1e6))
        return self._turn

    def _holder_of(self, contact: Contact) -> Holder:
        return Holder(contact=contact, schema=self._schema.digest)

    async def _ask_hosts(self, report: Callable[[Mapping[PeerId, Holder]], None]) -> None:
        """Enter the place of the search, and `report` the other members."""
        place, now_s = self.place, self._clock.monotonic_s()
        if place is None:
            return
        if now_s - self._lookup_s < _LOOKUP_INTERVAL_S:
            report(self.candidates())
            return
        self._lookup_s = now_s

        def on_reply(host: PeerId, reply: CellLookupReply) -> None:
            if self.place != place:
                return
            for contact in reply.members:
                self._reported[contact.peer_id] = self._holders.get(contact.peer_id) or self._holder_of(
                    contact
                )
            self.on_reported_place(reply.home)
            self._round_passed[host] = reply.passed
            report(self.candidates())

        await self._call_hosts_of(place.text, on_reply)
        if self.place == place:  # the lookup has ended even if no host replied
            report(self.candidates())

    async def _call_hosts_of(
        self, place: str, on_reply: Callable[[PeerId, CellLookupReply], None] | None = None
    ) -> None:
        await self._call_hosts(place, await self._hosts_of(place), on_reply)

    async def _call_hosts(
        self,
        place: str,
        hosts: list[Contact],
        on_reply: Callable[[PeerId, CellLookupReply], None] | None = None,
        *,
        leaves: bool = False,
    ) -> None:
        """Report to the hosts of a place that this peer is there, or leaves. With `on_reply` it also searches
        there.
        """
        contact = self._contact
        assert contact is not None
        if not leaves:
            self._entered[place] = hosts
        key = self._round_key if on_reply is not None else ""
        lookup = CellLookup(
            contact=contact,
            schema=self._schema.digest,
            place=place,
            round_key=key,
            turn=self._next_turn(),
            leaves=leaves,
        )
        request = encode_cell_lookup(lookup, name=self._name)

        async def call(host: Contact) -> None:
            try:
                reply = decode_cell_lookup_reply(
                    await self._caller.call(host, CELL_LOOKUP, request, timeout_s=_CALL_TIMEOUT_S)
                )
            except SwarmError:
                self.mark_lost(host.peer_id)
                return
            self.mark_alive(host.peer_id)
            if on_reply is not None:
                on_reply(host.peer_id, reply)

        async with asyncio.TaskGroup() as tasks:
            for host in hosts:
                if host.peer_id != self._own:
                    tasks.create_task(call(host))
                    continue
                own_reply = self.on_cell_lookup(lookup)
                if on_reply is not None:
                    self._reported.update(
                        {member.peer_id: self._holder_of(member) for member in own_reply.members}
                    )
