"""A limit of the concurrent calls from this peer to each server of experts."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

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
        self._slots: dict[PeerId, asyncio.Semaphore] = {}
        self._users: Counter[PeerId] = Counter()  # calls under way, and those that wait

    @contextlib.asynccontextmanager
    async def to(self, peer: PeerId, deadline_s: float) -> AsyncIterator[None]:
        """Hold a slot for a call. `deadline_s` is a time of the loop's clock. Raises DeadlineExceeded when no
        slot was free until then.
        """
        slots = self._slots.get(peer)
        if slots is None:
            slots = self._slots[peer] = asyncio.Semaphore(OPEN_MAX)
        self._users[peer] += 1
        try:
            try:
                if slots.locked():
                    async with asyncio.timeout_at(deadline_s):
                        await slots.acquire()
                else:
                    await slots.acquire()
            except TimeoutError:
                raise DeadlineExceeded(f"{OPEN_MAX} other calls to peer {peer} did not end in time") from None
            try:
                yield
            finally:
                slots.release()
        finally:
            self._users[peer] -= 1
            if not self._users[peer]:
                del self._users[peer], self._slots[peer]
