"""Butterfly all-reduce between the members of a group: one service per node, any number of rounds side by
side.

All members divide the vector in the same way. Each reduces one shard, whose size follows from its bandwidth,
and exchanges values and averages with the reducers of the other shards. A round is a pure machine
(`averaging.allreduce.logic.machine`) and its driver. The result stays encoded, and is handed over once a
certificate proves that more than half of the contributors hold the same bytes.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

import torch

from averaging.allreduce import wire
from averaging.allreduce.auditing import Auditor, sign
from averaging.allreduce.config import (
    ACCOUNT,
    ENDORSE,
    EXCHANGE,
    FETCH,
    HEARTBEAT,
    INVENTORY,
    METHODS,
    OFFER,
    VOTE,
    Dialer,
    RoundConfig,
)
from averaging.allreduce.driver import RoundDriver
from averaging.allreduce.finished import FinishedRound
from averaging.allreduce.kernels import ReductionKernels
from averaging.allreduce.known_rounds import KnownRound, KnownRounds
from averaging.allreduce.logic.effects import Finish
from averaging.allreduce.logic.events import Heard
from averaging.allreduce.logic.machine import RoundMachine
from averaging.allreduce.logic.setup import RoundSetup, proposal_of
from averaging.allreduce.logic.values import RoundState
from averaging.allreduce.network import RoundNetwork
from averaging.allreduce.offload import ComputeOffload, OutOfMemory
from averaging.allreduce.outcome import RoundOutcome, outcome_of
from averaging.allreduce.resolution import resolve
from averaging.allreduce.voter import IN_ANOTHER_ROUND, Voter
from averaging.history.certificate import Proposal, Vote
from averaging.history.electors import NEW_REGISTER
from averaging.history.round_lineage import RoundLineage
from averaging.matchmaking.logic.group import Group
from averaging.reduction.audit import Notary
from averaging.reduction.averages import Averages, ResultBuffer
from averaging.reduction.balance import shares_of, speeds_of
from averaging.reduction.feedback import NO_SHARD, Feedback, FeedbackRound, Shard
from averaging.reduction.framing import unpack
from averaging.reduction.partition import chunk_bytes_for, plan_chunks
from averaging.reduction.reduce import relative_weights
from averaging.reduction.speed import Speed
from averaging.reduction.vector import FlatVector
from swarm.compression import find
from swarm.core.clock import Clock
from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import PeerId
from swarm.net.rpc import Handlers, Stream
from swarm.runtime.supervise import Supervisor
from swarm.wire import reduce_pb2

T = TypeVar("T")
# An elector's answer to a proposal, a result (b"": none) and the votes for it: its own vote, or the reason
# for not voting.
Endorser: TypeAlias = Callable[[PeerId, Proposal, bytes, Sequence[Vote]], Awaitable[Vote | str]]


@dataclass(frozen=True, slots=True)
class RoundMemory:
    """The memory of an averager from one round to the next."""

    result_buffer: ResultBuffer = field(default_factory=ResultBuffer)  # where the averages are stored
    # errors of a lossy codec, updated when a round is committed; None: they are discarded
    feedback: Feedback | None = None


class AllReduce:
    """Runs rounds and serves those of others. Lives on the network loop."""

    def __init__(
        self, *, handlers: Handlers, channels: Dialer, pool: Executor, clock: Clock, notary: Notary
    ) -> None:
        """`notary`: this node's identity, which signs votes, and the chance by which it audits."""
        self._network = RoundNetwork(channels, clock)
        self._own = notary.identity.peer_id
        self._pool = pool
        self._notary = notary
        self._rounds = KnownRounds()
        self._endorsers: dict[str, Endorser] = {}
        self._background = Supervisor()
        self._conducting: set[RoundDriver] = set()  # rounds that run, or that tell members how they ended
        self._resolving: set[asyncio.Task[None]] = set()  # tasks of rounds that others may have committed
        self._handlers = handlers
        _keep_freed_memory()
        handlers.stream(EXCHANGE, self._serve_exchange)
        handlers.direct(HEARTBEAT, self._serve_heartbeat)
        handlers.unary(VOTE, self._serve_vote)
        handlers.unary(ACCOUNT, self._serve_account)
        handlers.unary(INVENTORY, self._serve_inventory)
        handlers.unary(FETCH, self._serve_fetch)
        handlers.unary(OFFER, self._serve_offer)
        handlers.unary(ENDORSE, self._serve_endorse)

    def close(self) -> None:
        """Stop answering calls, and fail the rounds that are running."""
        for method in METHODS:
            self._handlers.remove(method.name)
        for driver in list(self._conducting):
            driver.close()
        for task in self._resolving:
            task.cancel()

    @property
    def speed(self) -> Speed:
        """Return the measured speed of this node's link."""
        return self._network.speed

    @property
    def running(self) -> list[RoundDriver]:
        """Return the rounds that have not ended on this node."""
        return self._rounds.running

    @property
    def waiting(self) -> int:
        """Return how many calls of faster members wait for rounds that have not begun here."""
        return self._rounds.waiting

    def serve_history(self, run: str, endorser: Endorser | None) -> None:
        """Answer requests for this peer's vote as an elector of a run with `endorser`; None: stop answering
        them.
        """
        if endorser is None:
            self._endorsers.pop(run, None)
        elif run in self._endorsers:
            raise UsageError(f"votes of the run {run!r} come from another optimizer on this node")
        else:
            self._endorsers[run] = endorser

    async def run(
        self,
        group: Group,
        vector: torch.Tensor | FlatVector,
        *,
        deadline_s: float,
        config: RoundConfig | None = None,
        memory: RoundMemory | None = None,
        history: RoundLineage | None = None,
    ) -> RoundOutcome:
        """Average `vector` with the group; returns by `deadline_s` (on the clock's `monotonic_s`).

        `vector`: flat, contiguous, float32, on any device, in one tensor or several; read until this returns,
        never written. `memory`: of the averager, the same for one round after the other. `history`: of the
        run, whose electors then have a vote; None: the votes of more than half of the contributors commit.
        What the network or a peer does is an outcome. A call that is cancelled before the round is committed
        has no effect; afterwards the cancellation has none.

        UsageError: the vector is anything else, this group cannot be served (nobody reduces, an unknown
        codec), or the round runs already.
        """
        config = config or RoundConfig()
        vector = vector if isinstance(vector, FlatVector) else FlatVector([vector])
        setup = self._setup(group, vector.numel, deadline_s, config, history)
        history = history if history is not None and history.extends else None
        memory = memory or RoundMemory()
        averages = Averages(setup.plan, setup.codec, memory.result_buffer)
        kernels = ReductionKernels(
            setup.plan,
            setup.codec,
            setup.own,
            vector,
            averages,
            config.aggregation,
            setup.weights,
            _feedback_of(memory.feedback, setup),
            sign=functools.partial(sign, self._notary.identity, group.group_id) if config.audit else None,
        )
        driver = self._begin(setup, kernels, config, history)
        self._conducting.add(driver)
        self._background.spawn("averaging round", driver.conduct).add_done_callback(
            lambda _: self._conducting.discard(driver)
        )
        try:
            finish = await _ended(driver)
        finally:
            if not driver.ended.done() or driver.ended.cancelled():
                kernels.roll_back()
            self._rounds.finish(group.group_id, FinishedRound(driver.machine, averages))
            self.speed.round_over()
            if history is not None:
                self._free_vote(driver.machine, history)
        return await self._conclude(driver, finish)

    # ---- rounds

    def _free_vote(self, machine: RoundMachine, history: RoundLineage) -> None:
        """After a round that failed here: free this peer's vote, at once or when it is known that nobody can
        commit the round.
        """
        finish = machine.finished
        if finish is None or finish.failure is None:
            return
        if finish.unresolved:
            work = functools.partial(resolve, machine, self._network, history)
            task = self._background.spawn("the end of an averaging round", work)
            self._resolving.add(task)
            task.add_done_callback(self._resolving.discard)
        else:
            history.release(machine.setup.proposal)

    def _setup(
        self,
        group: Group,
        numel: int,
        deadline_s: float,
        config: RoundConfig,
        history: RoundLineage | None,
    ) -> RoundSetup:
        own = group.index(self._own)
        decides = history is not None and history.extends
        if group.group_id in self._rounds:
            raise UsageError("this round has run already")
        codec = find(group.codec)
        size_bytes = codec.encoded_bytes(numel)
        alone = len(group.members) == 1
        shares = [1.0] if alone else shares_of(group.members, size_bytes, group.reducers)
        speeds = speeds_of(group.members, group.reducers)
        chunk_bytes = chunk_bytes_for(speeds, size_bytes, config.chunk_bytes)
        plan = plan_chunks(numel, shares, codec, chunk_bytes)
        if not any(member.weight > 0 for member in group.members):
            raise UsageError("nobody in this group contributes: all weights are 0")
        return RoundSetup(
            group=group,
            own=own,
            plan=plan,
            codec=codec,
            weights=relative_weights([member.weight for member in group.members]),
            proposal=proposal_of(group, history),
            electors=history.electors if history is not None and decides else (),
            register=history.register if history is not None and decides else NEW_REGISTER,
            goodbyes=dict(history.goodbyes) if history is not None and decides else {},
            audited=config.audit > 0.0,
            min_fraction=config.min_fraction,
            begun_s=self._network.now_s,
            deadline_s=deadline_s,
        )

    def _begin(
        self,
        setup: RoundSetup,
        kernels: ReductionKernels,
        config: RoundConfig,
        history: RoundLineage | None,
    ) -> RoundDriver:
        driver = RoundDriver(
            RoundMachine(setup),
            kernels,
            self._network,
            ComputeOffload(self._pool, kernels.queues),
            Voter(self._notary.identity, setup.proposal, history),
            Auditor(setup.group, kernels, self._notary, config.audit) if config.audit else None,
        )
        self._rounds.begin(setup.group.group_id, driver)
        return driver

    async def _conclude(self, driver: RoundDriver, finish: Finish) -> RoundOutcome:
        """If the round is committed, advance the error feedback and copy the averages to their devices."""
        machine, kernels, setup = driver.machine, driver.kernels, driver.machine.setup
        ended_s = self._network.now_s
        exchanged_s = machine.voted_s if machine.voted_s is not None else ended_s
        seconds = {
            "total": ended_s - setup.begun_s,
            "exchange": exchanged_s - setup.begun_s,
            "commit": ended_s - exchanged_s,
            **kernels.seconds,
        }
        accused = driver.auditor.accused if driver.auditor is not None else {}
        outcome = replace(
            outcome_of(machine, kernels.averages, accused, seconds),
            bytes_sent=driver.bytes_sent,
            bytes_received=driver.bytes_received,
            out_of_memory=finish.failure is not None and bool(driver.offload.out_of_memory),
        )
        if outcome.failed:
            if finish.certificate is not None and kernels.feedback is not None and not outcome.out_of_memory:
                await uninterrupted(driver.offload.start(kernels.conclude_feedback, machine.assembly.held))
            kernels.roll_back()  # no effect on delivered results
            return outcome
        self.speed.committed(outcome.bytes_sent, ended_s - setup.begun_s)
        if kernels.feedback is None and not kernels.queues:
            return outcome
        try:
            await uninterrupted(driver.offload.start(kernels.conclude, machine.assembly.held))
        except OutOfMemory:  # the others have committed and continue without this member
            kernels.roll_back()
            name = setup.name(setup.own)
            return outcome.without_memory(f"{name} {driver.offload.out_of_memory}")
        return outcome

    # ---- calls of members

    async def _serve_exchange(self, stream: Stream) -> None:
        message = await stream.receive()
        if message is None:
            return
        header, first = unpack(message)
        if not header.HasField("open"):
            raise PeerError("a stream of a round begins with an opening")
        found = await self._rounds.find(header.open.group_id, stream.peer_id)
        place = _place(found, stream.peer_id)
        if isinstance(found, RoundDriver) and found.running:
            await found.serve(place, header.open, stream, first)
            return
        if isinstance(found, RoundDriver):  # the round ends at this moment
            found = FinishedRound(found.machine, found.kernels.averages)
        try:
            async with asyncio.timeout(found.machine.setup.deadline_s - self._network.now_s):
                await found.give_averages(place, self._network.framed(stream, _nothing, lambda: None))
        except TimeoutError:
            raise PeerError("this round is over") from None

    def _serve_heartbeat(
        self, caller: PeerId, request: reduce_pb2.HeartbeatRequest
    ) -> reduce_pb2.HeartbeatReply:
        found = self._rounds.get(request.group_id)
        if found is None:
            return wire.state_to_wire(RoundState.UNKNOWN, "")
        place = _place(found, caller)
        if isinstance(found, RoundDriver):
            found.feed(Heard(place))
        finish = found.machine.finished
        return wire.state_to_wire(found.machine.state, (finish.failure or "") if finish is not None else "")

    async def _serve_vote(self, caller: PeerId, request: reduce_pb2.VoteRequest) -> reduce_pb2.VoteReply:
        found = await self._rounds.find(request.group_id, caller)
        place = _place(found, caller)
        statement = wire.statement_from_wire(request.statement, len(found.machine.setup.members))
        return reduce_pb2.VoteReply(
            statement=wire.statement_to_wire(await found.answer_votes(place, statement))
        )

    async def _serve_inventory(
        self, caller: PeerId, request: reduce_pb2.InventoryRequest
    ) -> reduce_pb2.InventoryReply:
        found = await self._find_repairable(request.group_id, caller)
        return await found.answer_inventory(_place(found, caller), request)

    async def _serve_fetch(self, caller: PeerId, request: reduce_pb2.FetchRequest) -> reduce_pb2.FetchReply:
        found = await self._find_repairable(request.group_id, caller)
        _place(found, caller)
        if request.chunk >= len(found.machine.setup.plan.chunks):
            raise PeerError(f"there is no chunk {request.chunk}")
        return await found.answer_fetch(request)

    async def _serve_offer(self, caller: PeerId, request: reduce_pb2.OfferRequest) -> reduce_pb2.OfferReply:
        found = await self._find_repairable(request.group_id, caller)
        place = _place(found, caller)
        if isinstance(found, FinishedRound):
            raise PeerError("this round is over")
        found.take_offer(place, request.chunk, request.payload, request.withdrawn)
        return reduce_pb2.OfferReply()

    async def _serve_account(
        self, caller: PeerId, request: reduce_pb2.AccountRequest
    ) -> reduce_pb2.AccountReply:
        found = self._rounds.get(request.group_id)
        if found is None or not found.machine.setup.audited:
            raise PeerError("this peer is in no round of that name that is audited")
        _place(found, caller)
        finish = found.machine.finished
        if isinstance(found, FinishedRound) or found.auditor is None:
            failure = finish.failure if finish is not None else None
            raise PeerError(f"this round failed here: {failure}" if failure else "this round is over")
        return found.auditor.answer(_place(found, caller), request)

    async def _serve_endorse(
        self, caller: PeerId, request: reduce_pb2.EndorseRequest
    ) -> reduce_pb2.EndorseReply:
        endorser = self._endorsers.get(request.run)
        if endorser is None:
            raise PeerError("this peer takes no part in that run")
        proposal, result, votes = wire.endorsement_from_wire(request)
        # before this peer votes for none, allow time for the message that the round has begun
        is_here = not result and await self._rounds.wait_for(proposal.group_id, caller) is not None
        competes = is_here or any(driver.voter.competes_with(proposal) for driver in self.running)
        answer = IN_ANOTHER_ROUND if competes else await endorser(caller, proposal, result, votes)
        if isinstance(answer, Vote):
            return reduce_pb2.EndorseReply(vote=wire.vote_to_wire(answer))
        return reduce_pb2.EndorseReply(refusal=answer)

    async def _find_repairable(self, group_id: bytes, caller: PeerId) -> KnownRound:
        """Return the round of this name. Raises PeerError where reducers are audited: a member that takes
        over a shard could not be audited.
        """
        found = await self._rounds.find(group_id, caller)
        if found.machine.setup.audited:
            raise PeerError("this round is audited: nobody takes over what another member reduces")
        return found


async def _ended(driver: RoundDriver) -> Finish:
    """Wait for the end of a round. A cancellation ends the round, unless it is committed already."""
    try:
        await asyncio.wait({driver.ended})
    except asyncio.CancelledError:
        if driver.running:
            driver.give_up()
        await uninterrupted(driver.ended)
        finish = driver.ended.result()
        if finish.failure is not None:
            raise
        _forget_cancellation()
    return driver.ended.result()


async def uninterrupted(future: asyncio.Future[T]) -> T:
    """Wait for `future` even if this task is cancelled: the cancellation comes too late."""
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            _forget_cancellation()
    return future.result()


def _forget_cancellation() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


def _feedback_of(feedback: Feedback | None, setup: RoundSetup) -> Callable[[], FeedbackRound] | None:
    """Return the function that begins this round of error feedback; None without error feedback."""
    if feedback is None:
        return None
    own = setup.plan.shard(setup.own)
    members = b"".join(member.peer_id.public_key for member in setup.group.members)
    return functools.partial(
        feedback.begin, Shard(start=own[0].start, stop=own[-1].stop, members=members) if own else NO_SHARD
    )


@functools.cache
def _keep_freed_memory() -> None:
    """Make glibc keep freed blocks of a megabyte, which this process uses again and again.

    Its malloc maps such blocks for each allocation, until one of them has been freed. A round makes and drops
    a message for every megabyte: ten times the page faults and 5 to 10 % of the processor time.
    """
    # freed at once, so that glibc raises its mmap threshold to this size, close to its limit of 32 MiB
    bytes(31 << 20)


def _nothing(size_bytes: int) -> None:
    """Ignore messages on the stream of a member that contributes nothing."""


def _place(found: RoundDriver | FinishedRound, caller: PeerId) -> int:
    try:
        return found.machine.setup.group.index(caller)
    except UsageError:
        raise PeerError(f"{caller} is not a member of this round") from None
