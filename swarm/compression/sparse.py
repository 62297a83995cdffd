"""The codec that keeps the largest elements of every chunk, and drops the others. Only for use with error
feedback.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from swarm.compression.codec import register
from swarm.compression.segments import SEGMENT_ELEMENTS, SegmentCodec, inverse, round_, rows, steps_of

_PLACE_BITS = 12
_PLACES = (1 << _PLACE_BITS) - 1
_LEVELS = 7  # a value has four bits, and its place twelve: sixteen in all
_WORD_BYTES = 2


@dataclass(frozen=True, slots=True)
class Largest:
    """Keep the `kept` largest magnitudes of each chunk of 4096 elements, as SparseLoCo does (arXiv
    2508.15706): for each element, 12 bits give its place in the chunk, and 4 its value, a whole multiple of
    (largest magnitude of the chunk) / 7, rounded to nearest.

    A shorter chunk at the end keeps the same share, at least one. Magnitudes are compared by their exponent
    and first 11 bits; of equal ones the first are kept. Elements are written in the order of their places.
    The error is never longer than the input.
    """

    kept: int  # divides 4096
    block: int = 1 << _PLACE_BITS
    levels: int = _LEVELS

    def code_bytes(self, numel: int) -> int:
        return _WORD_BYTES * -(-numel * self.kept // self.block)

    def error_bound(self, magnitude: float) -> float:
        """Return `magnitude`: dropped elements are lost as a whole."""
        return magnitude

    def quantize(self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        given = rows(values, self.block)
        order = torch.arange(_PLACES, -1, -1, dtype=torch.int32, device=values.device)
        # all different within a chunk
        keys = torch.abs(given).view(torch.int32).bitwise_and_(~_PLACES).bitwise_or_(order)
        steps, words = [], []
        for first, end, kept in self._runs(values.numel()):
            places = torch.sort(_PLACES - (_largest(keys[first:end], kept) & _PLACES), dim=1).values
            found = torch.gather(given[first:end], 1, places.to(torch.int64))
            magnitudes = torch.amax(torch.abs(found), dim=1, keepdim=True)
            step = steps_of(magnitudes, _LEVELS)
            digits = round_(found.mul_(inverse(step))).to(torch.int32).add_(_LEVELS + 1)
            words.append((digits << _PLACE_BITS | places).to(torch.int16).view(-1))  # the low sixteen bits
            steps.append(step.view(-1))
        scales.copy_(torch.cat(steps).view(scales.shape))
        codes.copy_(torch.cat(words).view(torch.uint8).view(codes.shape))

    def restore(self, scales: torch.Tensor, codes: torch.Tensor, out: torch.Tensor) -> None:
        """Restore a chunk; one whose places do not ascend becomes NaN where it has values, and a place beyond
        the end is skipped.
        """
        words = codes.contiguous().view(torch.int16).to(torch.int32).view(-1) & 0xFFFF
        ragged = out.shape[1] % self.block
        chunks = (
            out.new_empty(-(-out.shape[1] // self.block), self.block) if ragged else out.view(-1, self.block)
        )
        chunks.zero_()
        flat = scales.reshape(-1)
        for first, end, kept in self._runs(out.numel()):
            run = words[first * self.kept :][: (end - first) * kept].view(end - first, kept)
            places = run & _PLACES
            ascending = (places[:, 1:] > places[:, :-1]).all(dim=1)
            values = ((run >> _PLACE_BITS) - (_LEVELS + 1)).to(torch.float32)
            values.mul_(flat[first:end].masked_fill(~ascending, math.nan)[:, None])
            chunks[first:end].scatter_(1, places.to(torch.int64), values)
        if ragged:
            out.copy_(chunks.view(1, -1)[:, : out.shape[1]])

    def flaw(self, codes: npt.NDArray[np.uint8], numel: int | None) -> str:
        if codes.shape[1] % _WORD_BYTES:
            return f"{codes.shape[1]} bytes of places and values, and each takes {_WORD_BYTES}"
        places = codes.view(np.uint16) & _PLACES
        whole = places.shape[1] // self.kept * self.kept
        for chunks in (places[:, :whole].reshape(-1, self.kept), places[:, whole:]):
            falling = chunks[:, 1:] <= chunks[:, :-1]
            if falling.any():
                chunk, nth = (int(found[0]) for found in np.nonzero(falling))
                before, place = chunks[chunk, nth], chunks[chunk, nth + 1]
                return (
                    f"a place that is {'repeated' if place == before else 'out of order'} in a chunk: "
                    f"{place} after {before}"
                )
        rest = 0 if numel is None else numel % self.block
        if rest and places[0, -1] >= rest:  # ascending: the last is the largest
            return f"place {places[0, -1]} in a chunk of {rest} elements"
        return ""

    def _runs(self, numel: int) -> Iterator[tuple[int, int, int]]:
        """Iterate over runs of chunks that keep equally many elements: (first, end, how many)."""
        whole, rest = divmod(numel, self.block)
        if whole:
            yield 0, whole, self.kept
        if rest:
            yield whole, whole + 1, self.code_bytes(rest) // _WORD_BYTES


def _largest(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` largest of each row of whole numbers, in any order."""
    if keys.device.type != "cpu":
        return torch.topk(keys, count, dim=1, sorted=False).values
    at = keys.shape[1] - count  # NumPy finds them eight times as fast as torch
    return torch.from_numpy(np.partition(keys.numpy(), at, axis=1)[:, at:])


TOPK = SegmentCodec("topk", 8, Largest(kept=64))
assert SEGMENT_ELEMENTS % TOPK.quantizer.block == 0
register(TOPK)
