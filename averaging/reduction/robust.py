"""What the members' values of a part become: their mean, or something that a minority of liars cannot move
far.

Everything here is made of element by element additions, multiplications, divisions, minima and maxima of IEEE
numbers, each rounded by itself; sums over a part are folded in halves, never left to a library's order. So
the same contributions in the same group order give the same bits on any processor, and whoever holds them can
recompute an average. (What would break that: a process that flushes denormals.)

Weights are claims. The mean follows them; the robust rules count every contributor once, or a liar would only
have to claim a large batch. With one contributor every rule returns its values, with two their mean: nobody
can tell which of two lies. Robust rules bound what senders can do, not what a reducer can: that takes an
audit (`averaging.reduction.audit`).
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from averaging.reduction.reduce import Block, Contribution, Mean, Values, spoilers
from swarm.compression import Codec
from swarm.core.errors import UsageError

Row: TypeAlias = npt.NDArray[np.float32]
F = TypeVar("F", np.float32, np.float64)
RULES = ("mean", "trimmed_mean", "median", "centered_clip")

# of all members' rows that are worked on at once: half a megabyte, which stays in a core's cache
_ROWS_ELEMENTS = 1 << 17
_STEP_ELEMENTS_MIN, _STEP_ELEMENTS_MAX = 1 << 10, 1 << 15
_SQUARES_MIN = 1e-24  # a sum of squares below this has lost some to underflow in float32
_LANES = 64  # sums over a part stay so wide until its end
_SETTLED = 1e-6  # of the radius: a centre that moves less has been found


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """How a group makes one vector out of many. Peers that disagree in any of it never meet: it is in their
    schema.
    """

    rule: str = "mean"  # one of RULES
    # trimmed_mean: share of the contributors cut off at either end; must be at least the share that may lie
    trim: float = 0.25
    # centered_clip: in medians of the contributions' distances; smaller: liars do less, the mean is met more
    # slowly
    radius: float = 1.0
    # centered_clip: steps towards the centre; they cost next to nothing, and each lets liars pull once more
    iterations_max: int = 5
    # contributions longer than so many medians are shortened to that, part by part; None: never
    clip_to_median: float | None = None

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise UsageError(f"there is no aggregation {self.rule!r}; there is: {', '.join(RULES)}")
        if not 0.0 < self.trim < 0.5:
            raise UsageError(f"trim is above 0 and below 0.5, not {self.trim!r}")
        if not 0.0 < self.radius < math.inf or not 1 <= self.iterations_max <= 100:
            raise UsageError("radius is a positive number, iterations_max between 1 and 100")
        if self.clip_to_median is not None and not 1.0 <= self.clip_to_median < math.inf:
            raise UsageError(
                f"clip_to_median is at least 1, or None for no clipping, not {self.clip_to_median!r}"
            )

    @property
    def terms(self) -> str:
        """What matters of it, as text: equal exactly when two peers mean the same."""
        own = {
            "trimmed_mean": f" trim {self.trim!r}",
            "centered_clip": f" radius {self.radius!r} in {self.iterations_max}",
        }
        clip = "" if self.clip_to_median is None else f", clipped to {float(self.clip_to_median)!r} medians"
        return f"{self.rule}{own.get(self.rule, '')}{clip}"


MEAN = Aggregation()


class Rule(Protocol):
    """The aggregation of one part, block by block."""

    def compute(self, block: Block, total: torch.Tensor, scratch: torch.Tensor) -> None:
        """total[:] = the result for this block; both are flat float32 host tensors of its size."""
        ...

    def spoilers(self) -> tuple[int, ...]:
        """Whose values are NaN or infinity, asked when a result is; nobody's: it overflowed."""
        ...


class Rows:
    """Working space of the rules that compare members, kept from part to part: a few floats per member and
    element of a block.
    """

    def __init__(self) -> None:
        self._decoded: Row = np.empty((0, 0), np.float32)
        self._work: Row = np.empty((0, 0), np.float32)

    def decoded(self, members: int, elements: int) -> Row:
        """Room for what members contribute to a block: at least so many rows and columns."""
        self._decoded = _grown(self._decoded, members, elements)
        return self._decoded

    def work(self, rows: int, elements: int) -> Row:
        """Room to work on some of that; not kept from call to call."""
        self._work = _grown(self._work, rows, elements)
        return self._work


def _grown(room: Row, rows: int, columns: int) -> Row:
    if room.shape[0] >= rows and room.shape[1] >= columns:
        return room
    return np.empty((max(room.shape[0], rows), max(room.shape[1], columns)), np.float32)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A part that can be aggregated now, or `spoiled` says by whose values it cannot."""

    rule: Rule
    clipped: tuple[int, ...] = ()  # places in group order
    spoiled: tuple[int, ...] = ()


def prepare(
    aggregation: Aggregation,
    contributions: Sequence[Contribution],
    codec: Codec,
    cut: Sequence[Block],
    total: torch.Tensor,
    rows: Rows,
) -> Prepared:
    """What must be known of a whole part before its first block is aggregated. `total`: flat float32, of the
    part's size, handed over.

    `contributions`: at least one, in group order, their payloads of the right size and otherwise as they
    came.
    """
    if aggregation == MEAN:
        return Prepared(Mean(contributions, codec))
    if bad := spoilers(contributions, codec):
        return Prepared(Mean(contributions, codec), spoiled=bad)
    scales = [1.0] * len(contributions)
    clipped: tuple[int, ...] = ()
    if aggregation.clip_to_median is not None:
        scales = clip_scales(norms(contributions, codec, cut, rows), aggregation.clip_to_median)
        clipped = tuple(item.place for item, scale in zip(contributions, scales, strict=True) if scale != 1.0)
    values = Values(contributions, codec, scales)
    if aggregation.rule == "mean":
        return Prepared(Mean(contributions, codec, scales), clipped)
    if aggregation.rule == "median":
        return Prepared(Ranked(values, rows, (len(contributions) - 1) // 2), clipped)
    if aggregation.rule == "trimmed_mean":
        return Prepared(Ranked(values, rows, trimmed(aggregation.trim, len(contributions))), clipped)
    centered = CenteredClip(values, rows, aggregation)
    centered.find(cut, total)
    return Prepared(centered, clipped)


# ---- clipping


def norms(
    contributions: Sequence[Contribution], codec: Codec, cut: Sequence[Block], rows: Rows
) -> list[float]:
    """The Euclidean norm of every contribution to a part, of the values as its reducer has them."""
    values = Values(contributions, codec, [1.0] * len(contributions))
    scratch = rows.decoded(1, max((block.stop - block.start for block in cut), default=0))
    product, lanes = rows.work(2, _STEP_ELEMENTS_MAX)[:2, :_STEP_ELEMENTS_MAX]

    def pieces_of(nth: int) -> Iterator[Row]:
        for block in cut:
            found = values.read(nth, block, torch.from_numpy(scratch[0, : block.stop - block.start]))
            for piece in pieces(len(found), 1):
                yield found[piece]

    lengths = []
    for nth in range(len(contributions)):
        lanes[:] = 0.0
        with np.errstate(over="ignore", under="ignore"):
            for found in pieces_of(nth):
                used = lanes[: len(found)]
                np.add(used, np.multiply(found, found, out=product[: len(found)]), out=used)
            squares = float(_fold(lanes)[0])
        # more than float32 squares can be, or less; or nothing but zeros
        if not _SQUARES_MIN < squares < math.inf:
            squares = math.fsum(
                float(_fold(np.multiply(found, found, dtype=np.float64))[0])
                for found in pieces_of(nth)
                if found.any()
            )
        lengths.append(math.sqrt(squares))
    return lengths


def clip_scales(lengths: Sequence[float], multiple: float) -> list[float]:
    """By what each contribution is to be multiplied, so that none is longer than `multiple` medians; 1.0 for
    who is not.

    The median of an even number is the mean of the two in the middle. Where it is 0 (most contribute nothing
    to this part, an embedding's unused rows for instance) nobody is clipped: one honest gradient among zeros
    is not an attack.
    """
    longest = multiple * statistics.median(lengths)
    return [longest / length if length > longest > 0.0 else 1.0 for length in lengths]


def _fold(values: npt.NDArray[F], width: int = 1) -> npt.NDArray[F]:
    """Sums along the last axis, halves added to each other until `width` elements are left, or fewer.
    Overwrites `values`.
    """
    count = values.shape[-1]
    while count > width:
        half = count // 2
        low = values[..., :half]
        np.add(low, values[..., count - half : count], out=low)
        count -= half
    return values[..., :count]


# ---- rules that sort


def trimmed(trim: float, contributors: int) -> int:
    """How many values are cut off at either end: `trim` of them, at least one as soon as there are three, and
    never all.
    """
    cut_off = max(math.floor(trim * contributors + 1e-9), 1)
    return min(cut_off, (contributors - 1) // 2)


@functools.lru_cache(maxsize=512)
def network(count: int, first: int, end: int) -> tuple[tuple[int, int, bool, bool], ...]:
    """Comparisons that bring the values of ranks `first` to `end` to their places: (i, j, is the smaller
    wanted, is the larger).

    Batcher's merge exchange (Knuth, The Art of Computer Programming, volume 3, 5.2.2, algorithm M), less what
    those ranks do not need.
    """
    pairs: list[tuple[int, int]] = []
    top = 1 << max((count - 1).bit_length() - 1, 0) if count > 1 else 0
    p = top
    while p > 0:
        q, r, d = top, 0, p
        while True:
            pairs += [(i, i + d) for i in range(count - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
    wanted = set(range(first, end))
    kept: list[tuple[int, int, bool, bool]] = []
    for i, j in reversed(pairs):
        if i in wanted or j in wanted:
            kept.append((i, j, i in wanted, j in wanted))
            wanted |= {i, j}
    return tuple(reversed(kept))


class Ranked:
    """Coordinate by coordinate, the mean of what is left when the `cut_off` smallest and largest values are
    gone.

    `cut_off` a share: the trimmed mean; all but the middle one or two: the median. Both: Yin et al.,
    "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates" (arXiv 1803.01498). With at
    most `cut_off` liars every coordinate lies within the range of the honest values; with more it can be
    anything. Does not depend on the order of the members. Needs three contributors to mean anything.
    """

    def __init__(self, values: Values, rows: Rows, cut_off: int) -> None:
        self._values, self._rows = values, rows
        self._first, self._end = cut_off, len(values) - cut_off
        self._network = network(len(values), self._first, self._end)

    def compute(self, block: Block, total: torch.Tensor, scratch: torch.Tensor) -> None:
        out: Row = total.numpy()
        found = self._values.read_all(block, self._rows.decoded(len(self._values), len(out)))
        for piece in pieces(len(out), len(self._values)):
            self.rank([values[piece] for values in found], out[piece])

    def rank(self, values: Sequence[Row], out: Row) -> None:
        """out[:] = the result for these values, one row per member, which are read only."""
        work = self._rows.work(2 * len(values), len(out))  # the other half is for who calls this
        rows = [work[nth, : len(out)] for nth in range(len(values))]
        spare = work[len(values), : len(out)]
        for row, given in zip(rows, values, strict=True):
            np.copyto(row, given)
        for i, j, smaller, larger in self._network:
            low, high = rows[i], rows[j]
            if smaller and larger:
                np.minimum(low, high, out=spare)
                np.maximum(low, high, out=high)
                rows[i], spare = spare, low
            elif smaller:
                np.minimum(low, high, out=low)
            else:
                np.maximum(low, high, out=high)
        kept = rows[self._first : self._end]
        with np.errstate(over="ignore", invalid="ignore"):
            _middle(kept, out)

    def spoilers(self) -> tuple[int, ...]:
        return self._values.spoilers()


def _middle(kept: Sequence[Row], out: Row) -> None:
    """The mean of sorted rows, held within them: it must not leave their range by rounding. Zeros are
    positive, as minima may not be.
    """
    if len(kept) == 1:
        np.add(kept[0], np.float32(0.0), out=out)
        return
    if len(kept) == 2:
        np.multiply(kept[0], np.float32(0.5), out=out)  # halves: a sum could overflow
        out += kept[1] * np.float32(0.5)
    else:
        np.add(kept[0], kept[1], out=out)
        for row in kept[2:]:
            out += row
        out /= np.float32(len(kept))
    np.maximum(out, kept[0], out=out)
    np.minimum(out, kept[-1], out=out)
    out += np.float32(0.0)


def pieces(size: int, members: int) -> list[slice]:
    """Some elements of a block, so that all members' rows of them stay in the cache.

    A power of two, so that sums over pieces come out alike on machines that cut a part into blocks of another
    size.
    """
    step = min(max(1 << (_ROWS_ELEMENTS // members).bit_length() - 1, _STEP_ELEMENTS_MIN), _STEP_ELEMENTS_MAX)
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


# ---- centered clipping


class CenteredClip:
    """v ← v + mean of (x − v)·min(1, radius/‖x − v‖), from the coordinate-wise median on, a few times.

    Karimireddy et al., "Learning from History for Byzantine Robust Optimization" (arXiv 2012.10333),
    algorithm 2, started from the median as BTARD does (arXiv 2106.11257), over each part by itself. The
    radius is relative: in medians of the distances to the first v, so that under a half of liars cannot
    stretch it beyond an honest distance. A contributor moves the result by radius/n per step at most: the
    error is bounded by what liars pull in all steps, radius·steps·(share of liars); honest values that lie
    close together are averaged.

    v stays a combination of the first v and the x, so that all distances follow from the inner products of x
    − v: two passes over the part, however many steps. n² inner products for n members make it dear in large
    groups.
    """

    def __init__(self, values: Values, rows: Rows, aggregation: Aggregation) -> None:
        self._values, self._rows, self._aggregation = values, rows, aggregation
        self._median = Ranked(values, rows, (len(values) - 1) // 2)
        self._shares: list[np.float32] = []

    def find(self, cut: Sequence[Block], total: torch.Tensor) -> None:
        """The first pass: `total` becomes the median of the part, and where the centre lies is known."""
        out: Row = total.numpy()
        lanes = np.zeros((len(self._values), len(self._values), _LANES))
        for block in cut:
            found = self._values.read_all(
                block, self._rows.decoded(len(self._values), block.stop - block.start)
            )
            for piece in pieces(block.stop - block.start, len(self._values)):
                median = out[block.start : block.stop][piece]
                self._median.rank([values[piece] for values in found], median)
                self._add_products([values[piece] for values in found], median, lanes)
        products = _fold(lanes)[..., 0]
        products += np.triu(products, 1).T
        self._shares = [np.float32(share) for share in _centre(products.tolist(), self._aggregation)]

    def compute(self, block: Block, total: torch.Tensor, scratch: torch.Tensor) -> None:
        """The second pass: `total` holds the median of this block."""
        out: Row = total.numpy()
        work: Row = scratch.numpy()
        median = out.copy()
        found = self._values.read_all(block, self._rows.decoded(len(self._values), len(out)))
        with np.errstate(over="ignore", invalid="ignore"):
            for values, share in zip(found, self._shares, strict=True):
                if share:
                    np.subtract(values, median, out=work)
                    np.multiply(work, share, out=work)
                    out += work
        out += np.float32(0.0)

    def spoilers(self) -> tuple[int, ...]:
        return self._values.spoilers()

    def _add_products(self, values: Sequence[Row], median: Row, lanes: npt.NDArray[np.float64]) -> None:
        """lanes[i, j] += (x_i − median)·(x_j − median) for all pairs of members, j not before i, summed until
        they fit the lanes.
        """
        members, size = len(values), len(median)
        work = self._rows.work(2 * members, size)
        apart, products = work[:members, :size], work[members : 2 * members, :size]
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for row, given in zip(apart, values, strict=True):
                np.subtract(given, median, out=row)
            squares = _fold(np.multiply(apart, apart, out=products))[:, 0]
            fits = bool(np.all(((squares > _SQUARES_MIN) & (squares < math.inf)) | ~apart.any(axis=1)))
            for nth in range(members):
                if fits:
                    found: npt.NDArray[Any] = _fold(
                        np.multiply(apart[nth:], apart[nth], out=products[nth:]), _LANES
                    )
                # more than float32 squares can be, or less: only liars are so far away, or everybody so close
                else:
                    found = _fold(np.multiply(apart[nth:], apart[nth], dtype=np.float64), _LANES)
                lanes[nth, nth:, : found.shape[-1]] += found


def _centre(products: Sequence[Sequence[float]], aggregation: Aggregation) -> list[float]:
    """Centered clipping in the coordinates of its contributions: v = median + Σ share·(x − median)."""
    members = len(products)
    shares = [0.0] * members
    start = sorted(math.sqrt(products[nth][nth]) for nth in range(members))
    radius = aggregation.radius * start[(members - 1) // 2]
    if not radius:
        return shares  # half of them are the median itself
    for _ in range(aggregation.iterations_max):
        to_centre = [
            math.fsum(product * share for product, share in zip(row, shares, strict=True)) for row in products
        ]
        length = math.fsum(share * towards for share, towards in zip(shares, to_centre, strict=True))
        squares = [products[nth][nth] - 2.0 * to_centre[nth] + length for nth in range(members)]
        pulls = [min(1.0, radius / math.sqrt(square)) if square > 0.0 else 1.0 for square in squares]
        rest = math.fsum(pulls)
        moved = [(pull - rest * share) / members for pull, share in zip(pulls, shares, strict=True)]
        shares = [share + step for share, step in zip(shares, moved, strict=True)]
        walked = math.fsum(a * b * products[i][j] for i, a in enumerate(moved) for j, b in enumerate(moved))
        if walked <= (_SETTLED * radius) ** 2:
            break
    return shares
