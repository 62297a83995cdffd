"""The cut of the vector: which member reduces which shard, and the chunks in which shards travel.

The cut depends only on what every member knows equally (the group, the vector's size, the codec). It ignores
tensor boundaries: many small tensors share a chunk, a large one takes many. The sizes of shards come from
`averaging.reduction.balance`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack

from swarm.compression import Codec
from swarm.core.errors import UsageError

ALIGNMENT_ELEMENTS = 1024  # edges of chunks: whole blocks for blockwise codecs, whole pages in float32
CHUNKS_MAX = 1 << 24
# Working space is in float32, and a codec of a quarter of a bit would put tens of millions of elements into 1
# MB.
CHUNK_ELEMENTS_MAX = 1 << 21
CHUNK_S = 0.02
HOME_BYTES_PER_S = 25e6  # on links up to this speed, often long ones, small chunks save more than they cost
CHUNK_S_HOME = 0.003
CHUNKS_ENOUGH = 16  # more chunks in a shard hardly improve the overlap
CHUNK_BYTES_SMALL = 32 << 10  # a header and a message cost as much as some kilobytes


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements `start` to `stop` of the vector, reduced by the member at place `reducer` of the group."""

    index: int  # in the plan
    reducer: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Return the number of elements, at least 1."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Plan:
    """All chunks of a round: they cover the vector once, in order, and each reducer's chunks are adjacent."""

    numel: int
    chunks: tuple[Chunk, ...]
    members: int

    def shard(self, place: int) -> tuple[Chunk, ...]:
        """Return the chunks that this member reduces, in order; none when it reduces nothing."""
        return tuple(chunk for chunk in self.chunks if chunk.reducer == place)

    @property
    def reducers(self) -> tuple[int, ...]:
        """Return the places of the members that reduce at least one chunk."""
        return tuple(dict.fromkeys(chunk.reducer for chunk in self.chunks))

    def digest(self, codec: Codec) -> bytes:
        """Return 32 bytes by which two members compare their plans."""
        cut = [[chunk.reducer, chunk.start, chunk.stop] for chunk in self.chunks]
        return hashlib.sha256(
            msgpack.packb([self.numel, self.members, codec.wire_id, codec.version, cut])
        ).digest()


def cut_shards(numel: int, shares: Sequence[float]) -> list[tuple[int, int]]:
    """Cut `numel` elements in proportion to `shares`: one (start, stop) per share, adjacent, in order,
    possibly empty.

    Edges lie on multiples of ALIGNMENT_ELEMENTS, so that a tiny vector has one reducer and takes one message
    each way. Raises UsageError when every share is zero although there is something to cut.
    """
    # floats would round differently in another order of summation
    ratios = [float(share).as_integer_ratio() for share in shares]
    unit = max((denominator for _, denominator in ratios), default=1)  # a power of two, as all of them are
    exact = [numerator * (unit // denominator) for numerator, denominator in ratios]
    total = sum(exact)
    if any(share < 0 for share in exact) or (numel and not total):
        raise UsageError("nobody in this group can reduce: no member has a port that others can dial")
    edges = [0]
    for cumulated in itertools.accumulate(exact):
        aligned = _rounded(cumulated * numel, total * ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS if total else 0
        edges.append(numel if cumulated == total else min(max(aligned, edges[-1]), numel))
    return list(itertools.pairwise(edges))


def _rounded(numerator: int, denominator: int) -> int:
    """Return the integer next to a fraction of two that are not negative, the even one of two."""
    whole, rest = divmod(numerator, denominator)
    return whole + (2 * rest > denominator or (2 * rest == denominator and whole % 2))


def plan_chunks(numel: int, shares: Sequence[float], codec: Codec, chunk_bytes: int) -> Plan:
    """Return the plan with shards by `shares` (one per member, in group order), each cut into equal chunks.

    A chunk has at most about `chunk_bytes` encoded bytes and at most CHUNK_ELEMENTS_MAX elements. Raises
    UsageError when nobody reduces, or there would be more than CHUNKS_MAX chunks.
    """
    elements = min(int(chunk_bytes * 8 / codec.bits_per_element), CHUNK_ELEMENTS_MAX)
    chunk_elements_max = max(elements // ALIGNMENT_ELEMENTS, 1) * ALIGNMENT_ELEMENTS
    if numel > CHUNKS_MAX * (chunk_elements_max // 2):
        raise UsageError(
            f"{numel} elements in chunks of {chunk_bytes} bytes are too many chunks (at most {CHUNKS_MAX})"
        )
    chunks: list[Chunk] = []
    for reducer, (start, stop) in enumerate(cut_shards(numel, shares)):
        count = math.ceil((stop - start) / chunk_elements_max)
        for nth in range(count):
            chunks.append(
                Chunk(
                    len(chunks), reducer, _edge(start, stop, nth, count), _edge(start, stop, nth + 1, count)
                )
            )
    return Plan(numel, tuple(chunks), len(shares))


def chunk_bytes_for(bandwidths: Sequence[float], size_bytes: int, chunk_bytes: int) -> int:
    """Return the size of chunks, at most `chunk_bytes`, for a group whose members that may reduce have these
    upload bandwidths in bytes/s (others: left out, or 0.0), and an encoded vector of `size_bytes`.

    The average of a chunk leaves when the whole chunk is there, and the last one when everything else has
    been sent, so smaller chunks overlap more on slow links, and cost more processor time. On the slowest link
    of the group a chunk takes at most CHUNK_S. If that link has at most HOME_BYTES_PER_S, it takes about
    CHUNK_S_HOME, or longer where a shard would have more than CHUNKS_ENOUGH chunks. No chunk is made smaller
    than CHUNK_BYTES_SMALL for these reasons.
    """
    announced = [bandwidth for bandwidth in bandwidths if bandwidth > 0.0]
    slowest, shard_bytes = min(announced, default=math.inf), size_bytes / max(len(announced), 1)
    size = slowest * CHUNK_S
    if slowest <= HOME_BYTES_PER_S:
        size = min(size, max(slowest * CHUNK_S_HOME, shard_bytes / CHUNKS_ENOUGH))
    return int(min(chunk_bytes, max(size, CHUNK_BYTES_SMALL)))


def _edge(start: int, stop: int, nth: int, count: int) -> int:
    """Return where chunk `nth` of `count` begins: aligned, and such that sizes differ by at most one
    alignment.
    """
    if nth == count:
        return stop
    blocks = math.ceil((stop - start) / ALIGNMENT_ELEMENTS)
    return start + blocks * nth // count * ALIGNMENT_ELEMENTS
