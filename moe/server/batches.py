"""The tensors of several requests as one batch, and a batch as those of its requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def concatenate(many: Sequence[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the tensors of several requests as one batch; those of a single request unchanged."""
    return many[0] if len(many) == 1 else [torch.cat(parts) for parts in zip(*many, strict=True)]


def split(tensors: Sequence[torch.Tensor | None], sizes: Sequence[int]) -> list[list[torch.Tensor | None]]:
    """Split a batch's tensors into those of its requests."""
    if len(sizes) == 1:
        return [list(tensors)]
    columns = [
        torch.split(tensor, list(sizes)) if tensor is not None else (None,) * len(sizes) for tensor in tensors
    ]
    return [[column[number] for column in columns] for number in range(len(sizes))]
