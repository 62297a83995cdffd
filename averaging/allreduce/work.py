"""The tensor work of a round, in batches of parts, on a thread of the node's pool: encode what is sent,
average what came, keep results.

One hop to the pool per batch, none per operation: a hop costs as much as a hundred kilobytes of work. Within
a part, everything is done to one block before the next is begun, so that it stays in the cache. What these
functions are given is not touched by anybody else meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from blake3 import blake3

from averaging.allreduce.assembly import decode_places, encode_places
from averaging.allreduce.commit import Version, digest_average, digest_payload
from averaging.reduction.averages import Averages
from averaging.reduction.chunks import pack
from averaging.reduction.devices import Fetch
from averaging.reduction.feedback import FeedbackRound
from averaging.reduction.partition import Part, Plan
from averaging.reduction.reduce import Contribution, blocks, first_bad
from averaging.reduction.robust import MEAN, Aggregation, Rows, prepare
from averaging.reduction.vector import FlatVector
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
    """Working space for one part."""

    values: torch.Tensor  # what one member contributes to a block
    total: torch.Tensor  # the sum, of the whole part: float32's encoding is a view of it
    encoded: torch.Tensor
    read: torch.Tensor  # our own values, where tensors meet within a part
    rows: Rows  # of all members, for rules that compare them


@dataclass(frozen=True, slots=True)
class _Launched:
    """A part that is being encoded on its device, and on its way to the host."""

    values: torch.Tensor  # what is sent; on the device
    fetch: Fetch
    place: torch.Tensor  # where it arrives

    def collect(self) -> tuple[torch.Tensor, memoryview]:
        """What is sent, and its encoding on the host."""
        self.fetch.wait()
        return self.values, view_tensor(self.place)


@dataclass
class ReductionKernels:
    """What a round's tensor work needs: the vector that goes in, what comes out, scratch space, and a count
    of the seconds spent.
    """

    plan: Plan
    codec: Codec
    own: int
    vector: FlatVector
    averages: Averages
    aggregation: Aggregation = MEAN
    weights: Sequence[float] = ()  # relative, by place
    feedback: FeedbackRound | None = None  # what earlier rounds left out goes along
    # (part, encoded values); None: chunks travel unsigned
    sign: Callable[[int, memoryview], bytes] | None = None
    # part: digest and contributors of its average
    noted: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    withdrawn: str | None = None  # why this member contributes no more
    seconds: dict[str, float] = field(default_factory=lambda: {"encode": 0.0, "reduce": 0.0, "settle": 0.0})
    _free: list[_Scratch] = field(default_factory=list)

    def encode(self, parts: Sequence[Part]) -> list[bytes | int]:
        """The messages that carry our values of `parts`; an element of the vector that cannot be sent ends
        the list with its index.
        """
        started_s = time.perf_counter()
        messages: list[bytes | int] = []
        scratches = [self._borrow() for _ in (parts if self.vector.queues else parts[:1])]
        # on a device all are on their way before any is waited for: copies to the host run beside the next
        # one's encoding
        launched = (
            [self._launch(part, scratch) for part, scratch in zip(parts, scratches, strict=False)]
            if self.vector.queues
            else []
        )
        try:
            for nth, part in enumerate(parts):
                way = launched[nth] if launched else None
                found = (
                    way.collect()
                    if way is not None
                    else self._payload(part, scratches[nth if launched else 0])
                )
                messages.append(self._message(part, *found))
                if isinstance(messages[-1], int):
                    break
        finally:
            for way in launched:
                if way is not None:
                    way.fetch.wait()
        self._free += scratches
        self.seconds["encode"] += time.perf_counter() - started_s
        return messages

    def reduce(self, jobs: Sequence[tuple[Part, Sequence[Contribution]]]) -> list[Averaged | Spoiled]:
        """Average parts of our own span, into `averages`."""
        started_s = time.perf_counter()
        scratch = self._borrow()
        done = [self._reduce_one(part, contributions, scratch) for part, contributions in jobs]
        self._free.append(scratch)
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

    def own_values(self, part: Part) -> torch.Tensor:
        """What this member contributes to a part that it reduces itself: float32, as it is, on the host,
        where it meets the others'.
        """
        vector = self.vector
        with vector.queues.working():
            values = vector.read(part.start, part.stop)
            if self.feedback is not None:
                values = self.feedback.give(part.start, values, torch.empty_like(values))
                self.feedback.kept(part.start, part.stop)
        queue = vector.queues.of(values.device)
        if queue is None:
            return values
        host = vector.queues.host_memory(part.numel)
        queue.fetch(values, host).wait()
        return host

    def first_bad(self, part: Part) -> int:
        """The element of the vector, within `part`, that cannot be sent."""
        return part.start + (first_bad(self.own_values(part), self.codec.magnitude_max) or 0)

    def flaw(self, part: Part, contributions: Sequence[Contribution], place: int) -> str:
        """What is wrong with the values by which a member spoiled the average of a part, in words."""
        values = next(item.values for item in contributions if item.place == place)
        found = "" if isinstance(values, torch.Tensor) else self.codec.flaw(values, part.numel)
        return found or "together they are too large"

    def encoded(self, part: Part) -> bytes:
        """Our values of a part as they would travel."""
        scratch = self._borrow()
        payload = bytes(self._payload(part, scratch)[1])
        self._free.append(scratch)
        return payload

    def recompute(self, given: Recomputation) -> bytes:
        """The digest that the average of a part must have if it was made of these contributions."""
        scratch = self._borrow()
        computed = self._compute(given.part, given.contributions, scratch, None)
        self._free.append(scratch)
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

    def _payload(self, part: Part, scratch: _Scratch) -> tuple[torch.Tensor, memoryview]:
        """What is to be sent of a part, and its encoding, both in `scratch` (or the first in the vector);
        noted in the error feedback.
        """
        launched = self._launch(part, scratch)
        if launched is not None:
            return launched.collect()
        with self.vector.queues.working():  # pieces may lie on several devices
            values = self.vector.read(part.start, part.stop, scratch.read)
            if self.feedback is None:
                return values, self.codec.encode(values, scratch.encoded)
            given = self.feedback.give(part.start, values, scratch.read[: part.numel])
            payload = self.codec.encode(given, scratch.encoded)
            if self.codec.is_finite(payload):
                self.feedback.sent(part.start, given, payload, scratch.values[: part.numel])
            return given, payload

    def _launch(self, part: Part, scratch: _Scratch) -> _Launched | None:
        """Have a part encoded on the device where it is, and brought to the host; None when that is the host."""
        vector = self.vector
        queue = vector.queues.of(vector.device_of(part.start, part.stop)) if vector.queues else None
        if queue is None:
            return None
        with queue.working():
            values = vector.read(part.start, part.stop)
            if self.feedback is not None:
                values = self.feedback.give(part.start, values, torch.empty_like(values))
            encoded = torch.empty(
                self.codec.encoded_bytes(part.numel), dtype=torch.uint8, device=values.device
            )
            self.codec.write(values, encoded)
            # of values that cannot be sent, too: then it is withdrawn as a whole
            if self.feedback is not None:
                self.feedback.sent(part.start, values, encoded, torch.empty_like(values))
        place = scratch.encoded[: encoded.numel()]
        return _Launched(values, queue.fetch(encoded, place), place)

    def conclude(self, held: Mapping[int, Version], *, committed: bool) -> None:
        """The round has ended, with these versions of the parts: error feedback moves on, or stays where it
        was.

        What went into no average is still to be sent. Without effect where there is no feedback, or it has
        ended.
        """
        feedback = self.feedback
        if feedback is None or not feedback.open:
            return
        if not committed:
            feedback.roll_back()
            return
        with self.vector.queues.working():
            self._commit(feedback, held)
        self.vector.queues.finish()  # the vector's owner may write to it from now on

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

    def _borrow(self) -> _Scratch:
        """Scratch space for one part; threads work side by side, each with its own."""
        try:
            return self._free.pop()
        except IndexError:
            numel_max = max((part.numel for part in self.plan.parts), default=0)
            encoded = self.vector.queues.host_memory(self.codec.encoded_bytes(numel_max), torch.uint8)
            return _Scratch(
                torch.empty(numel_max), torch.empty(numel_max), encoded, torch.empty(numel_max), Rows()
            )
