"""Torch with the model and its optimizer, idle after some steps: the baseline of a trainer's memory."""

from __future__ import annotations

import torch

from benchmarks.training import LEARNING_RATE, backward, build_model
from benchmarks.worker_channel import WorkerChannel

STEPS = 20


def main() -> None:
    channel = WorkerChannel()
    torch.set_num_threads(1)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(channel.configuration["rank"])
    for _ in range(STEPS):
        backward(model, generator)
        optimizer.step()
        optimizer.zero_grad()
    channel.send("steady")
    channel.receive()


if __name__ == "__main__":
    main()
