"""A mixture of local experts that learns as remote ones do, for tests that compare the two."""

from __future__ import annotations

import copy

import torch
from torch import nn

from moe.client.logic.gate import ProductKeyGate
from moe.protocol.names import ExpertGrid


class LocalMixture(nn.Module):
    """The same mixture with local experts: each has an optimizer of its own, which steps when the expert was
    used.
    """

    def __init__(
        self, width: int, grid: str, k_best: int, experts: dict[str, nn.Module], learning_rate: float
    ) -> None:
        super().__init__()
        self.grid, self.k_best = ExpertGrid.parse(grid), k_best
        self.gate = ProductKeyGate(width, self.grid.shape)
        self._experts = [copy.deepcopy(experts[str(name)]) for name in self.grid.names()]
        self._optimizers = [
            torch.optim.Adam(expert.parameters(), lr=learning_rate) for expert in self._experts
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x)
        logits = (scores[0][:, :, None] + scores[1][:, None, :]).flatten(1)
        best = logits.topk(self.k_best, dim=1)
        weights = best.values.softmax(dim=1)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self._experts):
            rows, columns = (best.indices == number).nonzero(as_tuple=True)
            if len(rows):
                total = total.index_add(0, rows, weights[rows, columns].unsqueeze(1) * expert(x[rows]))
        if total.requires_grad:
            total.register_hook(self._later)
        return total

    def _later(self, _gradient: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._step)  # type: ignore[attr-defined]

    def _step(self) -> None:
        """Step at the end of the backward pass."""
        for optimizer in self._optimizers:
            optimizer.step()  # skips parameters without a gradient
            optimizer.zero_grad(set_to_none=True)
