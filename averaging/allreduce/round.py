"""One averaging round of one member, as it runs: streams out to the reducers, its own shard, what is done
about reducers that are lost.

Our values go out chunk by chunk, averages come back on the same streams, and what we reduce ourselves is
served to those who opened streams here (`averaging.allreduce.span`); all of it overlaps. A reducer that is
lost fails nobody: its shard is repaired (`averaging.allreduce.recovery`). Who is alive and how members agree
is in `averaging.allreduce.quorum`.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from concurrent.futures import Executor
from dataclasses import dataclass

from averaging.allreduce.assembly import Assembly
from averaging.allreduce.auditing import Auditor
from averaging.allreduce.config import EXCHANGE, REASON_CHARACTERS_MAX, RoundConfig
from averaging.allreduce.labour import ComputeOffload, OutOfMemory, drain
from averaging.allreduce.metering import MeteredDialer
from averaging.allreduce.pacing import StragglerDetector, TransferEta
from averaging.allreduce.quorum import Events, RoundMembership
from averaging.allreduce.recovery import Recovery
from averaging.allreduce.span import ReducerSession, RoundContext, RoundTraffic
from averaging.allreduce.together import first_error, run_concurrently
from averaging.allreduce.work import Arrived, ReductionKernels
from averaging.matchmaking.logic.group import Group
from averaging.reduction.framing import pack, unpack
from swarm.core.errors import NetworkError, PeerError, UsageError
from swarm.net.rpc import Stream
from swarm.wire.reduce_pb2 import ExchangeHeader, ExchangeOpen, ExchangeWithdrawal


@dataclass(frozen=True, slots=True)
class ParticipationReport:
    """How the members fared, by place."""

    left_out: dict[int, str]  # who was left out somewhere, lost or not asked, or died, and why
    fractions: dict[int, float]  # of the result's elements that each is in
    clipped: dict[int, float]  # in which each was shortened
    covered: float  # the fraction of the elements that somebody is in


class Round:
    """`conduct` runs it."""

    def __init__(
        self,
        group: Group,
        kernels: ReductionKernels,
        quorum: RoundMembership,
        *,
        channels: MeteredDialer,
        pool: Executor,
        config: RoundConfig,
    ) -> None:
        self.group = group
        self.quorum = quorum
        self.kernels = kernels
        self.assembly = Assembly(kernels.plan, kernels.codec)
        self.traffic = RoundTraffic()
        self._own = kernels.own
        self._channels = channels
        self._config = config
        self._auxiliary = group.members[self._own].auxiliary
        self._labour = ComputeOffload(pool, config, kernels.queues)
        self.shared = RoundContext(
            kernels=kernels,
            quorum=quorum,
            labour=self._labour,
            assembly=self.assembly,
            weights=tuple(kernels.weights),
            config=config,
            traffic=self.traffic,
            clock=quorum.clock,
            bytes_per_s=channels.speed.known_bytes_per_s,
            progressed=self._finish_if_complete,
        )
        self.span = ReducerSession(self.shared)
        self.recovery = Recovery(self.shared, channels, self._halt)
        self._pacing = StragglerDetector(config.pacing.reducer_s, config.pacing, quorum.now_s)
        owed = Counter[int]()
        for chunk in kernels.plan.chunks:
            owed[chunk.reducer] += (
                0 if chunk.reducer == self._own else kernels.codec.encoded_bytes(chunk.numel)
            )
        self._forecast = TransferEta(+owed, config.pacing.reducer_s, quorum.now_s)
        self._arrived: asyncio.Queue[Arrived] = asyncio.Queue()
        self._refused: dict[int, str] = {}  # reducers that take no more from us
        self._exchanges: dict[int, asyncio.Task[None]] = {}
        self._complete = asyncio.Event()  # everything is in place: what audits wait for
        self._given_up = False  # our own shard was taken over by others
        self._reducing: asyncio.Task[None]
        self._settling: asyncio.Task[None]

    @property
    def auditor(self) -> Auditor | None:
        """Where reducers are audited: this member's part in it, to be set before the round runs. Nothing is
        taken over then.
        """
        return self.span.auditor

    @auditor.setter
    def auditor(self, auditor: Auditor) -> None:
        self.span.auditor = auditor

    # ---- the whole

    async def conduct(self) -> None:
        """Run until there is a verdict; then nothing of the round runs any more, in the pool neither."""
        reducers = (
            [] if self._auxiliary else [place for place in self.kernels.plan.reducers if place != self._own]
        )
        events = Events(
            dead=self._on_dead,
            doing=self._doing,
            elsewhere=self.recovery.adopt,
            resolve=self.recovery.resolve,
            overtaken=self._overtaken,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                for place in reducers:
                    self._exchanges[place] = tasks.create_task(
                        self._exchange(place), name=f"exchange with {self.quorum.name(place)}"
                    )
                self._reducing = tasks.create_task(self.span.reduce(), name="reduce")
                self._settling = tasks.create_task(self._settle(), name="settle")
                others = [
                    tasks.create_task(self.recovery.run(), name="recovery"),
                    tasks.create_task(self._pace(), name="pace"),
                    *(
                        [tasks.create_task(self._audit(self.auditor), name="audit")]
                        if self.auditor is not None
                        else []
                    ),
                    tasks.create_task(self.quorum.watch(events), name="watch"),
                ]
                # beside the tasks, which answer members and send heartbeats
                await self._labour.prepare(self.kernels.prepare, not self._auxiliary)
                self._finish_if_complete()
                await self.quorum.ended()
                for task in (*self._exchanges.values(), self._reducing, self._settling, *others):
                    task.cancel()
        except* UsageError as errors:  # the node was closed under our feet
            self.quorum.fail(f"{self.quorum.name(self._own)} cannot go on: {first_error(errors)}")
        except* OutOfMemory:
            self.quorum.fail(f"{self.quorum.name(self._own)} {self._labour.out_of_memory}")
        finally:
            await self._labour.finish()

    @property
    def out_of_memory(self) -> str:
        """Where this member ran out of memory, as the end of a sentence about it; "": nowhere."""
        return self._labour.out_of_memory

    async def conclude(self) -> bool:
        """The round was committed: error feedback moves on, and averages begin to go to their devices. False:
        `out_of_memory`.
        """
        try:
            if self.kernels.feedback is not None or self.kernels.queues:
                await self._labour.work(self.kernels.conclude, self.assembly.held)
            return True
        except OutOfMemory:
            return False
        finally:
            await self._labour.finish()

    def missing(self) -> str:
        """Return what is still to come, and from which members, for the message about a missed deadline."""
        lacking = [
            f"{self.quorum.name(place)} has sent {self.assembly.share(place)}"
            for place in self.kernels.plan.reducers
            if place != self._own and self.assembly.outstanding(place)
        ]
        waiting = [
            f"the vote of {self.quorum.name(place)}"
            for place in self.quorum.votes.missing
            if place != self._own
        ]
        return "; ".join(lacking) or (
            "waiting for " + ", ".join(waiting) if waiting else "the last averages were being reduced"
        )

    def _doing(self, place: int) -> str:
        """Return what a member was doing, for the sentence about its failure."""
        if self.assembly.outstanding(place) and not self._auxiliary and place != self._own:
            return f"reducing; {self.assembly.share(place)} of its shard had come back"
        return self.span.doing(place) or "committing"

    def _on_dead(self, place: int, reason: str) -> None:
        """A member died or gave up: what it was to reduce is taken over, what it was to send is left out."""
        self.span.leave_out(place, reason)
        self.recovery.mark_failed(place)
        self._lose(place, reason, trusted=False)
        if len(self.quorum.votes.live) == 1 and not self._holding() and not self.recovery.adopting:
            self.quorum.fail(f"nobody else is left: {'; '.join(self.quorum.dead.values())}")

    def _lose(self, place: int, reason: str, *, trusted: bool) -> None:
        """Take nothing more from this reducer's stream. `trusted`: what it has may still be asked for."""
        if place not in self.kernels.plan.reducers or place == self._own:
            return
        # who took its shard over could not be audited, nor could what it has reduced
        if self.auditor is not None:
            if self.assembly.outstanding(place) and not self._auxiliary:
                self.quorum.fail(f"{self.quorum.name(place)} was lost as a reducer: {reason}")
            return
        task = self._exchanges.get(place)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self.recovery.lose(place, reason, trusted=trusted)

    def _holding(self) -> bool:
        """Is everything that this member is to hold in place?"""
        return self.span.reduced or self._given_up if self._auxiliary else self.assembly.complete

    def _finish_if_complete(self) -> None:
        """Vote, once everything that this member is to hold is in place."""
        self.recovery.wake()
        if not self._holding():
            return
        if self.auditor is not None and not self._auxiliary:
            self._complete.set()
        else:
            self._vote()

    def _vote(self) -> None:
        self.quorum.votes.lone_reason = self._lone_reason()
        left_out = self.recovery.contributions.left_out | self.span.reduction.left_out
        if self.kernels.excluded_reason is not None:
            left_out = {**left_out, self._own: self.kernels.excluded_reason}
        self.quorum.cast(b"" if self._auxiliary else self.assembly.digest(), left_out)

    async def _audit(self, auditor: Auditor) -> None:
        """Vote once everything is in place, and not before others' work was looked at."""
        await self._complete.wait()
        finding = await auditor.audit(self._channels, self._labour.work)
        if finding is not None:
            self.quorum.fail(finding.reason)
        else:
            self._vote()

    def _lone_reason(self) -> str | None:
        """Why this member must not commit when it is the last: others may have committed something else, and
        be out of its reach.
        """
        if len(self.group.members) == 2 and not self.assembly.taken_over:
            return None  # the other one can have committed nothing else
        return "nobody else is left to commit with"

    def _overtaken(self) -> None:
        """Most others hold everything, averages of our own shard too: they have lost us, and we take what
        they made of it.
        """
        if not self.span.reduced and not self._given_up:
            self._given_up = True
            self.recovery.give_up_own("others took its shard over")

    async def _halt(self, everything: bool) -> None:
        """Reduce no more; or nothing touches the averages any more but who called this: others have ended the
        round with theirs.
        """
        self._reducing.cancel()
        if everything:
            for task in (*self._exchanges.values(), self._settling):
                task.cancel()
        await self._labour.finish()

    async def _pace(self) -> None:
        """Go on without members that live and hold the others up."""
        while True:
            await asyncio.sleep(self._config.pacing.tick_s)
            now_s = self.quorum.now_s
            self.span.pace(now_s)
            waited_for = [
                place
                for place in self._exchanges
                if self.assembly.outstanding(place) and place not in self.recovery.lost
            ]
            for place, idle_s in self._pacing.tick(waited_for, now_s):
                self._lose(
                    place,
                    f"it took and gave nothing for {idle_s:.1f} s, with {self.assembly.share(place)} given",
                    trusted=False,
                )
            self._forecast.due_s = self.quorum.by_s(self._config.pacing.reducer_share)
            for place, more_s in self._forecast.late(
                [place for place in waited_for if place not in self.recovery.lost], now_s
            ):
                why = (
                    f"at its pace its averages would take {more_s:.0f} s more; the round has "
                    f"{self.quorum.deadline_s - now_s:.0f} s"
                )
                self._lose(place, why, trusted=False)
            self.recovery.pace(now_s)

    # ---- our streams to reducers

    async def _exchange(self, place: int) -> None:
        """Send our values to one reducer, and take its averages."""
        try:
            contact = self.group.members[place].contact
            async with self._channels.open_stream(contact, EXCHANGE, timeout_s=None, connection=1) as opened:
                stream = self.shared.in_pieces(opened, place, functools.partial(self._came, place))
                await run_concurrently(
                    self._send_contributions(place, stream), self._receive_averages(place, stream)
                )
        except NetworkError as error:
            if self.assembly.outstanding(place):
                why = f"its stream broke ({error})"
                self.quorum.suspect(
                    place, why, lambda: self._lose(place, f"it lives, but {why}", trusted=True)
                )
        except PeerError as error:
            if self.assembly.outstanding(place):
                self._lose(place, f"the exchange with it ended: {error}", trusted=False)
                self.quorum.suspect(place, f"the exchange with it ended ({error})")

    def _came(self, place: int, size_bytes: int) -> None:
        """An average, or a piece of one."""
        self.quorum.heard(place)
        self._pacing.worked(place)
        self._forecast.came(place, size_bytes)

    async def _send_contributions(self, place: int, stream: Stream) -> None:
        kernels, inline = self.kernels, self._labour.inline
        codec, plan = kernels.codec, kernels.plan
        opening = ExchangeOpen(
            group_id=self.group.group_id,
            codec=codec.wire_id,
            codec_version=codec.version,
            plan_digest=plan.digest(codec),
        )
        await self.shared.send(stream, pack(ExchangeHeader(open=opening)))
        chunks = plan.shard(place) if self.shared.weights[self._own] > 0 else ()
        size = 1 if inline else self._config.batch_chunks
        batches = [chunks[nth : nth + size] for nth in range(0, len(chunks), size)]
        ahead: asyncio.Future[list[bytes | int]] | None = None
        for nth, batch in enumerate(batches):
            messages = await (
                asyncio.shield(ahead) if ahead is not None else self._labour.work(kernels.encode, batch)
            )
            pipelined = not inline and nth + 1 < len(batches)
            # while these are sent
            ahead = self._labour.start(kernels.encode, batches[nth + 1]) if pipelined else None
            for message in messages:
                if isinstance(message, int):
                    await self._labour.work(kernels.exclude_self, message)
                elif kernels.excluded_reason is None and place not in self._refused:
                    await self.shared.send(stream, message)
                    self._pacing.worked(place)
            if kernels.excluded_reason is not None or place in self._refused:
                break
        if kernels.excluded_reason is not None:
            await self.shared.send(
                stream, pack(ExchangeHeader(withdrawal=ExchangeWithdrawal(reason=kernels.excluded_reason)))
            )
        await stream.finish()

    async def _receive_averages(self, place: int, stream: Stream) -> None:
        due = {chunk.index for chunk in self.kernels.plan.shard(place)}
        while (message := await stream.receive()) is not None:
            self.traffic.received += len(message)
            header, payload = unpack(message)
            if header.HasField("average"):
                average = header.average
                if not any(average.contributors) and self._somebody_contributes(place):
                    raise PeerError(
                        f"an average of chunk {average.chunk} that nobody is in, although members that "
                        "contribute live"
                    )
                chunk = self.assembly.announce(
                    place, average.chunk, average.contributors, len(payload), average.clipped
                )
                due.discard(average.chunk)
                self._arrived.put_nowait(Arrived.of(chunk, payload, average))
            elif header.HasField("refusal"):
                self._refused[place] = header.refusal.reason[:REASON_CHARACTERS_MAX]
            elif header.HasField("waiting"):
                self._forecast.excused(place, self.quorum.now_s)
            else:
                raise PeerError("it sent a message that only the opener of a stream sends")
        if due and self.assembly.outstanding(place):
            raise PeerError(f"it finished after {self.assembly.share(place)}")

    def _somebody_contributes(self, reducer: int) -> bool:
        """Does anybody live, beside this reducer, who has something to contribute? Then its word that nobody
        does is not taken.
        """
        live = self.quorum.votes.live - {reducer, self._own}
        return self.shared.contributes or any(self.shared.weights[place] > 0 for place in live)

    async def _settle(self) -> None:
        """Check averages as they come and keep them, as many at once as there are."""
        while True:
            batch = await drain(self._arrived, self._config.batch_chunks * 4)
            for arrived, digest in zip(
                batch, await self._labour.work(self.kernels.settle, batch), strict=True
            ):
                if digest is None:
                    self.assembly.forget(arrived.chunk.index)
                    flaw = self.kernels.codec.flaw(arrived.payload, arrived.chunk.numel)
                    self._lose(
                        arrived.chunk.reducer,
                        f"its average of chunk {arrived.chunk.index} is none: {flaw}",
                        trusted=False,
                    )
                else:
                    self.assembly.settle(arrived.chunk.index, arrived.version(digest))
            self._finish_if_complete()

    # ---- for the service

    def fared(self) -> ParticipationReport:
        """How everybody fared."""
        left_out: dict[int, str] = {}
        for ballot in self.quorum.votes.cast.values():
            left_out |= ballot.left_out
        left_out |= (
            self.quorum.excluded
            | self.recovery.contributions.left_out
            | self.span.reduction.left_out
            | self.recovery.lost
            | self.quorum.dead
        )
        if self.kernels.excluded_reason is not None:
            left_out[self._own] = self.kernels.excluded_reason
        fractions = self.assembly.fractions()
        if self.assembly.complete and self.kernels.plan.chunks:
            for place, weight in enumerate(self.shared.weights):
                if weight > 0 and fractions.get(place, 0.0) < 1.0:  # by a reducer whose reasons died with it
                    left_out.setdefault(place, "its values are not in chunks whose reducers did not say why")
        return ParticipationReport(left_out, fractions, self.assembly.clipped(), self.assembly.covered())
