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

from benchmarks.conversation import Conversation, wait_until
from benchmarks.known_values import delivered, fill
from swarm.testing import linkrelay

LOOPBACK = "127.0.0.1"


def main() -> None:
    talk = Conversation()
    settings = talk.configuration
    if settings["host"] != LOOPBACK:  # in a network of its own, where names of hosts lead nowhere
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
    talk.say("ready")
    while True:
        order = talk.hear()
        if order["do"] == "prepare":
            fill([vector], settings["rank"])
            talk.say("prepared")
        elif order["do"] == "round":
            wait_until(order["at_s"])
            distributed.all_reduce(vector)
            vector.div_(settings["peers"])
            talk.say(
                "done",
                ok=True,
                reason="",
                end_s=time.monotonic(),
                grouped_s=order["at_s"],
                group=settings["peers"],
            )
        elif order["do"] == "check":
            fraction, worst = delivered([vector], settings["peers"], "float32")
            talk.say("checked", delivered=fraction, worst=worst)


if __name__ == "__main__":
    main()
