"""The shard that this member reduces in a round: the contributions of the others, its averages, and the
streams that carry both.

Members open the streams. Contributions come in on them, averages go out, and all of it overlaps with the
arithmetic.
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
from averaging.reduction.framing import pack, unpack
from averaging.reduction.reduce import Contribution, Reduction, ReductionJob
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
    """The objects that all components of a round share."""

    kernels: ReductionKernels
    quorum: RoundMembership
    labour: ComputeOffload
    assembly: Assembly
    weights: tuple[float, ...]  # relative, by place
    config: RoundConfig
    traffic: RoundTraffic
    clock: Clock
    bytes_per_s: float | None  # what our link is known to do; None: nobody knows
    progressed: Callable[[], None]  # to be called when another chunk is settled

    @property
    def own(self) -> int:
        """Our place."""
        return self.kernels.own

    async def send(self, stream: Stream, message: bytes) -> None:
        """Send and count."""
        self.traffic.sent += len(message)
        await stream.send(message)

    def in_pieces(self, stream: Stream, place: int, came: Callable[[int], None]) -> Stream:
        """Return the stream with this member, with large messages cut as the link's speed requires. `came` is
        called with the size of everything that arrives.
        """
        return PiecewiseStream(
            stream, self.clock, self.bytes_per_s, came, functools.partial(self.quorum.sent, place)
        )

    @property
    def contributes(self) -> bool:
        """Return whether this member's values go into averages."""
        return self.weights[self.own] > 0 and self.kernels.excluded_reason is None


class ReducerSession:
    """`reduce` runs it; `serve` is called for every stream that a member opens here."""

    def __init__(self, shared: RoundContext) -> None:
        self._shared = shared
        self.kernels, self.quorum = shared.kernels, shared.quorum
        self.auditor: Auditor | None = None  # where reducers are audited
        self._config = shared.config
        self._own = shared.own
        self.chunks = self.kernels.plan.shard(self._own)
        senders = [place for place, weight in enumerate(shared.weights) if weight > 0 and place != self._own]
        self.reduction = Reduction(self.chunks, senders, self.kernels.codec)
        self.pacing = StragglerDetector(
            shared.config.pacing.sender_s, shared.config.pacing, self.quorum.now_s
        )
        owed_bytes = sum(self.kernels.codec.encoded_bytes(chunk.numel) for chunk in self.chunks)
        self._forecast = TransferEta(
            dict.fromkeys(senders, owed_bytes), shared.config.pacing.sender_s, self.quorum.now_s
        )
        members = self.quorum.group.members
        # Messages, in the order in which they were reduced; b"" once every member has one.
        self._averages: list[bytes] = []
        self._takers = [
            sum(not member.auxiliary for member in members) - (not members[self._own].auxiliary)
        ] * len(self.chunks)
        self._changed = (
            asyncio.Event()
        )  # there is another average, or room for more contributions, or a refusal
        self._todo: asyncio.Queue[int] = asyncio.Queue()  # chunks that can be reduced
        # to tell senders that were left out, over the streams that they opened here
        self._refusals: dict[int, str] = {}
        self._serving: set[int] = set()  # places of the members whose stream was opened
        self._ready(self.reduction.ready_at_start())

    @property
    def reduced(self) -> bool:
        """Is every chunk averaged?"""
        return len(self._averages) == len(self.chunks)

    def doing(self, place: int) -> str:
        """Return what a member still has to send here, for the sentence about its failure; "" for nothing."""
        remaining = self.reduction.remaining(place)
        return (
            f"sending; {remaining} of its {len(self.chunks)} chunks for us were to come" if remaining else ""
        )

    def pace(self, now_s: float) -> None:
        """Go on without senders that live and hold the others up."""
        for place, idle_s in self.pacing.tick(self.reduction.waited_for(self._shared.contributes), now_s):
            self.leave_out(place, f"it sent nothing for {idle_s:.1f} s while a chunk waited for it")
        self._forecast.due_s = self.quorum.by_s(self._config.pacing.sender_share)
        for place, more_s in self._forecast.late(
            [place for place in self.reduction.senders if self.reduction.remaining(place)], now_s
        ):
            self.leave_out(
                place,
                f"at its pace it would send for {more_s:.0f} s more; the round has "
                f"{self.quorum.deadline_s - now_s:.0f} s",
            )

    def _ready(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            self._todo.put_nowait(chunk)

    def leave_out(self, place: int, reason: str) -> None:
        """Reduce without this member from now on, and tell it over its stream, if that still stands."""
        self._ready(self.reduction.leave_out(place, reason))
        if self.reduction.left_out.get(place) == reason:
            self._refusals.setdefault(place, reason)
        self._wake()

    async def reduce(self) -> None:
        """Average chunks of our shard as they become ready, as many at once as there are."""
        while True:
            batch = await drain(self._todo, self._config.batch_chunks)
            jobs = [await self._job(index) for index in batch]
            self._wake()  # readers that were ahead may go on
            while jobs:
                full = [job for job in jobs if not job.empty]
                for job in jobs:
                    if job.empty:  # nobody is left who contributes to it
                        await self._conclude(job, self.kernels.nothing(job.chunk))
                done = await self._shared.labour.work(self.kernels.reduce, full) if full else []
                again = [await self._conclude(job, outcome) for job, outcome in zip(full, done, strict=True)]
                jobs = [job for job in again if job is not None]
            self._shared.progressed()

    async def _job(self, index: int) -> ReductionJob:
        """Return the reduction job of this chunk, with the contributions taken so far."""
        chunk, own = self.kernels.plan.chunks[index], self._shared.contributes
        found = [
            Contribution(place, self._shared.weights[place], payload)
            for place, payload in self.reduction.take(index)
        ]
        if own and self.auditor is not None:  # what is averaged must be shown later: encoded
            payload = await self._shared.labour.work(self.auditor.own, chunk)
            found.append(Contribution(self._own, self._shared.weights[self._own], payload))
        return ReductionJob(
            chunk, sorted(found, key=lambda contribution: contribution.place), own and self.auditor is None
        )

    async def _conclude(self, job: ReductionJob, outcome: Averaged | Spoiled) -> ReductionJob | None:
        """Serve what was averaged; what was spoiled is to be averaged again, without those who spoiled it."""
        if isinstance(outcome, Averaged):
            if self.auditor is not None:
                self.auditor.keep(outcome.chunk.index, job.contributions)
            self._shared.assembly.settle(
                outcome.chunk.index, Version(0, outcome.contributors, outcome.digest, outcome.clipped)
            )
            self._averages.append(outcome.message)
            self._wake()
            return None
        if not outcome.places:
            self.quorum.fail(f"the sum of chunk {outcome.chunk.index} overflows float32")
            return None
        for place in outcome.places:
            if place == self._own:
                await self._shared.labour.work(self.kernels.exclude_self_for, outcome.chunk)
            else:
                flaw = self.kernels.flaw(outcome.chunk, job.contributions, place)
                self.leave_out(place, f"its values of chunk {outcome.chunk.index} cannot be averaged: {flaw}")
        return job.without(outcome.places, self._own)

    # ---- streams that members open here

    async def serve(self, place: int, opening: ExchangeOpen, stream: Stream) -> None:
        """One member's stream: take its contributions, give it our averages. PeerError refuses it, or says
        why the round failed.
        """
        codec, plan = self.kernels.codec, self.kernels.plan
        if (opening.codec, opening.codec_version) != (codec.wire_id, codec.version):
            raise PeerError(
                f"codec {opening.codec} version {opening.codec_version} is not this round's: {codec.name} "
                f"version {codec.version}"
            )
        if opening.plan_digest != plan.digest(codec):
            raise PeerError(
                "its cut of the vector into chunks differs: does the vector have another size there, or "
                "chunk_bytes another value?"
            )
        if place in self._serving:
            raise PeerError("a second stream in one round")
        self._serving.add(place)
        self.pacing.worked(place)
        self.quorum.starting(place, self.reduction.remaining(place) > 0)
        stream = self._shared.in_pieces(stream, place, functools.partial(self._came, place))
        try:
            await run_concurrently(
                self._take_contributions(place, stream),
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

    async def _take_contributions(self, place: int, stream: Stream) -> None:
        strays = 0
        expected = iter([chunk.index for chunk in self.chunks])
        while (message := await stream.receive()) is not None:
            self._shared.traffic.received += len(message)
            if place in self.reduction.left_out:
                strays += 1  # what was under way when it was left out; then it has been told
                if strays > len(self.chunks) + _STRAY_MESSAGES_MAX:
                    raise PeerError(f"it was left out ({self.reduction.left_out[place]}) and goes on sending")
                continue
            try:
                header, payload = unpack(message)
                if header.HasField("contribution"):
                    following = next(expected, None)
                    if header.contribution.chunk != following:
                        wanted = "nothing more" if following is None else f"chunk {following}"
                        raise PeerError(
                            f"a contribution to chunk {header.contribution.chunk} where {wanted} was to come"
                        )
                    if self.auditor is not None:
                        self.auditor.accept(
                            place, header.contribution.chunk, payload, header.contribution.signature
                        )
                    self._ready(self.reduction.accept(place, header.contribution.chunk, payload))
                elif header.HasField("withdrawal"):
                    self.leave_out(place, f"it withdrew: {header.withdrawal.reason[:REASON_CHARACTERS_MAX]}")
                else:
                    raise PeerError("neither a contribution nor a withdrawal")
            except PeerError as error:
                self.leave_out(place, f"it broke the protocol: {error}")
            while (
                self.reduction.ahead(place) > self._config.ahead_max and place not in self.reduction.left_out
            ):
                await self._change()
        unsent = len(list(expected)) if self.reduction.remaining(place) else 0
        if unsent:
            self.leave_out(place, f"it finished with {unsent} of {len(self.chunks)} chunks unsent")

    async def _give_averages(self, place: int, stream: Stream) -> None:
        given = 0  # averages looked at
        told = False
        while given < len(self.chunks):
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
