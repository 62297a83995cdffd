"""Copy memory, which bounds everything on loopback."""

from __future__ import annotations

import time

import torch

from benchmarks.worker_channel import WorkerChannel, wait_until

BUFFER_BYTES = 256 << 20
REPEATS = 4


def main() -> None:
    channel = WorkerChannel()
    torch.set_num_threads(1)
    source, target = torch.ones(BUFFER_BYTES // 4), torch.zeros(BUFFER_BYTES // 4)
    channel.send("ready")
    wait_until(channel.receive()["at_s"])
    started_s = time.monotonic()
    for _ in range(REPEATS):
        target.copy_(source)
    channel.send("copied", bytes_per_s=BUFFER_BYTES * REPEATS / (time.monotonic() - started_s))
    channel.receive()


if __name__ == "__main__":
    main()
