"""What a reducing member does with its span: which contributions each part waits for, and the arithmetic of
the average.

`Reduction` is a pure machine: chunks and failures go in, in any order, parts that can be reduced come out.
`Mean` is the arithmetic; it is fixed to the bit, so that anybody who holds the contributions gets the same
result: float32, members in group order, each weight relative to the largest, multiplications and additions
rounded one by one (NumPy's, never fused), one division at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from averaging.reduction.partition import Part
from swarm.compression import Buffer, Codec, view_bytes
from swarm.core.errors import PeerError


def relative_weights(weights: Sequence[float]) -> tuple[float, ...]:
    """Weights divided by the largest, rounded to float32: equal weights cost no multiplication, and large
    ones overflow nothing.
    """
    largest = max(weights, default=0.0)
    return tuple(float(np.float32(weight / largest)) if largest else 0.0 for weight in weights)


@dataclass(slots=True)
class _Progress:
    """One part on its way."""

    part: Part
    waiting: set[int]  # senders whose chunk is still to come
    payloads: dict[int, Buffer] = field(default_factory=dict)
    taken: bool = False


class Reduction:
    """The parts of one reducer. Senders are places in the group; the reducer's own contribution needs no
    chunk and is not counted here.
    """

    def __init__(self, parts: Sequence[Part], senders: Sequence[int], codec: Codec) -> None:
        self._codec = codec
        self._progress = {part.index: _Progress(part, set(senders)) for part in parts}
        # parts of which each sender's chunk is here
        self._came: dict[int, set[int]] = {sender: set() for sender in senders}
        self._taken = 0
        self._order = [part.index for part in parts]
        self._first_open = 0  # index into _order: every part before it was taken
        self.left_out: dict[int, str] = {}

    @property
    def senders(self) -> list[int]:
        """All of them, left out or not."""
        return list(self._came)

    def ready_at_start(self) -> list[int]:
        """Parts that wait for nobody: all of them when nobody else contributes."""
        return [index for index in self._order if not self._progress[index].waiting]

    def accept(self, sender: int, part: int, payload: Buffer) -> list[int]:
        """A chunk came: the parts (none or this one) that can be reduced now.

        PeerError, and nothing has changed: it is not what this sender's next chunk must be.
        """
        if sender not in self._came:
            raise PeerError("a chunk from a member that contributes nothing")
        if sender in self.left_out:
            raise PeerError(f"a chunk after being left out: {self.left_out[sender]}")
        progress = self._progress.get(part)
        if progress is None or part in self._came[sender]:
            raise PeerError(f"a chunk of part {part}, which is not reduced here or came before")
        size = self._codec.encoded_bytes(progress.part.numel)
        if len(payload) != size:
            raise PeerError(
                f"a chunk of part {part} with {len(payload)} bytes; {self._codec.name} takes {size}"
            )
        self._came[sender].add(part)
        progress.waiting.discard(sender)
        progress.payloads[sender] = payload
        return [part] if not progress.waiting and not progress.taken else []

    def leave_out(self, sender: int, reason: str) -> list[int]:
        """Reduce without this sender what is not reduced yet: the parts that waited for it alone. Without
        effect when repeated.
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

    def take(self, part: int) -> tuple[tuple[int, Buffer], ...]:
        """The contributions of a part that is ready, in group order; they are not held any longer."""
        progress = self._progress[part]
        assert not progress.waiting
        assert not progress.taken
        progress.taken = True
        self._taken += 1
        inputs = tuple(sorted(progress.payloads.items()))
        progress.payloads = {}
        while self._first_open < len(self._order) and self._progress[self._order[self._first_open]].taken:
            self._first_open += 1
        return inputs

    def waited_for(self, own: bool) -> list[int]:
        """Who holds up the first part that is not reduced, although others (`own`: the reducer itself) have
        given theirs.
        """
        if self._first_open == len(self._order):
            return []
        progress = self._progress[self._order[self._first_open]]
        return sorted(progress.waiting) if progress.payloads or own else []

    def ahead(self, sender: int) -> int:
        """How many chunks of this sender are held because others' are missing: what a reader bounds."""
        return len(self._came.get(sender, ())) - self._taken

    def remaining(self, sender: int) -> int:
        """How many chunks this sender still owes."""
        return (
            0
            if sender in self.left_out or sender not in self._came
            else len(self._order) - len(self._came[sender])
        )


@dataclass(frozen=True, slots=True)
class Contribution:
    """One member's values for a part: as they travelled, or (the reducer's own) as they are."""

    place: int
    weight: float  # relative, above 0
    values: Buffer | torch.Tensor  # a tensor: float32


@dataclass(frozen=True, slots=True)
class Job:
    """A part to reduce. Our own values are read from the vector when it is done: that may wait for a device."""

    part: Part
    contributions: Sequence[Contribution]  # in group order
    own: bool = False  # whether our own values belong to them, in their place in this order

    @property
    def empty(self) -> bool:
        """Whether nobody contributes."""
        return not self.own and not self.contributions

    def without(self, places: Sequence[int], own: int) -> Job:
        """The job without the contributions of these members; `own`: our place."""
        kept = [contribution for contribution in self.contributions if contribution.place not in places]
        return Job(self.part, kept, self.own and own not in places)


class Block(NamedTuple):
    """Some of a part's elements, and the bytes that they are in an encoding of it; both counted from the
    part's beginning.
    """

    start: int
    stop: int
    first_byte: int
    end_byte: int


def blocks(part: Part, codec: Codec) -> list[Block]:
    """A part, cut as its codec likes it."""
    edges = [*range(0, part.numel, codec.block_elements), part.numel]
    return [Block(a, b, codec.encoded_bytes(a), codec.encoded_bytes(b)) for a, b in itertools.pairwise(edges)]


class Values:
    """What members contribute to a part, read block by block: decoded, and shortened where it is clipped."""

    def __init__(self, contributions: Sequence[Contribution], codec: Codec, scales: Sequence[float]) -> None:
        """`scales`: by what each contribution is multiplied; 1.0 leaves it alone, and costs nothing."""
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
        """The nth contribution to this block: not to be written, valid until `scratch` (float32, of its size)
        is.
        """
        values, scale = self._values[nth], self._scales[nth]
        if values.dtype == torch.float32:
            found: npt.NDArray[np.float32] = values[block.start : block.stop].numpy()
        else:
            found = self._codec.decode(values[block.first_byte : block.end_byte], scratch).numpy()
        return found if scale == 1.0 else np.multiply(found, scale, out=scratch.numpy())

    def read_all(self, block: Block, rows: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
        """Every contribution to this block; `rows`: a row of scratch space for each, at least as long as the
        block.
        """
        return [
            self.read(nth, block, torch.from_numpy(rows[nth, : block.stop - block.start]))
            for nth in range(len(self))
        ]

    def spoilers(self) -> tuple[int, ...]:
        """See `spoilers`."""
        return spoilers(self._contributions, self._codec)


class Mean:
    """The weighted mean of one part's contributions (at least one, in group order), computed block by block.

    `scales`: by what contributions are multiplied before they are weighted; None for not at all.
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
        """total[:] = the mean of this block. `total` and `scratch` are flat float32 host tensors of its size.

        Payloads have been checked to be of the part's size; values have not: NaN and infinity show in the
        mean, and `spoilers` finds whose they are.
        """
        out: npt.NDArray[np.float32] = total.numpy()
        work: npt.NDArray[np.float32] = scratch.numpy()
        # where the sum so far is: with weight 1, the first values themselves, added to and not copied
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
        """See `spoilers`."""
        return self._values.spoilers()


def spoilers(contributions: Sequence[Contribution], codec: Codec) -> tuple[int, ...]:
    """Whose values are NaN or infinity, or more than the codec can carry. Nobody's: then a mean that is not
    finite overflowed.
    """
    return tuple(item.place for item in contributions if not _is_sound(item.values, codec))


def _is_sound(values: Buffer | torch.Tensor, codec: Codec) -> bool:
    if not isinstance(values, torch.Tensor):
        return codec.is_finite(view_bytes(values))
    if not values.numel():
        return True
    array = values.numpy()  # a NaN is its extrema
    return bool(np.maximum.reduce(array) <= codec.magnitude_max) and bool(
        np.minimum.reduce(array) >= -codec.magnitude_max
    )


def first_bad(values: torch.Tensor, magnitude_max: float) -> int | None:
    """The index of the first element that is NaN or more than `magnitude_max` in magnitude."""
    bad = (~(values.abs() <= magnitude_max)).nonzero()
    return int(bad[0]) if len(bad) else None
