"""A limit of the concurrent calls from this peer to each server of experts."""

from __future__ import annotations

import asyncio
from collections import deque

from swarm.core.errors import DeadlineExceeded
from swarm.core.ids import PeerId

# A server queues 128 requests of one caller, takes 256 calls of a peer at a time, and refuses further ones.
# It computes them one after the other, so half of that keeps it busy. A mixture may call hundreds of its
# experts in one pass.
OPEN_MAX = 64


class CallSlots:
    """Limits the concurrent calls to each server to OPEN_MAX: further ones wait for slots, in the order in
    which they came. Calls that share a message enter together. Used on the network loop only.
    """

    def __init__(self) -> None:
        self._open: dict[PeerId, int] = {}  # slots that are taken
        # messages that wait, each with the number of its calls
        self._waiting: dict[PeerId, deque[tuple[asyncio.Future[None], int]]] = {}

    def try_enter(self, peer: PeerId, count: int = 1) -> bool:
        """Take slots for calls if enough are free and nobody waits for them, and return whether that is
        true. `leave` gives them back.
        """
        taken = self._open.get(peer, 0) + count
        if taken > OPEN_MAX or peer in self._waiting:
            return False
        self._open[peer] = taken
        return True

    async def wait(self, peer: PeerId, count: int, deadline_s: float) -> None:
        """Wait for `count` slots, at most OPEN_MAX. Raises DeadlineExceeded when fewer were free until
        `deadline_s`.
        """
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(peer, deque()).append((turn, count))
        try:
            async with asyncio.timeout_at(deadline_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # it got its slots a moment ago
                self.leave(peer, count)
            else:
                turn.cancel()
                self.leave(peer, 0)  # others may have waited behind it
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"{OPEN_MAX} other calls to peer {peer} did not end in time") from None
            raise

    def leave(self, peer: PeerId, count: int = 1) -> None:
        """Give slots back, and pass them on to the calls that have waited longest."""
        taken, waiting = self._open.get(peer, 0) - count, self._waiting.get(peer)
        while waiting and (waiting[0][0].done() or taken + waiting[0][1] <= OPEN_MAX):
            turn, wanted = waiting.popleft()
            if not turn.done():  # it was not cancelled
                taken += wanted
                turn.set_result(None)
        if not waiting:
            self._waiting.pop(peer, None)
        if taken:
            self._open[peer] = taken
        else:
            self._open.pop(peer, None)
