"""The rules that combine the members' values of a chunk: their mean, or a rule whose result a minority of
dishonest members cannot move far.

All rules use element by element additions, multiplications, divisions, minima and maxima of IEEE numbers,
each rounded by itself; sums over a chunk are added in halves, never in the order of a library. So the same
contributions in the same group order give the same bits on any processor, and every process that holds them
can recompute an average. (A process that flushes denormals would break that.)

Weights are not verified. The mean uses them; the robust rules count every contributor once, because a
dishonest member could otherwise claim a large batch. With one contributor every rule returns its values, with
two their mean (`median_of_three`: by weights, within limits): no rule can tell which of two is dishonest.
Robust rules limit what senders can do, not what a reducer can: that takes an audit
(`averaging.reduction.audit`).
"""

from __future__ import annotations

import functools
import math
import statistics
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from averaging.reduction.reduce import Block, Contribution, Mean, Values, spoilers
from swarm.compression import Codec
from swarm.core.errors import UsageError

Row: TypeAlias = npt.NDArray[np.float32]
F = TypeVar("F", np.float32, np.float64)
AggregationRule: TypeAlias = Literal["mean", "trimmed_mean", "median", "centered_clip", "median_of_three"]
RULES: tuple[AggregationRule, ...] = typing.get_args(AggregationRule)

# elements of all members' rows processed at once: half a megabyte, which stays in a core's cache
_ROWS_ELEMENTS = 1 << 17
_STEP_ELEMENTS_MIN, _STEP_ELEMENTS_MAX = 1 << 10, 1 << 15
_SQUARES_MIN = 1e-24  # a sum of squares below this has lost some to underflow in float32
_SUM_WIDTH = 64  # partial sums over a chunk have this width until its end
# centered_clip: steps towards the centre; they are cheap, and each lets dishonest members pull once more
CLIP_ITERATIONS = 5
PAIR_RATIO_MAX = 4.0  # median_of_three: a weight is a claim
_SETTLED = 1e-6  # fraction of the radius: iteration stops when the centre moves less


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """The rule by which a group combines its vectors. Peers whose settings differ never meet, because the
    settings are in their schema.
    """

    # "trimmed_mean", "median" and "centered_clip" resist a minority of dishonest members; "mean" does not.
    # "median_of_three" is the median from three contributors on, and the mean by weights of two, one of which
    # may have done much more than the other; the larger weight counts at most PAIR_RATIO_MAX times as much.
    rule: AggregationRule = "mean"
    # trimmed_mean: share of the contributors cut off at either end; must be at least the expected share of
    # dishonest members
    trim: float = 0.25
    # centered_clip: in medians of the contributions' distances; smaller: dishonest members have less
    # influence, and the mean is approached more slowly
    radius: float = 1.0
    # contributions longer than this many medians are shortened to that, chunk by chunk; None: never
    clip_to_median: float | None = None

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise UsageError(f"there is no aggregation {self.rule!r}; there is: {', '.join(RULES)}")
        if not 0.0 < self.trim < 0.5:
            raise UsageError(f"trim is above 0 and below 0.5, not {self.trim!r}")
        if not 0.0 < self.radius < math.inf:
            raise UsageError(f"radius is a positive number, not {self.radius!r}")
        if self.clip_to_median is not None and not 1.0 <= self.clip_to_median < math.inf:
            raise UsageError(
                f"clip_to_median is at least 1, or None for no clipping, not {self.clip_to_median!r}"
            )

    @property
    def compatibility_tag(self) -> str:
        """Return the settings that matter as text: equal exactly when two peers use the same rule."""
        own = {
            "trimmed_mean": f" trim {self.trim!r}",
            "centered_clip": f" radius {self.radius!r} in {CLIP_ITERATIONS}",
            "median_of_three": f" pairs to {PAIR_RATIO_MAX!r}",
        }
        clip = "" if self.clip_to_median is None else f", clipped to {float(self.clip_to_median)!r} medians"
        return f"{self.rule}{own.get(self.rule, '')}{clip}"


MEAN = Aggregation()


def aggregation_of(rule: AggregationRule | Aggregation, clip_to_median: float | None) -> Aggregation:
    """Return the aggregation that a caller asked for: by a rule's name or with its numbers, and with the
    limit on norms that is given with it. Raises UsageError when there is no such rule.
    """
    if not isinstance(rule, Aggregation):
        return Aggregation(rule=rule, clip_to_median=clip_to_median)
    return rule if clip_to_median is None else replace(rule, clip_to_median=clip_to_median)


class Rule(Protocol):
    """The aggregation of one chunk, block by block."""

    def compute(self, block: Block, total: torch.Tensor, scratch: torch.Tensor) -> None:
        """Write the result for this block to `total`. Both tensors are flat float32 on the host,
        of its size.
        """
        ...

    def spoilers(self) -> tuple[int, ...]:
        """Return the places whose values are NaN or infinite, when a result is. If there are none, the result
        overflowed.
        """
        ...


class Rows:
    """Scratch space of the rules that compare members, kept from chunk to chunk: a few floats per member and
    element of a block.
    """

    def __init__(self) -> None:
        self._decoded: Row = np.empty((0, 0), np.float32)
        self._work: Row = np.empty((0, 0), np.float32)

    def decoded(self, members: int, elements: int) -> Row:
        """Return space for the contributions to a block: at least this many rows and columns."""
        self._decoded = _grown(self._decoded, members, elements)
        return self._decoded

    def work(self, rows: int, elements: int) -> Row:
        """Return scratch space for a part of a block; its content is not kept from call to call."""
        self._work = _grown(self._work, rows, elements)
        return self._work


def _grown(room: Row, rows: int, columns: int) -> Row:
    if room.shape[0] >= rows and room.shape[1] >= columns:
        return room
    return np.empty((max(room.shape[0], rows), max(room.shape[1], columns)), np.float32)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A chunk that can be aggregated now, unless `spoiled` names members whose values prevent it."""

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
    """Compute what a rule needs of a whole chunk before its first block is aggregated.

    `contributions`: at least one, in group order, their payloads of the right size and otherwise unchecked.
    `total`: flat float32, of the chunk's size; the rule overwrites it.
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
    if aggregation.rule == "median_of_three" and len(contributions) == 2:
        return Prepared(Mean(_capped_pair(contributions), codec, scales), clipped)
    if aggregation.rule in ("median", "median_of_three"):
        return Prepared(Ranked(values, rows, (len(contributions) - 1) // 2), clipped)
    if aggregation.rule == "trimmed_mean":
        return Prepared(Ranked(values, rows, trimmed(aggregation.trim, len(contributions))), clipped)
    centered = CenteredClip(values, rows, aggregation)
    centered.find(cut, total)
    return Prepared(centered, clipped)


def _capped_pair(contributions: Sequence[Contribution]) -> list[Contribution]:
    """Return two contributions with the larger weight cut to PAIR_RATIO_MAX times the smaller one."""
    weight_max = PAIR_RATIO_MAX * min(item.weight for item in contributions)
    return [replace(item, weight=min(item.weight, weight_max)) for item in contributions]


# ---- clipping


def norms(
    contributions: Sequence[Contribution], codec: Codec, cut: Sequence[Block], rows: Rows
) -> list[float]:
    """Return the Euclidean norm of every contribution to a chunk, of the values as its reducer has them."""
    values = Values(contributions, codec, [1.0] * len(contributions))
    scratch = rows.decoded(1, max((block.stop - block.start for block in cut), default=0))
    product, sums = rows.work(2, _STEP_ELEMENTS_MAX)[:2, :_STEP_ELEMENTS_MAX]

    def pieces_of(nth: int) -> Iterator[Row]:
        for block in cut:
            found = values.read(nth, block, torch.from_numpy(scratch[0, : block.stop - block.start]))
            for piece in pieces(len(found), 1):
                yield found[piece]

    lengths = []
    for nth in range(len(contributions)):
        sums[:] = 0.0
        with np.errstate(over="ignore", under="ignore"):
            for found in pieces_of(nth):
                used = sums[: len(found)]
                np.add(used, np.multiply(found, found, out=product[: len(found)]), out=used)
            squares = float(_fold(sums)[0])
        # The squares overflow or underflow float32, or all values are zeros.
        if not _SQUARES_MIN < squares < math.inf:
            squares = math.fsum(
                float(_fold(np.multiply(found, found, dtype=np.float64))[0])
                for found in pieces_of(nth)
                if found.any()
            )
        lengths.append(math.sqrt(squares))
    return lengths


def clip_scales(lengths: Sequence[float], multiple: float) -> list[float]:
    """Return the factor of each contribution, so that none is longer than `multiple` medians; 1.0 for those
    that are not clipped.

    The median of an even number is the mean of the two in the middle. Where it is 0 (most contribute nothing
    to this chunk, for instance an embedding's unused rows) no contribution is clipped: one honest gradient
    among zeros is not an attack.
    """
    longest = multiple * statistics.median(lengths)
    return [longest / length if length > longest > 0.0 else 1.0 for length in lengths]


def _fold(values: npt.NDArray[F], width: int = 1) -> npt.NDArray[F]:
    """Return sums along the last axis: halves are added to each other until at most `width` elements are
    left. Overwrites `values`.
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
    """Return how many values are cut off at either end: `trim` of them, at least one as soon as there are
    three, and never all.
    """
    cut_off = max(math.floor(trim * contributors + 1e-9), 1)
    return min(cut_off, (contributors - 1) // 2)


@functools.lru_cache(maxsize=512)
def network(count: int, first: int, end: int) -> tuple[tuple[int, int, bool, bool], ...]:
    """Return the comparisons that bring the values of ranks `first` to `end` to their places: (i, j, is the
    smaller needed, is the larger needed).

    Batcher's merge exchange (Knuth, The Art of Computer Programming, volume 3, 5.2.2, algorithm M), without
    the comparisons that those ranks do not need.
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
    """The mean of each coordinate after the `cut_off` smallest and largest values are removed.

    With a fraction of the members as `cut_off` this is the trimmed mean; with all but the middle one or two
    it is the median. Both: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
    Rates" (arXiv 1803.01498). With at most `cut_off` dishonest members every coordinate lies within the range
    of the honest values; with more it can be anything. Does not depend on the order of the members. Needs
    three contributors to have an effect.
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
        """Write the result for these values, one read-only row per member, to `out`."""
        work = self._rows.work(2 * len(values), len(out))  # the caller uses the other half
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
    """Write the mean of sorted rows, clamped to their range, which rounding must not leave. Zeros are
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
    """Cut a block of `size` elements into pieces so small that the rows of all members stay in the cache.

    The step is a power of two, so that sums over pieces are equal on machines that cut a chunk into blocks of
    another size.
    """
    step = min(max(1 << (_ROWS_ELEMENTS // members).bit_length() - 1, _STEP_ELEMENTS_MIN), _STEP_ELEMENTS_MAX)
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


# ---- centered clipping


class CenteredClip:
    """Centered clipping: v ← v + mean of (x − v)·min(1, radius/‖x − v‖), from the coordinate-wise median on,
    a few times.

    Karimireddy et al., "Learning from History for Byzantine Robust Optimization" (arXiv 2012.10333),
    algorithm 2, started from the median as BTARD does (arXiv 2106.11257), over each chunk by itself. The
    radius is relative to the median of the distances to the first v, so that a minority of dishonest members
    cannot stretch it beyond an honest distance. A contributor moves the result by radius/n per step at most,
    so the error is at most radius·steps·(share of dishonest members); honest values that lie close together
    are averaged.

    v stays a combination of the first v and the x, so that all distances follow from the inner products of x
    − v: two passes over the chunk, whatever the number of steps. n² inner products for n members make it
    expensive in large groups.
    """

    def __init__(self, values: Values, rows: Rows, aggregation: Aggregation) -> None:
        self._values, self._rows, self._aggregation = values, rows, aggregation
        self._median = Ranked(values, rows, (len(values) - 1) // 2)
        self._shares: list[np.float32] = []

    def find(self, cut: Sequence[Block], total: torch.Tensor) -> None:
        """Make the first pass: write the median of the chunk to `total`, and compute where the
        centre lies.
        """
        out: Row = total.numpy()
        sums = np.zeros((len(self._values), len(self._values), _SUM_WIDTH))
        for block in cut:
            found = self._values.read_all(
                block, self._rows.decoded(len(self._values), block.stop - block.start)
            )
            for piece in pieces(block.stop - block.start, len(self._values)):
                median = out[block.start : block.stop][piece]
                self._median.rank([values[piece] for values in found], median)
                self._add_products([values[piece] for values in found], median, sums)
        products = _fold(sums)[..., 0]
        products += np.triu(products, 1).T
        self._shares = [np.float32(share) for share in _centre(products.tolist(), self._aggregation)]

    def compute(self, block: Block, total: torch.Tensor, scratch: torch.Tensor) -> None:
        """Make the second pass: `total` holds the median of this block and is overwritten."""
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

    def _add_products(self, values: Sequence[Row], median: Row, sums: npt.NDArray[np.float64]) -> None:
        """Add (x_i − median)·(x_j − median) to sums[i, j] for all pairs of members with j not before i,
        folded to the width of `sums`.
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
                        np.multiply(apart[nth:], apart[nth], out=products[nth:]), _SUM_WIDTH
                    )
                # The squares overflow or underflow float32: only dishonest members are so far away, or all so
                # close.
                else:
                    found = _fold(np.multiply(apart[nth:], apart[nth], dtype=np.float64), _SUM_WIDTH)
                sums[nth, nth:, : found.shape[-1]] += found


def _centre(products: Sequence[Sequence[float]], aggregation: Aggregation) -> list[float]:
    """Return the result of centered clipping in the coordinates of its contributions: v = median + Σ share·(x
    − median).
    """
    members = len(products)
    shares = [0.0] * members
    start = sorted(math.sqrt(products[nth][nth]) for nth in range(members))
    radius = aggregation.radius * start[(members - 1) // 2]
    if not radius:
        return shares  # half of them are the median itself
    for _ in range(CLIP_ITERATIONS):
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
