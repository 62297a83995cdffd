"""Contributions to chunks that a member takes over: pulled from those who can be dialed, offered by those who
cannot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from averaging.allreduce.config import FETCH, OFFER, REASON_CHARACTERS_MAX
from averaging.allreduce.labour import OutOfMemory
from averaging.allreduce.reach import RepairClient
from averaging.allreduce.span import RoundContext
from averaging.reduction.framing import unpack
from averaging.reduction.partition import Chunk
from averaging.reduction.reduce import Contribution
from swarm.core.errors import NetworkError, PeerError, SwarmError
from swarm.wire.reduce_pb2 import FetchReply, FetchRequest, OfferReply, OfferRequest

_FETCH_SHARE = 0.4  # of the time that the round has left


class Contributions:
    """Both sides of it: `collect` for a chunk that we take over, `encoded` and `offer` for one that another
    member does.
    """

    def __init__(self, shared: RoundContext, reach: RepairClient, wake: Callable[[], None]) -> None:
        self.left_out: dict[int, str] = {}  # who did not give its values, and why
        self._shared = shared
        self._kernels, self._quorum = shared.kernels, shared.quorum
        self._plan, self._own = shared.kernels.plan, shared.own
        self._reach = reach
        self._wake = wake
        # of chunks that we take over: what clients contribute
        self._offers: dict[int, dict[int, memoryview | None]] = {}
        self._offered: set[tuple[int, int]] = set()  # (owner, chunk): what we have offered
        self._arrived = asyncio.Event()

    def wanted(self, place: int) -> list[int]:
        """Chunks for which this member's values are wanted, if it cannot be asked for them."""
        if self._quorum.can_dial(place) or not self._shared.weights[place]:
            return []
        return sorted(chunk for chunk, offers in self._offers.items() if place not in offers)

    def leave_out(self, place: int, reason: str) -> None:
        """Without this member from now on."""
        self.left_out.setdefault(place, reason)

    async def collect(self, chunk: Chunk) -> list[Contribution]:
        """Collect the contributions of the other live members to a chunk, in group order."""
        weights = self._shared.weights
        senders = [
            place
            for place, weight in enumerate(weights)
            if weight > 0
            and place != self._own
            and place not in self._quorum.dead
            and place not in self.left_out
        ]
        payloads: dict[int, memoryview] = {}

        async def one(place: int) -> None:
            try:
                payload = await (self._pulled if self._quorum.can_dial(place) else self._awaited)(
                    place, chunk
                )
                size = self._kernels.codec.encoded_bytes(chunk.numel)
                if len(payload) != size:
                    raise PeerError(f"{len(payload)} bytes; {self._kernels.codec.name} takes {size}")
                payloads[place] = payload
            except SwarmError as error:
                self.leave_out(
                    place,
                    f"it did not give its values of chunk {chunk.index}, which another peer takes over: "
                    f"{error}",
                )

        async with asyncio.TaskGroup() as tasks:
            for place in senders:
                tasks.create_task(one(place))
        return [Contribution(place, weights[place], payload) for place, payload in sorted(payloads.items())]

    async def _pulled(self, place: int, chunk: Chunk) -> memoryview:
        request = FetchRequest(group_id=self._quorum.group.group_id, chunk=chunk.index)
        remaining_s = self._quorum.deadline_s - self._quorum.now_s
        timeout_s = min(self._shared.config.fetch_s, max(_FETCH_SHARE * remaining_s, 0.001))
        reply: FetchReply = await self._reach.call(place, FETCH, request, timeout_s)
        self._shared.traffic.received += len(reply.payload)
        return memoryview(reply.payload)

    def forget(self, chunk_index: int) -> None:
        """The chunk is reduced."""
        self._offers.pop(chunk_index, None)

    async def _awaited(self, place: int, chunk: Chunk) -> memoryview:
        """From a client, which hears that its values are wanted when it asks what we hold."""
        offers = self._offers.setdefault(chunk.index, {})
        self._wake()
        limit_s = self._quorum.now_s + self._shared.config.pacing.sender_s
        while place not in offers:
            if place in self._quorum.dead or self._quorum.now_s >= limit_s:
                raise NetworkError("it did not offer them in time")
            try:
                async with asyncio.timeout(limit_s - self._quorum.now_s):
                    self._arrived.clear()
                    await self._arrived.wait()
            except TimeoutError:
                continue
        payload = offers[place]
        if payload is None:
            raise PeerError("it withdrew")
        return payload

    async def offer(self, owner: int, chunk_index: int) -> None:
        """We cannot be dialed: give our values to a member that takes a chunk over."""
        if chunk_index >= len(self._plan.chunks) or (owner, chunk_index) in self._offered:
            return
        self._offered.add((owner, chunk_index))
        request = OfferRequest(group_id=self._quorum.group.group_id, chunk=chunk_index)
        try:
            request.payload = await self.encoded(chunk_index)
        except PeerError as error:
            request.withdrawn = str(error)[:REASON_CHARACTERS_MAX]
        try:
            await self._reach.call(owner, OFFER, request, self._shared.config.fetch_s)
        except SwarmError:
            self._offered.discard((owner, chunk_index))  # it asks again, or is dead

    async def encoded(self, chunk_index: int) -> bytes:
        """Our encoded values of a chunk; PeerError when there are none to give."""
        if not self._shared.contributes:
            raise PeerError(
                f"this peer contributes nothing: {self._kernels.excluded_reason or 'its weight is 0'}"
            )
        try:
            (message,) = await self._shared.labour.work(
                self._kernels.encode, [self._plan.chunks[chunk_index]]
            )
            if isinstance(message, int):
                await self._shared.labour.work(self._kernels.exclude_self, message)
                raise PeerError(f"this peer contributes nothing: {self._kernels.excluded_reason}")
        except OutOfMemory as error:  # this may be a member's call, whose errors end no round
            self._quorum.fail(f"{self._quorum.name(self._own)} {error}")
            raise PeerError(f"this peer {error}") from None
        _, payload = unpack(message)
        return bytes(payload)

    def take_offer(self, place: int, request: OfferRequest) -> OfferReply:
        """A client's contribution to a chunk that we take over."""
        if request.chunk not in self._offers:
            raise PeerError(f"nobody asked for chunk {request.chunk}")
        if self._quorum.can_dial(place) or not self._shared.weights[place]:
            raise PeerError("only members that contribute and cannot be dialed offer")
        self._shared.traffic.received += len(request.payload)
        self._offers[request.chunk].setdefault(
            place, None if request.withdrawn else memoryview(request.payload)
        )
        self._arrived.set()
        return OfferReply()
