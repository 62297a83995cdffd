"""Vectors whose average is known, so that missing, partial and wrong averages are detected.

Needs torch only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch

CHUNK_ELEMENTS = 1 << 20
_PRIME = 4099
# tolerated distance from the exact mean; without one peer, it is at least half a unit away
TOLERANCE = {"float32": 1e-5, "float16": 0.01, "bfloat16": 0.03, "int8": 0.15, "int4": 0.15}
# one element's error may be as large as that of a missing peer: the mean over a chunk is checked
COARSE = frozenset({"int4"})


def _pattern() -> torch.Tensor:
    return (torch.arange(CHUNK_ELEMENTS, dtype=torch.int64) * 7919 % _PRIME).to(torch.float32) / _PRIME


def fill(tensors: Sequence[torch.Tensor], rank: float) -> None:
    """Write the values with which peer `rank` starts a round: a pattern in [0, 2) that differs between
    chunks, plus `rank`.
    """
    pattern = _pattern()
    for place, tensor in enumerate(tensors):
        flat = tensor.view(-1)
        for chunk, start in enumerate(range(0, flat.numel(), CHUNK_ELEMENTS)):
            piece = flat[start : start + CHUNK_ELEMENTS]
            piece.copy_(pattern[: piece.numel()]).add_(rank + (chunk + 3 * place) % 7 / 8)


def delivered(
    tensors: Sequence[torch.Tensor], peers: int, codec: str, lost: int | None = None
) -> tuple[float, float]:
    """Return (fraction of the elements that hold the average of `peers` peers, largest error).

    With `lost`, the average without that peer counts, too.
    """
    pattern, total_rank = _pattern(), peers * (peers - 1) / 2
    mean_ranks = [total_rank / peers] + ([] if lost is None else [(total_rank - lost) / (peers - 1)])
    right = total = 0
    worst = 0.0
    for place, tensor in enumerate(tensors):
        flat = tensor.detach().view(-1)
        for chunk, start in enumerate(range(0, flat.numel(), CHUNK_ELEMENTS)):
            piece = flat[start : start + CHUNK_ELEMENTS]
            offset = (piece - pattern[: piece.numel()]).sub_((chunk + 3 * place) % 7 / 8)
            if codec in COARSE:
                offset.fill_(float(offset.mean()))
            error = reduce(torch.minimum, [(offset - mean_rank).abs_() for mean_rank in mean_ranks])
            right += int((error <= TOLERANCE[codec]).sum())
            total += piece.numel()
            worst = max(worst, float(error.max()))
    return right / max(1, total), worst


def tensors_of(elements: int, count: int) -> list[torch.Tensor]:
    """Return `count` float32 tensors with `elements` elements in all, of sizes as even as possible."""
    return [
        torch.zeros(elements * (index + 1) // count - elements * index // count) for index in range(count)
    ]
