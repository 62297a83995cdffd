"""The span that this member reduces in a round: what the others send for it, its averages, and the streams
that carry both.

Members open the streams; chunks come in on them, averages go out, and all of it overlaps with the arithmetic.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from averaging.allreduce.assembly import Assembly
from averaging.allreduce.auditing import Auditor
from averaging.allreduce.commit import Version
from averaging.allreduce.config import REASON_CHARACTERS_MAX, RoundConfig
from averaging.allreduce.labour import ComputeOffload, drain
from averaging.allreduce.pacing import StragglerDetector, TransferEta
from averaging.allreduce.pieces import PiecewiseStream
from averaging.allreduce.quorum import RoundMembership
from averaging.allreduce.together import run_concurrently
from averaging.allreduce.work import Averaged, ReductionKernels, Spoiled
from averaging.reduction.chunks import pack, unpack
from averaging.reduction.reduce import Contribution, Job, Reduction
from swarm.core.clock import Clock
from swarm.core.errors import NetworkError, PeerError
from swarm.net.rpc import Stream
from swarm.wire.reduce_pb2 import ExchangeHeader, ExchangeOpen, ExchangeRefusal, ExchangeWaiting

_STRAY_MESSAGES_MAX = 16  # beyond a stream's chunks: an opening, a withdrawal, and no patience for much more


@dataclass(slots=True)
class RoundTraffic:
    """Bytes of tensors, framing included."""

    sent: int = 0
    received: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundContext:
    """What the pieces of a round have in common."""

    bench: ReductionKernels
    quorum: RoundMembership
    labour: ComputeOffload
    assembly: Assembly
    weights: tuple[float, ...]  # relative, by place
    config: RoundConfig
    traffic: RoundTraffic
    clock: Clock
    bytes_per_s: float | None  # what our link is known to do; None: nobody knows
    progressed: Callable[[], None]  # to be called when another part is settled

    @property
    def own(self) -> int:
        """Our place."""
        return self.bench.own

    async def send(self, stream: Stream, message: bytes) -> None:
        """Send and count."""
        self.traffic.sent += len(message)
        await stream.send(message)

    def in_pieces(self, stream: Stream, place: int, came: Callable[[int], None]) -> Stream:
        """The stream with this member, what is large on it cut as our link's speed demands; `came` is told of
        everything that arrives.
        """
        return PiecewiseStream(
            stream, self.clock, self.bytes_per_s, came, functools.partial(self.quorum.told, place)
        )

    @property
    def contributes(self) -> bool:
        """Whether our values go into averages."""
        return self.weights[self.own] > 0 and self.bench.withdrawn is None


class ReducerSession:
    """`reduce` runs it; `serve` is called for every stream that a member opens here."""

    def __init__(self, shared: RoundContext) -> None:
        self._shared = shared
        self.bench, self.quorum = shared.bench, shared.quorum
        self.auditor: Auditor | None = None  # where reducers are audited
        self._config = shared.config
        self._own = shared.own
        self.parts = self.bench.plan.of_reducer(self._own)
        senders = [place for place, weight in enumerate(shared.weights) if weight > 0 and place != self._own]
        self.reduction = Reduction(self.parts, senders, self.bench.codec)
        self.pacing = StragglerDetector(
            shared.config.pacing.sender_s, shared.config.pacing, self.quorum.now_s
        )
        owed_bytes = sum(self.bench.codec.encoded_bytes(part.numel) for part in self.parts)
        self._forecast = TransferEta(
            dict.fromkeys(senders, owed_bytes), shared.config.pacing.sender_s, self.quorum.now_s
        )
        members = self.quorum.group.members
        # Messages, in the order in which they were reduced; b"" once every member has one.
        self._averages: list[bytes] = []
        self._takers = [
            sum(not member.auxiliary for member in members) - (not members[self._own].auxiliary)
        ] * len(self.parts)
        self._changed = asyncio.Event()  # there is another average, or room for more chunks, or a refusal
        self._todo: asyncio.Queue[int] = asyncio.Queue()  # parts that can be reduced
        # to tell senders that were left out, over the streams that they opened here
        self._refusals: dict[int, str] = {}
        self._serving: set[int] = set()  # places of the members whose stream was opened
        self._ready(self.reduction.ready_at_start())

    @property
    def reduced(self) -> bool:
        """Is every part averaged?"""
        return len(self._averages) == len(self.parts)

    def doing(self, place: int) -> str:
        """What a member owes us, for sentences about its end; "" for nothing."""
        remaining = self.reduction.remaining(place)
        return f"sending; {remaining} of its {len(self.parts)} parts for us were to come" if remaining else ""

    def pace(self, now_s: float) -> None:
        """Go on without senders that live and hold the others up."""
        for place, idle_s in self.pacing.tick(self.reduction.waited_for(self._shared.contributes), now_s):
            self.leave_out(place, f"it sent nothing for {idle_s:.1f} s while a part waited for it")
        self._forecast.due_s = self.quorum.by_s(self._config.pacing.sender_share)
        for place, more_s in self._forecast.late(
            [place for place in self.reduction.senders if self.reduction.remaining(place)], now_s
        ):
            self.leave_out(
                place,
                f"at its pace it would send for {more_s:.0f} s more; the round has {self.quorum.deadline_s - now_s:.0f} s",
            )

    def _ready(self, parts: Iterable[int]) -> None:
        for part in parts:
            self._todo.put_nowait(part)

    def leave_out(self, place: int, reason: str) -> None:
        """Reduce without this member from now on, and tell it over its stream, if that still stands."""
        self._ready(self.reduction.leave_out(place, reason))
        if self.reduction.left_out.get(place) == reason:
            self._refusals.setdefault(place, reason)
        self._wake()

    async def reduce(self) -> None:
        """Average parts of our span as they become ready, as many at once as there are."""
        while True:
            batch = await drain(self._todo, self._config.batch_parts)
            jobs = [await self._job(index) for index in batch]
            self._wake()  # readers that were ahead may go on
            while jobs:
                full = [job for job in jobs if not job.empty]
                for job in jobs:
                    if job.empty:  # nobody is left who contributes to it
                        await self._conclude(job, self.bench.nothing(job.part))
                done = await self._shared.labour.work(self.bench.reduce, full) if full else []
                again = [await self._conclude(job, outcome) for job, outcome in zip(full, done, strict=True)]
                jobs = [job for job in again if job is not None]
            self._shared.progressed()

    async def _job(self, index: int) -> Job:
        """What the average of this part is to be made of."""
        part, own = self.bench.plan.parts[index], self._shared.contributes
        found = [
            Contribution(place, self._shared.weights[place], payload)
            for place, payload in self.reduction.take(index)
        ]
        if own and self.auditor is not None:  # what is averaged must be shown later: encoded
            payload = await self._shared.labour.work(self.auditor.own, part)
            found.append(Contribution(self._own, self._shared.weights[self._own], payload))
        return Job(
            part, sorted(found, key=lambda contribution: contribution.place), own and self.auditor is None
        )

    async def _conclude(self, job: Job, outcome: Averaged | Spoiled) -> Job | None:
        """Serve what was averaged; what was spoiled is to be averaged again, without those who spoiled it."""
        if isinstance(outcome, Averaged):
            if self.auditor is not None:
                self.auditor.keep(outcome.part.index, job.contributions)
            self._shared.assembly.settle(
                outcome.part.index, Version(0, outcome.contributors, outcome.digest, outcome.clipped)
            )
            self._averages.append(outcome.message)
            self._wake()
            return None
        if not outcome.places:
            self.quorum.fail(f"the sum of part {outcome.part.index} overflows float32")
            return None
        for place in outcome.places:
            if place == self._own:
                await self._shared.labour.work(self.bench.withdraw_part, outcome.part)
            else:
                flaw = self.bench.flaw(outcome.part, job.contributions, place)
                self.leave_out(place, f"its values of part {outcome.part.index} cannot be averaged: {flaw}")
        return job.without(outcome.places, self._own)

    # ---- streams that members open here

    async def serve(self, place: int, opening: ExchangeOpen, stream: Stream) -> None:
        """One member's stream: take its chunks, give it our averages. PeerError refuses it, or says why the
        round failed.
        """
        codec, plan = self.bench.codec, self.bench.plan
        if (opening.codec, opening.codec_version) != (codec.wire_id, codec.version):
            raise PeerError(
                f"codec {opening.codec} version {opening.codec_version} is not this round's: {codec.name} version {codec.version}"
            )
        if opening.plan_digest != plan.digest(codec):
            raise PeerError(
                "its cut of the vector into parts differs: does the vector have another size there, or part_bytes another value?"
            )
        if place in self._serving:
            raise PeerError("a second stream in one round")
        self._serving.add(place)
        self.pacing.worked(place)
        self.quorum.starting(place, self.reduction.remaining(place) > 0)
        stream = self._shared.in_pieces(stream, place, functools.partial(self._came, place))
        try:
            await run_concurrently(
                self._take_chunks(place, stream),
                self._give_averages(place, stream),
                until=self._refuse_when_over(place),
            )
        except NetworkError as error:
            self._lost(place, str(error))
        except PeerError as error:
            if self.quorum.verdict is None:
                self.leave_out(place, f"it broke the protocol: {error}")
            raise
        except asyncio.CancelledError:  # gRPC's word for a caller that is gone
            self._lost(place, "its connection closed")
            raise

    def _came(self, place: int, size_bytes: int) -> None:
        """A message, or a piece of one."""
        self.quorum.heard(place)
        self.quorum.starting(place, False)
        self.pacing.worked(place)
        self._forecast.came(place, size_bytes)

    async def _take_chunks(self, place: int, stream: Stream) -> None:
        strays = 0
        expected = iter([part.index for part in self.parts])
        while (message := await stream.receive()) is not None:
            self._shared.traffic.received += len(message)
            if place in self.reduction.left_out:
                strays += 1  # what was under way when it was left out; then it has been told
                if strays > len(self.parts) + _STRAY_MESSAGES_MAX:
                    raise PeerError(f"it was left out ({self.reduction.left_out[place]}) and goes on sending")
                continue
            try:
                header, payload = unpack(message)
                if header.HasField("chunk"):
                    following = next(expected, None)
                    if header.chunk.part != following:
                        wanted = "nothing more" if following is None else f"part {following}"
                        raise PeerError(f"a chunk of part {header.chunk.part} where {wanted} was to come")
                    if self.auditor is not None:
                        self.auditor.accept(place, header.chunk.part, payload, header.chunk.signature)
                    self._ready(self.reduction.accept(place, header.chunk.part, payload))
                elif header.HasField("withdrawal"):
                    self.leave_out(place, f"it withdrew: {header.withdrawal.reason[:REASON_CHARACTERS_MAX]}")
                else:
                    raise PeerError("neither a chunk nor a withdrawal")
            except PeerError as error:
                self.leave_out(place, f"it broke the protocol: {error}")
            while (
                self.reduction.ahead(place) > self._config.ahead_max and place not in self.reduction.left_out
            ):
                await self._change()
        unsent = len(list(expected)) if self.reduction.remaining(place) else 0
        if unsent:
            self.leave_out(place, f"it finished with {unsent} of {len(self.parts)} parts unsent")

    async def _give_averages(self, place: int, stream: Stream) -> None:
        given = 0  # averages looked at
        told = False
        while given < len(self.parts):
            if place in self._refusals and not told:
                told = True
                await self._shared.send(
                    stream, pack(ExchangeHeader(refusal=ExchangeRefusal(reason=self._refusals[place])))
                )
            elif given < len(self._averages):
                message = self._averages[given]
                await self._shared.send(stream, message)
                self._takers[given] -= 1
                if not self._takers[given]:
                    self._averages[given] = b""  # frees memory that the next one uses
                del message
                given += 1
            elif not await self._change(self._config.waiting_s):
                waited_for = self.reduction.waited_for(self._shared.contributes)
                if waited_for:
                    await self._shared.send(
                        stream, pack(ExchangeHeader(waiting=ExchangeWaiting(place=waited_for[0])))
                    )

    async def _refuse_when_over(self, place: int) -> None:
        """End a stream that would otherwise outlive the round."""
        await self.quorum.ended()
        verdict = self.quorum.verdict
        if verdict is not None and verdict.failure is not None:
            raise PeerError(f"the round failed: {verdict.failure}")
        if place in self.quorum.votes.excluded:
            raise PeerError("the round is over; the others ended it without this peer")

    def _lost(self, place: int, why: str) -> None:
        """A stream that a member had opened here is gone."""
        if self.quorum.verdict is None:
            reason = f"its stream broke while it was {self.doing(place) or 'waiting for averages'}: {why}"
            self.quorum.suspect(place, f"its stream broke ({why})", lambda: self.leave_out(place, reason))

    # ---- waiting

    def _wake(self) -> None:
        self._changed.set()

    async def _change(self, timeout_s: float | None = None) -> bool:
        """Until something has changed (True); check again then. There is no await between a check and this,
        so no change is missed.
        """
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True
