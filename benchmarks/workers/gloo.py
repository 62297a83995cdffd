"""A member of a gloo process group that sums known vectors: no encryption, no fault tolerance, fixed
membership.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as distributed

from benchmarks.reference_vectors import delivered, fill
from benchmarks.worker_channel import WorkerChannel, wait_until
from swarm.testing import linkrelay

LOOPBACK = "127.0.0.1"


def main() -> None:
    channel = WorkerChannel()
    settings = channel.configuration
    if settings["host"] != LOOPBACK:  # in a network namespace, where host names do not resolve
        os.environ["GLOO_SOCKET_IFNAME"] = linkrelay.DEVICE
    store = Path(settings["rendezvous"]) / "gloo"
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=settings["rank"],
        world_size=settings["peers"],
        timeout=timedelta(seconds=60),
    )
    vector = torch.zeros(settings["elements"])
    channel.send("ready")
    while True:
        order = channel.receive()
        if order["do"] == "prepare":
            fill([vector], settings["rank"])
            channel.send("prepared")
        elif order["do"] == "round":
            wait_until(order["at_s"])
            distributed.all_reduce(vector)
            vector.div_(settings["peers"])
            channel.send(
                "done",
                ok=True,
                reason="",
                end_s=time.monotonic(),
                grouped_s=order["at_s"],
                group=settings["peers"],
            )
        elif order["do"] == "check":
            fraction, worst = delivered([vector], settings["peers"], "float32")
            channel.send("checked", delivered=fraction, worst=worst)


if __name__ == "__main__":
    main()
