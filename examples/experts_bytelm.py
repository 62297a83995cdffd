"""Train a byte-level language model whose feed-forward layers are hosted and trained by other processes.

Alone:              python examples/experts_bytelm.py                (hosts the experts itself)
With servers:       swarm serve --expert-class ffn --hidden-dim 64 --lr 0.002 \\
                        --experts 'bytelm0.[0:2].[0:4]' --experts 'bytelm1.[0:2].[0:4]'
                    python examples/experts_bytelm.py INVITE         (the invite that the server prints)

More servers can join with `swarm serve INVITE …`. The text is the source of Python's standard library.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional

import swarm
from swarm.run.tasks.bytelm_model import ByteData
from swarm.run.tasks.corpus import read_corpus

LAYERS = 2
WIDTH = 64
HEADS = 4
CONTEXT = 64
BATCH = 8
STEPS = 300
LEARNING_RATE = 2e-3
DATA_BYTES = 4_000_000


def grid_of(layer: int) -> str:
    return f"bytelm{layer}.[0:2].[0:4]"


class Block(nn.Module):
    """Local causal self-attention, then a mixture of remote experts for each byte."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.mixture_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.projection = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attention_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mixture = mixture

    def forward(self, x_BTW: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x_BTW.shape
        qkv = self.projection(self.attention_norm(x_BTW)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTW = x_BTW + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        through: torch.Tensor = self.mixture(self.mixture_norm(x_BTW).reshape(batch * length, WIDTH))
        return x_BTW + through.view(batch, length, WIDTH)


class ByteModel(nn.Module):
    """A language model that maps int64 [batch, length] to logits [batch, length, 256]."""

    def __init__(self, make_mixture: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(make_mixture(layer)) for layer in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, bytes_BT: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(
            self.norm(self.blocks(self.embedding(bytes_BT) + self.position[: bytes_BT.shape[1]]))
        )
        return logits


def train(make_mixture: Callable[[int], nn.Module], steps: int, log: Callable[[str], None] = print) -> float:
    """Train for `steps` steps and return the loss on held-out text, in nats per byte.

    `make_mixture(layer)` makes the module of a layer, which maps float32 [samples, WIDTH] to the same shape.
    """
    torch.manual_seed(0)
    data = ByteData(
        read_corpus(None, bytes_max=DATA_BYTES, sample_bytes=CONTEXT + 1),
        context=CONTEXT,
        device=torch.device("cpu"),
    )
    model = ByteModel(make_mixture)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        loss = data.loss(model, BATCH)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 20 == 0:
            log(f"step {step}: loss {loss.item():.3f}")
    return data.validation_loss(model)


def make_expert() -> swarm.Expert:
    """Make an expert like those of `swarm serve --expert-class ffn`."""
    module = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    return swarm.Expert(module, (torch.zeros(1, WIDTH),), partial(torch.optim.Adam, lr=LEARNING_RATE))


def main() -> None:
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(swarm.Node(bootstrap=sys.argv[1:], listen="127.0.0.1:0"))
        if len(sys.argv) == 1:
            host = stack.enter_context(swarm.Node(bootstrap=node.addresses, listen="127.0.0.1:0"))
            names = [
                f"bytelm{layer}.{row}.{column}"
                for layer in range(LAYERS)
                for row in range(2)
                for column in range(4)
            ]
            stack.enter_context(swarm.ExpertServer(host, {name: make_expert() for name in names}))
        loss = train(
            lambda layer: swarm.RemoteMixtureOfExperts(node, WIDTH, grid=grid_of(layer), k_best=2), STEPS
        )
        print(f"held out: {loss:.3f} nats per byte (5.545 for a random guess)")


if __name__ == "__main__":
    main()
