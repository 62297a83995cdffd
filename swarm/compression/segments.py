"""Codecs with a scale for each block of elements: their layout on the wire, and the iteration over a tensor.

A tensor is encoded segment by segment, each of `SEGMENT_ELEMENTS`, the last one shorter: first the scales of
the segment's blocks (float32), then the codes of its elements. So an encoding may be cut at every segment,
and a segment with all its intermediate results stays in a core's cache.

**The same values give the same bytes on every machine, device and number of threads**: all members of a group
hold one encoding, and audits compare them. Quantizers use only operations whose result IEEE 754 fixes
(products, sums and quotients of two tensors, comparisons, minima and maxima), and sums of many only over
whole numbers so small that float32 holds them exactly in any order. A tensor divided by a number is not among
these: some devices multiply by its reciprocal. `round_` rounds to nearest, ties to even. Blocks whose largest
magnitude is below `MAGNITUDE_MIN` become zeros, and no result depends on how a processor treats subnormal
numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from swarm.compression.codec import Buffer, exact_device, view_bytes, view_tensor

SEGMENT_ELEMENTS = 1 << 14
# limits of values: so far from float32's limits that nothing here overflows, and no reciprocal is subnormal
MAGNITUDE_MAX = 2.0**100
MAGNITUDE_MIN = 2.0**-90
_STEP_MIN = 2.0**-98  # smallest scale above 0: MAGNITUDE_MIN / 2 by the largest number of levels
_SCALE_BYTES = 4
# processed at once on a device, where a call costs more than its work: 16 MiB for each temporary
_DEVICE_SEGMENTS = 256
_HOST_SEGMENTS = 8  # on the host: as much as one core's cache holds
# torch splits an operation among a team of threads from this many elements on, and its slowest thread can
# take milliseconds where peers and trainers share the cores. A segment is half of that.
_TEAM_ELEMENTS = 1 << 15
_ROUNDER = 1.5 * 2.0**23  # a float32 of this size has no fraction


class Quantizer(Protocol):
    """The part of a codec that differs between codecs. A batch has `m` rows, each a segment's elements: m is
    1 wherever n is not SEGMENT_ELEMENTS.
    """

    @property
    def block(self) -> int:
        """Return the number of elements that share a scale: a power of two, at most SEGMENT_ELEMENTS."""
        ...

    @property
    def levels(self) -> int:
        """Return the largest |code| that `quantize` writes: a block's values reach up to this many times its
        scale.
        """
        ...

    def code_bytes(self, numel: int) -> int:
        """Return the size of the codes of a segment, or of its first `numel` elements; additive for whole
        blocks.
        """
        ...

    def error_bound(self, magnitude: float) -> float:
        """Return the bound of `Codec.error_bound`, without elements that become zero because of
        MAGNITUDE_MIN.
        """
        ...

    def quantize(self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        """Quantize `values` (m, n) float32 to `scales` (m, blocks) float32 and `codes` (m, code bytes) uint8,
        all on one device.

        The scale of a block with NaN or infinity is NaN or infinity, and that of a block with a magnitude
        above MAGNITUDE_MAX is above `scale_max`.
        """
        ...

    def restore(self, scales: torch.Tensor, codes: torch.Tensor, out: torch.Tensor) -> None:
        """Restore the values to `out` (m, n), for any codes. `out` is finite exactly if all scales are,
        unless `flaw` has found an error.
        """
        ...

    def flaw(self, codes: npt.NDArray[np.uint8], numel: int | None) -> str:
        """Return what is wrong with the codes (m, code bytes) of segments, if codes can be invalid. `numel`:
        elements of each; None: not known.
        """
        ...


@dataclass(frozen=True, slots=True)
class SegmentCodec:
    """A quantizer with a name, over tensors of any length. Satisfies `Codec`."""

    name: str
    wire_id: int
    quantizer: Quantizer
    version: int = 1

    @property
    def block_elements(self) -> int:
        """Return a multiple of 32768 everywhere, so that sums over a chunk's blocks are equal everywhere (see
        `averaging.reduction.robust.pieces`).
        """
        return max(_host_segments() * SEGMENT_ELEMENTS, _TEAM_ELEMENTS)

    @property
    def magnitude_max(self) -> float:
        return MAGNITUDE_MAX

    @property
    def bits_per_element(self) -> float:
        return 8.0 * self.encoded_bytes(SEGMENT_ELEMENTS) / SEGMENT_ELEMENTS

    def encoded_bytes(self, numel: int) -> int:
        whole, rest = divmod(numel, SEGMENT_ELEMENTS)
        return whole * self._segment_bytes(SEGMENT_ELEMENTS) + self._segment_bytes(rest)

    def error_bound(self, magnitude: float) -> float:
        """Return the bound for |values| up to `magnitude`; blocks that are smaller than MAGNITUDE_MIN as a
        whole become zeros.
        """
        return max(self.quantizer.error_bound(magnitude), min(magnitude, MAGNITUDE_MIN))

    def encode(self, values: torch.Tensor, scratch: torch.Tensor) -> memoryview:
        encoded = scratch[: self.encoded_bytes(values.numel())]
        place = encoded
        if values.device.type != "cpu":
            values = values.to(exact_device(values.device))
        if values.device.type != "cpu" or encoded.storage_offset() % _SCALE_BYTES:
            place = torch.empty(encoded.numel(), dtype=torch.uint8, device=values.device)
        self.write(values, place)
        if place is not encoded:
            encoded.copy_(place)  # the only bytes that leave the device
        return view_tensor(encoded)

    def write(self, values: torch.Tensor, out: torch.Tensor) -> None:
        place = exact_device(values.device)
        if place != values.device:
            written = torch.empty(out.numel(), dtype=torch.uint8, device=place)
            self.write(values.to(place), written)
            out.copy_(written)
            return
        for source, target in self._batches(values, out):
            self.quantizer.quantize(source, *self._split(target, source.shape[1]))

    def decode(self, payload: Buffer | torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        place = exact_device(scratch.device)
        if place != scratch.device:
            return scratch.copy_(
                self.decode(payload, torch.empty(scratch.numel(), dtype=torch.float32, device=place))
            )
        encoded = payload if isinstance(payload, torch.Tensor) else view_bytes(payload)
        if encoded.device != place:
            encoded = encoded.to(place)
        elif encoded.storage_offset() % _SCALE_BYTES:
            encoded = encoded.clone()
        for target, source in self._batches(scratch, encoded):
            self.quantizer.restore(*self._split(source, target.shape[1]), target)
        return scratch

    def is_finite(self, payload: Buffer | torch.Tensor) -> bool:
        return not self._flaw(payload, None)

    def flaw(self, payload: Buffer | torch.Tensor, numel: int) -> str:
        size = len(payload)
        if size != self.encoded_bytes(numel):
            return f"{numel} elements in {self.name} are {self.encoded_bytes(numel)} bytes, not {size}"
        return self._flaw(payload, numel)

    def _flaw(self, payload: Buffer | torch.Tensor, numel: int | None) -> str:
        raw = payload if isinstance(payload, torch.Tensor) else view_bytes(payload)
        array: npt.NDArray[np.uint8] = raw.numpy()
        whole, rest = divmod(len(array), self._segment_bytes(SEGMENT_ELEMENTS))
        cut = len(array) - rest
        if whole and (
            found := self._flaw_of(
                array[:cut].reshape(whole, -1), self._blocks(SEGMENT_ELEMENTS), SEGMENT_ELEMENTS
            )
        ):
            return found
        if not rest:
            return ""
        # the last may be short
        blocks = -(-rest // (_SCALE_BYTES + self.quantizer.code_bytes(self.quantizer.block)))
        if rest <= blocks * _SCALE_BYTES:
            return f"{len(array)} bytes are no encoding of any number of elements in {self.name}"
        return self._flaw_of(array[None, cut:], blocks, None if numel is None else numel % SEGMENT_ELEMENTS)

    def _flaw_of(self, segments: npt.NDArray[np.uint8], blocks: int, numel: int | None) -> str:
        """Return what is wrong with segments of one size: their scales, then their codes."""
        scales = segments[:, : blocks * _SCALE_BYTES].view(np.float32)
        limit = scale_max(self.quantizer.levels)
        if not (
            np.maximum.reduce(scales, axis=None) <= limit and np.minimum.reduce(scales, axis=None) >= -limit
        ):
            segment, block = (int(place[0]) for place in np.nonzero(~(np.abs(scales) <= limit)))
            return f"the scale of block {block} of segment {segment} is {float(scales[segment, block]):g}"
        return self.quantizer.flaw(segments[:, blocks * _SCALE_BYTES :], numel)

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.quantizer.block)

    def _segment_bytes(self, numel: int) -> int:
        return self._blocks(numel) * _SCALE_BYTES + self.quantizer.code_bytes(numel)

    def _batches(
        self, values: torch.Tensor, encoded: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Iterate over batches of values (m, n) and their encoding (m, bytes), both views."""
        numel, segment_bytes = values.numel(), self._segment_bytes(SEGMENT_ELEMENTS)
        at_once = _host_segments() if values.device.type == "cpu" else _DEVICE_SEGMENTS
        whole = numel // SEGMENT_ELEMENTS
        for first in range(0, whole, at_once):
            end = min(first + at_once, whole)
            yield (
                values[first * SEGMENT_ELEMENTS : end * SEGMENT_ELEMENTS].view(end - first, -1),
                encoded[first * segment_bytes : end * segment_bytes].view(end - first, -1),
            )
        if numel % SEGMENT_ELEMENTS:
            yield values[None, whole * SEGMENT_ELEMENTS :], encoded[None, whole * segment_bytes :]

    def _split(self, segments: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales and the codes in encoded segments of `numel` elements."""
        at = self._blocks(numel) * _SCALE_BYTES
        if segments.shape[0] == 1:  # of any length: torch would have rows begin at whole float32
            return segments[0, :at].view(torch.float32)[None], segments[:, at:]
        return segments[:, :at].view(torch.float32), segments[:, at:]


def _host_segments() -> int:
    return _HOST_SEGMENTS if torch.get_num_threads() == 1 else 1


def rows(values: torch.Tensor, block: int) -> torch.Tensor:
    """Return `values` (m, n) as (blocks, block), filled with zeros where n is no multiple of the block: then
    a copy, else a view.
    """
    missing = -values.shape[1] % block
    if missing:
        values = functional.pad(values, (0, missing))
    return values.view(-1, block)


def round_(values: torch.Tensor) -> torch.Tensor:
    """Round in place to the nearest whole number, ties to even, for |values| up to 2^22. `torch.round` wakes
    a team of threads already for 2048.
    """
    return values.add_(_ROUNDER).sub_(_ROUNDER)


def scale_max(levels: int) -> np.float32:
    """Return the largest scale that is accepted: that of a block up to MAGNITUDE_MAX. With it all codes give
    finite values.
    """
    return np.float32(MAGNITUDE_MAX) * share(levels)


def share(levels: int) -> np.float32:
    """Return the float32 nearest to 1 / levels."""
    return np.float32(1.0 / levels)


def steps_of(magnitudes: torch.Tensor, levels: int) -> torch.Tensor:
    """Return the step of blocks with these largest magnitudes, which are counted up to `levels`; 0 for
    negligible magnitudes.
    """
    return functional.threshold(torch.mul(magnitudes, float(share(levels))), _STEP_MIN, 0.0)


def inverse(steps: torch.Tensor) -> torch.Tensor:
    """Return 1 / steps; for steps of 0 a number by which the block's elements stay small."""
    return torch.div(_one(steps.device), steps).clamp_(max=1.0 / _STEP_MIN)


@lru_cache(maxsize=64)
def _one(device: torch.device) -> torch.Tensor:
    # complete when this returns, since other streams use it, too
    return torch.tensor([1.0], dtype=torch.float32, device=device)


def scale_up(out: torch.Tensor, scales: torch.Tensor, block: int) -> None:
    """Multiply `out` (m, n) by the scales (m, blocks) of its blocks."""
    m, n = out.shape
    if n % block:  # then m is 1
        whole = n // block
        out[0, : whole * block].view(whole, block).mul_(scales[0, :whole, None])
        out[0, whole * block :].mul_(scales[0, whole])
    else:
        out.view(m, n // block, block).mul_(scales[:, :, None])
