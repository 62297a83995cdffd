"""A round that has ended here, for members that ask late: how it ended, and its averages while they are in
memory.
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
    """Keeps no tensors alive: only the averages' owner does."""

    def __init__(self, machine: RoundMachine, averages: Averages) -> None:
        self.machine = machine
        self._averages = weakref.ref(averages)

    async def answer_votes(self, place: int, statement: Statement) -> Statement:
        """A member says what it knows of the votes, and asks what this one knows."""
        machine = self.machine
        for effect in machine.step(on.VotesAsked(0, place, statement), machine.setup.deadline_s):
            if isinstance(effect, do.AnswerVotes):
                return effect.statement
        raise AssertionError("a finished round answers at once")

    async def answer_inventory(self, place: int, request: InventoryRequest) -> InventoryReply:
        """A member asks what this member holds. Raises PeerError when it is not in memory any more."""
        self._alive()
        wire.question_from_wire(request, len(self.machine.setup.members))
        reply = wire.inventory_to_wire(request, self.machine.setup.plan, self.machine.assembly.held)
        reply.sealed = True
        return reply

    async def answer_fetch(self, request: FetchRequest) -> FetchReply:
        """A member asks for an average."""
        if not request.digest:
            raise PeerError("the round is over")
        return FetchReply(payload=payload_of(self.machine, self._alive(), request))

    async def give_averages(self, place: int, stream: Stream) -> None:
        """Give the averages of this member's shard to a member that opens its stream late. Nobody waits for
        one without weight, so that it may find a committed round. Raise PeerError for a member that
        contributes, which was left out, and when there is nothing to give.
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
    """Return the bytes of an average. Raises PeerError when it is not held, or not this one."""
    version = machine.assembly.held.get(request.chunk)
    if version is None or version.digest != request.digest:
        raise PeerError(
            f"no average of chunk {request.chunk} with the digest {request.digest.hex()[:12]} is held here"
        )
    return averages.payload(machine.setup.plan.chunks[request.chunk]).numpy().tobytes()
