"""Running statistics of normalization layers, which a forward pass that is computed twice counts once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules.batchnorm import _NormBase


@contextmanager
def unchanged_statistics(module: torch.nn.Module) -> Iterator[None]:
    """Restore the running statistics of batch and instance normalization layers at the end: a backward pass
    computes again a forward pass that has counted already. The layers still normalize by the batch where they
    are in training mode.
    """
    buffers = [
        buffer
        for layer in module.modules()
        if isinstance(layer, _NormBase) and layer.training
        for buffer in layer.buffers(recurse=False)
    ]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)  # `data`: autograd has saved the buffers, and does not read them
