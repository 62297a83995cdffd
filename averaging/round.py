"""One averaging round of one member, as it runs: streams out to the reducers, streams in from the members, tensor work, and how it ends.

Our values go out part by part, averages come back on the same streams, and what we reduce ourselves is served to those who opened streams
here; all of it overlaps. The first failure that cannot be healed ends the round, with a reason that names the peer and what it was doing.
Who is alive and how members agree is in `averaging.quorum`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Executor
from typing import Any, TypeVar

from averaging.assembly import Assembly
from averaging.auditing import Auditor
from averaging.chunks import pack, unpack
from averaging.group import Group
from averaging.partition import Part
from averaging.quorum import Quorum
from averaging.reduce import Contribution, Reduction, relative_weights
from averaging.roundconfig import EXCHANGE, INLINE_BELOW_CORES, REASON_CHARACTERS_MAX, Dialer, RoundConfig, cores
from averaging.roundwork import Arrived, Averaged, Spoiled, Workbench
from swarm.errors import NetworkError, PeerError, SwarmError, UsageError
from swarm.net.rpc import Stream
from swarm.wire.reduce_pb2 import ExchangeHeader, ExchangeOpen, ExchangeRefusal, ExchangeWithdrawal

A = TypeVar("A")
T = TypeVar("T")
_STRAY_MESSAGES_MAX = 16  # beyond a stream's chunks: an opening, a withdrawal, and no patience for much more


class Round:
    """`conduct` runs it; `serve` is called for every stream that a member opens here."""

    def __init__(self, group: Group, bench: Workbench, quorum: Quorum, *, channels: Dialer, pool: Executor, config: RoundConfig) -> None:
        self.group = group
        self.quorum = quorum
        self.bytes_sent = self.bytes_received = 0
        self.assembly = Assembly(bench.plan, bench.codec)
        self.withdrawn: str | None = None  # why we contribute no more
        self.bench = bench
        self._own = bench.own
        self._channels = channels
        self._pool = pool
        self._config = config
        self._inline = config.inline if config.inline is not None else cores() < INLINE_BELOW_CORES
        self._weights = relative_weights([member.weight for member in group.members])
        self._auxiliary = group.members[self._own].auxiliary
        senders = [place for place, weight in enumerate(self._weights) if weight > 0 and place != self._own]
        self._own_parts = bench.plan.of_reducer(self._own)
        self.reduction = Reduction(self._own_parts, senders, bench.codec)
        self._averages: list[bytes] = []  # messages, of our own parts, in the order in which they were reduced; b"" when all have them
        self._takers = [sum(not member.auxiliary for member in group.members) - (not self._auxiliary)] * len(self._own_parts)
        self._changed = asyncio.Event()  # there is another average, or room for more chunks, or a refusal
        self._todo: asyncio.Queue[int] = asyncio.Queue()  # parts that can be reduced
        self._arrived: asyncio.Queue[Arrived] = asyncio.Queue()
        self._refusals: dict[int, str] = {}  # to tell senders that were left out, over the streams that they opened here
        self._refused: dict[int, str] = {}  # reducers that take no more from us
        self._serving: set[int] = set()
        self._jobs: set[asyncio.Future[Any]] = set()
        self.auditor: Auditor | None = None  # where reducers are audited
        self._complete = asyncio.Event()  # everything is in place

    # ---- the whole

    async def conduct(self) -> None:
        """Run until there is a verdict; then nothing of the round runs any more, in the pool neither."""
        reducers = [] if self._auxiliary else [place for place in self.bench.plan.reducers if place != self._own]
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._exchange(place), name=f"exchange with {self.quorum.name(place)}") for place in reducers]
                running.append(tasks.create_task(self._reduce(), name="reduce"))
                running.append(tasks.create_task(self._settle(), name="settle"))
                if self.auditor is not None:
                    running.append(tasks.create_task(self._audit(self.auditor), name="audit"))
                running.append(tasks.create_task(self.quorum.watch(self._on_dead, self._doing), name="watch"))
                self._ready(self.reduction.ready_at_start())
                self._finish_if_complete()
                await self.quorum.ended()
                for task in running:
                    task.cancel()
        except* UsageError as errors:  # the node was closed under our feet
            self.quorum.fail(f"{self.quorum.name(self._own)} cannot go on: {_first(errors)}")
        finally:
            if self._jobs:  # they read and write tensors that the caller is about to get back
                await asyncio.wait(self._jobs)

    def missing(self) -> str:
        """For a deadline: what is still to come, and from whom."""
        lacking = [
            f"{self.quorum.name(place)} has sent {self.assembly.share(place)}"
            for place in self.bench.plan.reducers
            if place != self._own and self.assembly.outstanding(place)
        ]
        waiting = [f"the vote of {self.quorum.name(place)}" for place in self.quorum.votes.missing if place != self._own]
        return "; ".join(lacking) or ("waiting for " + ", ".join(waiting) if waiting else "the last averages were being reduced")

    def _doing(self, place: int) -> str:
        """What a member owes us, for sentences about its end."""
        if self.assembly.outstanding(place) and not self._auxiliary and place != self._own:
            return f"reducing; {self.assembly.share(place)} of its span had come back"
        if self.reduction.remaining(place):
            return f"sending; {self.reduction.remaining(place)} of its {len(self._own_parts)} parts for us were to come"
        return "committing"

    def _on_dead(self, place: int, reason: str) -> None:
        self._leave_out(place, reason)
        if self.assembly.outstanding(place) and not self._auxiliary:
            self.quorum.fail(reason)

    def _finish_if_complete(self) -> None:
        """Vote, once everything that this member is to hold is in place."""
        reduced = len(self._averages) == len(self._own_parts)
        if self.auditor is not None and not self._auxiliary and self.assembly.complete:
            self._complete.set()
        elif self.assembly.complete or (self._auxiliary and reduced):
            digest = b"" if self._auxiliary else self.assembly.digest()
            self.quorum.cast(digest, self.reduction.left_out)

    async def _audit(self, auditor: Auditor) -> None:
        """Vote once everything is in place, and not before others' work was looked at."""
        await self._complete.wait()
        finding = await auditor.audit(self._channels, self._work)
        if finding is not None:
            self.quorum.fail(finding.reason)
        else:
            self.quorum.cast(self.assembly.digest(), self.reduction.left_out)

    def _start(self, function: Callable[[A], T], argument: A) -> asyncio.Future[T]:
        """Tensor work in the pool. It ends even if nobody waits for it any more: `conduct` does."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, function, argument)
        self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)
        return future

    async def _work(self, function: Callable[[A], T], argument: A) -> T:
        if not self._inline:
            return await asyncio.shield(self._start(function, argument))
        result = function(argument)
        await asyncio.sleep(0)  # the loop answers beats, and everything else of the node, between two pieces of work
        return result

    # ---- our streams to reducers

    async def _exchange(self, place: int) -> None:
        """Send our values to one reducer, and take its averages."""
        try:
            async with self._channels.open_stream(self.group.members[place].contact, EXCHANGE, timeout_s=None, lane=1) as stream:
                await _together(self._send_chunks(place, stream), self._receive_averages(place, stream))
        except NetworkError as error:
            if self.assembly.outstanding(place):
                why = f"its stream broke ({error})"
                self.quorum.suspect(place, why, lambda: self.quorum.fail(f"{self.quorum.name(place)} lives, but {why}"))
        except (PeerError, UsageError) as error:
            if self.assembly.outstanding(place):
                self.quorum.fail(f"the exchange with {self.quorum.name(place)} ended: {error}")

    async def _send_chunks(self, place: int, stream: Stream) -> None:
        codec, plan = self.bench.codec, self.bench.plan
        opening = ExchangeOpen(
            group_id=self.group.group_id, codec=codec.wire_id, codec_version=codec.version, plan_digest=plan.digest(codec)
        )
        await self._send(stream, pack(ExchangeHeader(open=opening)))
        parts = plan.of_reducer(place) if self._weights[self._own] > 0 else ()
        size = 1 if self._inline else self._config.batch_parts
        batches = [parts[nth : nth + size] for nth in range(0, len(parts), size)]
        ahead: asyncio.Future[list[bytes | int]] | None = None
        for nth, batch in enumerate(batches):
            messages = await (asyncio.shield(ahead) if ahead is not None else self._work(self.bench.encode, batch))
            pipelined = not self._inline and nth + 1 < len(batches)
            ahead = self._start(self.bench.encode, batches[nth + 1]) if pipelined else None  # while these are sent
            for message in messages:
                if isinstance(message, int):
                    self._withdraw(message)
                elif self.withdrawn is None and place not in self._refused:
                    await self._send(stream, message)
            if self.withdrawn is not None or place in self._refused:
                break
        if self.withdrawn is not None:
            await self._send(stream, pack(ExchangeHeader(withdrawal=ExchangeWithdrawal(reason=self.withdrawn))))
        await stream.finish()

    async def _receive_averages(self, place: int, stream: Stream) -> None:
        while (message := await stream.receive()) is not None:
            self.quorum.heard(place)
            self.bytes_received += len(message)
            header, payload = unpack(message)
            if header.HasField("average"):
                average = header.average
                part = self.assembly.announce(place, average.part, average.contributors, len(payload))
                self._arrived.put_nowait(Arrived.of(part, payload, average, len(self.group.members)))
            elif header.HasField("refusal"):
                self._refused[place] = header.refusal.reason[:REASON_CHARACTERS_MAX]
            else:
                raise PeerError("it sent a message that only the opener of a stream sends")
        if self.assembly.outstanding(place):
            raise PeerError(f"it finished after {self.assembly.share(place)}")

    async def _send(self, stream: Stream, message: bytes) -> None:
        self.bytes_sent += len(message)
        await stream.send(message)

    def _withdraw(self, element: int) -> None:
        """Contribute no more, anywhere, because of this element: a gradient with NaN in one part is not to be trusted in the others."""
        if self.withdrawn is None:
            value = self.bench.vector.element(element)
            self.withdrawn = f"element {element} of its vector is {value:g}, which {self.bench.codec.name} cannot carry"

    async def _settle(self) -> None:
        """Check averages as they come and keep them, as many at once as there are."""
        while True:
            batch = await _drain(self._arrived, self._config.batch_parts * 4)
            for arrived, digest in zip(batch, await self._work(self.bench.settle, batch), strict=True):
                if digest is None:
                    name = self.quorum.name(arrived.part.reducer)
                    return self.quorum.fail(f"{name} sent an average of part {arrived.part.index} with NaN or infinity in it")
                self.assembly.settle(arrived.part.index, digest, arrived.contributors)
            self._finish_if_complete()

    # ---- our span

    def _ready(self, parts: Iterable[int]) -> None:
        for part in parts:
            self._todo.put_nowait(part)

    def _leave_out(self, place: int, reason: str) -> None:
        """Reduce without this member from now on, and tell it over its stream, if that still stands."""
        self._ready(self.reduction.leave_out(place, reason))
        if self.reduction.left_out.get(place) == reason:
            self._refusals.setdefault(place, reason)
        self._wake()

    async def _reduce(self) -> None:
        """Average parts of our span as they become ready, as many at once as there are."""
        while True:
            batch = await _drain(self._todo, self._config.batch_parts)
            jobs = [(self.bench.plan.parts[index], self._contributions(index)) for index in batch]
            self._wake()  # readers that were ahead may go on
            while jobs:
                if not all(contributions for _, contributions in jobs):
                    gone = "; ".join(f"{self.quorum.name(place)}: {reason}" for place, reason in self.reduction.left_out.items())
                    return self.quorum.fail(f"nobody is left who contributes to a part that this peer reduces ({gone or self.withdrawn})")
                done = await self._work(self.bench.reduce, jobs)
                jobs = [again for job, outcome in zip(jobs, done, strict=True) if (again := self._conclude(job[1], outcome)) is not None]
            self._finish_if_complete()

    def _contributions(self, index: int) -> list[Contribution]:
        """Who is in the average of this part, in group order."""
        part = self.bench.plan.parts[index]
        found = [Contribution(place, self._weights[place], payload) for place, payload in self.reduction.take(index)]
        if self._weights[self._own] > 0 and self.withdrawn is None:
            values = self.bench.own_values(part) if self.auditor is None else self.auditor.own(part)
            found.append(Contribution(self._own, self._weights[self._own], values))
        return sorted(found, key=lambda contribution: contribution.place)

    def _conclude(self, contributions: list[Contribution], outcome: Averaged | Spoiled) -> tuple[Part, list[Contribution]] | None:
        """Serve what was averaged; what was spoiled is to be averaged again, without those who spoiled it."""
        if isinstance(outcome, Averaged):
            if self.auditor is not None:
                self.auditor.keep(outcome.part.index, contributions)
            self.assembly.announce(self._own, outcome.part.index, outcome.contributors, self.bench.codec.encoded_bytes(outcome.part.numel))
            self.assembly.settle(outcome.part.index, outcome.digest, outcome.contributors)
            self._averages.append(outcome.message)
            self._wake()
            return None
        if not outcome.places:
            self.quorum.fail(f"the sum of part {outcome.part.index} overflows float32")
        for place in outcome.places:
            if place == self._own:
                self._withdraw(self.bench.first_bad(outcome.part))
            else:
                self._leave_out(place, f"it sent NaN or infinity in part {outcome.part.index}")
        kept = [contribution for contribution in contributions if contribution.place not in outcome.places]
        return outcome.part, kept

    # ---- streams that members open here

    async def serve(self, place: int, opening: ExchangeOpen, stream: Stream) -> None:
        """One member's stream: take its chunks, give it our averages. PeerError refuses it, or says why the round failed."""
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
        try:
            await _together(self._take_chunks(place, stream), self._give_averages(place, stream), until=self._refuse_when_over(place))
        except NetworkError as error:
            self._lost(place, str(error))
        except asyncio.CancelledError:  # gRPC's word for a caller that is gone
            self._lost(place, "its connection closed")
            raise

    async def _take_chunks(self, place: int, stream: Stream) -> None:
        strays = 0
        while (message := await stream.receive()) is not None:
            self.quorum.heard(place)
            self.bytes_received += len(message)
            if place in self.reduction.left_out:
                strays += 1  # what was under way when it was left out; then it has been told
                if strays > len(self._own_parts) + _STRAY_MESSAGES_MAX:
                    raise PeerError(f"it was left out ({self.reduction.left_out[place]}) and goes on sending")
                continue
            try:
                header, payload = unpack(message)
                if header.HasField("chunk"):
                    if self.auditor is not None:
                        self.auditor.accept(place, header.chunk.part, payload, header.chunk.signature)
                    self._ready(self.reduction.accept(place, header.chunk.part, payload))
                elif header.HasField("withdrawal"):
                    self._leave_out(place, f"it withdrew: {header.withdrawal.reason[:REASON_CHARACTERS_MAX]}")
                else:
                    raise PeerError("neither a chunk nor a withdrawal")
            except PeerError as error:
                self._leave_out(place, f"it broke the protocol: {error}")
            while self.reduction.ahead(place) > self._config.ahead_max and place not in self.reduction.left_out:
                await self._change()
        if self.reduction.remaining(place):
            self._leave_out(place, f"it finished with {self.reduction.remaining(place)} of {len(self._own_parts)} parts unsent")

    async def _give_averages(self, place: int, stream: Stream) -> None:
        given = 0
        told = False
        while given < len(self._own_parts):
            if place in self._refusals and not told:
                told = True
                await self._send(stream, pack(ExchangeHeader(refusal=ExchangeRefusal(reason=self._refusals[place]))))
            elif given < len(self._averages):
                await self._send(stream, self._averages[given])
                self._takers[given] -= 1
                if not self._takers[given]:
                    self._averages[given] = b""  # the next one is made in the same memory
                given += 1
            else:
                await self._change()

    async def _refuse_when_over(self, place: int) -> None:
        """End a stream that would otherwise outlive the round."""
        await self.quorum.ended()
        verdict = self.quorum.verdict
        if verdict is not None and verdict.failure is not None:
            raise PeerError(f"the round failed: {verdict.failure}")
        if place in self.quorum.dead:
            raise PeerError("the round is over; this peer was taken for dead")

    def _lost(self, place: int, why: str) -> None:
        """A stream that a member had opened here is gone."""
        if self.quorum.verdict is None:
            reason = f"its stream broke while it was {self._doing(place)}: {why}"
            self.quorum.suspect(place, f"its stream broke ({why})", lambda: self._leave_out(place, reason))

    # ---- waiting

    def _wake(self) -> None:
        self._changed.set()

    async def _change(self) -> None:
        """Until something has changed; check again then. There is no await between a check and this, so no change is missed."""
        self._changed.clear()
        await self._changed.wait()


async def _together(*work: Coroutine[Any, Any, None], until: Coroutine[Any, Any, None] | None = None) -> None:
    """Run all of `work` side by side; the first error ends the rest and is raised as it is. `until` runs for as long as they do."""
    try:
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(until) if until is not None else None
            running = [tasks.create_task(coroutine) for coroutine in work]
            await asyncio.wait(running)
            if watch is not None:
                watch.cancel()
    except BaseExceptionGroup as group:
        raise _first(group) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to report: our own bugs first, then what peers did, then what the network did."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found.append(_first(error) if isinstance(error, BaseExceptionGroup) else error)
    return min(found, key=lambda error: 2 if isinstance(error, NetworkError) else 1 if isinstance(error, SwarmError) else 0)


async def _drain(queue: asyncio.Queue[T], count_max: int) -> list[T]:
    """At least one item, and what else is there, up to `count_max`."""
    items = [await queue.get()]
    while len(items) < count_max and not queue.empty():
        items.append(queue.get_nowait())
    return items
