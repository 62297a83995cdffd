"""A peer that averages known vectors with swarm.Averager."""

from __future__ import annotations

import time
from typing import Any

import torch

import swarm
from benchmarks.conversation import Conversation, wait_until
from benchmarks.known_values import delivered, fill, tensors_of

GROUP_PHASE = "matchmaking"


def main() -> None:
    talk = Conversation()
    settings = talk.configuration
    torch.set_num_threads(1)
    bootstrap = [] if settings["rank"] == 0 else [talk.published("address")]
    tensors = tensors_of(settings["elements"], settings["tensors"])
    with swarm.Node(bootstrap=bootstrap, listen=f"{settings['host']}:0") as node:
        if settings["rank"] == 0:
            talk.publish("address", node.addresses[0])
        averager = swarm.Averager(
            node,
            tensors,
            name="benchmark",
            target_group_size=settings["target_group_size"],
            codec=settings["codec"],
        )
        talk.say("ready")
        while True:
            order = talk.hear()
            if order["do"] == "prepare":
                fill(tensors, settings["rank"])
                talk.say("prepared")
            elif order["do"] == "round":
                talk.say("done", **_round(averager, order["at_s"], order["timeout_s"]))
            elif order["do"] == "check":
                fraction, worst = delivered(tensors, settings["peers"], settings["codec"], order.get("lost"))
                talk.say("checked", delivered=fraction, worst=worst)


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
