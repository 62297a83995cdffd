"""The work of a reducer on its shard: which contributions each chunk waits for, and the arithmetic of the
average.

`Reduction` is a pure state machine: contributions and failures go in, in any order, and chunks that can be
reduced come out. `Mean` is the arithmetic. It is fixed to the bit, so that every process that holds the
contributions gets the same result: float32, members in group order, each weight relative to the largest,
multiplications and additions rounded one by one (NumPy's, never fused), one division at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from averaging.reduction.partition import Chunk
from swarm.compression import Buffer, Codec, view_bytes
from swarm.core.errors import PeerError


def relative_weights(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights divided by the largest, rounded to float32: equal weights cost no multiplication,
    and large ones do not overflow.
    """
    largest = max(weights, default=0.0)
    return tuple(float(np.float32(weight / largest)) if largest else 0.0 for weight in weights)


@dataclass(slots=True)
class _Progress:
    """The state of one chunk."""

    chunk: Chunk
    waiting: set[int]  # senders whose contribution is still to come
    came: set[int] = field(default_factory=set)  # senders whose contribution came
    taken: bool = False


class Reduction:
    """The chunks of one reducer. Senders are places in the group. The reducer's own contribution is not sent
    and not counted here. The values themselves are kept elsewhere.
    """

    def __init__(self, chunks: Sequence[Chunk], senders: Sequence[int], codec: Codec) -> None:
        self._codec = codec
        self._progress = {chunk.index: _Progress(chunk, set(senders)) for chunk in chunks}
        # chunks to which each sender has contributed
        self._came: dict[int, set[int]] = {sender: set() for sender in senders}
        self._taken = 0
        self._order = [chunk.index for chunk in chunks]
        self._first_open = 0  # index into _order: every chunk before it was taken
        self.left_out: dict[int, str] = {}

    @property
    def senders(self) -> list[int]:
        """Return all senders, left out or not."""
        return list(self._came)

    def ready_at_start(self) -> list[int]:
        """Return the chunks that wait for no sender: all of them when nobody else contributes."""
        return [index for index in self._order if not self._progress[index].waiting]

    def accept(self, sender: int, chunk: int, size_bytes: int) -> list[int]:
        """Count a contribution of `size_bytes`, and return the chunks (none or this one) that can be reduced
        now.

        Raises PeerError, with nothing changed, when it is not the contribution that this sender must send.
        """
        if sender not in self._came:
            raise PeerError("a contribution from a member that contributes nothing")
        if sender in self.left_out:
            raise PeerError(f"a contribution after being left out: {self.left_out[sender]}")
        progress = self._progress.get(chunk)
        if progress is None or chunk in self._came[sender]:
            raise PeerError(f"a contribution to chunk {chunk}, which is not reduced here or came before")
        size = self._codec.encoded_bytes(progress.chunk.numel)
        if size_bytes != size:
            raise PeerError(
                f"a contribution to chunk {chunk} with {size_bytes} bytes; {self._codec.name} takes {size}"
            )
        self._came[sender].add(chunk)
        progress.waiting.discard(sender)
        progress.came.add(sender)
        return [chunk] if not progress.waiting and not progress.taken else []

    def leave_out(self, sender: int, reason: str) -> list[int]:
        """Reduce without this sender from now on, and return the chunks that waited for it alone. Does
        nothing when repeated.
        """
        if sender not in self._came or sender in self.left_out:
            return []
        self.left_out[sender] = reason
        ready = []
        for index in self._order:
            progress = self._progress[index]
            if sender not in progress.waiting:
                continue
            progress.waiting.discard(sender)
            if not progress.waiting and not progress.taken:
                ready.append(index)
        return ready

    def take(self, chunk: int) -> tuple[int, ...]:
        """Begin to reduce a chunk that is ready: return its contributors, in group order."""
        progress = self._progress[chunk]
        assert not progress.waiting
        assert not progress.taken
        progress.taken = True
        self._taken += 1
        while self._first_open < len(self._order) and self._progress[self._order[self._first_open]].taken:
            self._first_open += 1
        return tuple(sorted(progress.came))

    def waited_for(self, own: bool) -> list[int]:
        """Return the senders that delay the first chunk that is not reduced, although others (`own`: the
        reducer itself) have contributed to it.
        """
        if self._first_open == len(self._order):
            return []
        progress = self._progress[self._order[self._first_open]]
        return sorted(progress.waiting) if progress.came or own else []

    def ahead(self, sender: int) -> int:
        """Return how many contributions of this sender are held because others are missing. Readers limit
        this number.
        """
        return len(self._came.get(sender, ())) - self._taken

    def remaining(self, sender: int) -> int:
        """Return how many contributions of this sender are still to come."""
        return (
            0
            if sender in self.left_out or sender not in self._came
            else len(self._order) - len(self._came[sender])
        )


@dataclass(frozen=True, slots=True)
class Contribution:
    """One member's values of a chunk: as they travelled, or (the reducer's own) not encoded."""

    place: int
    weight: float  # relative, above 0
    values: Buffer | torch.Tensor  # a tensor: float32


@dataclass(frozen=True, slots=True)
class ReductionJob:
    """A chunk to reduce. This member's own values are read from the vector when the work is done, because
    reading may wait for a device.
    """

    chunk: Chunk
    contributions: Sequence[Contribution]  # in group order
    own: bool = False  # whether this member contributes as well

    @property
    def empty(self) -> bool:
        """Return whether nobody contributes."""
        return not self.own and not self.contributions


class Block(NamedTuple):
    """A range of a chunk's elements, and its range of bytes in the encoded chunk; both relative
    to the chunk.
    """

    start: int
    stop: int
    first_byte: int
    end_byte: int


def blocks(chunk: Chunk, codec: Codec) -> list[Block]:
    """Return the blocks of a chunk, in the size that its codec prefers."""
    edges = [*range(0, chunk.numel, codec.block_elements), chunk.numel]
    return [Block(a, b, codec.encoded_bytes(a), codec.encoded_bytes(b)) for a, b in itertools.pairwise(edges)]


class Values:
    """The values that members contribute to a chunk, read block by block: decoded, and scaled where they are
    clipped.
    """

    def __init__(self, contributions: Sequence[Contribution], codec: Codec, scales: Sequence[float]) -> None:
        """Prepare the contributions. `scales`: the factor of each one; 1.0 leaves it unchanged and costs
        nothing.
        """
        self._codec = codec
        self._contributions = contributions
        self._values = [
            item.values if isinstance(item.values, torch.Tensor) else view_bytes(item.values)
            for item in contributions
        ]
        self._scales = [np.float32(scale) for scale in scales]

    def __len__(self) -> int:
        return len(self._values)

    def read(self, nth: int, block: Block, scratch: torch.Tensor) -> npt.NDArray[np.float32]:
        """Return the nth contribution to this block, read-only, valid until `scratch` (float32, of its size)
        changes.
        """
        values, scale = self._values[nth], self._scales[nth]
        if values.dtype == torch.float32:
            found: npt.NDArray[np.float32] = values[block.start : block.stop].numpy()
        else:
            found = self._codec.decode(values[block.first_byte : block.end_byte], scratch).numpy()
        return found if scale == 1.0 else np.multiply(found, scale, out=scratch.numpy())

    def read_all(self, block: Block, rows: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
        """Return every contribution to this block. `rows`: a row of scratch space for each, at least as long
        as the block.
        """
        return [
            self.read(nth, block, torch.from_numpy(rows[nth, : block.stop - block.start]))
            for nth in range(len(self))
        ]

    def spoilers(self) -> tuple[int, ...]:
        """Return the members whose values cannot be averaged; see the function `spoilers`."""
        return spoilers(self._contributions, self._codec)


class Mean:
    """The weighted mean of the contributions to one chunk (at least one, in group order), computed block by
    block.

    `scales`: the factors of the contributions before weighting; None for no scaling.
    """

    def __init__(
        self, contributions: Sequence[Contribution], codec: Codec, scales: Sequence[float] | None = None
    ) -> None:
        self._values = Values(contributions, codec, [1.0] * len(contributions))
        self._divisor = np.float32(sum(contribution.weight for contribution in contributions))
        scales = scales or [1.0] * len(contributions)
        self._factors = [
            np.float32(item.weight * scale) for item, scale in zip(contributions, scales, strict=True)
        ]

    def compute(self, block: Block, total: torch.Tensor, scratch: torch.Tensor) -> None:
        """Write the mean of this block to `total`. `total` and `scratch` are flat float32 host tensors of its
        size.

        The sizes of payloads have been checked, their values have not: NaN and infinity show in the mean, and
        `spoilers` finds the members that sent them.
        """
        out: npt.NDArray[np.float32] = total.numpy()
        work: npt.NDArray[np.float32] = scratch.numpy()
        # The sum so far. With weight 1 it starts as the first values themselves, without a copy.
        running = out
        with np.errstate(over="ignore", invalid="ignore"):
            for nth, factor in enumerate(self._factors):
                found = self._values.read(nth, block, scratch if nth else total)
                if nth:
                    running = np.add(
                        running, found if factor == 1.0 else np.multiply(found, factor, out=work), out=out
                    )
                else:
                    running = found if factor == 1.0 else np.multiply(found, factor, out=out)
            np.divide(running, self._divisor, out=out)

    def spoilers(self) -> tuple[int, ...]:
        """Return the members whose values cannot be averaged; see the function `spoilers`."""
        return self._values.spoilers()


def spoilers(contributions: Sequence[Contribution], codec: Codec) -> tuple[int, ...]:
    """Return the places of members whose values are NaN, infinite or larger than the codec can carry. If
    there are none, a mean that is not finite overflowed.
    """
    return tuple(item.place for item in contributions if not _is_sound(item.values, codec))


def _is_sound(values: Buffer | torch.Tensor, codec: Codec) -> bool:
    if not isinstance(values, torch.Tensor):
        return codec.is_finite(view_bytes(values))
    if not values.numel():
        return True
    array = values.numpy()  # NaN propagates to both extrema
    return bool(np.maximum.reduce(array) <= codec.magnitude_max) and bool(
        np.minimum.reduce(array) >= -codec.magnitude_max
    )


def first_bad(values: torch.Tensor, magnitude_max: float) -> int | None:
    """Return the index of the first element that is NaN or larger than `magnitude_max` in magnitude; None if
    there is none.
    """
    bad = (~(values.abs() <= magnitude_max)).nonzero()
    return int(bad[0]) if len(bad) else None
