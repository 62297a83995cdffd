"""A peer that donates the state of a swarm.Optimizer, or downloads it.

The rate of a donor can be limited, as that of a slow link.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import torch

import swarm
from averaging.optim.state.donor import Donor
from averaging.optim.state.view import StateView
from benchmarks.worker_channel import WorkerChannel

LOAD_TIMEOUT_S = 180.0
STEPS = 12  # of a training donor, per measurement


def main() -> None:
    channel = WorkerChannel()
    settings = channel.configuration
    torch.set_num_threads(1)
    if settings["bytes_per_s"]:
        pace(settings["bytes_per_s"])
    bootstrap = [] if settings["rank"] == 0 else [channel.published("address")]
    with swarm.Node(bootstrap=bootstrap, listen="127.0.0.1:0") as node:
        if settings["rank"] == 0:
            channel.publish("address", node.addresses[0])
        torch.manual_seed(1 if settings["gives"] else 2)
        parameters = [torch.nn.Parameter(torch.randn(settings["elements"] // 16)) for _ in range(16)]
        inner = torch.optim.SGD(parameters, lr=1e-3)
        with swarm.Optimizer(
            inner, node=node, run="benchmark", target_batch_size=1 << 30, batch_size_per_step=1
        ) as optimizer:
            if settings["gives"]:
                # the first donor is alone, the others have its state
                loaded = optimizer.load_state_from_peers(timeout_s=LOAD_TIMEOUT_S)
                channel.publish(
                    "address", node.addresses[0]
                )  # the first donor may have left when the next one comes
            channel.send("ready")
            while (order := channel.receive())["do"] != "stop":
                if order["do"] == "load":
                    began_s = time.monotonic()
                    loaded = optimizer.load_state_from_peers(timeout_s=LOAD_TIMEOUT_S)
                    took_s = time.monotonic() - began_s
                    right = bool(torch.equal(parameters[3].detach()[:100], _expected(settings)[:100]))
                    channel.send(
                        "loaded",
                        ok=loaded.loaded and right,
                        reason=loaded.reason,
                        seconds=took_s,
                        donors=len(loaded.donors),
                    )
                elif order["do"] == "train":
                    channel.send("trained", steps_s=train(optimizer, parameters))
    channel.send("stopped")


def _expected(settings: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(1)
    return [torch.randn(settings["elements"] // 16) for _ in range(4)][3]


def train(optimizer: Any, parameters: list[torch.nn.Parameter]) -> list[float]:
    """Make steps that write the whole state, as the end of an epoch does. Return the seconds of each."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    steps_s = []
    for _ in range(STEPS):
        began_s = time.monotonic()
        optimizer._catch_up.advance(optimizer.inner.step)
        optimizer._donor.changed()
        steps_s.append(time.monotonic() - began_s)
        # stands for forward, backward and the round of an epoch
        time.sleep(0.5)
        optimizer._donor.on_round_begin()
    return steps_s


def pace(bytes_per_s: float) -> None:
    """Delay each chunk until a link of this rate would have carried the chunks before it."""
    plain = Donor._chunk
    free_s = [0.0]

    async def paced(self: Donor, view: StateView, index: int) -> bytes:
        message = await plain(self, view, index)
        now_s = asyncio.get_running_loop().time()
        free_s[0] = max(free_s[0], now_s) + len(message) / bytes_per_s
        await asyncio.sleep(free_s[0] - now_s)
        return message

    Donor._chunk = paced  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
