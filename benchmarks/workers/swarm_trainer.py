"""A trainer with swarm.Optimizer."""

from __future__ import annotations

import time

import torch

IMPORTED_S = time.monotonic()

import swarm
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

LOAD_TIMEOUT_S = 60.0


def main() -> None:
    marks = Marks(IMPORTED_S)
    marks.add("import swarm")
    swarm.Optimizer  # noqa: B018  its modules are imported on first use
    marks.add("its parts")
    channel = WorkerChannel()
    settings = channel.configuration
    torch.set_num_threads(1)
    bootstrap = [] if settings["rank"] == 0 else [channel.published("address")]
    with swarm.Node(bootstrap=bootstrap, listen="127.0.0.1:0") as node:
        if settings["rank"] == 0:
            channel.publish("address", node.addresses[0])
        marks.add("node")
        model = build_model()
        # torch imports its compiler when the first optimizer is made
        inner = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        marks.add("model and AdamW")
        optimizer = swarm.Optimizer(
            inner,
            node=node,
            run="benchmark",
            target_batch_size=TARGET_BATCH_SAMPLES,
            batch_size_per_step=BATCH_SAMPLES,
            mode="gradients",
            codec="float16",
        )
        marks.add("optimizer")
        if settings["joins"]:
            loaded = optimizer.load_state_from_peers(timeout_s=LOAD_TIMEOUT_S)
            if not loaded.loaded:
                raise SystemExit(f"no state: {loaded.reason}")
            marks.add("state")
        channel.send("started", imported_s=IMPORTED_S, loaded_s=time.monotonic(), phases=marks.seconds)
        generator = torch.Generator().manual_seed(settings["rank"])
        for _ in paced(channel):
            backward(model, generator)
            report = optimizer.step()
            optimizer.zero_grad()
            if report.stepped and report.contributed and report.round is not None and not report.round.failed:
                channel.send("joint", at_s=time.monotonic(), peers=len(report.round.peers))
    channel.send("stopped")


if __name__ == "__main__":
    main()
