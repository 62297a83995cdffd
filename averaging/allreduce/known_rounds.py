"""The rounds that this process runs, those that ended recently, and calls that wait for a round to begin."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from typing import TypeAlias

from averaging.allreduce.driver import RoundDriver
from averaging.allreduce.finished import FinishedRound
from averaging.allreduce.logic.membership import JOIN_S
from averaging.matchmaking.logic.group import GROUP_ID_BYTES
from swarm.core.errors import PeerError
from swarm.core.ids import PeerId
from swarm.core.notify import ChangeEvent

_FINISHED_MAX = 16  # rounds whose end is remembered, for members that ask late
_WAITING_MAX = 256  # streams and votes of rounds that have not begun here
_WAITING_PER_PEER_MAX = 8

KnownRound: TypeAlias = RoundDriver | FinishedRound


class KnownRounds:
    """Rounds by the identifier of their group. The oldest that have finished are forgotten."""

    def __init__(self) -> None:
        self._rounds: OrderedDict[bytes, KnownRound] = OrderedDict()
        self._begun = ChangeEvent()
        self._waiting: Counter[PeerId] = Counter()

    def __contains__(self, group_id: bytes) -> bool:
        return group_id in self._rounds

    @property
    def running(self) -> list[RoundDriver]:
        """Return the rounds that have not finished."""
        return [one for one in self._rounds.values() if isinstance(one, RoundDriver)]

    @property
    def waiting(self) -> int:
        """Return the number of calls that wait for rounds that have not begun here."""
        return self._waiting.total()

    def get(self, group_id: bytes) -> KnownRound | None:
        """Return the round of this name if it has begun here."""
        return self._rounds.get(group_id)

    def begin(self, group_id: bytes, driver: RoundDriver) -> None:
        """Add a round, and wake the calls that wait for it."""
        self._rounds[group_id] = driver
        finished = [name for name, one in self._rounds.items() if isinstance(one, FinishedRound)]
        for name in finished[:-_FINISHED_MAX]:
            del self._rounds[name]
        self._begun.notify()

    def finish(self, group_id: bytes, finished: FinishedRound) -> None:
        """Replace a round by its record (`FinishedRound`)."""
        self._rounds[group_id] = finished

    async def find(self, group_id: bytes, caller: PeerId) -> KnownRound:
        """Return the round of this name, as `wait_for` does. Raises PeerError if it does not begin here."""
        found = await self.wait_for(group_id, caller)
        if found is None:
            raise PeerError(
                f"this peer is in no round of that name, and did not begin one within {JOIN_S:g} s"
            )
        return found

    async def wait_for(self, group_id: bytes, caller: PeerId) -> KnownRound | None:
        """Return the round of this name, once its driver performs calls; None if it does not begin here
        within `JOIN_S`, the time for one that has begun at a faster member only.
        """
        if len(group_id) != GROUP_ID_BYTES:
            raise PeerError(f"a round's name has {GROUP_ID_BYTES} bytes, not {len(group_id)}")
        if group_id not in self._rounds:
            if self._waiting[caller] >= _WAITING_PER_PEER_MAX or self._waiting.total() >= _WAITING_MAX:
                raise PeerError("too many calls wait here for rounds that have not begun")
            self._waiting[caller] += 1
            try:
                async with asyncio.timeout(JOIN_S):
                    while group_id not in self._rounds:
                        await self._begun.wait()
            except TimeoutError:
                return None
            finally:
                self._waiting -= Counter([caller])  # without entries that are 0
        found = self._rounds[group_id]
        if isinstance(found, RoundDriver):
            await found.begun.wait()
        return found
