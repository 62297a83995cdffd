"""The service around `averaging.matchmaking.logic.matchmaking`: it passes calls, timers and presence records
to the state machine, and performs its effects.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from averaging.matchmaking.logic.asking import FIRST_MAX
from averaging.matchmaking.logic.grace_period import GracePeriod
from averaging.matchmaking.logic.grid import Place, key_at, split_key
from averaging.matchmaking.logic.group import Group, Member
from averaging.matchmaking.logic.matchmaking import MIN_GROUP_SIZE, TARGET_GROUP_SIZE, Matchmaker
from averaging.matchmaking.logic.messages import (
    NO_PRECEDENCE,
    AbandonJoin,
    Answer,
    AnswerJoin,
    AveragerName,
    Effect,
    Holder,
    Join,
    LookForGroup,
    PeerStatus,
    Precedence,
    ReadRecords,
    SearchFailed,
    SearchFinished,
    SearchRequest,
    SendJoin,
    SendLookForGroup,
    VectorSchema,
)
from averaging.matchmaking.logic.peer_table import QUERIED_PEERS_MAX
from averaging.matchmaking.service.cells import LOBBY_S, LOBBY_S_MAX, Cells
from averaging.matchmaking.service.presence import PermittedPresence, Presence
from averaging.matchmaking.service.wire import (
    JOIN,
    LOOK_FOR_GROUP,
    decode_answer,
    decode_join_answer,
    encode_announcement,
    encode_join,
    encode_query,
)
from swarm.core.backoff import Backoff
from swarm.core.errors import SwarmError
from swarm.core.ids import Contact, PeerId
from swarm.core.notify import ChangeEvent
from swarm.core.presets import WAN, Timings
from swarm.runtime.supervise import Supervisor

if TYPE_CHECKING:
    from averaging.matchmaking.service.exchange import GroupExchange

# added to timers: one that fires early by a rounding error would find nothing to do and repeat
_TIMER_MARGIN_S = 1e-6
# margin for the reply and for clock errors: a leader answers by its own deadline, which is not after its
# follower's
_ANSWER_SLACK_S = 1.0
# times as long as a peer with an address may take to answer one that is called through relays: the first call
# takes four round trips of the way over the relay, and more handshakes. Too small: peers that are far from
# their relay, or many that connect at once, never answer; too large: a group waits for one that is gone
_RELAYED_TIMES = 4.0


class GroupService:
    """Searches of one averager, one at a time. Runs on the network loop."""

    def __init__(
        self,
        *,
        exchange: GroupExchange,
        presence: Presence,
        name: AveragerName,
        schema: VectorSchema,
        rng: random.Random,
        supervisor: Supervisor,
        target_group_size: int = TARGET_GROUP_SIZE,
        min_group_size: int = MIN_GROUP_SIZE,
        grace_period: GracePeriod | None = None,
        timings: Timings = WAN,
    ) -> None:
        self.name = name
        self._timings = timings
        self._exchange, self._caller, self._clock = exchange, exchange.caller, exchange.clock
        self.blocklist = blocklist = exchange.blocklist_of(name.run)
        self.ledger = exchange.ledger_of(name.run)
        self._presence = presence = PermittedPresence(presence, lambda peer: blocklist.reason(peer) is None)
        self._schema = schema
        self.machine = Matchmaker(
            own=exchange.own,
            schema=schema,
            rng=rng,
            now_s=self._clock.monotonic_s(),
            target_group_size=target_group_size,
            min_group_size=min_group_size,
            grace_period=grace_period or GracePeriod(unknown_peer_s=timings.unknown_peer_s),
        )
        self.cells = Cells(
            exchange,
            presence,
            supervisor,
            name=name,
            schema=schema,
            group_size=target_group_size,
        )
        self._in_cell = False  # True: the machine knows only the peers of one cell
        self._changed = ChangeEvent()
        self._pending_joins: dict[int, asyncio.Future[Group | Answer]] = {}  # calls of followers, by ticket
        self._joining: asyncio.Task[None] | None = None
        exchange.add(self)

    async def find(
        self,
        *,
        member: Member,
        round_key: str,
        deadline_s: float,
        gathered: bytes = b"",
        electors: int = 0,
        precedence: Precedence = NO_PRECEDENCE,
    ) -> Group | SearchFailed:
        """Search for a group until `deadline_s` (monotonic seconds); after a group, call `round_over`.

        Cancelling informs the followers and the leader. In a grid the search alternates between this peer's
        cell and, when nobody is left to wait for there, the lobby of unmatched peers. `electors`: search in
        the cell of the run's electors instead, where this many are expected. `precedence`: who comes
        first.
        """
        now_s = self._clock.monotonic_s()
        rank_deadline_s = self._clock.swarm_s() + (deadline_s - now_s)
        request = SearchRequest(
            round_key=round_key,
            deadline_s=deadline_s,
            rank_deadline_s=rank_deadline_s,
            gathered=gathered,
            precedence=precedence,
            may_be_alone=precedence.may_be_alone,
        )
        cells = self.cells
        place, stay_until_s = cells.grid.electors if electors else cells.grid.home, -math.inf
        request = replace(request, expected=electors)
        lobby_stay = Backoff(LOBBY_S, LOBBY_S_MAX)
        try:
            while True:
                cells.begin_search(place, member.contact, round_key)
                outcome = await self._run_search(self._request_at(place, request, stay_until_s), member)
                if isinstance(outcome, Group):
                    cells.on_group_formed(outcome)
                    return outcome
                if outcome is not None and outcome.held_by is not None:
                    self.ledger.fault(outcome.held_by, "it led a group, and did not begin", held=True)
                now_s = self._clock.monotonic_s()
                stay_until_s = -math.inf
                if outcome is None:  # the grid has a different shape by now
                    place = cells.grid.home
                elif electors or not cells.grid.divided:
                    return outcome
                else:
                    home = cells.grid.home
                    cells.on_unmatched()
                    if now_s >= deadline_s:
                        return outcome
                    if cells.round_has_passed():
                        cells.on_round_passed()
                        return SearchFailed(
                            reason="passed",
                            detail=f"most peers have finished round {round_key!r} without this one",
                        )
                    place = cells.grid.lobby if place == home else cells.grid.home
                    stay_until_s = now_s + lobby_stay.next_s()
        finally:
            cells.end_search()

    def _request_at(self, place: Place, request: SearchRequest, stay_until_s: float) -> SearchRequest:
        """Return the same request, restricted to a place of the grid."""
        if place.text or self._in_cell:
            self.machine.set_candidates(self.cells.candidates())
        self._in_cell = bool(place.text)
        if not place.text:
            return request
        expected = (
            max(self.cells.grid.expected, 1) if place == self.cells.grid.home else request.expected or 1
        )
        return replace(
            request,
            round_key=key_at(request.round_key, place.text),
            expected=expected,
            stay_until_s=stay_until_s,
        )

    async def _run_search(self, request: SearchRequest, member: Member) -> Group | SearchFailed | None:
        """Run one search of the machine. Return None when the shape of the grid changed meanwhile, so that
        this peer belongs to another cell.
        """
        self.machine.start(request, member, self._clock.monotonic_s())
        children: set[asyncio.Task[None]] = set()
        outcome: Group | SearchFailed | None = None
        done = False
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._changed.clear()
                    now_s = self._clock.monotonic_s()
                    outcome = self._perform(self.machine.poll(now_s), tasks, children)
                    if outcome is not None:
                        break
                    grid = self.cells.grid
                    if self.cells.place not in (grid.home, grid.lobby, grid.electors):
                        self.machine.stop(now_s)
                        self._perform(self.machine.poll(now_s), None, set())
                        break
                    wake_s = self.machine.wake_s(now_s)
                    await self._changed.wait(
                        None if wake_s is None else max(wake_s - now_s, 0.0) + _TIMER_MARGIN_S
                    )
                for child in children:
                    child.cancel()
            done = True
        finally:
            self._joining = None
            if not done:
                self._cancel_search(outcome)
        return outcome

    def _cancel_search(self, outcome: Group | SearchFailed | None) -> None:
        """Cancel the search: nobody keeps waiting for this peer, and it waits for no round that will not take
        place here.
        """
        now_s = self._clock.monotonic_s()
        self.machine.stop(now_s)
        # the leader's answer may have arrived a moment ago, in which case the machine has ended the search
        # itself
        ended = self._perform(self.machine.poll(now_s), None, set())
        if isinstance(outcome or ended, Group):
            self.machine.round_over(committed=False, left_out=frozenset(), now_s=now_s)

    async def announce(self, own: Contact) -> None:
        """Introduce this peer to the present holders, so that they expect it before they read the records
        again.
        """
        holders = await self._presence.read(self._timings.records_timeout_s)
        self.cells.on_records(holders)
        self.cells.enter_home(own)
        if not self.cells.grid.divided:
            self.machine.on_holders(holders, self._clock.monotonic_s())
        hello = Holder(contact=own, schema=self._schema.digest, schema_text=self._schema.text)
        request = encode_announcement(hello, name=self.name, now_s=self._clock.swarm_s())

        async def introduce(contact: Contact) -> None:
            try:
                await self._caller.call(
                    contact, LOOK_FOR_GROUP, request, timeout_s=self._query_timeout_s(contact)
                )
            except SwarmError:
                self.cells.mark_lost(contact.peer_id)

        is_member = functools.partial(self._exchange.standing.is_member, run=self.name.run)
        async with asyncio.TaskGroup() as tasks:
            for contact in introduced(holders.values(), own.peer_id, self._schema.digest, is_member):
                tasks.create_task(introduce(contact))

    def round_over(
        self,
        *,
        committed: bool,
        left_out: frozenset[PeerId] = frozenset(),
        accused: Mapping[PeerId, str] = MappingProxyType({}),
        faults: Mapping[PeerId, str] = MappingProxyType({}),
    ) -> None:
        """Record the end of the round of the group that `find` returned. `left_out`: members that did not
        finish it; `accused`: members that were proved to have lied in it, each with its lie; `faults`:
        members that kept it from going well.
        """
        for peer_id, reason in faults.items():
            self.ledger.fault(peer_id, reason, committed=committed)
        for peer_id, lie in accused.items():
            self.blocklist.block(peer_id, lie)
        self.machine.round_over(committed=committed, left_out=left_out, now_s=self._clock.monotonic_s())
        self.cells.on_round_over(committed=committed)

    def close(self) -> None:
        """Stop answering calls."""
        self._exchange.remove(self)

    # --- calls from other peers

    def on_query(self, query: LookForGroup, *, announced: bool) -> Answer:
        """Handle a query of another peer, or its announcement that it holds the averager; return this peer's
        status.
        """
        now_s = self._clock.monotonic_s()
        self.cells.mark_alive(query.contact.peer_id)
        if announced:
            holder = Holder(contact=query.contact, schema=query.schema, schema_text=query.schema_text)
            self.cells.on_announcement(holder)
            self._changed.notify()
            if not self.cells.grid.divided:
                self.machine.on_announce(holder)
            return self.machine.status_for(query, now_s)
        if not self.cells.is_relevant(query.round_key):
            self.cells.on_reported_place(split_key(query.round_key)[1])
            self._changed.notify()
            return self._answer_elsewhere(query)
        answer = self.machine.on_query(query, now_s)
        self._changed.notify()
        coming, place = self.cells.grid.next, split_key(query.round_key)[1]
        moves_on = coming is not None and place not in ("", coming.text)
        if moves_on and answer.status is PeerStatus.BUSY and answer.round_key != query.round_key:
            return self._answer_elsewhere(query)  # its next round is in a different cell than the current one
        return answer

    def _answer_elsewhere(self, query: LookForGroup) -> Answer:
        """Return the status for a peer that searches in a cell where this peer is not, so that it does not
        wait for this one there.
        """
        answer, place = (
            self.machine.status_for(query, self._clock.monotonic_s()),
            split_key(query.round_key)[1],
        )
        # the key in this answer informs a peer that does not know of the grid yet
        if not place or answer.status is PeerStatus.REFUSED:
            return answer
        return Answer(status=PeerStatus.PASSED, round_key=query.round_key, turn=answer.turn)

    async def on_join(self, join: Join) -> Group | Answer:
        """Handle the request of another peer to be led: return the group once it begins, or this peer's
        status.
        """
        if not self.cells.is_relevant(join.query.round_key):
            return self._answer_elsewhere(join.query)
        ticket = self.machine.on_join(join, self._clock.monotonic_s())
        self._changed.notify()
        if isinstance(ticket, Answer):
            return ticket
        pending: asyncio.Future[Group | Answer] = asyncio.get_running_loop().create_future()
        self._pending_joins[ticket] = pending
        try:
            return await pending
        finally:
            del self._pending_joins[ticket]
            if pending.cancelled():
                self.machine.on_join_lost(join.query.contact.peer_id, ticket)
                self._changed.notify()

    # --- effects of the machine

    def _perform(
        self, effects: list[Effect], tasks: asyncio.TaskGroup | None, children: set[asyncio.Task[None]]
    ) -> Group | SearchFailed | None:
        outcome: Group | SearchFailed | None = None
        for effect in effects:
            if isinstance(effect, SearchFinished):
                outcome = effect.outcome
            elif isinstance(effect, AnswerJoin):
                pending = self._pending_joins.get(effect.ticket)
                if pending is not None and not pending.done():
                    pending.set_result(effect.answer)
            elif isinstance(effect, AbandonJoin):
                if self._joining is not None:
                    self._joining.cancel()
            elif tasks is not None:
                self._start(effect, tasks, children)
        return outcome

    def _start(
        self,
        effect: SendLookForGroup | SendJoin | ReadRecords,
        tasks: asyncio.TaskGroup,
        children: set[asyncio.Task[None]],
    ) -> None:
        if isinstance(effect, SendLookForGroup):
            child = tasks.create_task(self._send_query(effect.contact, effect.query))
        elif isinstance(effect, SendJoin):
            child = self._joining = tasks.create_task(self._send_join(effect.contact, effect.join))
        else:
            child = tasks.create_task(self._read_records())
        children.add(child)
        child.add_done_callback(children.discard)

    def _query_timeout_s(self, contact: Contact) -> float:
        return self._timings.query_timeout_s * (1.0 if contact.addresses else _RELAYED_TIMES)

    async def _send_query(self, contact: Contact, query: LookForGroup) -> None:
        sent_s = self._clock.swarm_s()
        request = encode_query(query, name=self.name, now_s=sent_s)
        try:
            reply = await self._caller.call(
                contact, LOOK_FOR_GROUP, request, timeout_s=self._query_timeout_s(contact)
            )
            answer = decode_answer(reply, (sent_s + self._clock.swarm_s()) / 2)
        except SwarmError as error:
            self.machine.on_query_failed(contact.peer_id, str(error), self._clock.monotonic_s())
            self.cells.mark_lost(contact.peer_id)
        else:
            self.cells.mark_alive(contact.peer_id)
            self.cells.on_reported_place(split_key(answer.round_key)[1])
            self.machine.on_query_answer(contact.peer_id, answer, self._clock.monotonic_s())
        self._changed.notify()

    async def _send_join(self, contact: Contact, join: Join) -> None:
        sent_s = self._clock.swarm_s()
        request = encode_join(join, name=self.name, now_s=sent_s)
        timeout_s = max(join.query.deadline_s - sent_s, 0.0) + _ANSWER_SLACK_S
        try:
            # a peer that does not know of the block yet may still follow this leader
            self.blocklist.check(contact.peer_id)
            reply = await self._caller.call(contact, JOIN, request, timeout_s=timeout_s)
            now_s = self._clock.swarm_s()
            answer = decode_join_answer(reply, now_s)
        except SwarmError as error:
            self.machine.on_join_failed(contact.peer_id, str(error), self._clock.monotonic_s())
        else:
            self.machine.on_join_answer(contact.peer_id, answer, self._clock.monotonic_s())
        self._changed.notify()

    async def _read_records(self) -> None:
        try:
            await self.cells.find_candidates(self._report_holders, self._timings.records_timeout_s)
        except SwarmError:
            self.machine.on_read_failed(self._clock.monotonic_s())
        self._changed.notify()

    def _report_holders(self, holders: Mapping[PeerId, Holder]) -> None:
        self.machine.on_holders(holders, self._clock.monotonic_s())
        self._changed.notify()


def introduced(
    holders: Iterable[Holder], own: PeerId, schema: bytes, is_member: Callable[[PeerId], bool]
) -> list[Contact]:
    """Return the peers to which this one introduces itself: members, then peers with the same tensors,
    because strangers may have written any number of records. Members lead rounds. With members, a few others
    are enough, so that many newcomers do not all introduce themselves to one another.
    """
    ranked = sorted(holders, key=lambda one: (not is_member(one.contact.peer_id), one.schema != schema))
    others = [one.contact for one in ranked if one.contact.peer_id != own and one.contact.is_callable]
    members = sum(is_member(contact.peer_id) for contact in others)
    return others[: min(max(members, FIRST_MAX), QUERIED_PEERS_MAX) if members else QUERIED_PEERS_MAX]
