"""The averages that a member offers to others, during a round and, once it has committed, while they are in
its memory: late members download them.
"""

from __future__ import annotations

import weakref

from averaging.allreduce.assembly import Assembly
from averaging.allreduce.config import VERSIONS_MAX
from averaging.reduction.averages import Averages
from averaging.reduction.partition import Plan
from swarm.core.errors import PeerError
from swarm.wire.reduce_pb2 import FetchReply, HeldReply, HeldRequest, Version


class ChunkInventory:
    """Keeps no tensors alive: only the averages' owner does."""

    def __init__(self, assembly: Assembly, averages: Averages) -> None:
        self.plan: Plan = averages.plan
        self._assembly = assembly
        self._averages = weakref.ref(averages)

    def count(self, reducer: int) -> int:
        """How many averages of a shard are held."""
        held = self._assembly.held
        return sum(chunk.index in held for chunk in self.plan.shard(reducer))

    def tell(self, request: HeldRequest, sealed: bool) -> HeldReply:
        """The versions that are held. PeerError: no such reducer, or the memory holds another
        round by now.
        """
        self._alive()
        if request.reducer >= self.plan.members:
            raise PeerError(f"a question about reducer {request.reducer} among {self.plan.members}")
        chunks = self.plan.chunks if request.everything else self.plan.shard(request.reducer)
        held = self._assembly.held
        found = [
            chunk.index for chunk in chunks if chunk.index >= request.first_chunk and chunk.index in held
        ]
        reply = HeldReply(sealed=sealed, more=len(found) > VERSIONS_MAX, count=self.count(request.reducer))
        for index in found[:VERSIONS_MAX]:
            version = held[index]
            reply.held.append(
                Version(
                    chunk=index,
                    attempt=version.attempt,
                    contributors=version.contributors,
                    digest=version.digest,
                    clipped=version.clipped,
                )
            )
        return reply

    def give(self, chunk_index: int, digest: bytes) -> FetchReply:
        """The bytes of an average. PeerError: it is not held, or not this one."""
        averages = self._alive()
        version = self._assembly.held.get(chunk_index)
        if version is None or version.digest != digest:
            raise PeerError(
                f"no average of chunk {chunk_index} with the digest {digest.hex()[:12]} is held here"
            )
        return FetchReply(payload=averages.payload(self.plan.chunks[chunk_index]).numpy().tobytes())

    def _alive(self) -> Averages:
        averages = self._averages()
        if averages is None or averages.gone:
            raise PeerError("this round's averages are not in memory here any more")
        return averages
