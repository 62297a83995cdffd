"""Calls to members while a round is repaired: what they hold, and the bytes of it. They end when the member
dies.
"""

from __future__ import annotations

import asyncio
from typing import Any

from averaging.allreduce.assembly import check_clipped, decode_places
from averaging.allreduce.commit import DIGEST_BYTES, Version
from averaging.allreduce.config import FETCH, HELD, Dialer
from averaging.allreduce.span import RoundContext
from averaging.allreduce.work import Arrived
from swarm.core.errors import DeadlineExceeded, NetworkError, PeerError, SwarmError
from swarm.net.rpc import Method, ReplyT, RequestT
from swarm.wire.reduce_pb2 import FetchReply, FetchRequest, HeldReply, HeldRequest


class RepairClient:
    """The members of one round, as far as they can be called; `tasks` is set while the round runs."""

    def __init__(self, shared: RoundContext, caller: Dialer) -> None:
        self.tasks: asyncio.TaskGroup | None = None
        self.include_failed = False  # who is dead to us may live for others, and have what we need
        self._shared = shared
        self._assembly, self._quorum = shared.assembly, shared.quorum
        self._plan = shared.kernels.plan
        self._members = shared.quorum.group.members
        self._caller = caller
        self._calls: dict[int, set[asyncio.Task[Any]]] = {}

    def mark_failed(self, place: int) -> None:
        """This member died: calls to it end."""
        for call in self._calls.get(place, ()):
            call.cancel()

    def everything(self) -> HeldRequest:
        """A question for all that a member holds."""
        return HeldRequest(group_id=self._quorum.group.group_id, everything=True)

    async def table(self, place: int, request: HeldRequest) -> tuple[dict[int, Version], HeldReply]:
        """Return the versions that a member holds, as far as it was asked, with its last reply. Raises
        PeerError for an invalid reply.
        """
        table: dict[int, Version] = {}
        while True:
            reply: HeldReply = await self.call(
                place, HELD, request, self._shared.config.held_wait_s + self._shared.config.fetch_s
            )
            for item in reply.held:
                if (
                    not request.first_chunk <= item.chunk < len(self._plan.chunks)
                    or len(item.digest) != DIGEST_BYTES
                ):
                    raise PeerError(
                        f"it says that it holds chunk {item.chunk}, with a digest of {len(item.digest)} bytes"
                    )
                if not request.everything and self._plan.chunks[item.chunk].reducer != request.reducer:
                    raise PeerError(f"it answers with chunk {item.chunk}, which it was not asked about")
                if item.attempt >= len(self._members):
                    raise PeerError(f"attempt {item.attempt} among {len(self._members)} members")
                decode_places(item.contributors, self._plan.members)
                check_clipped(item.clipped, item.contributors, self._plan.members)
                table[item.chunk] = Version(item.attempt, item.contributors, item.digest, item.clipped)
                request.first_chunk = item.chunk + 1
            if not reply.more or not reply.held:
                return table, reply
            request.wait = False

    async def fetch(self, place: int, chunk_index: int, version: Version) -> bool:
        """Get one average and keep it; False when this member cannot give it."""
        chunk = self._plan.chunks[chunk_index]
        payload = memoryview(b"")
        if not version.empty:
            request = FetchRequest(
                group_id=self._quorum.group.group_id, chunk=chunk_index, digest=version.digest
            )
            try:
                reply: FetchReply = await self.call(place, FETCH, request, self._shared.config.fetch_s)
                self._assembly.check(chunk_index, version.contributors, len(reply.payload))
            except NetworkError as error:
                if not isinstance(error, DeadlineExceeded):
                    self._quorum.suspect(place, f"its connection broke ({error})")
                return False
            except PeerError:
                return False
            payload = memoryview(reply.payload)
            self._shared.traffic.received += len(payload)
        arrived = Arrived(chunk, payload, version.contributors, version.clipped, version.digest)
        (digest,) = await self._shared.labour.work(self._shared.kernels.settle, [arrived])
        if digest is None:
            return False
        self._assembly.settle(chunk_index, version)
        return True

    async def call(
        self, place: int, method: Method[RequestT, ReplyT], request: RequestT, timeout_s: float
    ) -> ReplyT:
        """A call that ends when the member dies. NetworkError, PeerError."""
        if self.tasks is None or (place in self._quorum.dead and not self.include_failed):
            raise NetworkError(f"{self._quorum.name(place)} is dead")
        call = self.tasks.create_task(self._quietly(place, method, request, timeout_s))
        calls = self._calls.setdefault(place, set())
        calls.add(call)
        try:
            await asyncio.wait({call})
        finally:
            calls.discard(call)
            call.cancel()
        if call.cancelled():
            raise NetworkError(f"{self._quorum.name(place)} died meanwhile")
        result = call.result()
        if isinstance(result, SwarmError):
            raise result
        self._quorum.heard(place)
        return result

    async def _quietly(
        self, place: int, method: Method[RequestT, ReplyT], request: RequestT, timeout_s: float
    ) -> ReplyT | NetworkError | PeerError:
        try:
            return await self._caller.call(self._members[place].contact, method, request, timeout_s=timeout_s)
        except (NetworkError, PeerError) as error:
            return error
