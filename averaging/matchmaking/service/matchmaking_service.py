"""The service around `averaging.matchmaking.logic.matchmaking`: carries calls, timers and presence records to
it, and performs what it asks for.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

from averaging.matchmaking.logic.grid import Place, key_at, split_key
from averaging.matchmaking.logic.group import Group, Member
from averaging.matchmaking.logic.matchmaking import Matchmaker, MatchmakingConfig
from averaging.matchmaking.logic.messages import (
    AbandonJoin,
    Answer,
    AnswerJoin,
    AveragerName,
    CellLookup,
    CellLookupReply,
    Effect,
    Holder,
    Join,
    LookForGroup,
    LookUp,
    PeerStatus,
    SearchFailed,
    SearchFinished,
    SearchRequest,
    SendJoin,
    SendSeek,
    VectorSchema,
)
from averaging.matchmaking.service.cells import Background, CellContext, Cells, CellsConfig
from averaging.matchmaking.service.presence import Permitted, Presence
from averaging.matchmaking.service.refusals import Refusals
from averaging.matchmaking.service.wire import (
    JOIN,
    MEET,
    SEEK,
    decode_answer,
    decode_join,
    decode_join_answer,
    decode_meet,
    decode_seek,
    encode_announcement,
    encode_answer,
    encode_join,
    encode_join_answer,
    encode_met,
    encode_seek,
)
from swarm.core.clock import Clock
from swarm.core.errors import PeerError, SwarmError, UsageError
from swarm.core.ids import Contact, PeerId
from swarm.net.rpc import Caller
from swarm.wire import group_pb2

# timers are set this much late: one that fires a rounding error early finds nothing to do, again and again
_PAST_S = 1e-6
# a leader answers by its own deadline, which is not after ours; this covers the way back and clocks
_ANSWER_SLACK_S = 1.0


class HandlerRegistry(Protocol):
    """What the exchange needs of `swarm.net.rpc.Handlers`."""

    def unary(self, method: Any, handler: Any) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupServiceConfig:
    # a peer that does not answer a Seek for this long counts as gone. Too small: a busy machine is left out
    ping_timeout_s: float = 1.0
    look_timeout_s: float = 5.0  # for reading the presence records
    matchmaking: MatchmakingConfig = field(default_factory=MatchmakingConfig)
    cells: CellsConfig = field(default_factory=CellsConfig)  # for swarms larger than a group


class GroupExchange:
    """One per node: answers Seek, Join and Meet for all of its averagers."""

    def __init__(self, *, handlers: HandlerRegistry, caller: Caller, own: PeerId, clock: Clock) -> None:
        self.caller = caller
        self.own = own
        self.clock = clock
        self._services: dict[AveragerName, GroupService] = {}
        self.refusals = Refusals(clock)
        handlers.unary(SEEK, self._on_seek)
        handlers.unary(JOIN, self._on_join)
        handlers.unary(MEET, self._on_meet)

    def add(self, service: GroupService) -> None:
        """UsageError when this node already has that averager."""
        if service.name in self._services:
            raise UsageError(
                f"this node already has an averager {service.name.averager!r}: give the second one another name"
            )
        self._services[service.name] = service

    def remove(self, service: GroupService) -> None:
        if self._services.get(service.name) is service:
            del self._services[service.name]

    async def _on_seek(self, caller: PeerId, request: group_pb2.Seek) -> group_pb2.SeekAnswer:
        now_s = self.clock.swarm_s()
        seek = decode_seek(request, caller, now_s)
        answer = self._service(request, caller).on_seek(seek, announced=request.announce)
        return encode_answer(answer, now_s=now_s)

    async def _on_join(self, caller: PeerId, request: group_pb2.Join) -> group_pb2.JoinAnswer:
        join = decode_join(request, caller, self.clock.swarm_s())
        answer = await self._service(request.seek, caller).on_join(join)
        return encode_join_answer(answer, now_s=self.clock.swarm_s())

    async def _on_meet(self, caller: PeerId, request: group_pb2.Meet) -> group_pb2.MeetAnswer:
        meet = decode_meet(request, caller)
        return encode_met(self._service(request, caller).on_meet(meet))

    def _service(self, seek: group_pb2.Seek | group_pb2.Meet, caller: PeerId) -> GroupService:
        self.refusals.check(seek.run, caller)
        service = self._services.get(AveragerName(run=seek.run, averager=seek.averager))
        if service is None:
            raise PeerError(f"no averager {seek.averager[:100]!r} here")
        return service


class GroupService:
    """One averager's searches, on the network loop. One at a time."""

    def __init__(
        self,
        *,
        exchange: GroupExchange,
        presence: Presence,
        name: AveragerName,
        schema: VectorSchema,
        rng: random.Random,
        background: Background,
        config: GroupServiceConfig | None = None,
    ) -> None:
        self.name = name
        self.config = config or GroupServiceConfig()
        self._exchange, self._caller, self._clock = exchange, exchange.caller, exchange.clock
        self._presence = presence = Permitted(
            presence, lambda peer: exchange.refusals.reason(name.run, peer) is None
        )
        self._schema = schema
        self.machine = Matchmaker(
            own=exchange.own,
            config=self.config.matchmaking,
            schema=schema,
            rng=rng,
            now_s=self._clock.monotonic_s(),
        )
        around = CellContext(
            caller=self._caller,
            clock=self._clock,
            presence=presence,
            background=background,
            name=name,
            schema=schema,
        )
        self.cells = Cells(around, exchange.own, self.config.matchmaking.target_group_size, self.config.cells)
        self._in_cell = False  # the machine was told of one cell's peers only
        self._wake = asyncio.Event()
        self._held: dict[int, asyncio.Future[Group | Answer]] = {}  # followers' calls, by ticket
        self._joining: asyncio.Task[None] | None = None
        exchange.add(self)

    async def find(
        self, *, member: Member, round_key: str, deadline_s: float, gathered: bytes = b""
    ) -> Group | SearchFailed:
        """Search until `deadline_s` (monotonic). Cancelling it tells followers and leader. After a group:
        `round_over`.

        In a grid: in our cell; when nobody is left to wait for there, among those to whom the same happened;
        and so on in turns.
        """
        now_s = self._clock.monotonic_s()
        rank_s = self._clock.swarm_s() + (deadline_s - now_s)
        want = SearchRequest(
            round_key=round_key, deadline_s=deadline_s, rank_s=rank_s, weight=member.weight, gathered=gathered
        )
        cells = self.cells
        at, stays_s, room_s = cells.grid.home, -math.inf, self.config.cells.room_s
        try:
            while True:
                cells.arrive(at, member.contact, round_key)
                outcome = await self._search(self._at(at, want, stays_s), member)
                if isinstance(outcome, Group):
                    cells.seated(outcome)
                    return outcome
                now_s = self._clock.monotonic_s()
                stays_s = -math.inf
                if outcome is None:  # the grid has another shape by now
                    at = cells.grid.home
                elif not cells.grid.divided:
                    return outcome
                else:
                    there = cells.grid.home
                    cells.stray()
                    if now_s >= deadline_s:
                        return outcome
                    if cells.passed():
                        return SearchFailed(
                            reason="passed",
                            detail=f"most peers have finished round {round_key!r} without this one",
                        )
                    at = cells.grid.room if at == there else cells.grid.home
                    stays_s, room_s = now_s + room_s, min(2 * room_s, self.config.cells.room_s_max)
        finally:
            cells.leave()

    def _at(self, at: Place, want: SearchRequest, stays_s: float) -> SearchRequest:
        """The same search, at a place of the grid."""
        if at.text or self._in_cell:
            self.machine.moved(self.cells.mates())
        self._in_cell = bool(at.text)
        if not at.text:
            return want
        expected = max(self.cells.grid.expected, 1) if at == self.cells.grid.home else 1
        return replace(
            want, round_key=key_at(want.round_key, at.text), expected=expected, stays_until_s=stays_s
        )

    async def _search(self, want: SearchRequest, member: Member) -> Group | SearchFailed | None:
        """One search of the machine; None: the grid's shape changed meanwhile, and we belong elsewhere."""
        self.machine.start(want, member, self._clock.monotonic_s())
        children: set[asyncio.Task[None]] = set()
        outcome: Group | SearchFailed | None = None
        done = False
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._wake.clear()
                    now_s = self._clock.monotonic_s()
                    outcome = self._perform(self.machine.poll(now_s), tasks, children)
                    if outcome is not None:
                        break
                    if self.cells.at not in (self.cells.grid.home, self.cells.grid.room):
                        self.machine.stop(now_s)
                        self._perform(self.machine.poll(now_s), None, set())
                        break
                    wake_s = self.machine.wake_s(now_s)
                    try:
                        async with asyncio.timeout(
                            None if wake_s is None else max(wake_s - now_s, 0.0) + _PAST_S
                        ):
                            await self._wake.wait()
                    except TimeoutError:
                        pass
                for child in children:
                    child.cancel()
            done = True
        finally:
            self._joining = None
            if not done:
                self._give_up(outcome)
        return outcome

    def _give_up(self, outcome: Group | SearchFailed | None) -> None:
        """The search was cancelled: nobody may go on waiting for us, nor we for a round that will not be held
        here.
        """
        now_s = self._clock.monotonic_s()
        if isinstance(outcome, Group):
            self.machine.round_over(committed=False, left_out=frozenset(), now_s=now_s)
        elif self.machine.searching:
            self.machine.stop(now_s)
            self._perform(self.machine.poll(now_s), None, set())

    async def announce(self, own: Contact) -> None:
        """Introduce ourselves to the holders there are: they expect us from now on, before they read the
        records again.
        """
        holders = await self._presence.look(self.config.look_timeout_s)
        self.cells.saw(holders)
        self.cells.declare(own)
        if not self.cells.grid.divided:
            self.machine.on_holders(holders, self._clock.monotonic_s())
        hello = Holder(contact=own, schema=self._schema.digest, schema_text=self._schema.text)
        request = encode_announcement(hello, name=self.name, now_s=self._clock.swarm_s())

        async def introduce(contact: Contact) -> None:
            try:
                await self._caller.call(contact, SEEK, request, timeout_s=self.config.ping_timeout_s)
            except SwarmError:
                self.cells.lost(contact.peer_id)  # who is gone need not know us

        others = [
            holder.contact
            for holder in holders.values()
            if holder.contact.peer_id != own.peer_id and holder.contact.addresses
        ]
        async with asyncio.TaskGroup() as tasks:
            for contact in others[: self.config.matchmaking.book.seek_peers_max]:
                tasks.create_task(introduce(contact))

    def round_over(
        self,
        *,
        committed: bool,
        left_out: frozenset[PeerId] = frozenset(),
        accused: Mapping[PeerId, str] = MappingProxyType({}),
    ) -> None:
        """The round of the group that `find` returned has ended; `accused`: who was proved to have lied in
        it, and in what.
        """
        for peer_id, lie in accused.items():
            self._exchange.refusals.shun(self.name.run, peer_id, lie)
        self.machine.round_over(committed=committed, left_out=left_out, now_s=self._clock.monotonic_s())
        self.cells.over(committed=committed)

    def close(self) -> None:
        """Answer nobody any more."""
        self._exchange.remove(self)

    # --- what others ask of us

    def on_seek(self, seek: LookForGroup, *, announced: bool) -> Answer:
        now_s = self._clock.monotonic_s()
        self.cells.heard(seek.contact.peer_id)
        if announced:
            holder = Holder(contact=seek.contact, schema=seek.schema, schema_text=seek.schema_text)
            self.cells.met(holder)
            self._wake.set()
            if not self.cells.grid.divided:
                self.machine.on_announce(holder)
            return self.machine.stand(seek, now_s)
        if not self.cells.concerns(seek.round_key):
            self.cells.hint(split_key(seek.round_key)[1])
            self._wake.set()
            return self._elsewhere(seek)
        answer = self.machine.on_seek(seek, now_s)
        self._wake.set()
        return answer

    def on_meet(self, meet: CellLookup) -> CellLookupReply:
        """A peer tells us, whom everybody chooses for its cell, where it is."""
        return self.cells.on_meet(meet)

    def _elsewhere(self, seek: LookForGroup) -> Answer:
        """A peer looks in a cell where we are not: it does not wait for us there."""
        answer, place = self.machine.stand(seek, self._clock.monotonic_s()), split_key(seek.round_key)[1]
        # it knows of no grid yet: our own key tells it
        if not place or answer.standing is PeerStatus.REFUSED:
            return answer
        return Answer(standing=PeerStatus.PASSED, round_key=seek.round_key, turn=answer.turn)

    async def on_join(self, join: Join) -> Group | Answer:
        if not self.cells.concerns(join.seek.round_key):
            return self._elsewhere(join.seek)
        ticket = self.machine.on_join(join, self._clock.monotonic_s())
        self._wake.set()
        if isinstance(ticket, Answer):
            return ticket
        held: asyncio.Future[Group | Answer] = asyncio.get_running_loop().create_future()
        self._held[ticket] = held
        try:
            return await held
        finally:
            del self._held[ticket]
            if held.cancelled():
                self.machine.on_join_lost(join.seek.contact.peer_id, ticket)
                self._wake.set()

    # --- what the machine asks of us

    def _perform(
        self, effects: list[Effect], tasks: asyncio.TaskGroup | None, children: set[asyncio.Task[None]]
    ) -> Group | SearchFailed | None:
        outcome: Group | SearchFailed | None = None
        for effect in effects:
            if isinstance(effect, SearchFinished):
                outcome = effect.outcome
            elif isinstance(effect, AnswerJoin):
                held = self._held.get(effect.ticket)
                if held is not None and not held.done():
                    held.set_result(effect.answer)
            elif isinstance(effect, AbandonJoin):
                if self._joining is not None:
                    self._joining.cancel()
            elif tasks is not None:
                self._start(effect, tasks, children)
        return outcome

    def _start(
        self,
        effect: SendSeek | SendJoin | LookUp,
        tasks: asyncio.TaskGroup,
        children: set[asyncio.Task[None]],
    ) -> None:
        if isinstance(effect, SendSeek):
            child = tasks.create_task(self._seek(effect.contact, effect.seek))
        elif isinstance(effect, SendJoin):
            child = self._joining = tasks.create_task(self._join(effect.contact, effect.join))
        else:
            child = tasks.create_task(self._look())
        children.add(child)
        child.add_done_callback(children.discard)

    async def _seek(self, contact: Contact, seek: LookForGroup) -> None:
        sent_s = self._clock.swarm_s()
        request = encode_seek(seek, name=self.name, now_s=sent_s)
        try:
            reply = await self._caller.call(contact, SEEK, request, timeout_s=self.config.ping_timeout_s)
            answer = decode_answer(reply, (sent_s + self._clock.swarm_s()) / 2)
        except SwarmError as error:
            self.machine.on_seek_failed(contact.peer_id, str(error), self._clock.monotonic_s())
            self.cells.lost(contact.peer_id)
        else:
            self.cells.heard(contact.peer_id)
            self.cells.hint(split_key(answer.round_key)[1])
            self.machine.on_seek_answer(contact.peer_id, answer, self._clock.monotonic_s())
        self._wake.set()

    async def _join(self, contact: Contact, join: Join) -> None:
        sent_s = self._clock.swarm_s()
        request = encode_join(join, name=self.name, now_s=sent_s)
        timeout_s = max(join.seek.deadline_s - sent_s, 0.0) + _ANSWER_SLACK_S
        try:
            # somebody who does not know of it yet may follow this one
            self._exchange.refusals.check(self.name.run, contact.peer_id)
            reply = await self._caller.call(contact, JOIN, request, timeout_s=timeout_s)
            now_s = self._clock.swarm_s()
            answer = decode_join_answer(reply, now_s)
        except SwarmError as error:
            self.machine.on_join_failed(contact.peer_id, str(error), self._clock.monotonic_s())
        else:
            self.machine.on_join_answer(contact.peer_id, answer, self._clock.monotonic_s())
        self._wake.set()

    async def _look(self) -> None:
        try:
            await self.cells.look(self._report, self.config.look_timeout_s)
        except SwarmError:
            self.machine.on_look_failed(self._clock.monotonic_s())
        self._wake.set()

    def _report(self, holders: Mapping[PeerId, Holder]) -> None:
        self.machine.on_holders(holders, self._clock.monotonic_s())
        self._wake.set()
