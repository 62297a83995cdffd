"""Peers without a network for tests of averaging modes: a round is an exact weighted mean computed in this
process, so that only the arithmetic of the modes is tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from averaging.optim.modes import Mode, ModeParts, ModeSettings

FEATURES = 5


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))


def batch(seed: int, samples: int) -> torch.Tensor:
    return torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(seed))


def backward(net: torch.nn.Module, seed: int, samples: int) -> None:
    net.zero_grad()
    (net(batch(seed, samples)).square().sum(1) - 1).square().mean().backward()


def adamw(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)


def vector(tensors: Any) -> torch.Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors])


@dataclass
class Seat:
    net: torch.nn.Module
    mode: Any  # a Mode; tests also inspect its learner

    def step(self, seed: int, samples: int) -> None:
        backward(self.net, seed, samples)
        assert self.mode.learner.accumulate(samples) is None

    def advance(self, told: Sequence[Any] = ()) -> None:
        self.mode.apply(told)
        self.mode.state.mark_changed(self.mode.state.epoch + 1)

    @property
    def theta(self) -> torch.Tensor:
        return vector(self.net.parameters())


def seat(settings: ModeSettings, net: torch.nn.Module | None = None, **parts: Any) -> Seat:
    net = net or model()
    return Seat(net, settings.build(ModeParts(inner=parts.pop("inner", None) or adamw(net), **parts)))


def prepare(seats: Sequence[Seat]) -> list[tuple[float, Any]]:
    return [one.mode.prepare(one.mode.state.epoch) for one in seats]


def average(modes: Sequence[Mode], weights: Sequence[float]) -> None:
    """Set all tensors to their weighted mean, as a round does."""
    for tensors in zip(*(mode.tensors() for mode in modes), strict=True):
        mean = sum(t.double() * w for t, w in zip(tensors, weights, strict=True)) / sum(weights)
        for tensor in tensors:
            tensor.copy_(mean)


def hold(seats: Sequence[Seat]) -> list[float]:
    """Run one round of all peers, apply it at once, and return the weights."""
    prepared = prepare(seats)
    weights = [weight for weight, _ in prepared]
    average([one.mode for one in seats], weights)
    for one in seats:
        one.advance([told for _, told in prepared])
    return weights
