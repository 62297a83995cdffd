"""Learned low-rank compression of activations: the stages of a pipeline exchange codes of a few numbers
instead of whole activations.

Between two stages a vector of `width` numbers is projected to `rank` numbers, sent, and expanded again. The
gradient of a code has `rank` numbers, too, and is exact: the projection is a part of the model, not a codec,
so nothing is lost in the backward pass. All projections start from the same orthonormal basis, derived from a
seed, so that each stage expands codes with the basis that the previous stage used. Then each projection is
learned with its stage.

The idea of a common subspace for both directions is that of Ramasinghe and others ("Protocol Models",
arXiv 2506.01260). In that paper the basis is fixed and the weights of all stages are confined to it; here the
basis is learned and the weights are unconstrained. Whatever lies outside the subspace is lost between stages,
so a deep residual stream needs a larger rank than a single layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from swarm.core.errors import UsageError

__all__ = ["ActivationSubspace"]


class ActivationSubspace:
    """The codes in which stages exchange their activations::

        subspace = swarm.ActivationSubspace(width=1024, rank=64)
        swarm.Expert(subspace.stage(module), (torch.zeros(1, 128, 64),), optimizer)  # at each server
        model = nn.Sequential(
            embedding, subspace.encoder(), swarm.RemoteSequential(node, "block.[0:12]"),
            subspace.decoder(), head,
        )

    In a grid file, `activation_rank = 64` does the same.

    Args:
        width: The last dimension of the activations.
        rank: The last dimension of their codes.
        seed: The seed of the basis from which all projections start.
    """

    def __init__(self, width: int, rank: int, seed: int = 0) -> None:
        if not 1 <= rank <= width:
            raise UsageError(f"the rank of activations is from 1 to their width, {width}, not {rank}")
        self.width, self.rank = width, rank
        generator = torch.Generator("cpu").manual_seed(seed)
        gaussian = torch.randn(width, rank, dtype=torch.float32, device="cpu", generator=generator)
        self._basis = torch.linalg.qr(gaussian).Q

    def encoder(self) -> nn.Linear:
        """Return a new projection from float (…, width) to (…, rank), for the trainer's end."""
        return self._linear(self._basis.T)

    def decoder(self) -> nn.Linear:
        """Return a new expansion from float (…, rank) to (…, width), for the trainer's end."""
        return self._linear(self._basis)

    def stage(self, module: nn.Module) -> nn.Module:
        """Return a module that takes and returns codes, wrapped around one that takes and returns
        activations. Further arguments and results are passed unchanged.
        """
        return _CodedStage(self.decoder(), module, self.encoder())

    def sample(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the sample inputs of a stage, given those of its module."""
        first = inputs[0]
        if not isinstance(first, torch.Tensor) or first.ndim < 2 or first.shape[-1] != self.width:
            raise UsageError(f"the first input of a stage is a tensor (batch, …, {self.width})")
        return (first.new_zeros((*first.shape[:-1], self.rank)), *inputs[1:])

    def _linear(self, weight: torch.Tensor) -> nn.Linear:
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.float32)
        with torch.no_grad():
            linear.weight.copy_(weight)
        return linear


class _CodedStage(nn.Module):
    def __init__(self, decode: nn.Linear, module: nn.Module, encode: nn.Linear) -> None:
        super().__init__()
        self.decode, self.module, self.encode = decode, module, encode
        dimension = getattr(module, "sequence_dimension", None)
        if dimension is not None:
            self.sequence_dimension = dimension

    def forward(self, codes: torch.Tensor, *others: Any) -> Any:
        outputs = self.module(self.decode(codes), *others)
        if isinstance(outputs, tuple):
            return (self.encode(outputs[0]), *outputs[1:])
        return self.encode(outputs)
