"""The driver of the failure detector: it sends heartbeats and probes on the control connections, apart from
the tensors, and reports the results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from averaging.allreduce.config import HEARTBEAT
from averaging.allreduce.liveness import FailureDetector, LivenessConfig
from averaging.matchmaking.logic.group import Group
from swarm.core.clock import Clock
from swarm.core.errors import DeadlineExceeded, NetworkError, PeerError
from swarm.net.rpc import Caller
from swarm.wire.reduce_pb2 import HeartbeatReply, HeartbeatRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureListener:
    """The callbacks by which the driver reports."""

    dead: Callable[[int, str], None]  # silent, or out of reach
    left: Callable[[int, str], None]  # it lives, and refuses to be in the round
    heed: Callable[[int, HeartbeatReply], None]  # a living member's word
    over: Callable[[int], bool]  # is this member, or the round, of no interest any more
    can_dial: Callable[[int], bool]


class FailureDetectorDriver:
    """Sends heartbeats and probes: call `tick` at every interval, and run `run` beside it."""

    def __init__(
        self,
        group: Group,
        liveness: FailureDetector,
        findings: FailureListener,
        *,
        caller: Caller,
        clock: Clock,
        config: LivenessConfig,
    ) -> None:
        self._group = group
        self._liveness = liveness
        self._findings = findings
        self._caller = caller
        self._clock = clock
        self._config = config
        self._suspects: asyncio.Queue[tuple[int, str, Callable[[], None] | None]] = asyncio.Queue()

    def suspect(self, place: int, why: str, if_alive: Callable[[], None] | None = None) -> None:
        """Probe a member now because its connection broke. If it lives and is still in the round, `if_alive`
        is called.
        """
        if not self._findings.over(place):
            self._suspects.put_nowait((place, why, if_alive))

    def tick(self, tasks: asyncio.TaskGroup) -> None:
        """Send heartbeats to the members that are due, and report failed ones."""
        heartbeats, dead = self._liveness.tick(self._clock.monotonic_s())
        for place, silent_s in dead:
            self._findings.dead(place, f"it was silent for {silent_s:.1f} s")
        for place in heartbeats:
            if self._findings.can_dial(place):
                tasks.create_task(self._send_heartbeat(place))

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Probe suspects until cancelled."""
        while True:
            place, why, if_alive = await self._suspects.get()
            if not self._findings.over(place):
                tasks.create_task(self._probe(place, why, if_alive))

    async def _probe(self, place: int, why: str, if_alive: Callable[[], None] | None) -> None:
        """Probe a member whose connection broke. It has failed unless it answers now."""
        if not self._findings.can_dial(place):  # it cannot be asked; its silence will tell
            if if_alive is not None:
                if_alive()
            return
        for last in (False, True):  # the first call may still meet the old, broken connection
            try:
                reply = await self._ask(place, self._config.probe_s)
            except NetworkError:
                if last:
                    self._findings.dead(place, why)
            except PeerError as error:
                self._findings.left(place, f"it has left the round: {error}")
                return
            else:
                self._findings.heed(place, reply)
                if if_alive is not None and not self._findings.over(place):
                    if_alive()
                return

    async def _send_heartbeat(self, place: int) -> None:
        try:
            self._findings.heed(place, await self._ask(place, self._liveness.timeout_s(place)))
        except DeadlineExceeded:
            self._liveness.unanswered(place)  # its silence decides
        except NetworkError as error:
            self._liveness.unanswered(place)
            await self._probe(place, f"its connection broke ({error})", None)
        except PeerError as error:
            self._findings.left(place, f"it has left the round: {error}")

    async def _ask(self, place: int, timeout_s: float) -> HeartbeatReply:
        asked_s = self._clock.monotonic_s()
        request = HeartbeatRequest(group_id=self._group.group_id)
        reply = await self._caller.call(
            self._group.members[place].contact, HEARTBEAT, request, timeout_s=timeout_s
        )
        self._liveness.answered(place, self._clock.monotonic_s() - asked_s)
        return reply
