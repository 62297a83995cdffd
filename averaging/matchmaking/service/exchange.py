"""The matchmaking calls that a node receives, for all of its averagers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from averaging.blocklist import PeerBlocklist
from averaging.matchmaking.logic.messages import Answer, AveragerName, PeerStatus
from averaging.matchmaking.service.wire import (
    CELL_LOOKUP,
    JOIN,
    LOOK_FOR_GROUP,
    decode_cell_lookup,
    decode_join,
    decode_query,
    encode_answer,
    encode_cell_lookup_reply,
    encode_join_answer,
)
from averaging.run_ledger import RunLedger
from swarm.core.clock import Clock
from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import PeerId
from swarm.core.standing import PeerStanding
from swarm.net.rpc import Caller, Handlers
from swarm.wire import group_pb2

if TYPE_CHECKING:
    from averaging.matchmaking.service.matchmaking_service import GroupService

COMPUTING_S_MAX = 3600.0  # longest computing time that is reported to others


class GroupExchange:
    """Receiver of the matchmaking calls of a node, for all of its averagers. There is one per node."""

    def __init__(
        self,
        *,
        handlers: Handlers,
        caller: Caller,
        own: PeerId,
        clock: Clock,
        standing: PeerStanding | None = None,
        ledger_path: Callable[[str], Path | None] = lambda run: None,
    ) -> None:
        """`ledger_path` returns where the ledger of a run is kept on disk; None: nowhere."""
        self._ledger_path = ledger_path
        self.standing = standing or PeerStanding()
        self.caller = caller
        self.own = own
        self.clock = clock
        self._services: dict[AveragerName, GroupService] = {}
        self._blocklists: dict[str, PeerBlocklist] = {}  # by run
        self._ledgers: dict[str, RunLedger] = {}  # by run
        self._computing_until_s: dict[str, float] = {}  # by run, monotonic
        handlers.direct(LOOK_FOR_GROUP, self._on_query)
        handlers.unary(JOIN, self._on_join)
        handlers.direct(CELL_LOOKUP, self._on_cell_lookup)

    def blocklist_of(self, run: str) -> PeerBlocklist:
        """Return the blocklist of a run, which all services of this run on this node share."""
        return self._blocklists.setdefault(run, PeerBlocklist(self.own, self.clock))

    def ledger_of(self, run: str) -> RunLedger:
        """Return the ledger of a run, which all services of this run on this node share."""
        if run not in self._ledgers:
            self._ledgers[run] = RunLedger(self.own, run, self.clock, self.standing, self._ledger_path(run))
        return self._ledgers[run]

    def set_computing(self, run: str, seconds: float) -> None:
        """Record that the trainer of a run on this node computes for about this long from now, and joins no
        round meanwhile; 0: it has finished. Callable from any thread.
        """
        self._computing_until_s[run] = self.clock.monotonic_s() + seconds

    def add(self, service: GroupService) -> None:
        """Register the service of an averager. Raise UsageError when this node already has an averager of
        that name.
        """
        if service.name in self._services:
            raise UsageError(
                f"this node already has an averager {service.name.averager!r}:"
                " give the second one another name"
            )
        self._services[service.name] = service

    def remove(self, service: GroupService) -> None:
        if self._services.get(service.name) is service:
            del self._services[service.name]

    def _on_query(self, caller: PeerId, request: group_pb2.Seek) -> group_pb2.SeekAnswer:
        now_s = self.clock.swarm_s()
        query = decode_query(request, caller, now_s)
        answer = self._service(request, caller).on_query(query, announced=request.announce)
        return encode_answer(self._with_computing(answer, request.run), now_s=now_s)

    def _with_computing(self, answer: Answer, run: str) -> Answer:
        """Add to an answer for how long this node's trainer will be computing, so that others do not wait for
        it in vain.
        """
        left_s = self._computing_until_s.get(run, 0.0) - self.clock.monotonic_s()
        if answer.status is not PeerStatus.IDLE or left_s <= 0.0:
            return answer
        return replace(answer, status=PeerStatus.BUSY, expected_s=min(left_s, COMPUTING_S_MAX))

    async def _on_join(self, caller: PeerId, request: group_pb2.Join) -> group_pb2.JoinAnswer:
        join = decode_join(request, caller, self.clock.swarm_s())
        answer = await self._service(request.seek, caller).on_join(join)
        return encode_join_answer(answer, now_s=self.clock.swarm_s())

    def _on_cell_lookup(self, caller: PeerId, request: group_pb2.Meet) -> group_pb2.MeetAnswer:
        lookup = decode_cell_lookup(request, caller)
        return encode_cell_lookup_reply(self._service(request, caller).cells.on_cell_lookup(lookup))

    def _service(self, query: group_pb2.Seek | group_pb2.Meet, caller: PeerId) -> GroupService:
        service = self._services.get(AveragerName(run=query.run, averager=query.averager))
        if service is None:
            raise PeerError(f"no averager {query.averager[:100]!r} here")
        service.blocklist.check(caller)
        return service
