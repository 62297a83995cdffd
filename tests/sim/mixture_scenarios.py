"""Mixture layers over four simulated servers, each with one row of a grid of sixteen experts, and the same
mixture computed locally.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from moe.client.mixture.layer import RemoteMixtureOfExperts
from swarm.testing.expert_swarm import ExpertSwarm, SimulatedExperts

WIDTH = 8
GRID = "ffn.[0:4].[0:4]"


def experts() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        f"ffn.{row}.{column}": nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        for row in range(4)
        for column in range(4)
    }


MODULES = experts()


def serve_rows(swarm: ExpertSwarm, **settings: float) -> list[SimulatedExperts]:
    """Start four servers, each with one row of the grid."""
    return [
        swarm.serve(
            {name: module for name, module in MODULES.items() if name.startswith(f"ffn.{row}.")}, **settings
        )  # type: ignore[arg-type]
        for row in range(4)
    ]


def local_mixture(
    layer: RemoteMixtureOfExperts,
    modules: Mapping[str, nn.Module],
    x: torch.Tensor,
    alive: set[str] | None = None,
) -> torch.Tensor:
    """Compute the oracle: every expert on every sample, the k best of those alive, softmax over them."""
    scores = layer.gate(x)
    names = [name for name in modules if alive is None or name in alive]
    places = [tuple(map(int, name.split(".")[1:])) for name in names]
    logits = torch.stack([scores[0][:, row] + scores[1][:, column] for row, column in places], dim=1)
    best = logits.topk(min(layer.options.k_best, len(names)), dim=1)
    weights = torch.zeros_like(logits).scatter(1, best.indices, best.values.softmax(dim=1))
    outputs = torch.stack([modules[name](x) for name in names], dim=1)
    return (weights.unsqueeze(-1) * outputs).sum(dim=1)


def layer_of(swarm: ExpertSwarm, **settings: object) -> RemoteMixtureOfExperts:
    torch.manual_seed(1)
    return RemoteMixtureOfExperts(
        swarm.node, WIDTH, **{"grid": GRID, "k_best": 4, "timeout_after_k_min_s": 0.5, **settings}
    )  # type: ignore[arg-type]


def batch(samples: int = 32, seed: int = 2) -> torch.Tensor:
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradients(layer: RemoteMixtureOfExperts, output: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    return list(torch.autograd.grad((output * direction).sum(), [x, *layer.parameters()]))


def assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-5), (one - other).abs().max()


def output_of(layer: RemoteMixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    output = layer(x)
    assert isinstance(output, torch.Tensor)
    return output
