"""LoRA adapters of several peers: averaging A and B, against averaging their product B·A, at equal bytes.

    python -m benchmarks.lora_averages MODEL_FOLDER RESULTS.json [--rounds 8] [--steps 10]

MODEL_FOLDER is that of `benchmarks.smollm2 --folder` (its `model`). Three peers in one process start from a
common adapter, train on separate shares of the data, and average after every `--steps` steps. Both ways send
and receive float16 factors of the same shapes:

- `factors`: mode `local`, so A and B become their means;
- `product`: each reducer multiplies the factors that it gets and sends back those of the matrix of the
  adapter's rank that is nearest to the mean of the products. Of all such factors it takes those whose A is
  nearest to the mean A, so that statistics of the peers' optimizers still fit.

The result is written after every round.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from averaging.optim.modes import ModeParts
from averaging.optim.optimizer import Local
from benchmarks.report import replace_file
from benchmarks.rounds_in_process import RoundsInProcess
from swarm.core.ids import PeerId
from swarm.run.task import Draw
from swarm.run.tasks.causal_lm import LanguageModelSettings
from swarm.run.tasks.causal_lm_data import TextData
from swarm.run.tasks.documents import documents_of

PEERS = 3
BATCH = 2
RATE = 1e-3
_SEED, _TOKENS = 0, 32


def product_average(
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return A [r, k] and B [d, r] whose product is the best of rank r for the mean of the peers' products,
    and how far the product of the mean factors is from that mean, relative to it.

    `pairs`: A and B of each peer. The singular values come from the thin factors, not from the [d, k] matrix.
    """
    rank, count = pairs[0][0].shape[0], len(pairs)
    wide_a = torch.cat([a for a, _ in pairs])  # [n·r, k]
    wide_b = torch.cat([b for _, b in pairs], dim=1) / count  # [d, n·r]
    left, upper = torch.linalg.qr(wide_b)
    right, lower = torch.linalg.qr(wide_a.T)
    u, s, v = torch.linalg.svd(upper @ lower.T)
    best_b, best_a = left @ u[:, :rank] * s[:rank], v[:rank] @ right.T
    mean_a = torch.stack([a for a, _ in pairs]).mean(0)
    mean_b = torch.stack([b for _, b in pairs]).mean(0)
    whole = wide_b @ wide_a
    error = float((mean_b @ mean_a - whole).norm() / whole.norm().clamp_min(1e-20))
    basis = mean_a @ best_a.T  # mean A in the rows of the best matrix
    return basis @ best_a, best_b @ torch.linalg.inv(basis), error


class AdapterPeers:
    """Peers that share one frozen model; each has its own adapter and optimizer."""

    def __init__(self, folder: Path) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(_SEED)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model: nn.Module = get_peft_model(base, lora).train()
        self.shown = [one for one in self.model.parameters() if one.requires_grad]  # A, B, A, B, …
        tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True)
        # avoids a warning: documents are longer, and are cut into samples afterwards
        tokenizer.model_max_length = 1 << 40
        settings = LanguageModelSettings(model="smollm2", sequence_length=_TOKENS, data_bytes=1 << 20)
        self.data = TextData(documents_of(None, settings), tokenizer, settings, torch.device("cpu"))
        self.adapters = [[nn.Parameter(one.detach().clone()) for one in self.shown] for _ in range(PEERS)]
        self.inner = [torch.optim.AdamW(one, lr=RATE, weight_decay=0.0) for one in self.adapters]
        self.modes = [Local().build(ModeParts(inner=one)) for one in self.inner]
        self.numel = sum(one.numel() for one in self.shown)

    def train(self, peer: int, epoch: int, steps: int) -> None:
        """Make local steps of one peer, on its share of the samples."""
        ids = [PeerId(bytes([number + 1]) * 32) for number in range(PEERS)]
        others = tuple(one for one in ids if one != ids[peer])
        self.data.start_epoch(Draw("adapters", epoch, ids[peer], others))
        self._show(peer)
        for _ in range(steps):
            self.model.zero_grad()
            self.data.loss(self.model, BATCH).backward()  # type: ignore[no-untyped-call]
            for own, shown in zip(self.adapters[peer], self.shown, strict=True):
                own.grad = shown.grad
            self.modes[peer].learner.accumulate(BATCH)
            self._show(peer)

    def _show(self, peer: int) -> None:
        with torch.no_grad():
            for own, shown in zip(self.adapters[peer], self.shown, strict=True):
                shown.copy_(own)

    def held_out_loss(self) -> float:
        """Return the loss of the adapter that all peers have after a round, in nats per token."""
        self._show(0)
        self.model.eval()
        loss = self.data.validation_loss(self.model)
        self.model.train()
        return loss

    def average_products(self) -> float:
        """Average as `product` does, and return the mean of `product_average`'s errors over all layers."""
        errors = []
        with torch.no_grad():
            for place in range(0, len(self.shown), 2):
                pairs = [(one[place].half().float(), one[place + 1].half().float()) for one in self.adapters]
                a, b, error = product_average(pairs)
                errors.append(error)
                for adapter in self.adapters:
                    adapter[place].copy_(a.half())
                    adapter[place + 1].copy_(b.half())
        return sum(errors) / len(errors)


def run(folder: Path, way: str, rounds: int, steps: int) -> Iterator[dict[str, Any]]:
    """Train with one of the two ways from the common adapter, and yield the loss after each round."""
    peers, began_s = AdapterPeers(folder), time.monotonic()
    averaging = RoundsInProcess(PEERS, peers.numel, "float16", error_feedback=False)
    yield {"round": 0, "loss": peers.held_out_loss(), "seconds": 0.0}
    for number in range(rounds):
        for peer in range(PEERS):
            peers.train(peer, number, steps)
        found: dict[str, Any] = {"round": number + 1}
        if way == "product":
            found["error_of_mean_factors"] = peers.average_products()
        else:
            averaging.hold(peers.modes)
        yield {**found, "loss": peers.held_out_loss(), "seconds": round(time.monotonic() - began_s, 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    kept = json.loads(chosen.results.read_text()) if chosen.results.exists() else {}
    for way in ("factors", "product"):
        if len(kept.get(way, ())) > chosen.rounds:
            continue
        kept[way] = []
        for found in run(chosen.model, way, chosen.rounds, chosen.steps):
            kept[way].append(found)
            replace_file(chosen.results, json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
