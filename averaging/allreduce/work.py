"""The tensor work of a round, in batches of parts, on a thread of the node's pool: encode what is sent,
average what came, keep results.

One hop to the pool per batch, none per operation: a hop costs as much as a hundred kilobytes of work. Within
a part, everything is done to one block before the next is begun, so that it stays in the cache. What these
functions are given is not touched by anybody else meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from blake3 import blake3

from averaging.allreduce.assembly import decode_places, encode_places
from averaging.allreduce.commit import Version, digest_average, digest_payload
from averaging.reduction.averages import Averages
from averaging.reduction.chunks import pack
from averaging.reduction.devices import Fetch, Queue, Queues
from averaging.reduction.feedback import FeedbackRound
from averaging.reduction.partition import Part, Plan
from averaging.reduction.reduce import Contribution, Job, blocks, first_bad
from averaging.reduction.robust import MEAN, Aggregation, Rows, prepare
from averaging.reduction.vector import HOST, FlatVector
from swarm.compression import Codec, view_bytes, view_tensor
from swarm.wire.reduce_pb2 import ExchangeAverage, ExchangeChunk, ExchangeHeader


@dataclass(frozen=True, slots=True)
class Averaged:
    """A part that this member reduced."""

    part: Part
    message: bytes  # for everybody else
    digest: bytes  # of the average and of who was clipped
    contributors: bytes
    clipped: bytes = b""


@dataclass(frozen=True, slots=True)
class Spoiled:
    """A part that could not be reduced, and whose values are to blame; nobody's: the sum itself overflows."""

    part: Part
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arrived:
    """An average that came from its reducer, or from another member that holds it."""

    part: Part
    payload: memoryview
    contributors: bytes
    clipped: bytes = b""  # a bitmap like the contributors, or nothing
    digest: bytes = b""  # which it must have; empty: not known

    @classmethod
    def of(cls, part: Part, payload: memoryview, average: ExchangeAverage) -> Arrived:
        """It came on its reducer's stream, and was announced."""
        return cls(part, payload, average.contributors, average.clipped)

    def version(self, digest: bytes) -> Version:
        """As which version it is held, when its planned reducer made it."""
        return Version(0, self.contributors, digest, self.clipped)


@dataclass(frozen=True, slots=True)
class Recomputation:
    """A part, and what its average should be made of."""

    part: Part
    contributions: Sequence[Contribution]


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Working space for one part, on the host."""

    values: torch.Tensor  # what one member contributes to a block
    total: torch.Tensor  # the sum, of the whole part: float32's encoding is a view of it
    encoded: torch.Tensor
    read: torch.Tensor  # our own values, where tensors meet within a part
    rows: Rows  # of all members, for rules that compare them


@dataclass(frozen=True, slots=True)
class _Launched:
    """A part that is on its way from its device to the host: its values, or their encoding."""

    values: torch.Tensor  # on the device
    fetch: Fetch
    place: torch.Tensor  # where it arrives

    def arrive(self) -> torch.Tensor:
        """Wait for it. Its memory is used again when the `_fetching` that began it ends."""
        self.fetch.wait()
        return self.place


@dataclass
class ReductionKernels:
    """What a round's tensor work needs: the vector that goes in, what comes out, scratch space, and a count
    of the seconds spent.

    Where `queues` is true, everything here may wait for a device, and is called in threads of the pool, after
    `prepare`.
    """

    plan: Plan
    codec: Codec
    own: int
    vector: FlatVector
    averages: Averages
    aggregation: Aggregation = MEAN
    weights: Sequence[float] = ()  # relative, by place
    begin_feedback: Callable[[], FeedbackRound] | None = None  # None: what rounds leave out is lost
    feedback: FeedbackRound | None = None  # what earlier rounds left out goes along
    # (part, encoded values); None: chunks travel unsigned
    sign: Callable[[int, memoryview], bytes] | None = None
    # part: digest and contributors of its average
    noted: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    withdrawn: str | None = None  # why this member contributes no more
    seconds: dict[str, float] = field(default_factory=lambda: {"encode": 0.0, "reduce": 0.0, "settle": 0.0})
    _free: list[_Scratch] = field(default_factory=list)

    @property
    def queues(self) -> Queues:
        """The queues of the devices on which this member has its vector, or will have its averages; none: all
        of it is on the host.
        """
        return self.vector.queues or self.averages.landing.queues

    def prepare(self, lands: bool) -> None:
        """Before everything else: have the memory that the round needs, and wait until the vector is there.

        `lands`: this member takes the averages. Afterwards, threads of the pool wait for this round's own
        work only, not for the trainer's.
        """
        if self.begin_feedback is not None:
            self.feedback = self.begin_feedback()
        if self.queues:
            self.averages.prepare(lands=lands)
            self.vector.queues.finish()

    def encode(self, parts: Sequence[Part]) -> list[bytes | int]:
        """The messages that carry our values of `parts`; an element of the vector that cannot be sent ends
        the list with its index.
        """
        started_s = time.perf_counter()
        messages: list[bytes | int] = []
        with self._borrowed() as scratch, self._fetching(parts, self._launch) as launched:
            for part in parts:
                messages.append(self._message(part, *self._payload(part, scratch, launched.get(part.index))))
                if isinstance(messages[-1], int):
                    break
        self.seconds["encode"] += time.perf_counter() - started_s
        return messages

    def reduce(self, jobs: Sequence[Job]) -> list[Averaged | Spoiled]:
        """Average parts of our own span, into `averages`."""
        started_s = time.perf_counter()
        done: list[Averaged | Spoiled] = []
        with (
            self._borrowed() as scratch,
            self._fetching([job.part for job in jobs if job.own], self._launch_own) as launched,
        ):
            for job in jobs:
                contributions = job.contributions
                if job.own:
                    way = launched.get(job.part.index)
                    ours = Contribution(
                        self.own,
                        self.weights[self.own],
                        way.arrive() if way is not None else self._own(job.part),
                    )
                    contributions = sorted(
                        [*contributions, ours], key=lambda contribution: contribution.place
                    )
                done.append(self._reduce_one(job.part, contributions, scratch))
        self.seconds["reduce"] += time.perf_counter() - started_s
        return done

    def settle(self, arrived: Sequence[Arrived]) -> list[bytes | None]:
        """Keep averages that came: the digest of each, None where its values are no numbers, or not those
        that were asked for.
        """
        started_s = time.perf_counter()
        digests = [self._settle_one(average) for average in arrived]
        self.seconds["settle"] += time.perf_counter() - started_s
        return digests

    def nothing(self, part: Part) -> Averaged:
        """The average of a part to which nobody contributes."""
        contributors = encode_places((), self.plan.members)
        message = pack(ExchangeHeader(average=ExchangeAverage(part=part.index, contributors=contributors)))
        self.averages.keep_nothing(part)
        self.noted[part.index] = (digest_payload(b""), contributors)
        return Averaged(part, message, digest_payload(b""), contributors)

    def withdraw(self, element: int) -> None:
        """Contribute no more, anywhere, because of this element: a gradient with NaN in one part is not to be
        trusted in the others.
        """
        if self.withdrawn is None:
            what = self.vector.describe(element)
            self.withdrawn = (
                f"{what} is {self.vector.element(element):g}, which {self.codec.name} cannot carry"
            )

    def withdraw_part(self, part: Part) -> None:
        """As `withdraw`: our values of this part spoiled its average."""
        self.withdraw(part.start + (first_bad(self.own_values(part), self.codec.magnitude_max) or 0))

    def own_values(self, part: Part) -> torch.Tensor:
        """What this member contributes to a part that it reduces itself: float32, as it is, on the host,
        where it meets the others'.
        """
        with self._fetching([part], self._launch_own) as launched:
            way = launched.get(part.index)
            return way.arrive().clone() if way is not None else self._own(part)

    def flaw(self, part: Part, contributions: Sequence[Contribution], place: int) -> str:
        """What is wrong with the values by which a member spoiled the average of a part, in words."""
        values = next(item.values for item in contributions if item.place == place)
        found = "" if isinstance(values, torch.Tensor) else self.codec.flaw(values, part.numel)
        return found or "together they are too large"

    def encoded(self, part: Part) -> bytes:
        """Our values of a part as they would travel."""
        with self._borrowed() as scratch, self._fetching([part], self._launch) as launched:
            return bytes(self._payload(part, scratch, launched.get(part.index))[1])

    def recompute(self, given: Recomputation) -> bytes:
        """The digest that the average of a part must have if it was made of these contributions."""
        with self._borrowed() as scratch:
            computed = self._compute(given.part, given.contributions, scratch, None)
        if isinstance(computed, Spoiled):
            return b""
        _, digest, clipped = computed
        return digest_average(digest, clipped)

    def _message(self, part: Part, values: torch.Tensor, payload: memoryview) -> bytes | int:
        if not self.codec.is_finite(payload):
            with self.vector.queues.working():
                return part.start + (first_bad(values, self.codec.magnitude_max) or 0)
        signature = self.sign(part.index, payload) if self.sign is not None else b""
        return pack(ExchangeHeader(chunk=ExchangeChunk(part=part.index, signature=signature)), payload)

    def _payload(
        self, part: Part, scratch: _Scratch, launched: _Launched | None
    ) -> tuple[torch.Tensor, memoryview]:
        """What is to be sent of a part, and its encoding; noted in the error feedback. In `scratch`, unless
        it was `launched`.
        """
        if launched is not None:
            return launched.values, view_tensor(launched.arrive())
        with self.vector.queues.working():  # pieces may lie on several devices
            values = self.vector.read(part.start, part.stop, scratch.read)
            if self.feedback is None:
                return values, self.codec.encode(values, scratch.encoded)
            given = self.feedback.give(part.start, values, scratch.read[: part.numel])
            payload = self.codec.encode(given, scratch.encoded)
            if self.codec.is_finite(payload):
                self.feedback.sent(part.start, given, payload, scratch.values[: part.numel])
            return given, payload

    def _launch(self, part: Part, queue: Queue) -> tuple[torch.Tensor, torch.Tensor]:
        """Have a part encoded on its device: what is sent, and its encoding."""
        with queue.working():
            values = self.vector.read(part.start, part.stop)
            if self.feedback is not None:
                values = self.feedback.give(part.start, values, torch.empty_like(values))
            encoded = torch.empty(
                self.codec.encoded_bytes(part.numel), dtype=torch.uint8, device=values.device
            )
            self.codec.write(values, encoded)
            # of values that cannot be sent, too: then it is withdrawn as a whole
            if self.feedback is not None:
                self.feedback.sent(part.start, values, encoded, torch.empty_like(values))
        return values, encoded

    def _launch_own(self, part: Part, queue: Queue) -> tuple[torch.Tensor, torch.Tensor]:
        """As `_launch`, for a part that we reduce: its values as they are."""
        values = self._own(part)
        return values, values

    @contextlib.contextmanager
    def _fetching(
        self, parts: Sequence[Part], launch: Callable[[Part, Queue], tuple[torch.Tensor, torch.Tensor]]
    ) -> Iterator[dict[int, _Launched]]:
        """Launch those of `parts` that lie on a device, by their index, and have them copied to the host.

        All are on their way before any is waited for: copies run beside the next part's encoding. Afterwards
        nothing is on its way, and all memory is back, also when a launch failed.
        """
        vector, landing = self.vector, self.averages.landing
        launched: dict[int, _Launched] = {}
        buffers: list[torch.Tensor] = []
        try:
            for part in parts if vector.queues else ():
                queue = vector.queues.of(vector.device_of(part.start, part.stop))
                if queue is not None:
                    values, source = launch(part, queue)
                    buffers.append(landing.borrow(source.nbytes, vector.queues))
                    place = buffers[-1][: source.nbytes].view(source.dtype)
                    launched[part.index] = _Launched(values, queue.fetch(source, place), place)
            yield launched
        finally:
            for way in launched.values():
                way.fetch.wait()
            landing.give_back(buffers)

    def _own(self, part: Part) -> torch.Tensor:
        """What we contribute to a part of our own span, where it lies."""
        with self.vector.queues.working():  # pieces may lie on several devices
            values = self.vector.read(part.start, part.stop)
            if self.feedback is not None:
                values = self.feedback.give(part.start, values, torch.empty_like(values))
                self.feedback.kept(part.start, part.stop)
        return values

    def conclude(self, held: Mapping[int, Version]) -> None:
        """The round is committed, with these versions of the parts: averages go to their devices, and error
        feedback moves on.

        What went into no average is still to be sent. The vector's owner may write to it afterwards.
        """
        if self.vector.queues:
            self.averages.upload(self.vector)
        feedback = self.feedback
        if feedback is None or not feedback.open:
            return
        with self.vector.queues.working():
            self._commit(feedback, held)
        self.vector.queues.finish()

    def roll_back(self) -> None:
        """The round has failed: error feedback stays where it was. Without effect when it has ended."""
        if self.feedback is not None:
            self.feedback.roll_back()

    def _commit(self, feedback: FeedbackRound, held: Mapping[int, Version]) -> None:
        if self.withdrawn is not None or not self.weights[self.own]:
            feedback.withdraw()
        else:
            for part in self.plan.parts:
                version = held.get(part.index)
                if version is None or self.own not in decode_places(version.contributors, self.plan.members):
                    feedback.undelivered(part.start, self.vector.read(part.start, part.stop))
        feedback.commit()

    def _compute(
        self,
        part: Part,
        contributions: Sequence[Contribution],
        scratch: _Scratch,
        feedback: FeedbackRound | None,
    ) -> tuple[list[memoryview], bytes, bytes] | Spoiled:
        """The encoded average in pieces, which lie in `scratch`, their digest, and who was clipped."""
        codec, cut = self.codec, blocks(part, self.codec)
        prepared = prepare(
            self.aggregation, contributions, codec, cut, scratch.total[: part.numel], scratch.rows
        )
        if prepared.spoiled:
            return Spoiled(part, prepared.spoiled)
        state = blake3()
        pieces = []
        for block in cut:  # all that is to be done to a block is done before the next: it stays in the cache
            total = scratch.total[block.start : block.stop]
            work = scratch.values[: block.stop - block.start]
            prepared.rule.compute(block, total, work)
            if feedback is not None:
                feedback.correct(part.start + block.start, total)
            piece = codec.encode(total, scratch.encoded[block.first_byte : block.end_byte])
            if not codec.is_finite(piece):
                return Spoiled(part, prepared.rule.spoilers())
            if feedback is not None:
                feedback.reduced(part.start + block.start, total, piece, work)
            state.update(piece)
            pieces.append(piece)
        return (
            pieces,
            state.digest(),
            encode_places(prepared.clipped, self.plan.members) if prepared.clipped else b"",
        )

    def _reduce_one(
        self, part: Part, contributions: Sequence[Contribution], scratch: _Scratch
    ) -> Averaged | Spoiled:
        computed = self._compute(part, contributions, scratch, self.feedback)
        if isinstance(computed, Spoiled):
            return computed
        pieces, digest, clipped = computed
        contributors = encode_places(
            (contribution.place for contribution in contributions), self.plan.members
        )
        average = ExchangeAverage(part=part.index, contributors=contributors, clipped=clipped)
        message = pack(ExchangeHeader(average=average), *pieces)
        for block, piece in zip(blocks(part, self.codec), pieces, strict=True):
            self.averages.keep(part, piece, block.first_byte)
        digest = digest_average(digest, clipped)
        self.noted[part.index] = (digest, contributors)
        return Averaged(part, message, digest, contributors, clipped)

    def _settle_one(self, arrived: Arrived) -> bytes | None:
        empty = not any(arrived.contributors)
        # first: it brings the payload into the cache
        digest = digest_average(digest_payload(arrived.payload), arrived.clipped)
        if (arrived.digest and digest != arrived.digest) or not self.codec.is_finite(
            view_bytes(arrived.payload)
        ):
            return None
        if empty:
            self.averages.keep_nothing(arrived.part)
        else:
            self.averages.keep(arrived.part, arrived.payload)
        self.noted[arrived.part.index] = (digest, arrived.contributors)
        return digest

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[_Scratch]:
        """Scratch space for one part; threads work side by side, each with its own. It comes back whatever
        happens.
        """
        try:
            scratch = self._free.pop()
        except IndexError:
            numel_max = max((part.numel for part in self.plan.parts), default=0)
            values, total, read = (torch.empty(numel_max, dtype=torch.float32, device=HOST) for _ in range(3))
            encoded = torch.empty(self.codec.encoded_bytes(numel_max), dtype=torch.uint8, device=HOST)
            scratch = _Scratch(values, total, encoded, read, Rows())
        try:
            yield scratch
        finally:
            self._free.append(scratch)
