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
    """Limits the concurrent calls to each server to OPEN_MAX: further ones wait for a slot, in the order in
    which they came. Used on the network loop only.
    """

    def __init__(self) -> None:
        self._open: dict[PeerId, int] = {}  # calls that hold a slot
        self._waiting: dict[PeerId, deque[asyncio.Future[None]]] = {}  # calls that wait for one

    def try_enter(self, peer: PeerId) -> bool:
        """Take a slot if one is free, and return whether it was. `leave` gives it back."""
        count = self._open.get(peer, 0)
        if count >= OPEN_MAX:
            return False
        self._open[peer] = count + 1
        return True

    async def wait(self, peer: PeerId, deadline_s: float) -> None:
        """Wait for a slot. Raises DeadlineExceeded when none was free until `deadline_s`."""
        turn = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(peer, deque())
        waiting.append(turn)
        try:
            async with asyncio.timeout_at(deadline_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # it got a slot a moment ago
                self.leave(peer)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"{OPEN_MAX} other calls to peer {peer} did not end in time") from None
            raise

    def leave(self, peer: PeerId) -> None:
        """Give a slot back, or pass it on to the call that has waited longest."""
        waiting = self._waiting.get(peer)
        while waiting:
            turn = waiting.popleft()
            if not turn.done():  # it was not cancelled
                turn.set_result(None)
                return
        self._waiting.pop(peer, None)
        if self._open[peer] > 1:
            self._open[peer] -= 1
        else:
            del self._open[peer]
