"""Which samples go to which expert, and back: whole batches at a time.

Shapes: B samples, S places for experts per sample (-1: none), F features of an output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Places:
    """Where the samples of one expert are: row (sample) and column (place) of each, int64, rows ascending and
    distinct.
    """

    rows: torch.Tensor
    columns: torch.Tensor


def places_of(which_BS: torch.Tensor, experts: int) -> list[Places]:
    """For experts 0 to `experts` - 1 their places in `which_BS`. One sort of the batch, however many experts
    there are.
    """
    width = max(which_BS.shape[1], 1)
    flat = which_BS.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat + 1, minlength=experts + 1)
    order = order[int(counts[0]) :]
    return [Places(part // width, part % width) for part in torch.split(order, counts[1:].tolist())]


def not_among(
    which_BK: torch.Tensor, found_BKD: torch.Tensor, before_BSD: torch.Tensor, there_BS: torch.Tensor, k: int
) -> torch.Tensor:
    """For each sample the first `k` of `which_BK` (coordinates `found_BKD`) that are not among those it has
    already, then -1: [B, k].
    """
    same_BKS = (found_BKD.unsqueeze(2) == before_BSD.unsqueeze(1)).all(dim=-1) & there_BS.unsqueeze(1)
    is_new_BK = (which_BK >= 0) & ~same_BKS.any(dim=-1)
    first = is_new_BK.to(torch.int64).argsort(dim=1, descending=True, stable=True)[:, :k]
    return torch.where(is_new_BK, which_BK, -1).gather(1, first)


def spread(
    batch: int,
    width: int,
    places: Sequence[Places],
    answers: Sequence[Sequence[torch.Tensor]],
    empty: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Answers of experts, in one tensor [B, S, …] for each output; zeros where nobody answered. `empty`: what
    an output is like.
    """
    spread_out = [like.new_zeros((batch, width, *like.shape[1:])) for like in empty]
    for place, answer in zip(places, answers, strict=True):
        for target, tensor in zip(spread_out, answer, strict=True):
            target[place.rows, place.columns] = tensor
    return spread_out


def add_up(
    inputs: Sequence[torch.Tensor], parts: Iterable[tuple[Places, Sequence[torch.Tensor | None]]]
) -> list[torch.Tensor | None]:
    """The gradients of floating inputs: those of all experts added, in the order of the experts. None where
    nobody gave one.
    """
    floating = [tensor for tensor in inputs if tensor.is_floating_point()]
    sums: list[torch.Tensor | None] = [None] * len(floating)
    for place, gradients in parts:
        for number, gradient in enumerate(gradients):
            if gradient is None:
                continue
            total = sums[number]
            if total is None:
                total = sums[number] = torch.zeros(
                    floating[number].shape, dtype=floating[number].dtype, device="cpu"
                )
            total.index_add_(0, place.rows, gradient.to(total.dtype))
    return sums


def mixed(weights_BS: torch.Tensor, outputs_BS: torch.Tensor) -> torch.Tensor:
    """The sum over experts of weight times output: [B, S], [B, S, …] -> [B, …], in the outputs' dtype."""
    batch, width = weights_BS.shape
    flat_BSF = outputs_BS.reshape(batch, width, -1)
    total_B1F = torch.bmm(weights_BS.to(flat_BSF.dtype).unsqueeze(1), flat_BSF)
    return total_B1F.reshape(batch, *outputs_BS.shape[2:])
