"""A peer that averages known vectors with swarm.Averager."""

from __future__ import annotations

import time
from typing import Any

import torch

import swarm
from benchmarks.reference_vectors import delivered, fill, tensors_of
from benchmarks.worker_channel import WorkerChannel, wait_until

GROUP_PHASE = "matchmaking"


def main() -> None:
    channel = WorkerChannel()
    settings = channel.configuration
    torch.set_num_threads(1)
    bootstrap = [] if settings["rank"] == 0 else [channel.published("address")]
    tensors = tensors_of(settings["elements"], settings["tensors"])
    with swarm.Node(bootstrap=bootstrap, listen=f"{settings['host']}:0") as node:
        if settings["rank"] == 0:
            channel.publish("address", node.addresses[0])
        averager = swarm.Averager(
            node,
            tensors,
            name="benchmark",
            target_group_size=settings["target_group_size"],
            codec=settings["codec"],
        )
        channel.send("ready")
        while True:
            order = channel.receive()
            if order["do"] == "prepare":
                fill(tensors, settings["rank"])
                channel.send("prepared")
            elif order["do"] == "round":
                channel.send("done", **_round(averager, order["at_s"], order["timeout_s"]))
            elif order["do"] == "check":
                fraction, worst = delivered(tensors, settings["peers"], settings["codec"], order.get("lost"))
                channel.send("checked", delivered=fraction, worst=worst)


def _round(averager: Any, at_s: float, timeout_s: float) -> dict[str, Any]:
    wait_until(at_s)
    started_s = time.monotonic()
    result = averager.step(timeout_s=timeout_s)
    end_s = time.monotonic()
    return {
        "ok": not result.failed,
        "reason": f"{result.reason}: {result.detail}" if result.failed else "",
        "end_s": end_s,
        "grouped_s": started_s + result.seconds.get(GROUP_PHASE, 0.0),
        "group": len(result.peers),
        "digest": result.digest,
        "phases": dict(result.seconds),
    }


if __name__ == "__main__":
    main()
