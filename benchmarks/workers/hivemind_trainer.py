"""A trainer with hivemind.Optimizer. Runs in hivemind's environment."""

from __future__ import annotations

import time

import torch

IMPORTED_S = time.monotonic()

import logging
import re

import hivemind  # type: ignore[import-not-found,unused-ignore]

from benchmarks.training import (
    BATCH_SAMPLES,
    LEARNING_RATE,
    TARGET_BATCH_SAMPLES,
    Marks,
    backward,
    build_model,
    paced,
)
from benchmarks.worker_channel import WorkerChannel
from benchmarks.workers.hivemind_peer import joined

# The default of 15 s would prolong every epoch and every join; below the request timeout of 3 s hivemind
# can deadlock.
MATCHMAKING_S = 3.5
AVERAGING_TIMEOUT_S = 30.0


class JointRounds(logging.Handler):
    """Reports averaged gradients, which hivemind mentions in its log only."""

    def __init__(self, channel: WorkerChannel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        found = re.search(r"Averaged gradients with (\d+) peers", record.getMessage())
        if found and int(found[1]) > 1:
            self._channel.send("joint", at_s=time.monotonic(), peers=int(found[1]))


def main() -> None:
    marks = Marks(IMPORTED_S)
    marks.add("import hivemind")
    channel = WorkerChannel()
    settings = channel.configuration
    torch.set_num_threads(1)
    logging.getLogger("hivemind.optim.optimizer").addHandler(JointRounds(channel))
    dht = joined(channel)
    marks.add("DHT")
    model = build_model()
    # torch imports its compiler when the first optimizer is made
    inner = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    marks.add("model and AdamW")
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="benchmark",
        target_batch_size=TARGET_BATCH_SAMPLES,
        batch_size_per_step=BATCH_SAMPLES,
        optimizer=inner,
        matchmaking_time=MATCHMAKING_S,
        averaging_timeout=AVERAGING_TIMEOUT_S,
        grad_compression=hivemind.compression.Float16Compression(),
        verbose=True,
    )
    marks.add("optimizer")
    if settings["joins"]:
        optimizer.load_state_from_peers()
        marks.add("state")
    channel.send("started", imported_s=IMPORTED_S, loaded_s=time.monotonic(), phases=marks.seconds)
    generator = torch.Generator().manual_seed(settings["rank"])
    for _ in paced(channel):
        backward(model, generator)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.shutdown()
    dht.shutdown()
    channel.send("stopped")


if __name__ == "__main__":
    main()
