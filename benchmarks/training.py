"""The same small training job for the trainers of all systems: model, batches, pace. Needs torch only."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.worker_channel import WorkerChannel

WIDTH = 512
LAYERS = 4
BATCH_SAMPLES = 32
STEP_S = 0.05  # paced, so that two cores suffice for three trainers and a joiner
TARGET_BATCH_SAMPLES = 640  # two trainers reach this twice a second
LEARNING_RATE = 1e-3


class Marks:
    """Seconds between named moments of a start."""

    def __init__(self, since_s: float) -> None:
        self.seconds: dict[str, float] = {}
        self._last_s = since_s

    def add(self, name: str) -> None:
        now_s = time.monotonic()
        self.seconds[name] = now_s - self._last_s
        self._last_s = now_s


def build_model() -> nn.Module:
    """Return a model of about a million parameters: 4 MiB in float32."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def backward(model: nn.Module, generator: torch.Generator) -> None:
    """Compute the gradients of one batch."""
    samples = torch.randn(BATCH_SAMPLES, WIDTH, generator=generator)
    loss: torch.Tensor = nn.functional.mse_loss(model(samples), samples.roll(1, dims=1))
    loss.backward()  # type: ignore[no-untyped-call]


def orders(channel: WorkerChannel) -> Callable[[], dict[str, Any] | None]:
    """Listen for orders during the training. The returned function gives the next order, or None at once."""
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def listen() -> None:
        while True:
            waiting.put(channel.receive())

    threading.Thread(target=listen, daemon=True, name="orders").start()

    def pending() -> dict[str, Any] | None:
        return None if waiting.empty() else waiting.get()

    return pending


def paced(channel: WorkerChannel) -> Iterator[int]:
    """Yield step numbers, at most one every STEP_S, until the order to stop."""
    pending, step = orders(channel), 0
    while True:
        due_s = time.monotonic() + STEP_S
        yield step
        step += 1
        order = pending()
        if order is not None and order["do"] == "stop":
            return
        time.sleep(max(0.0, due_s - time.monotonic()))
