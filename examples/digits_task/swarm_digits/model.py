"""Model and data of the task `digits`."""

from __future__ import annotations

import gzip
from importlib.resources import files

import torch
from torch import nn
from torch.nn import functional

import swarm

HELD_OUT = 297


def build_model(channels: int, seed: int) -> nn.Module:
    """Return the network: float32 [B, 1, 8, 8] -> logits [B, 10]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * channels, 10),
        )


class DigitsData:
    """Images as float32 [B, 1, 8, 8] from 0 to 1, and their digits. The last images are held out."""

    def __init__(self, device: torch.device) -> None:
        raw = files("swarm_digits").joinpath("digits.csv.gz").read_bytes()
        lines = gzip.decompress(raw).decode().splitlines()
        table = torch.tensor([[int(field) for field in line.split(",")] for line in lines], device=device)
        images, labels = table[:, :64].float().reshape(-1, 1, 8, 8) / 16.0, table[:, 64]
        self._images, self._labels = images[:-HELD_OUT], labels[:-HELD_OUT]
        self._held_out = images[-HELD_OUT:], labels[-HELD_OUT:]
        self._generator = torch.Generator()
        self._accuracy = 0.0
        self.summary = f"{len(self._images):,} images of digits, and {HELD_OUT} held out"

    def start_epoch(self, draw: swarm.Draw) -> None:
        self._generator.manual_seed(draw.seed)

    def loss(self, model: nn.Module, samples: int) -> torch.Tensor:
        places = torch.randint(len(self._images), (samples,), generator=self._generator)
        places = places.to(self._images.device)
        return functional.cross_entropy(model(self._images[places]), self._labels[places])

    @torch.no_grad()
    def validation_loss(self, model: nn.Module) -> float:
        images, labels = self._held_out
        logits = model(images)
        self._accuracy = float((logits.argmax(1) == labels).float().mean())
        return float(functional.cross_entropy(logits, labels))

    def metrics(self, validation_loss: float) -> dict[str, float]:
        """Return the share of held-out digits that were read correctly, which the monitor shows."""
        return {"accuracy": self._accuracy}
