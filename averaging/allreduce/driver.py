"""The driver of one running round: it performs the effects of the round's machine, and feeds their results
back as events.

Tensor work goes to `ReductionKernels`, in a thread of the node's pool. Values and averages that are on their
way through this member are kept here; the machine knows them by chunk.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from averaging.allreduce import wire
from averaging.allreduce.auditing import Auditor
from averaging.allreduce.calls import RoundCalls
from averaging.allreduce.finished import payload_of
from averaging.allreduce.kernels import Arrived, ReductionKernels
from averaging.allreduce.logic import effects as do
from averaging.allreduce.logic import events as on
from averaging.allreduce.logic.effects import Effect
from averaging.allreduce.logic.machine import RoundMachine
from averaging.allreduce.logic.values import Statement
from averaging.allreduce.logic.versions import Version
from averaging.allreduce.network import RoundNetwork
from averaging.allreduce.offload import ComputeOffload, OutOfMemory
from averaging.allreduce.streams import ReducerStream, SenderStream, first_error
from averaging.allreduce.voter import Voter
from averaging.allreduce.work import ChunkWork
from averaging.history.certificate import Vote
from averaging.reduction.framing import unpack
from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import Contact
from swarm.core.notify import ChangeEvent
from swarm.net.rpc import Stream
from swarm.wire.reduce_pb2 import (
    ExchangeOpen,
    FetchReply,
    FetchRequest,
    InventoryReply,
    InventoryRequest,
)

# Interval at which streams that wait for news check without any. Longer: members learn later for which member
# their reducer waits; shorter: more wakeups in long rounds
_LOOK_S = 0.5
_FAREWELL_S = 1.0  # time for telling members the result of the round, in the background


class RoundDriver:
    """One round of this member. `conduct` runs it; `ended` is set when no tensor is touched any more."""

    def __init__(
        self,
        machine: RoundMachine,
        kernels: ReductionKernels,
        network: RoundNetwork,
        offload: ComputeOffload,
        voter: Voter,
        auditor: Auditor | None,
    ) -> None:
        self.machine, self.kernels, self.network, self.offload = machine, kernels, network, offload
        self.auditor = auditor
        self.group_id = machine.setup.group.group_id
        self.plan_digest = kernels.plan.digest(kernels.codec)
        self.own_chunks = machine.shard.chunks
        self.bytes_sent = self.bytes_received = 0
        # set when effects can be performed; calls and streams of earlier events would be lost
        self.begun = asyncio.Event()
        self.ended: asyncio.Future[do.Finish] = asyncio.get_running_loop().create_future()
        # encoded averages, in the order of reduction; b"" once every member has one
        self.averages: list[bytes] = []
        # senders that were left out, with the reason to send on their streams
        self.refusals: dict[int, str] = {}
        self.voter = voter
        self._calls = RoundCalls(self)
        members = machine.setup.group.members
        takers = sum(not member.auxiliary for member in members) - (not machine.setup.own_auxiliary)
        self._takers = [takers] * len(self.own_chunks)
        self._served: set[int] = set()  # members that opened a stream
        self._senders: set[SenderStream] = set()  # open streams of these members
        self.work = ChunkWork(self)
        self._events: deque[on.Event] = deque()
        self._stepping = False
        self._exchanges: dict[int, tuple[ReducerStream, asyncio.Task[None]]] = {}
        self._reducing: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._over = asyncio.Event()  # the round has ended here
        # set when the streams of other members have an average or a refusal to send
        self._news = ChangeEvent()
        self._looked_s = network.now_s  # last time at which waiting streams checked without news
        self._halted = False
        self._replies: dict[int, asyncio.Future[do.AnswerVotes | do.AnswerInventory]] = {}
        self._asked = 0

    # ---- the whole

    async def conduct(self) -> None:
        """Run the round to its end, then tell members how it ended."""
        try:
            async with asyncio.TaskGroup() as calls:
                self._calls.begin(calls)
                await self._run()
                await self.offload.finish()
                finish = self.machine.finished
                assert finish is not None
                self._drop_tensors()
                self.ended.set_result(finish)
                await self._say_goodbye()
        except asyncio.CancelledError:
            self.ended.cancel()
            raise
        except BaseException as error:  # a bug here
            if not self.ended.done():
                self.ended.set_exception(error)
            raise
        finally:
            self.begun.set()
            self._calls.close()

    async def _run(self) -> None:
        """Run until the machine has finished."""
        name = self.machine.setup.name(self.machine.setup.own)
        try:
            async with asyncio.TaskGroup() as work:
                self._tasks = work
                work.create_task(self.work.check(), name="check")
                self._reducing = work.create_task(self.work.reduce(), name="reduce")
                work.create_task(self._tick(), name="tick")
                self._perform(self.machine.begin())
                self.begun.set()
                # runs concurrently with the tasks that answer members and send heartbeats
                await self.offload.prepare(self.kernels.prepare, not self.machine.setup.own_auxiliary)
                self.feed(on.MemoryPrepared())
                await self._over.wait()
                raise _RoundOver
        except* _RoundOver:
            pass
        except* UsageError as errors:  # the node was closed meanwhile
            self.feed(on.GiveUp(f"{name} cannot continue: {first_error(errors)}"))
        except* OutOfMemory:
            self.feed(on.GiveUp(f"{name} {self.offload.out_of_memory}"))
        finally:
            self._tasks = None

    async def _say_goodbye(self) -> None:
        self._perform(self.machine.farewell())
        await self._calls.finish(_FAREWELL_S)

    async def _tick(self) -> None:
        while self.running:
            await asyncio.sleep(max(self.machine.deadline_s() - self.network.now_s, 0.0))
            now_s = self.network.now_s
            self._perform(self.machine.tick(now_s))
            if now_s - self._looked_s >= _LOOK_S:
                self._looked_s = now_s
                self._news.notify()

    @property
    def running(self) -> bool:
        """Return whether the round has not ended for this member."""
        return self.machine.finished is None

    def _drop_tensors(self) -> None:
        """Release all tensors except averages that are still being sent to slower members."""
        self.work.drop()
        if not self._senders:
            self.averages = []

    # ---- events and effects

    def feed(self, event: on.Event) -> None:
        """Feed an event to the machine, and perform the effects that it returns. Raises PeerError when a
        member broke the protocol.
        """
        self._events.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._events:
                self._perform_each(self.machine.step(self._events.popleft(), self.network.now_s))
        finally:
            self._stepping = False

    def _perform(self, effects: list[Effect]) -> None:
        self._stepping = True
        try:
            self._perform_each(effects)
            while self._events:
                self._perform_each(self.machine.step(self._events.popleft(), self.network.now_s))
        finally:
            self._stepping = False

    def _perform_each(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._perform_one(effect)

    def _perform_one(self, effect: Effect) -> None:
        match effect:
            case do.AnswerVotes() | do.AnswerInventory():
                reply = self._replies.pop(effect.call, None)
                if reply is not None and not reply.done():
                    reply.set_result(effect)
            case do.CheckAverage() | do.Reduce():
                self.work.perform(effect)
                if isinstance(effect, do.Reduce):
                    self._news.notify()
            case do.OpenStream():
                stream = ReducerStream(self, effect.reducer)
                task = self._spawn(stream.run)
                if task is not None:
                    self._exchanges[effect.reducer] = stream, task
            case do.CloseStream():
                if effect.reducer in self._exchanges:
                    self._exchanges[effect.reducer][1].cancel()
            case do.StopSending():
                if effect.reducer in self._exchanges:
                    self._exchanges[effect.reducer][0].refused = True
            case do.RefuseSender():
                self.refusals.setdefault(effect.sender, effect.reason)
                self._news.notify()
            case do.Sign():
                vote = self.voter.vote(effect.result)
                self._events.append(
                    on.VoteSigned(vote) if isinstance(vote, Vote) else on.SigningRefused(vote)
                )
            case do.Audit():
                self._spawn(self._audit)
            case do.HaltReduction():
                self._halt()
            case do.Finish():
                self._over.set()
                self._end_senders()
            case _:
                self._calls.perform(effect)

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None] | None:
        return self._tasks.create_task(work()) if self._tasks is not None else None

    def _halt(self) -> None:
        self._halted = True
        self.work.halt()
        if self._reducing is not None:
            self._reducing.cancel()

    async def news(self) -> None:
        """Wait for a change that concerns senders, at most `_LOOK_S`. The caller does not await between its
        last look and this call, so no change is missed.
        """
        self._news.clear()
        await self._news.wait()

    # ---- this member's own work

    async def exclude_self(self, element: int) -> None:
        """Stop contributing because of this element of the vector."""
        await self.offload.work(self.kernels.exclude_self, element)
        self.feed(on.OwnValuesExcluded(str(self.kernels.excluded_reason)))

    async def _audit(self) -> None:
        assert self.auditor is not None
        finding = await self.auditor.audit(self.network, self.offload.work)
        self.feed(on.Audited(finding.reason if finding is not None else ""))

    async def keep_fetched(self, chunk: int, payload: memoryview, version: Version) -> bool:
        """Check and keep a fetched average; return whether it is the requested version."""
        if self._halted:
            await self.offload.finish()  # from here on nothing else may write to the averages
        arrived = Arrived(
            self.kernels.plan.chunks[chunk], payload, version.contributors, version.clipped, version.digest
        )
        (digest,) = await self.offload.work(self.kernels.settle, [arrived])
        return digest is not None

    async def encoded(self, chunk: int) -> bytes:
        """Return this member's encoded values of a chunk. Raises PeerError when there are none to give."""
        if not self.running:
            raise PeerError("the round is over")
        if not self.machine.contributes:
            raise PeerError(
                f"this peer contributes nothing: {self.kernels.excluded_reason or 'its weight is 0'}"
            )
        try:
            (message,) = await self.offload.work(self.kernels.encode, [self.kernels.plan.chunks[chunk]])
            if isinstance(message, int):
                await self.exclude_self(message)
                raise PeerError(f"this peer contributes nothing: {self.kernels.excluded_reason}")
        except OutOfMemory as error:  # this may be a member's call, whose errors must not end the round
            self.feed(on.GiveUp(f"{self.machine.setup.name(self.kernels.own)} {error}"))
            raise PeerError(f"this peer {error}") from None
        return bytes(unpack(message)[1])

    # ---- for the streams

    def contact(self, place: int) -> Contact:
        """Return a member's contact."""
        return self.machine.setup.group.members[place].contact

    async def send(self, stream: Stream, message: bytes) -> None:
        """Send and count."""
        self.bytes_sent += len(message)
        await stream.send(message)

    def on_bytes(self, place: int, averages: bool, size_bytes: int) -> None:
        """Record that bytes arrived on a stream. `averages`: it is one that this member opened."""
        self.feed(on.BytesArrived(place, size_bytes, averages))

    def on_sent(self, place: int) -> None:
        """Record that bytes were sent on a stream."""
        self.feed(on.BytesSent(place))

    def on_average(
        self, place: int, chunk: int, payload: memoryview, contributors: bytes, clipped: bytes
    ) -> None:
        """Process an average that arrived from a reducer. Raises PeerError when it contradicts its header."""
        self.work.on_average(on.AverageArrived(place, chunk, contributors, clipped, len(payload)), payload)

    def on_contribution(self, place: int, chunk: int, payload: memoryview, signature: bytes) -> None:
        """Process values that arrived from a member. Raises PeerError when a required signature is
        missing.
        """
        if self.auditor is not None:
            self.auditor.accept(place, chunk, payload, signature)
        if chunk == self.machine.shard.expected(place):
            self.work.keep_value(place, chunk, payload)
        self.feed(on.ContributionArrived(place, chunk, len(payload)))

    def give(self, message: bytes) -> None:
        """Announce a further average of this member's shard to all members that take averages."""
        self.averages.append(message)
        self._news.notify()

    def given(self, nth: int) -> None:
        """Record that average number `nth` was sent to a member."""
        self._takers[nth] -= 1
        if not self._takers[nth]:
            self.averages[nth] = b""  # frees memory that the next one uses

    def why_over(self) -> str:
        """Return the reason to send when another member's stream is ended with the round."""
        finish = self.machine.finished
        if finish is not None and finish.failure is not None:
            return f"the round failed: {finish.failure}"
        return "the round is over; the others ended it without this peer"

    def _end_senders(self) -> None:
        """End the streams of other members that would otherwise outlive the round. Those that still give
        averages of a committed round to slower members continue, for as long as the round might have taken.
        """
        finish = self.machine.finished
        goes_on = finish is not None and not finish.failure and len(self.averages) == len(self.own_chunks)
        left_s = max(self.machine.setup.deadline_s - self.network.now_s, 0.0) if goes_on else 0.0
        for sender in self._senders:
            sender.end_after(left_s)

    # ---- for the service, when members call

    async def serve(self, place: int, opening: ExchangeOpen, stream: Stream, first: memoryview) -> None:
        """Serve a stream that a member opened. `first`: the message that came with the opening."""
        wire.check_opening(opening, self.kernels.codec, self.plan_digest)
        if place in self._served:
            raise PeerError("a second stream in one round")
        self._served.add(place)
        sender = SenderStream(self, place)
        self._senders.add(sender)
        try:
            await sender.serve(stream, first)
        finally:
            self._senders.discard(sender)
            if not self.running:
                self._drop_tensors()

    async def _ask(self, event: Callable[[int], on.Event]) -> do.AnswerVotes | do.AnswerInventory:
        """Feed a member's question to the machine, and wait for its answer. `event` makes the event from the
        number of the question.
        """
        self._asked += 1
        number = self._asked
        reply: asyncio.Future[do.AnswerVotes | do.AnswerInventory]
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            self.feed(event(number))
            return await reply
        finally:
            if self._replies.pop(number, None) is not None:
                self.feed(on.CallEnded(number))

    async def answer_votes(self, place: int, statement: Statement) -> Statement:
        """Answer a member that reports the votes that it knows and asks for those that this one knows."""
        answer = await self._ask(lambda number: on.VotesAsked(number, place, statement))
        assert isinstance(answer, do.AnswerVotes)
        return answer.statement

    async def answer_inventory(self, place: int, request: InventoryRequest) -> InventoryReply:
        """Answer a member that asks for this member's inventory."""
        setup = self.machine.setup
        question = wire.question_from_wire(request, len(setup.members))
        answer = await self._ask(lambda number: on.InventoryAsked(number, place, question))
        assert isinstance(answer, do.AnswerInventory)
        reply = wire.inventory_to_wire(request, setup.plan, self.machine.assembly.held)
        reply.sealed = answer.sealed
        reply.wanted.extend(answer.wanted)
        return reply

    async def answer_fetch(self, request: FetchRequest) -> FetchReply:
        """Answer a member that asks for an average, or for this member's values of a chunk that it takes
        over.
        """
        if request.digest:
            reply = FetchReply(payload=payload_of(self.machine, self.kernels.averages, request))
        else:
            reply = FetchReply(payload=await self.encoded(request.chunk))
        self.bytes_sent += len(reply.payload)
        return reply

    def take_offer(self, place: int, chunk: int, payload: bytes, withdrawn: str) -> None:
        """Accept values of a chunk that this member takes over, from a member that cannot be dialed."""
        refusal = self.machine.repairs.refusal(place, chunk)
        if refusal:
            raise PeerError(refusal)
        self.keep_value(place, chunk, memoryview(payload))
        error = "it withdrew" if withdrawn else ""
        self.feed(on.ContributionFetched(place, chunk, len(payload), error))

    def keep_value(self, place: int, chunk: int, payload: memoryview) -> None:
        """Keep a member's values of a chunk that this member takes over."""
        self.bytes_received += len(payload)
        self.work.keep_value(place, chunk, payload)

    def give_up(self) -> None:
        """End the round for this member, and tell the others."""
        own = self.machine.setup.own
        self.feed(on.GiveUp(f"{self.machine.setup.name(own)} gave the round up"))

    def close(self) -> None:
        """Fail the round if it is running, without telling the others."""
        if self.running:
            self.feed(on.GiveUp(f"{self.machine.setup.name(self.machine.setup.own)} was closed"))
        self._calls.close()


class _RoundOver(Exception):
    """Ends the tasks of a round that has ended."""
