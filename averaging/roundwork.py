"""The tensor work of a round, in batches of parts, on a thread of the node's pool: encode what is sent, average what came, settle results.

One hop to the pool per batch, none per operation: a hop costs as much as a hundred kilobytes of work. Within a part, everything is done to
one block before the next is begun, so that it stays in the cache. What these functions are given is not touched by anybody else meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from blake3 import blake3

from averaging.assembly import encode_places
from averaging.chunks import pack
from averaging.commit import digest_payload
from averaging.partition import Part, Plan
from averaging.reduce import Contribution, Mean, blocks, first_bad
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
    """An average that came from its reducer."""

    part: Part
    payload: memoryview
    contributors: bytes


@dataclass(frozen=True, slots=True)
class _Scratch:
    values: torch.Tensor  # of one block
    encoded: torch.Tensor  # of one part


@dataclass(slots=True)
class Workbench:
    """What a round's tensor work needs: the vector that goes in, the one that comes out, scratch space, seconds spent."""

    plan: Plan
    codec: Codec
    own: int
    vector: torch.Tensor
    out: torch.Tensor
    seconds: dict[str, float] = field(default_factory=lambda: {"encode": 0.0, "reduce": 0.0, "settle": 0.0})
    _free: list[_Scratch] = field(default_factory=list)

    def encode(self, parts: Sequence[Part]) -> list[bytes | int]:
        """The messages that carry our values of `parts`; an element of the vector that cannot be sent ends the list with its index."""
        started_s = time.perf_counter()
        messages: list[bytes | int] = []
        scratch = self._borrow()
        for part in parts:
            message = self._encode_one(part, scratch.encoded)
            messages.append(message)
            if isinstance(message, int):
                break
        self._free.append(scratch)
        self.seconds["encode"] += time.perf_counter() - started_s
        return messages

    def reduce(self, jobs: Sequence[tuple[Part, Sequence[Contribution]]]) -> list[Averaged | Spoiled]:
        """Average parts of our own span into `out`."""
        started_s = time.perf_counter()
        scratch = self._borrow()
        done = [self._reduce_one(part, contributions, scratch) for part, contributions in jobs]
        self._free.append(scratch)
        self.seconds["reduce"] += time.perf_counter() - started_s
        return done

    def settle(self, arrived: Sequence[Arrived]) -> list[bytes | None]:
        """Write averages into `out`: the digest of each, None where the values are no numbers."""
        started_s = time.perf_counter()
        digests = [self._settle_one(average_) for average_ in arrived]
        self.seconds["settle"] += time.perf_counter() - started_s
        return digests

    def _encode_one(self, part: Part, encoded: torch.Tensor) -> bytes | int:
        values = self.vector[part.start : part.stop]
        payload = self.codec.encode(values, encoded)
        if not self.codec.is_finite(payload):
            return part.start + (first_bad(values, self.codec.magnitude_max) or 0)
        return pack(ExchangeHeader(chunk=ExchangeChunk(part=part.index)), payload)

    def _reduce_one(self, part: Part, contributions: Sequence[Contribution], scratch: _Scratch) -> Averaged | Spoiled:
        codec = self.codec
        whole = self.out[part.start : part.stop]
        mean = Mean(contributions, codec)
        state = blake3()
        pieces = []
        for block in blocks(part, codec):  # all that is to be done to a block is done before the next: it stays in the cache
            total = whole[block.start : block.stop]
            mean.compute(block, total, scratch.values[: block.stop - block.start])
            piece = codec.encode(total, scratch.encoded[block.first_byte : block.end_byte])
            if not codec.is_finite(piece):
                return Spoiled(part, mean.spoilers())
            state.update(piece)
            codec.decode(piece, total)  # we hold what everybody decodes, not what we encoded (float32: `piece` is `total` itself)
            pieces.append(piece)
        contributors = encode_places((contribution.place for contribution in contributions), self.plan.members)
        message = pack(ExchangeHeader(average=ExchangeAverage(part=part.index, contributors=contributors)), *pieces)
        return Averaged(part, message, state.digest(), contributors)

    def _settle_one(self, arrived: Arrived) -> bytes | None:
        digest = digest_payload(arrived.payload)  # first: it brings the payload into the cache
        payload = view_bytes(arrived.payload)
        if not self.codec.is_finite(payload):
            return None
        target = self.out[arrived.part.start : arrived.part.stop]
        values = self.codec.decode(payload, target)
        if values is not target:
            np.copyto(target.numpy(), values.numpy())
        return digest

    def _borrow(self) -> _Scratch:
        """Scratch space for one part; threads work side by side, each with its own."""
        try:
            return self._free.pop()
        except IndexError:
            numel_max = max((part.numel for part in self.plan.parts), default=0)
            values = torch.empty(min(self.codec.block_elements, numel_max))
            return _Scratch(values, torch.empty(self.codec.encoded_bytes(numel_max), dtype=torch.uint8))
