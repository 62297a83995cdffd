"""Running statistics of normalization layers, which a forward pass that is computed twice counts once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.nn.modules.batchnorm import _NormBase


def norm_layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers of a module that may have running statistics."""
    return [layer for layer in module.modules() if isinstance(layer, _NormBase)]


def unchanged_statistics(layers: Sequence[torch.nn.Module]) -> AbstractContextManager[None]:
    """Restore the running statistics of batch and instance normalization layers at the end: a backward pass
    computes again a forward pass that has counted already. The layers still normalize by the batch where they
    are in training mode.
    """
    return _unchanged(layers) if layers else nullcontext()  # most experts have none


@contextmanager
def _unchanged(layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    buffers = [buffer for layer in layers if layer.training for buffer in layer.buffers(recurse=False)]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)  # `data`: autograd has saved the buffers, and does not read them
