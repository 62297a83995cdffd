"""Dispatch of samples to experts and back, for whole batches at a time.

Shapes: B samples, S slots for experts per sample (-1: empty), F features of an output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Experts whose tensors are joined before they are added up: one call of torch for each of hundreds of experts
# takes longer than the work. More of them would need more memory for a moment.
_JOINED_MAX = 32


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Places:
    """The places of one expert's samples: row (sample) and column (slot) of each, int64, rows ascending and
    distinct.
    """

    rows: torch.Tensor
    columns: torch.Tensor


def places_of(indices_BS: torch.Tensor, experts: int) -> list[Places]:
    """Return the places in `indices_BS` of each expert from 0 to `experts` - 1. The batch is sorted once,
    whatever the number of experts.
    """
    width = max(indices_BS.shape[1], 1)
    flat = indices_BS.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat + 1, minlength=experts + 1)
    order = order[int(counts[0]) :]
    return split_places(Places(order // width, order % width), counts[1:].tolist())


def split_places(joined: Places, sizes: Sequence[int]) -> list[Places]:
    """Return the places of each expert, of which `sizes` says how many it has. What is computed for the
    places of all takes much less time than for each of hundreds of experts.
    """
    return list(map(Places, torch.split(joined.rows, list(sizes)), torch.split(joined.columns, list(sizes))))


def join_places(places: Sequence[Places]) -> Places:
    """Return the places of all experts, in their order."""
    if not places:
        empty = torch.zeros(0, dtype=torch.int64, device="cpu")
        return Places(empty, empty)
    return Places(torch.cat([one.rows for one in places]), torch.cat([one.columns for one in places]))


def exclude_known(
    indices_BK: torch.Tensor,
    found_BKD: torch.Tensor,
    known_BSD: torch.Tensor,
    occupied_BS: torch.Tensor,
    k: int,
) -> torch.Tensor:
    """Return for each sample the first `k` of `indices_BK` (with coordinates `found_BKD`) that are not among
    the experts it already has, then -1: [B, k].
    """
    same_BKS = (found_BKD.unsqueeze(2) == known_BSD.unsqueeze(1)).all(dim=-1) & occupied_BS.unsqueeze(1)
    is_new_BK = (indices_BK >= 0) & ~same_BKS.any(dim=-1)
    first = is_new_BK.to(torch.int64).argsort(dim=1, descending=True, stable=True)[:, :k]
    return torch.where(is_new_BK, indices_BK, -1).gather(1, first)


def scatter_outputs(
    batch: int,
    width: int,
    places: Sequence[Places],
    answers: Sequence[Sequence[torch.Tensor]],
    empty: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Return the answers of experts as one tensor [B, S, …] for each output, with zeros where no expert
    answered. `empty` gives the shape and dtype of each output.
    """
    spread_out = [like.new_zeros((batch, width, *like.shape[1:])) for like in empty]
    for start in range(0, len(places), _JOINED_MAX):
        group = places[start : start + _JOINED_MAX]
        rows = torch.cat([one.rows for one in group])
        columns = torch.cat([one.columns for one in group])
        for target, parts in zip(
            spread_out, zip(*answers[start : start + _JOINED_MAX], strict=True), strict=True
        ):
            target[rows, columns] = torch.cat(parts)
    return spread_out


def sum_input_gradients(
    inputs: Sequence[torch.Tensor], parts: Sequence[tuple[Places, Sequence[torch.Tensor | None]]]
) -> list[torch.Tensor | None]:
    """Return the gradients of the floating-point inputs: those of all experts added, in the order of the
    experts. None for an input to which no expert gave a gradient.
    """
    sums: list[torch.Tensor | None] = []
    for number, tensor in enumerate(one for one in inputs if one.is_floating_point()):
        given = [
            (place.rows, gradients[number].to(tensor.dtype))  # type: ignore[union-attr]
            for place, gradients in parts
            if gradients[number] is not None
        ]
        total = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") if given else None
        for start in range(0, len(given), _JOINED_MAX):
            rows, gradients = zip(*given[start : start + _JOINED_MAX], strict=True)
            assert total is not None
            total.index_add_(0, torch.cat(rows), torch.cat(gradients))
        sums.append(total)
    return sums


def weighted_sum(weights_BS: torch.Tensor, outputs_BS: torch.Tensor) -> torch.Tensor:
    """Return the sum over experts of weight times output: [B, S], [B, S, …] -> [B, …], in the outputs'
    dtype.
    """
    batch, width = weights_BS.shape
    flat_BSF = outputs_BS.reshape(batch, width, math.prod(outputs_BS.shape[2:]))
    total_B1F = torch.bmm(weights_BS.to(flat_BSF.dtype).unsqueeze(1), flat_BSF)
    return total_B1F.reshape(batch, *outputs_BS.shape[2:])
