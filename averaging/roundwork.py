"""The tensor work of a round, in batches of parts, on a thread of the node's pool: encode what is sent, average what came, keep results.

One hop to the pool per batch, none per operation: a hop costs as much as a hundred kilobytes of work. Within a part, everything is done to
one block before the next is begun, so that it stays in the cache. What these functions are given is not touched by anybody else meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from blake3 import blake3

from averaging.assembly import encode_places
from averaging.averages import Averages
from averaging.chunks import pack
from averaging.commit import digest_payload
from averaging.partition import Part, Plan
from averaging.reduce import Contribution, Mean, blocks, first_bad
from averaging.vector import FlatVector
from swarm.compression import Codec, view_bytes
from swarm.wire.reduce_pb2 import ExchangeAverage, ExchangeChunk, ExchangeHeader


@dataclass(frozen=True, slots=True)
class Averaged:
    """A part that this member reduced."""

    part: Part
    message: bytes  # for everybody else
    digest: bytes
    contributors: bytes


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
    digest: bytes = b""  # which it must have; empty: not known


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Working space for one part."""

    values: torch.Tensor  # what one member contributes to a block
    total: torch.Tensor  # the sum, of the whole part: float32's encoding is a view of it
    encoded: torch.Tensor
    read: torch.Tensor  # our own values, where tensors meet within a part


@dataclass
class Workbench:
    """What a round's tensor work needs: the vector that goes in, what comes out, scratch space, and a count of the seconds spent."""

    plan: Plan
    codec: Codec
    own: int
    vector: FlatVector
    averages: Averages
    withdrawn: str | None = None  # why this member contributes no more
    seconds: dict[str, float] = field(default_factory=lambda: {"encode": 0.0, "reduce": 0.0, "settle": 0.0})
    _free: list[_Scratch] = field(default_factory=list)

    def encode(self, parts: Sequence[Part]) -> list[bytes | int]:
        """The messages that carry our values of `parts`; an element of the vector that cannot be sent ends the list with its index."""
        started_s = time.perf_counter()
        messages: list[bytes | int] = []
        scratch = self._borrow()
        for part in parts:
            message = self._encode_one(part, scratch)
            messages.append(message)
            if isinstance(message, int):
                break
        self._free.append(scratch)
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
        """Keep averages that came: the digest of each, None where its values are no numbers, or not those that were asked for."""
        started_s = time.perf_counter()
        digests = [self._settle_one(average) for average in arrived]
        self.seconds["settle"] += time.perf_counter() - started_s
        return digests

    def nothing(self, part: Part) -> Averaged:
        """The average of a part to which nobody contributes."""
        contributors = encode_places((), self.plan.members)
        message = pack(ExchangeHeader(average=ExchangeAverage(part=part.index, contributors=contributors)))
        self.averages.keep_nothing(part)
        return Averaged(part, message, digest_payload(b""), contributors)

    def withdraw(self, element: int) -> None:
        """Contribute no more, anywhere, because of this element: a gradient with NaN in one part is not to be trusted in the others."""
        if self.withdrawn is None:
            self.withdrawn = f"element {element} of its vector is {self.vector.element(element):g}, which {self.codec.name} cannot carry"

    def own_values(self, part: Part) -> torch.Tensor:
        """What this member contributes to a part that it reduces itself: float32, as it is."""
        return self.vector.read(part.start, part.stop)

    def first_bad(self, part: Part) -> int:
        """The element of the vector, within `part`, that cannot be sent."""
        return part.start + (first_bad(self.own_values(part), self.codec.magnitude_max) or 0)

    def _encode_one(self, part: Part, scratch: _Scratch) -> bytes | int:
        values = self.vector.read(part.start, part.stop, scratch.read)
        payload = self.codec.encode(values, scratch.encoded)
        if not self.codec.is_finite(payload):
            return part.start + (first_bad(values, self.codec.magnitude_max) or 0)
        return pack(ExchangeHeader(chunk=ExchangeChunk(part=part.index)), payload)

    def _reduce_one(self, part: Part, contributions: Sequence[Contribution], scratch: _Scratch) -> Averaged | Spoiled:
        codec = self.codec
        mean = Mean(contributions, codec)
        state = blake3()
        pieces = []
        for block in blocks(part, codec):  # all that is to be done to a block is done before the next: it stays in the cache
            total = scratch.total[block.start : block.stop]
            mean.compute(block, total, scratch.values[: block.stop - block.start])
            piece = codec.encode(total, scratch.encoded[block.first_byte : block.end_byte])
            if not codec.is_finite(piece):
                return Spoiled(part, mean.spoilers())
            state.update(piece)
            pieces.append(piece)
        contributors = encode_places((contribution.place for contribution in contributions), self.plan.members)
        message = pack(ExchangeHeader(average=ExchangeAverage(part=part.index, contributors=contributors)), *pieces)
        for block, piece in zip(blocks(part, codec), pieces, strict=True):
            self.averages.keep(part, piece, block.first_byte)
        return Averaged(part, message, state.digest(), contributors)

    def _settle_one(self, arrived: Arrived) -> bytes | None:
        if not any(arrived.contributors):
            self.averages.keep_nothing(arrived.part)
            return digest_payload(b"")
        digest = digest_payload(arrived.payload)  # first: it brings the payload into the cache
        if (arrived.digest and digest != arrived.digest) or not self.codec.is_finite(view_bytes(arrived.payload)):
            return None
        self.averages.keep(arrived.part, arrived.payload)
        return digest

    def _borrow(self) -> _Scratch:
        """Scratch space for one part; threads work side by side, each with its own."""
        try:
            return self._free.pop()
        except IndexError:
            numel_max = max((part.numel for part in self.plan.parts), default=0)
            encoded = torch.empty(self.codec.encoded_bytes(numel_max), dtype=torch.uint8)
            return _Scratch(torch.empty(numel_max), torch.empty(numel_max), encoded, torch.empty(numel_max))
