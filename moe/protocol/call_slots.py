"""A limit of the concurrent calls from this peer to each server of experts."""

from __future__ import annotations

import asyncio
from collections import Counter

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

    def to(self, peer: PeerId, deadline_s: float) -> CallSlot:
        """Return a context manager that holds a slot for a call. `deadline_s` is a time of the loop's clock.
        Entering it raises DeadlineExceeded when no slot was free until then.
        """
        return CallSlot(self, peer, deadline_s)

    async def enter(self, peer: PeerId, deadline_s: float) -> None:
        """Take a slot, as `to` does."""
        slots = self._slots.get(peer)
        if slots is None:
            slots = self._slots[peer] = asyncio.Semaphore(OPEN_MAX)
        self._users[peer] += 1
        try:
            if slots.locked():
                async with asyncio.timeout_at(deadline_s):
                    await slots.acquire()
            else:
                await slots.acquire()
        except BaseException as error:
            self._forget(peer)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"{OPEN_MAX} other calls to peer {peer} did not end in time") from None
            raise

    def leave(self, peer: PeerId) -> None:
        """Return a slot."""
        self._slots[peer].release()
        self._forget(peer)

    def _forget(self, peer: PeerId) -> None:
        self._users[peer] -= 1
        if not self._users[peer]:
            del self._users[peer], self._slots[peer]


class CallSlot:
    """One call's slot. A class, because a generator takes longer, and every call enters it."""

    __slots__ = ("_deadline_s", "_peer", "_slots")

    def __init__(self, slots: CallSlots, peer: PeerId, deadline_s: float) -> None:
        self._slots, self._peer, self._deadline_s = slots, peer, deadline_s

    async def __aenter__(self) -> None:
        await self._slots.enter(self._peer, self._deadline_s)

    async def __aexit__(self, *_: object) -> None:
        self._slots.leave(self._peer)
