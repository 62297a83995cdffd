"""Limits on the server memory that callers can occupy: answers waiting to be sent, and partly received
requests.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from swarm.core.ids import PeerId
from swarm.core.standing import PeerStanding

ANSWER_BYTES_PER_PEER_MAX = 8 << 20
ANSWER_BYTES_MAX = 32 << 20  # half of it for strangers
READS_MAX = 32  # half of them for strangers; each holds at most one message
READ_S_MAX = 30.0  # time for one request to arrive; too small: slow uplinks cannot send a megabyte
# if others wait, a request that has not arrived after this time is dropped
READ_S_WHEN_OTHERS_WAIT = 2.0


@dataclass(slots=True)
class _Held:
    is_stranger: bool  # determined when its first answer was counted
    size_bytes: int = 0


class AnswerRoom:
    """Bytes of answers that wait to be sent: to each peer, to strangers together, and in all."""

    def __init__(self, standing: PeerStanding) -> None:
        self._standing = standing
        self._by_peer: dict[PeerId, _Held] = {}
        self._strangers_bytes = 0
        self.size_bytes = 0
        self._waiting: dict[asyncio.Future[None], tuple[PeerId, int]] = {}  # waiters in the order of arrival

    def fits(self, peer: PeerId, size_bytes: int = 0) -> bool:
        """Return whether an answer of this size to the peer may be produced now."""
        held = self._by_peer.get(peer)
        if held is not None and held.size_bytes + size_bytes > ANSWER_BYTES_PER_PEER_MAX:
            return False
        if self.size_bytes + size_bytes <= ANSWER_BYTES_MAX // 2:
            return True  # fast path for all peers, because every call checks this
        if held.is_stranger if held is not None else not self._standing.is_member(peer):
            return self._strangers_bytes + size_bytes <= ANSWER_BYTES_MAX // 2
        return self.size_bytes + size_bytes <= ANSWER_BYTES_MAX

    def take(self, peer: PeerId, size_bytes: int) -> None:
        """Count bytes in."""
        held = self._by_peer.get(peer)
        if held is None:
            held = self._by_peer[peer] = _Held(not self._standing.is_member(peer))
        held.size_bytes += size_bytes
        self.size_bytes += size_bytes
        self._strangers_bytes += size_bytes if held.is_stranger else 0
        if not held.size_bytes:
            del self._by_peer[peer]

    def release(self, peer: PeerId, size_bytes: int) -> None:
        """Count bytes as sent, and wake the calls for which there is room now."""
        if size_bytes:
            self.take(peer, -size_bytes)
        for waiter, (other, wanted_bytes) in list(self._waiting.items()):
            if not waiter.done() and self.fits(other, wanted_bytes):
                del self._waiting[waiter]
                self.take(other, wanted_bytes)
                waiter.set_result(None)

    async def wait(self, peer: PeerId, size_bytes: int = 0) -> None:
        """Wait until there is room for an answer of this size, and count it in."""
        if self.fits(peer, size_bytes):
            self.take(peer, size_bytes)
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = peer, size_bytes
        try:
            await waiter
        except asyncio.CancelledError:
            if self._waiting.pop(waiter, None) is None:  # the bytes were counted a moment ago
                self.release(peer, size_bytes)
            raise


class RequestReads:
    """Places for requests that are arriving. A message is in memory from its first byte on, so only a few
    may arrive at a time; the others wait in the sockets of their senders.
    """

    def __init__(self, standing: PeerStanding) -> None:
        self._standing = standing
        self._places = {True: _Places(), False: _Places()}  # places by "the sender is a stranger"

    @asynccontextmanager
    async def place(self, peer: PeerId) -> AsyncIterator[None]:
        """Hold a place while a request arrives. Raises TimeoutError when there is none, or when the request
        takes too long. The time is much shorter while others wait.
        """
        places = self._places[not self._standing.is_member(peer)]
        async with asyncio.timeout(READ_S_MAX) as limit:
            if places.is_full:
                await places.wait(peer)
            else:
                places.held[peer] += 1
            places.limit(limit)
            try:
                yield
            finally:
                places.leave(peer, limit)


class _Places:
    """The places for strangers, or for members."""

    def __init__(self) -> None:
        self.held: Counter[PeerId] = Counter()
        self._reads: dict[asyncio.Timeout, float] = {}  # start time of each request, oldest first
        self._waiting: dict[asyncio.Future[None], PeerId] = {}

    @property
    def is_full(self) -> bool:
        return self.held.total() >= READS_MAX // 2

    def limit(self, limit: asyncio.Timeout) -> None:
        """Limit the time of a request that begins to arrive."""
        now_s = asyncio.get_running_loop().time()
        self._reads[limit] = now_s
        limit.reschedule(now_s + (READ_S_WHEN_OTHERS_WAIT if self._waiting else READ_S_MAX))

    def leave(self, peer: PeerId, limit: asyncio.Timeout | None = None) -> None:
        """Release a place. It goes to the longest-waiting request among those whose senders hold the fewest
        places. `limit`: the time limit of the request that had it.
        """
        if limit is not None:
            del self._reads[limit]
        self.held[peer] -= 1
        if not self.held[peer]:
            del self.held[peer]
        if not self._waiting:
            return
        waiting = [waiter for waiter in self._waiting if not waiter.done()]
        if waiting:
            waiter = min(waiting, key=lambda one: self.held[self._waiting[one]])
            self.held[self._waiting.pop(waiter)] += 1
            waiter.set_result(None)

    async def wait(self, peer: PeerId) -> None:
        """Wait for a place. All requests that are arriving have little time left from now on."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for limit, since_s in self._reads.items():
            due_s, when_s = max(since_s + READ_S_WHEN_OTHERS_WAIT, now_s), limit.when()
            if not limit.expired() and when_s is not None and when_s > due_s:
                limit.reschedule(due_s)
        waiter = loop.create_future()
        self._waiting[waiter] = peer
        try:
            await waiter
        except asyncio.CancelledError:
            if self._waiting.pop(waiter, None) is None:  # it was given a place a moment ago
                self.leave(peer)
            raise


@dataclass(frozen=True, slots=True)
class PeerRoom:
    """The room for answers to one peer."""

    room: AnswerRoom
    peer: PeerId

    def fits(self) -> bool:
        """Return whether a small answer may be made now."""
        return self.room.fits(self.peer)

    async def wait(self, size_bytes: int) -> None:
        """Wait until there is room for an answer of this size, and count it in."""
        await self.room.wait(self.peer, size_bytes)

    def take(self, size_bytes: int) -> None:
        """Count bytes in."""
        self.room.take(self.peer, size_bytes)

    def release(self, size_bytes: int) -> None:
        """Count bytes out."""
        self.room.release(self.peer, size_bytes)
