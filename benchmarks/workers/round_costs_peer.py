"""A peer that averages a vector repeatedly, and counts processor time and calls. It also runs with the
packages of an earlier commit, and uses only features that these have.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import swarm
from benchmarks.worker_channel import WorkerChannel
from swarm.net.channels import Channels

ROUND_S_MAX = 30.0


def main() -> None:
    channel = WorkerChannel()
    settings = channel.configuration
    torch.set_num_threads(1)
    calls = _count_calls()
    entries = [] if settings["rank"] == 0 else [channel.published("address")]
    vector = torch.full((settings["elements"],), float(settings["rank"]))
    with swarm.Node(bootstrap=entries, listen="127.0.0.1:0") as node:
        if settings["rank"] == 0:
            channel.publish("address", node.addresses[0])
        averager = swarm.Averager(node, [vector], name="costs", target_group_size=settings["peers"])
        # presence records are read from the DHT, which takes some rounds
        while len(averager.step(timeout_s=ROUND_S_MAX).peers) < settings["peers"]:
            pass
        channel.send("ready")
        number = 0  # names the round; without it, a peer that missed one would wait for the others at the end
        while True:
            rounds = channel.receive()["rounds"]
            before_s, before, failed = time.process_time(), calls[0], 0
            for _ in range(rounds):
                number += 1
                result = averager.step(timeout_s=ROUND_S_MAX, round_key=number)
                failed += result.failed or len(result.peers) < settings["peers"]
            processor_s = time.process_time() - before_s
            channel.send("averaged", processor_s=processor_s, calls=calls[0] - before, failed=failed)


def _count_calls() -> list[int]:
    """Count the calls and the streams that this process begins from now on."""
    counted, channels = [0], Channels
    for name in ("call", "open_stream"):
        begin = getattr(channels, name)

        def counting(*given: Any, begin: Any = begin, **named: Any) -> Any:
            counted[0] += 1
            return begin(*given, **named)

        setattr(channels, name, counting)
    return counted


if __name__ == "__main__":
    main()
