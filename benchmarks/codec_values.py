"""The values on which codecs are measured. Imports only torch, because hivemind's environment runs it,
too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def normal(elements: int) -> torch.Tensor:
    """Return float32 values drawn from N(0, 1), always the same ones."""
    return torch.randn(elements, generator=torch.Generator().manual_seed(1))


def heavy_tailed(elements: int) -> torch.Tensor:
    """Return float32 values drawn from Student's t with 3 degrees of freedom, always the same ones.

    Each is a normal value over the root of the mean of three squared ones.
    """
    chance = torch.Generator().manual_seed(2)
    squares = sum(torch.randn(elements, generator=chance).square() for _ in range(3))
    assert isinstance(squares, torch.Tensor)
    return torch.randn(elements, generator=chance) / (squares / 3.0).sqrt()


VALUES: dict[str, Callable[[int], torch.Tensor]] = {"N(0, 1)": normal, "heavy-tailed": heavy_tailed}


def relative_error(decoded: torch.Tensor, values: torch.Tensor) -> float:
    """Return the L2 norm of `decoded - values` over that of `values`."""
    return float((decoded - values).double().norm() / values.double().norm())
