"""The butterfly's cut: which member reduces which span of the vector, and the parts in which spans travel.

The cut depends only on what every member knows alike (the group, the vector's size, the codec), and takes no
notice of tensor boundaries: many small tensors share a part, a large one spans many. Shares come from
`averaging.reduction.balance`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import msgpack

from swarm.compression import Codec
from swarm.core.errors import UsageError

ALIGNMENT_ELEMENTS = 1024  # edges of parts: whole blocks for blockwise codecs, whole pages in float32
PARTS_MAX = 1 << 24
# a codec of a quarter of a bit would put tens of millions into a megabyte: working space is in float32
PART_ELEMENTS_MAX = 1 << 21
PART_S = 0.02
PART_BYTES_SMALL = 64 << 10  # a header and a message cost as much as some kilobytes


@dataclass(frozen=True, slots=True)
class Part:
    """Elements `start` to `stop` of the vector, reduced by the member at place `reducer` of the group."""

    index: int  # in the plan
    reducer: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """At least 1."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Plan:
    """All parts of a round: they cover the vector once, in order, and each reducer's are adjacent."""

    numel: int
    parts: tuple[Part, ...]
    members: int

    def of_reducer(self, place: int) -> tuple[Part, ...]:
        """The parts that this member reduces, in order; none when it reduces nothing."""
        return tuple(part for part in self.parts if part.reducer == place)

    @property
    def reducers(self) -> tuple[int, ...]:
        """The places of those that reduce at least one part."""
        return tuple(dict.fromkeys(part.reducer for part in self.parts))

    def digest(self, codec: Codec) -> bytes:
        """32 bytes by which two members find out that they made the same plan."""
        cut = [[part.reducer, part.start, part.stop] for part in self.parts]
        return hashlib.sha256(
            msgpack.packb([self.numel, self.members, codec.wire_id, codec.version, cut])
        ).digest()


def spans(numel: int, shares: Sequence[float]) -> list[tuple[int, int]]:
    """Cut `numel` elements in proportion to `shares`: one (start, stop) per share, adjacent, in order,
    possibly empty.

    Edges lie on multiples of ALIGNMENT_ELEMENTS, so that a tiny vector has one reducer and takes one message
    each way. UsageError when every share is zero although there is something to cut.
    """
    # floats would round differently in another order of summation
    exact = [Fraction(share) for share in shares]
    total = sum(exact)
    if any(share < 0 for share in exact) or (numel and not total):
        raise UsageError("nobody in this group can reduce: no member has a port that others can dial")
    edges = [0]
    for cumulated in itertools.accumulate(exact):
        ideal = cumulated / total * numel if total else Fraction(0)
        aligned = round(ideal / ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
        edges.append(numel if cumulated == total else min(max(aligned, edges[-1]), numel))
    return list(itertools.pairwise(edges))


def plan_parts(numel: int, shares: Sequence[float], codec: Codec, part_bytes: int) -> Plan:
    """Spans by `shares` (one per member, in group order), and each cut into equal parts of at most about
    `part_bytes` encoded, and PART_ELEMENTS_MAX elements.

    UsageError: nobody reduces, or there would be more than PARTS_MAX parts.
    """
    elements = min(int(part_bytes * 8 / codec.bits_per_element), PART_ELEMENTS_MAX)
    part_elements_max = max(elements // ALIGNMENT_ELEMENTS, 1) * ALIGNMENT_ELEMENTS
    if numel > PARTS_MAX * (part_elements_max // 2):
        raise UsageError(
            f"{numel} elements in parts of {part_bytes} bytes are too many parts (at most {PARTS_MAX})"
        )
    parts: list[Part] = []
    for reducer, (start, stop) in enumerate(spans(numel, shares)):
        count = math.ceil((stop - start) / part_elements_max)
        for nth in range(count):
            parts.append(
                Part(len(parts), reducer, _edge(start, stop, nth, count), _edge(start, stop, nth + 1, count))
            )
    return Plan(numel, tuple(parts), len(shares))


def part_bytes_for(bandwidths: Sequence[float], part_bytes: int) -> int:
    """How large parts are in a group whose members send that fast (bytes/s; 0.0 for who does not reduce), at
    most `part_bytes`.

    A part's average leaves when the whole part is there, and the last one when everything else has been sent:
    on slow links smaller parts overlap more. On the slowest one of the group a part takes about PART_S, but
    no part is smaller than PART_BYTES_SMALL for that.
    """
    slowest = min((bandwidth for bandwidth in bandwidths if bandwidth > 0.0), default=math.inf)
    return int(min(part_bytes, max(slowest * PART_S, PART_BYTES_SMALL)))


def _edge(start: int, stop: int, nth: int, count: int) -> int:
    """Where part `nth` of `count` begins: aligned, and never more than an alignment apart from the others'
    sizes.
    """
    if nth == count:
        return stop
    blocks = math.ceil((stop - start) / ALIGNMENT_ELEMENTS)
    return start + blocks * nth // count * ALIGNMENT_ELEMENTS
