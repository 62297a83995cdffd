"""What a member tells and gives others of the averages that it holds, during a round and, once it has
committed, for as long as they lie in its memory: late members take them from there.
"""

from __future__ import annotations

import weakref

from averaging.allreduce.assembly import Assembly
from averaging.allreduce.config import VERSIONS_MAX
from averaging.reduction.averages import Averages
from averaging.reduction.partition import Plan
from swarm.core.errors import PeerError
from swarm.wire.reduce_pb2 import FetchReply, HeldReply, HeldRequest, Version


class PartInventory:
    """Keeps no tensors alive: only the averages' owner does."""

    def __init__(self, assembly: Assembly, averages: Averages) -> None:
        self.plan: Plan = averages.plan
        self._assembly = assembly
        self._averages = weakref.ref(averages)

    def count(self, reducer: int) -> int:
        """How many averages of a span are held."""
        held = self._assembly.held
        return sum(part.index in held for part in self.plan.of_reducer(reducer))

    def tell(self, request: HeldRequest, sealed: bool) -> HeldReply:
        """The versions that are held. PeerError: no such reducer, or the memory holds another round by now."""
        self._alive()
        if request.reducer >= self.plan.members:
            raise PeerError(f"a question about reducer {request.reducer} among {self.plan.members}")
        parts = self.plan.parts if request.everything else self.plan.of_reducer(request.reducer)
        held = self._assembly.held
        found = [part.index for part in parts if part.index >= request.first_part and part.index in held]
        reply = HeldReply(sealed=sealed, more=len(found) > VERSIONS_MAX, count=self.count(request.reducer))
        for index in found[:VERSIONS_MAX]:
            version = held[index]
            reply.held.append(
                Version(
                    part=index,
                    attempt=version.attempt,
                    contributors=version.contributors,
                    digest=version.digest,
                    clipped=version.clipped,
                )
            )
        return reply

    def give(self, part_index: int, digest: bytes) -> FetchReply:
        """The bytes of an average. PeerError: it is not held, or not this one."""
        averages = self._alive()
        version = self._assembly.held.get(part_index)
        if version is None or version.digest != digest:
            raise PeerError(
                f"no average of part {part_index} with the digest {digest.hex()[:12]} is held here"
            )
        return FetchReply(payload=averages.payload(self.plan.parts[part_index]).numpy().tobytes())

    def _alive(self) -> Averages:
        averages = self._averages()
        if averages is None or averages.gone:
            raise PeerError("this round's averages are not in memory here any more")
        return averages
