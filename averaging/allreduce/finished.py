"""A round that has ended on this node, for members that ask late: its outcome, and its averages while they
are in memory.
"""

from __future__ import annotations

import weakref

from averaging.allreduce import wire
from averaging.allreduce.logic import effects as do
from averaging.allreduce.logic import events as on
from averaging.allreduce.logic.machine import RoundMachine
from averaging.allreduce.logic.values import Statement
from averaging.reduction.averages import Averages
from averaging.reduction.framing import pack
from swarm.core.errors import PeerError
from swarm.net.rpc import Stream
from swarm.wire.reduce_pb2 import (
    ExchangeAverage,
    ExchangeHeader,
    FetchReply,
    FetchRequest,
    InventoryReply,
    InventoryRequest,
)


class FinishedRound:
    """The record of an ended round. It keeps no tensors alive; the owner of the averages does."""

    def __init__(self, machine: RoundMachine, averages: Averages) -> None:
        self.machine = machine
        self._averages = weakref.ref(averages)

    async def answer_votes(self, place: int, statement: Statement) -> Statement:
        """Answer a member that reports the votes that it knows and asks for those that this one knows."""
        machine = self.machine
        for effect in machine.step(on.VotesAsked(0, place, statement), machine.setup.deadline_s):
            if isinstance(effect, do.AnswerVotes):
                return effect.statement
        raise AssertionError("a finished round answers at once")

    async def answer_inventory(self, place: int, request: InventoryRequest) -> InventoryReply:
        """Answer a member that asks for this member's inventory. Raises PeerError when the averages are no
        longer in memory.
        """
        self._alive()
        wire.question_from_wire(request, len(self.machine.setup.members))
        reply = wire.inventory_to_wire(request, self.machine.setup.plan, self.machine.assembly.held)
        reply.sealed = True
        return reply

    async def answer_fetch(self, request: FetchRequest) -> FetchReply:
        """Answer a member that asks for an average."""
        if not request.digest:
            raise PeerError("the round is over")
        return FetchReply(payload=payload_of(self.machine, self._alive(), request))

    async def give_averages(self, place: int, stream: Stream) -> None:
        """Send the averages of this member's shard to a member that opens its stream late. Nobody waits for a
        member without weight, so such a member may find a committed round. Raise PeerError for a contributor,
        which was left out, and when there are no averages.
        """
        machine = self.machine
        self._alive()
        if machine.setup.weights[place] or machine.setup.audited:
            raise PeerError("this round is over")
        for chunk in machine.shard.chunks:
            version = machine.assembly.held[chunk.index]
            average = ExchangeAverage(
                chunk=chunk.index, contributors=version.contributors, clipped=version.clipped
            )
            payload = self._alive().payload(chunk).numpy().tobytes()
            await stream.send(pack(ExchangeHeader(average=average), payload))

    def _alive(self) -> Averages:
        finish, averages = self.machine.finished, self._averages()
        if finish is None or finish.failure is not None:
            raise PeerError(f"this round failed here: {finish.failure if finish else 'internal error'}")
        if averages is None or averages.gone:
            raise PeerError("this round's averages are not in memory here any more")
        return averages


def payload_of(machine: RoundMachine, averages: Averages, request: FetchRequest) -> bytes:
    """Return the bytes of an average. Raises PeerError when this version of it is not held."""
    version = machine.assembly.held.get(request.chunk)
    if version is None or version.digest != request.digest:
        raise PeerError(
            f"no average of chunk {request.chunk} with the digest {request.digest.hex()[:12]} is held here"
        )
    return averages.payload(machine.setup.plan.chunks[request.chunk]).numpy().tobytes()
