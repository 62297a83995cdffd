"""Codecs that keep a few bits of every element: 8, 4, 2 (ternary) or 1 (the sign), with a scale for each
block.

Elements that share a byte lie far apart: a segment of n elements with p of them per byte is treated as p
planes of n / p, and byte j holds element j of each plane, the first in its lowest bits; elements that the
last plane lacks have the code of 0. So packing is a sum of planes, and no loop runs over single elements.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from swarm.compression.codec import register
from swarm.compression.segments import MAGNITUDE_MAX, SegmentCodec, inverse, round_, rows, scale_up, steps_of

_TERNARY_GRID = 1 << 16  # sums of 128 of these are exact in float32
_SIGN_GRID = 1 << 17
_SIGN_SUM = 128
# fraction of the mean magnitude: values below it become 0 (0.77 is best for a normal distribution)
_THRESHOLD = 0.75


@dataclass(frozen=True, slots=True)
class Packing:
    """`per_byte` whole numbers per byte, each a code of 8 / `per_byte` bits."""

    per_byte: int
    offset: float  # code = digit + offset, where digits are what `pack` is given
    gain: float  # number = code * gain + shift; a power of two
    shift: float

    @property
    def bits(self) -> int:
        """Return the number of bits of a code."""
        return 8 // self.per_byte

    def size(self, numel: int) -> int:
        """Return the number of bytes for `numel` numbers."""
        return -(-numel // self.per_byte)

    def pack(self, digits: torch.Tensor, codes: torch.Tensor) -> None:
        """Pack `digits` (m, n or more) float32 into `codes` (m, bytes) uint8. Digits beyond n fill the last
        byte.
        """
        width = codes.shape[1]
        planes = digits[:, : width * self.per_byte].view(-1, self.per_byte, width)
        weights = [float(1 << place * self.bits) for place in range(self.per_byte)]
        total = planes[:, 0]
        for place in range(1, self.per_byte):
            total = torch.add(total, planes[:, place], alpha=weights[place])  # whole numbers up to 255: exact
        codes.copy_(total.add(self.offset * sum(weights)) if self.offset else total)

    def unpack(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        """Unpack `codes` (m, bytes) to numbers, in `out` (m, n) float32."""
        (m, n), width = out.shape, codes.shape[1]
        room = out if n == width * self.per_byte else out.new_empty(m, width * self.per_byte)
        planes = room.view(m, self.per_byte, width)
        masks, factors = _columns(self, out.device)
        planes.copy_(codes.unsqueeze(1) & masks)
        planes.mul_(factors).add_(self.shift)  # by powers of two: exact
        if room is not out:
            out.copy_(room[:, :n])


@functools.lru_cache(maxsize=64)
def _columns(packing: Packing, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each place in a byte, the mask of its code and the factor that turns it into a number
    without the shift.
    """
    places = range(packing.per_byte)
    masks = [((1 << packing.bits) - 1) << place * packing.bits for place in places]
    factors = [packing.gain / (1 << place * packing.bits) for place in places]
    made = (
        torch.tensor(masks, dtype=torch.uint8, device=device),
        torch.tensor(factors, dtype=torch.float32, device=device),
    )
    return made[0][:, None], made[1][:, None]


@dataclass(frozen=True, slots=True)
class Rounded:
    """A quantizer with whole multiples, -levels to levels, of a step of (largest magnitude of the block) /
    levels; rounded to nearest, ties to even.

    A step is the product of the largest magnitude and the float32 nearest to 1 / levels; an element is
    multiplied with the step's reciprocal, and the product rounded. The one code beyond -levels, which is
    never written, is read as its number.
    """

    block: int
    levels: int  # 127: one element to the byte; 7: two

    def code_bytes(self, numel: int) -> int:
        return numel if self.levels == 127 else _NIBBLES.size(numel)

    def error_bound(self, magnitude: float) -> float:
        """Return half a step, and the error that rounding in float32 adds to it."""
        return magnitude * (0.5 + self.levels * 2.0**-21) / self.levels

    def quantize(self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        given = rows(values, self.block)
        work = torch.abs(given)
        magnitudes = torch.amax(work, dim=1, keepdim=True)
        steps = steps_of(magnitudes, self.levels)
        scales.copy_(steps.view(scales.shape))
        round_(torch.mul(given, inverse(steps), out=work))
        digits = work.view(values.shape[0], -1)
        if self.levels == 127:
            codes.view(torch.int8).copy_(digits[:, : values.shape[1]])
        else:
            _NIBBLES.pack(digits, codes)

    def restore(self, scales: torch.Tensor, codes: torch.Tensor, out: torch.Tensor) -> None:
        if self.levels == 127:
            out.copy_(codes.view(torch.int8))
        else:
            _NIBBLES.unpack(codes, out)
        scale_up(out, scales, self.block)

    def flaw(self, codes: npt.NDArray[np.uint8], numel: int | None) -> str:
        """Return "": every code is a number."""
        return ""


@dataclass(frozen=True, slots=True)
class Ternary:
    """A quantizer with -s, 0 or s: 0 up to 0.75 of the block's mean magnitude, and s the mean magnitude of
    the other elements, as in ternary weight networks (Li, Zhang, Liu, arXiv 1605.04711, section 2.1). The
    error is never longer than the input, as error feedback needs.

    Means are taken of magnitudes rounded to 1/65536 of the block's largest, so that sums are exact. The
    fourth code, which is never written, is read as 2 s.
    """

    block: int
    levels: int = 1

    def code_bytes(self, numel: int) -> int:
        return _TRITS.size(numel)

    def error_bound(self, magnitude: float) -> float:
        """Return the bound: an element can become 0, or become s although it is smaller."""
        return magnitude * (1.0 + 2.0**-15)

    def quantize(self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        given = rows(values, self.block)
        whole = torch.abs(given)
        magnitudes = torch.amax(whole, dim=1, keepdim=True)
        grains = steps_of(magnitudes, _TERNARY_GRID)  # the unit of the whole numbers below
        round_(whole.mul_(inverse(grains)))
        means = whole.sum(dim=1, keepdim=True) * _shares(values.shape[1], self.block, given)
        digits = round_(torch.mul(given, inverse(means * (2.0 * _THRESHOLD) * grains))).clamp_(-1.0, 1.0)
        kept = torch.abs(digits)
        counts = kept.sum(dim=1, keepdim=True)
        sums = whole.mul_(kept).sum(dim=1, keepdim=True)
        scales.copy_(
            _carried(torch.div(sums, counts.clamp_(min=1.0)) * grains, magnitudes).view(scales.shape)
        )
        _TRITS.pack(digits.view(values.shape[0], -1), codes)

    def restore(self, scales: torch.Tensor, codes: torch.Tensor, out: torch.Tensor) -> None:
        _TRITS.unpack(codes, out)
        scale_up(out, scales, self.block)

    def flaw(self, codes: npt.NDArray[np.uint8], numel: int | None) -> str:
        """Return "": every code is a number."""
        return ""


@dataclass(frozen=True, slots=True)
class Signs:
    """A quantizer with -s or s, and s the block's mean magnitude, as in signSGD with a norm (arXiv
    1901.09847) and 1-bit Adam (arXiv 2102.02888). Zeros of either sign count as positive. The error is never
    longer than the input; without error feedback it is a bias.

    The mean is taken of magnitudes rounded to 1/131072 of the block's largest, so that sums are exact.
    """

    block: int  # a multiple of 128
    levels: int = 1

    def code_bytes(self, numel: int) -> int:
        return _SIGNS.size(numel)

    def error_bound(self, magnitude: float) -> float:
        """Return the bound: a zero becomes s, and s is at most the largest magnitude."""
        return magnitude * (1.0 + 2.0**-15)

    def quantize(self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        given = rows(values, self.block)
        work = torch.abs(given)
        magnitudes = torch.amax(work, dim=1, keepdim=True)
        grains = steps_of(magnitudes, _SIGN_GRID)
        round_(work.mul_(inverse(grains)))
        sums = (
            work.view(-1, self.block // _SIGN_SUM, _SIGN_SUM)
            .sum(dim=2)
            .to(torch.int32)
            .sum(dim=1, keepdim=True)
        )
        means = sums.to(torch.float32) * _shares(values.shape[1], self.block, given) * grains
        scales.copy_(_carried(means, magnitudes).view(scales.shape))
        negative = torch.sign(given, out=work).neg_().clamp_(min=0.0)
        _SIGNS.pack(negative.view(values.shape[0], -1), codes)

    def restore(self, scales: torch.Tensor, codes: torch.Tensor, out: torch.Tensor) -> None:
        _SIGNS.unpack(codes, out)
        scale_up(out, scales, self.block)

    def flaw(self, codes: npt.NDArray[np.uint8], numel: int | None) -> str:
        """Return "": every code is a number."""
        return ""


def _carried(scales: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    """Return the scales, with NaN where the largest magnitude of the block exceeds MAGNITUDE_MAX."""
    return scales.masked_fill(~(magnitudes <= MAGNITUDE_MAX), math.nan)


def _shares(numel: int, block: int, given: torch.Tensor) -> torch.Tensor | float:
    """Return 1 / (elements of the block), by block of a segment of `numel`: the last may hold fewer than the
    others.
    """
    rest = numel % block
    if not rest:
        return 1.0 / block
    shares = torch.full((given.shape[0], 1), 1.0 / block, dtype=torch.float32, device=given.device)
    shares[-1] = float(np.float32(1.0 / rest))
    return shares


_NIBBLES = Packing(per_byte=2, offset=8.0, gain=1.0, shift=-8.0)
_TRITS = Packing(per_byte=4, offset=1.0, gain=1.0, shift=-1.0)
_SIGNS = Packing(per_byte=8, offset=0.0, gain=-2.0, shift=1.0)  # digits are 1 for negative values

INT8 = SegmentCodec("int8", 4, Rounded(block=4096, levels=127))
INT4 = SegmentCodec("int4", 5, Rounded(block=128, levels=7))
INT2 = SegmentCodec("int2", 6, Ternary(block=128))
SIGN = SegmentCodec("sign", 7, Signs(block=4096))

for _codec in (INT8, INT4, INT2, SIGN):
    register(_codec)
