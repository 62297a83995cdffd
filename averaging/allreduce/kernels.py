"""The tensor work of a round, in batches of chunks, on a thread of the node's pool: encode values, average
contributions, keep results.

One hop to the pool per batch, none per operation: a hop costs as much as a hundred kilobytes of work. Within
a chunk, everything is done to one block before the next is begun, so that it stays in the cache. No other
code may touch the arguments of these functions while they run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from blake3 import blake3

from averaging.allreduce.logic.versions import (
    Version,
    decode_places,
    digest_average,
    digest_payload,
    encode_places,
)
from averaging.reduction.averages import Averages
from averaging.reduction.devices import Queue, Queues
from averaging.reduction.feedback import FeedbackRound
from averaging.reduction.framing import pack
from averaging.reduction.partition import Chunk, Plan
from averaging.reduction.reduce import Contribution, ReductionJob, blocks, first_bad
from averaging.reduction.robust import MEAN, Aggregation, Rows, prepare
from averaging.reduction.vector import HOST, FlatVector
from swarm.compression import Codec, view_bytes, view_tensor
from swarm.core.copies import Arrival
from swarm.wire.reduce_pb2 import ExchangeAverage, ExchangeContribution, ExchangeHeader


@dataclass(frozen=True, slots=True)
class Averaged:
    """A chunk that this member reduced."""

    chunk: Chunk
    message: bytes  # the encoded average, for all other members
    digest: bytes  # digest of the average and of the bitmap of clipped members
    contributors: bytes
    clipped: bytes = b""


@dataclass(frozen=True, slots=True)
class Spoiled:
    """A chunk that could not be reduced, and the members whose values are the cause; none when the sum itself
    overflows.
    """

    chunk: Chunk
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arrived:
    """An average that came from its reducer, or from another member that holds it."""

    chunk: Chunk
    payload: memoryview
    contributors: bytes
    clipped: bytes = b""  # bitmap as in `contributors`, or empty
    digest: bytes = b""  # required digest; empty: not known


@dataclass(frozen=True, slots=True)
class Recomputation:
    """A chunk, and the contributions that its average should be made of."""

    chunk: Chunk
    contributions: Sequence[Contribution]


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Working space for one chunk, on the host."""

    values: torch.Tensor  # one member's contribution to a block
    total: torch.Tensor  # the sum of the whole chunk; the float32 encoding is a view of it
    encoded: torch.Tensor
    read: torch.Tensor  # this member's own values, for chunks that contain several tensors
    rows: Rows  # rows of all members, for rules that compare them


@dataclass(frozen=True, slots=True)
class _Launched:
    """A chunk that is on its way from its device to the host: its values, or their encoding."""

    values: torch.Tensor  # on the device
    fetch: Arrival
    place: torch.Tensor  # target of the copy

    def arrive(self) -> torch.Tensor:
        """Wait for it. Its memory is used again when the `_fetching` that began it ends."""
        self.fetch.wait()
        return self.place


@dataclass
class ReductionKernels:
    """The tensor work of a round: its input vector, its result, scratch space, and the seconds used.

    Where `queues` is true, every method may wait for a device, and is called in threads of the pool, after
    `prepare`.
    """

    plan: Plan
    codec: Codec
    own: int
    vector: FlatVector
    averages: Averages
    aggregation: Aggregation = MEAN
    weights: Sequence[float] = ()  # relative, by place
    begin_feedback: Callable[[], FeedbackRound] | None = None  # None: errors of the codec are discarded
    feedback: FeedbackRound | None = None  # residuals of earlier rounds are added
    # (chunk, encoded values); None: contributions travel unsigned
    sign: Callable[[int, memoryview], bytes] | None = None
    # chunk: digest and contributors of its average
    digests: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    excluded_reason: str | None = None  # why this member stopped contributing; None: it contributes
    seconds: dict[str, float] = field(default_factory=lambda: {"encode": 0.0, "reduce": 0.0, "settle": 0.0})
    # the codec's errors by chunk, of averages that this member made in place of a lost reducer
    _errors: dict[int, torch.Tensor] = field(default_factory=dict)
    _free: list[_Scratch] = field(default_factory=list)

    @property
    def queues(self) -> Queues:
        """Return the queues of the devices that hold this member's vector or will hold its averages; none
        when everything is on the host.
        """
        return self.vector.queues or self.averages.result_buffer.queues

    def prepare(self, receives: bool) -> None:
        """Allocate the memory that the round needs, and wait until the vector is there. Called first.

        `receives`: this member takes the averages. Afterwards, threads of the pool wait for this round's own
        work only, not for the trainer's.
        """
        if self.begin_feedback is not None:
            self.feedback = self.begin_feedback()
        if self.queues:
            self.averages.prepare(receives=receives)
            self.vector.queues.finish()

    def encode(self, chunks: Sequence[Chunk]) -> list[bytes | int]:
        """Return the messages that carry this member's values of `chunks`; an element of the vector that
        cannot be sent ends the list with its index.
        """
        started_s = time.perf_counter()
        messages: list[bytes | int] = []
        with self._borrowed() as scratch, self._fetching(chunks, self._launch) as launched:
            for chunk in chunks:
                messages.append(
                    self._message(chunk, *self._payload(chunk, scratch, launched.get(chunk.index)))
                )
                if isinstance(messages[-1], int):
                    break
        self.seconds["encode"] += time.perf_counter() - started_s
        return messages

    def reduce(self, jobs: Sequence[ReductionJob]) -> list[Averaged | Spoiled]:
        """Average chunks of this member's own shard, into `averages`."""
        started_s = time.perf_counter()
        done: list[Averaged | Spoiled] = []
        with (
            self._borrowed() as scratch,
            self._fetching([job.chunk for job in jobs if job.own], self._launch_own) as launched,
        ):
            for job in jobs:
                contributions = job.contributions
                if job.own:
                    way = launched.get(job.chunk.index)
                    ours = Contribution(
                        self.own,
                        self.weights[self.own],
                        way.arrive() if way is not None else self._own(job.chunk),
                    )
                    contributions = sorted(
                        [*contributions, ours], key=lambda contribution: contribution.place
                    )
                done.append(self.reduce_one(job.chunk, contributions, scratch))
        self.seconds["reduce"] += time.perf_counter() - started_s
        return done

    def settle(self, arrived: Sequence[Arrived]) -> list[bytes | None]:
        """Keep averages that arrived. Return the digest of each; None where its values are not finite, or
        where it is not the requested version.
        """
        started_s = time.perf_counter()
        digests = [self._settle_one(average) for average in arrived]
        self.seconds["settle"] += time.perf_counter() - started_s
        return digests

    def nothing(self, chunk: Chunk) -> Averaged:
        """Return the average of a chunk to which nobody contributes."""
        contributors = encode_places((), self.plan.members)
        message = pack(ExchangeHeader(average=ExchangeAverage(chunk=chunk.index, contributors=contributors)))
        self.averages.mark_empty(chunk)
        self.digests[chunk.index] = (digest_payload(b""), contributors)
        return Averaged(chunk, message, digest_payload(b""), contributors)

    def exclude_self(self, element: int) -> None:
        """Stop contributing to all chunks because of this element: a gradient with NaN in one chunk cannot be
        trusted in the others.
        """
        if self.excluded_reason is None:
            what = self.vector.describe(element)
            self.excluded_reason = (
                f"{what} is {self.vector.element(element):g}, which {self.codec.name} cannot carry"
            )

    def exclude_self_for(self, chunk: Chunk) -> None:
        """Stop contributing, as `exclude_self`, because this member's values of this chunk spoiled its
        average.
        """
        self.exclude_self(chunk.start + (first_bad(self.own_values(chunk), self.codec.magnitude_max) or 0))

    def own_values(self, chunk: Chunk) -> torch.Tensor:
        """Return this member's contribution to a chunk that it reduces itself: float32, not encoded, on the
        host, where the others' are.
        """
        with self._fetching([chunk], self._launch_own) as launched:
            way = launched.get(chunk.index)
            return way.arrive().clone() if way is not None else self._own(chunk)

    def flaw(self, chunk: Chunk, contributions: Sequence[Contribution], place: int) -> str:
        """Return what is wrong with the values by which a member spoiled the average of a chunk, in words."""
        values = next(item.values for item in contributions if item.place == place)
        found = "" if isinstance(values, torch.Tensor) else self.codec.flaw(values, chunk.numel)
        return found or "together they are too large"

    def encoded(self, chunk: Chunk) -> bytes:
        """Return this member's values of a chunk as they would be sent."""
        with self._borrowed() as scratch, self._fetching([chunk], self._launch) as launched:
            return bytes(self._payload(chunk, scratch, launched.get(chunk.index))[1])

    def recompute(self, given: Recomputation) -> bytes:
        """Return the digest that the average of a chunk must have if it was made of these contributions."""
        with self._borrowed() as scratch:
            computed = self._compute(given.chunk, given.contributions, scratch, None)
        if isinstance(computed, Spoiled):
            return b""
        _, digest, clipped = computed
        return digest_average(digest, clipped)

    def _message(self, chunk: Chunk, values: torch.Tensor, payload: memoryview) -> bytes | int:
        if not self.codec.is_finite(payload):
            with self.vector.queues.working():
                return chunk.start + (first_bad(values, self.codec.magnitude_max) or 0)
        signature = self.sign(chunk.index, payload) if self.sign is not None else b""
        return pack(
            ExchangeHeader(contribution=ExchangeContribution(chunk=chunk.index, signature=signature)), payload
        )

    def _payload(
        self, chunk: Chunk, scratch: _Scratch, launched: _Launched | None
    ) -> tuple[torch.Tensor, memoryview]:
        """Return the values to send of a chunk, and their encoding, and record them in the error feedback.
        They lie in `scratch`, unless the chunk was `launched`.
        """
        if launched is not None:
            return launched.values, view_tensor(launched.arrive())
        with self.vector.queues.working():  # pieces may lie on several devices
            values = self.vector.read(chunk.start, chunk.stop, scratch.read)
            if self.feedback is None:
                return values, self.codec.encode(values, scratch.encoded)
            given = self.feedback.give(chunk.start, values, scratch.read[: chunk.numel])
            payload = self.codec.encode(given, scratch.encoded)
            if self.codec.is_finite(payload):
                self.feedback.sent(chunk.start, given, payload, scratch.values[: chunk.numel])
            return given, payload

    def _launch(self, chunk: Chunk, queue: Queue) -> tuple[torch.Tensor, torch.Tensor]:
        """Have a chunk encoded on its device: what is sent, and its encoding."""
        with queue.working():
            values = self.vector.read(chunk.start, chunk.stop)
            if self.feedback is not None:
                values = self.feedback.give(chunk.start, values, torch.empty_like(values))
            encoded = torch.empty(
                self.codec.encoded_bytes(chunk.numel), dtype=torch.uint8, device=values.device
            )
            self.codec.write(values, encoded)
            # also if values cannot be sent, in which case this member excludes itself
            if self.feedback is not None:
                self.feedback.sent(chunk.start, values, encoded, torch.empty_like(values))
        return values, encoded

    def _launch_own(self, chunk: Chunk, queue: Queue) -> tuple[torch.Tensor, torch.Tensor]:
        """Do as `_launch`, for a chunk that this member reduces: its values stay as they are."""
        values = self._own(chunk)
        return values, values

    @contextlib.contextmanager
    def _fetching(
        self, chunks: Sequence[Chunk], launch: Callable[[Chunk, Queue], tuple[torch.Tensor, torch.Tensor]]
    ) -> Iterator[dict[int, _Launched]]:
        """Launch those of `chunks` that lie on a device, by their index, and have them copied to the host.

        All are on their way before any is waited for: copies run during the next chunk's encoding. Afterwards
        nothing is on its way, and all memory is back, also when a launch failed.
        """
        vector, result_buffer = self.vector, self.averages.result_buffer
        launched: dict[int, _Launched] = {}
        buffers: list[torch.Tensor] = []
        try:
            for chunk in chunks if vector.queues else ():
                queue = vector.queues.of(vector.device_of(chunk.start, chunk.stop))
                if queue is not None:
                    values, source = launch(chunk, queue)
                    buffers.append(result_buffer.borrow(source.nbytes, vector.queues))
                    place = buffers[-1][: source.nbytes].view(source.dtype)
                    launched[chunk.index] = _Launched(values, queue.fetch(source, place), place)
            yield launched
        finally:
            for way in launched.values():
                way.fetch.wait()
            result_buffer.give_back(buffers)

    def _own(self, chunk: Chunk) -> torch.Tensor:
        """Return this member's contribution to a chunk of its own shard, on its device."""
        with self.vector.queues.working():  # pieces may lie on several devices
            values = self.vector.read(chunk.start, chunk.stop)
            if self.feedback is not None:
                values = self.feedback.give(chunk.start, values, torch.empty_like(values))
                self.feedback.kept(chunk.start, chunk.stop)
        return values

    def conclude(self, held: Mapping[int, Version]) -> None:
        """Apply the versions of the chunks with which the round was committed: copy averages to their
        devices, and advance the error feedback. Values that are in no average remain in the residual. The
        vector's owner may write to it afterwards.
        """
        if self.vector.queues:
            self.averages.upload(self.vector)
        self.conclude_feedback(held)

    def conclude_feedback(self, held: Mapping[int, Version]) -> None:
        """Mark the values in these versions as delivered: the members committed the round with them, even if
        this member cannot get the averages.
        """
        feedback = self.feedback
        if feedback is None or not feedback.open:
            return
        with self.vector.queues.working():
            self._commit(feedback, held)
        self.vector.queues.finish()

    def roll_back(self) -> None:
        """Leave error feedback unchanged: the round has failed. Does nothing when it has ended."""
        if self.feedback is not None:
            self.feedback.roll_back()

    def _commit(self, feedback: FeedbackRound, held: Mapping[int, Version]) -> None:
        if not self.weights[self.own]:
            feedback.keep_sender_residual()
            return feedback.commit()
        for chunk in self.plan.chunks:
            version = held.get(chunk.index)
            if version is not None and self.own in decode_places(version.contributors, self.plan.members):
                error = self._errors.get(chunk.index)
                maker = (chunk.reducer + version.attempt) % self.plan.members
                if error is not None and maker == self.own:
                    feedback.deliver_next(chunk.start, error)
            elif self.excluded_reason is None:
                feedback.undelivered(chunk.start, self.vector.read(chunk.start, chunk.stop))
            else:
                feedback.withheld(chunk.start, chunk.stop)
        return feedback.commit(sent=self.excluded_reason is None)

    def _compute(
        self,
        chunk: Chunk,
        contributions: Sequence[Contribution],
        scratch: _Scratch,
        feedback: FeedbackRound | None,
    ) -> tuple[list[memoryview], bytes, bytes] | Spoiled:
        """Return the encoded average in pieces, which lie in `scratch`, their digest, and the members that
        were clipped.
        """
        codec, cut = self.codec, blocks(chunk, self.codec)
        prepared = prepare(
            self.aggregation, contributions, codec, cut, scratch.total[: chunk.numel], scratch.rows
        )
        if prepared.spoiled:
            return Spoiled(chunk, prepared.spoiled)
        state = blake3()
        pieces = []
        # all operations on a block are done before the next block, so that it stays in the cache
        for block in cut:
            total = scratch.total[block.start : block.stop]
            work = scratch.values[: block.stop - block.start]
            prepared.rule.compute(block, total, work)
            if feedback is not None:
                feedback.correct(chunk.start + block.start, total)
            piece = codec.encode(total, scratch.encoded[block.first_byte : block.end_byte])
            if not codec.is_finite(piece):
                return Spoiled(chunk, prepared.rule.spoilers())
            if feedback is not None:
                feedback.reduced(chunk.start + block.start, total, piece, work)
            state.update(piece)
            pieces.append(piece)
        return (
            pieces,
            state.digest(),
            encode_places(prepared.clipped, self.plan.members) if prepared.clipped else b"",
        )

    def reduce_one(
        self, chunk: Chunk, contributions: Sequence[Contribution], scratch: _Scratch
    ) -> Averaged | Spoiled:
        """Average one chunk, and pack the average as the message that all members receive."""
        computed = self._compute(chunk, contributions, scratch, self.feedback)
        if isinstance(computed, Spoiled):
            return computed
        pieces, digest, clipped = computed
        if self.feedback is not None and chunk.reducer != self.own:
            self._keep_error(chunk, contributions, pieces, scratch)
        contributors = encode_places(
            (contribution.place for contribution in contributions), self.plan.members
        )
        average = ExchangeAverage(chunk=chunk.index, contributors=contributors, clipped=clipped)
        message = pack(ExchangeHeader(average=average), *pieces)
        for block, piece in zip(blocks(chunk, self.codec), pieces, strict=True):
            self.averages.keep(chunk, piece, block.first_byte)
        digest = digest_average(digest, clipped)
        self.digests[chunk.index] = (digest, contributors)
        return Averaged(chunk, message, digest, contributors, clipped)

    def _keep_error(
        self,
        chunk: Chunk,
        contributions: Sequence[Contribution],
        pieces: Sequence[memoryview],
        scratch: _Scratch,
    ) -> None:
        """Keep the codec's error of an average that this member made in place of a lost reducer, so that it
        enters the next round: the lost reducer's own residual is gone.
        """
        ours = [item.weight for item in contributions if item.place == self.own]
        if not ours:
            return
        error = scratch.total[: chunk.numel].clone()
        for block, piece in zip(blocks(chunk, self.codec), pieces, strict=True):
            decoded = self.codec.decode(piece, scratch.values[: block.stop - block.start])
            error[block.start : block.stop] -= decoded
        self._errors[chunk.index] = error * (sum(item.weight for item in contributions) / ours[0])

    def _settle_one(self, arrived: Arrived) -> bytes | None:
        empty = not any(arrived.contributors)
        # first, because it brings the payload into the cache
        digest = digest_average(digest_payload(arrived.payload), arrived.clipped)
        if (arrived.digest and digest != arrived.digest) or not self.codec.is_finite(
            view_bytes(arrived.payload)
        ):
            return None
        if empty:
            self.averages.mark_empty(arrived.chunk)
        else:
            self.averages.keep(arrived.chunk, arrived.payload)
        self.digests[arrived.chunk.index] = (digest, arrived.contributors)
        return digest

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[_Scratch]:
        """Borrow scratch space for one chunk. Each thread has its own; it is returned even after an
        exception.
        """
        try:
            scratch = self._free.pop()
        except IndexError:
            numel_max = max((chunk.numel for chunk in self.plan.chunks), default=0)
            values, total, read = (torch.empty(numel_max, dtype=torch.float32, device=HOST) for _ in range(3))
            encoded = torch.empty(self.codec.encoded_bytes(numel_max), dtype=torch.uint8, device=HOST)
            scratch = _Scratch(values, total, encoded, read, Rows())
        try:
            yield scratch
        finally:
            self._free.append(scratch)
