"""Model and batches of the task `bytelm`.

Shape suffixes: B samples, T bytes of context, W width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from moe.client.local import LocalMixtureOfExperts
from swarm.run.task import Draw
from swarm.run.tasks.corpus import VALIDATION_SAMPLES, VOCABULARY, Corpus

_DEVIATION = 0.02  # standard deviation of the initial weights; small enough that the first loss is ln(256)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteExperts:
    """Experts in place of each feed-forward layer."""

    count: int = 0  # 0: none, one layer for all bytes
    per_byte: int = 2  # how many of them compute each byte


NO_EXPERTS = ByteExperts()


class FeedForward(nn.Module):
    """A feed-forward layer four times as wide as its input: one of the experts of a block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.feed_in = nn.Linear(width, 4 * width, bias=False)
        self.feed_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BW: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.feed_out(functional.gelu(self.feed_in(x_BW), approximate="tanh")))


class TransformerBlock(nn.Module):
    """One pre-norm transformer block: causal self-attention, then a feed-forward layer four times as wide, or
    for each byte a mixture of some of such layers.
    """

    def __init__(self, width: int, heads: int, experts: ByteExperts = NO_EXPERTS) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.LayerNorm(width)
        self.mixture: nn.Module | None = None
        if experts.count:
            self.mixture = LocalMixtureOfExperts(
                width,
                {f"ffn.{number}": FeedForward(width) for number in range(experts.count)},
                grid=f"ffn.[0:{experts.count}]",
                k_best=experts.per_byte,
            )
            return
        self.feed_in = nn.Linear(width, 4 * width, bias=False)
        self.feed_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTW: torch.Tensor) -> torch.Tensor:
        batch, length, width = x_BTW.shape
        qkv = self.projection(self.attention_norm(x_BTW)).view(
            batch, length, 3, self.heads, width // self.heads
        )
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTW = x_BTW + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        if self.mixture is not None:
            through: torch.Tensor = self.mixture(self.feed_norm(x_BTW).reshape(batch * length, width))
            return x_BTW + through.view(batch, length, width)
        return cast(
            torch.Tensor,
            x_BTW + self.feed_out(functional.gelu(self.feed_in(self.feed_norm(x_BTW)), approximate="tanh")),
        )


class ByteTransformer(nn.Module):
    """A decoder-only language model over bytes: int64 [B, T] -> logits float32 [B, T, 256]."""

    def __init__(
        self,
        *,
        width: int,
        layers: int,
        heads: int,
        context: int,
        seed: int,
        experts: ByteExperts = NO_EXPERTS,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, experts) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Projections into the residual stream are scaled down with depth, so that its variance does
                # not grow (as in GPT-2).
                added = name.endswith(("attention_out.weight", "feed_out.weight"))
                nn.init.normal_(
                    parameter,
                    std=_DEVIATION / math.sqrt(2 * layers) if added else _DEVIATION,
                    generator=generator,
                )
            elif name.endswith("gate.projection.bias"):
                nn.init.zeros_(parameter)

    def forward(self, bytes_BT: torch.Tensor) -> torch.Tensor:
        x_BTW = self.embedding(bytes_BT) + self.position[: bytes_BT.shape[1]]
        for block in self.blocks:
            x_BTW = block(x_BTW)
        return cast(torch.Tensor, self.head(self.norm(x_BTW)))


class ByteData:
    """Samples of T + 1 consecutive bytes of a corpus.

    Training samples begin at random positions, validation samples at fixed positions of the held-out part.
    """

    def __init__(self, corpus: Corpus, *, context: int, device: torch.device) -> None:
        self.summary = corpus.summary
        self._context = context
        self._training = torch.frombuffer(corpus.training, dtype=torch.uint8).to(device)
        self._offsets = torch.arange(context + 1, device=device)
        self._generator = torch.Generator()  # on the CPU, so that every device draws the same samples
        self._generator.manual_seed(0)
        held_out = torch.frombuffer(corpus.held_out, dtype=torch.uint8).to(device)
        starts = torch.linspace(0, len(held_out) - context - 1, VALIDATION_SAMPLES).long().to(device)
        self._validation = held_out[starts[:, None] + self._offsets].long()

    def start_epoch(self, draw: Draw) -> None:
        self._generator.manual_seed(draw.seed)

    def batch(self, samples: int) -> torch.Tensor:
        """Return the next samples of the current draw, int64 [samples, T + 1]."""
        starts = torch.randint(0, len(self._training) - self._context, (samples,), generator=self._generator)
        device = self._training.device
        # With non_blocking the host does not wait for the work that is queued on the CUDA device. That is
        # safe, since CUDA copies pageable host memory to a buffer of its own first.
        starts = starts.to(device, non_blocking=device.type == "cuda")
        return self._training[starts[:, None] + self._offsets].long()

    def loss(self, model: nn.Module, samples: int) -> torch.Tensor:
        return _next_byte_loss(model, self.batch(samples))

    @torch.no_grad()
    def validation_loss(self, model: nn.Module) -> float:
        return float(_next_byte_loss(model, self._validation))


def _next_byte_loss(model: nn.Module, samples_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats per byte of int64 samples [B, T + 1]."""
    logits = model(samples_BT[:, :-1])
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), samples_BT[:, 1:].reshape(-1))
