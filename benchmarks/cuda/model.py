"""The transformer that is trained, and the sizes of everything that is measured. Shapes: B sequences, T
tokens, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from swarm.run.tasks.bytelm_model import TransformerBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Sizes of the measurement. The defaults suit a GPU of at least 40 GB, and take 2 minutes on an H200."""

    width: int = 1024  # of the transformer: 319 million parameters
    layers: int = 24
    vocabulary: int = 8192
    context: int = 512
    batch: int = 16
    # training steps from one optimizer step of the swarm to the next: longer than a round
    epoch_steps: int = 120
    epochs: int = 3
    elements: int = 1 << 27  # float32 values that are encoded and averaged: 512 MiB
    state_elements: int = 1 << 28  # float32 values of the state that is served: 1 GiB
    step_s: float = 0.02  # of a trainer that trains while the state is served
    rounds: int = 4
    callers: int = 64
    caller_processes: int = 4
    expert_width: int = 1024
    call_samples: int = 64  # of one call of an expert
    calls_s: float = 3.0


TINY = Size(
    width=32,
    layers=1,
    vocabulary=64,
    context=8,
    batch=2,
    epoch_steps=12,
    epochs=2,
    elements=100_000,
    state_elements=100_000,
    step_s=0.01,
    rounds=2,
    callers=4,
    caller_processes=1,
    expert_width=32,
    call_samples=2,
    calls_s=0.5,
)


class Transformer(nn.Module):
    """A language model over random tokens, in bfloat16."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        heads = max(1, size.width // 64)
        self.blocks = nn.ModuleList(TransformerBlock(size.width, heads) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTW = self.embedding(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTW = block(x_BTW)
        logits: torch.Tensor = self.head(self.norm(x_BTW))
        return logits


class Training:
    """A transformer, its AdamW, and one batch of random tokens that is used again and again."""

    def __init__(self, size: Size, device: torch.device, seed: int = 0) -> None:
        torch.manual_seed(seed)
        with torch.device(device):
            self.model = Transformer(size).to(torch.bfloat16)
            self.tokens = torch.randint(size.vocabulary, (size.batch, size.context + 1))
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    @property
    def parameters(self) -> int:
        """Return how many parameters the model has."""
        return sum(p.numel() for p in self.model.parameters())

    def backward(self) -> None:
        """Forward and backward of one batch; gradients are added to `.grad`."""
        logits = self.model(self.tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), self.tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
