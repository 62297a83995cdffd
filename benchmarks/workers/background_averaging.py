"""A training loop with and without averaging behind it, in turns, and the partner that it averages with.

The partner computes almost nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

import swarm
from benchmarks.training import BATCH_SAMPLES, LEARNING_RATE, backward, build_model
from benchmarks.worker_channel import WorkerChannel

WINDOW_S = 2.0
ROUND_EVERY_S = 0.5
EPOCH_STEPS = 40  # of the trainer, so that a streaming mode has rounds about as often
PARTNER_STEP_S = 0.05
FRAGMENTS = 4
TIMEOUT_S = 60.0

Step = Callable[[], bool]  # one training step; returns whether it completed a round


class Averaging:
    """`Averager.step(wait=False)` over the parameters, every `ROUND_EVERY_S`. Each average is applied as a
    difference.
    """

    def __init__(self, node: swarm.Node, model: torch.nn.Module) -> None:
        self._inner = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self._averager = swarm.Averager(
            node, [p.detach() for p in model.parameters()], name="behind", target_group_size=2
        )
        self._pending: swarm.PendingRound | None = None
        self._next_s = 0.0

    def plain(self) -> bool:
        self._inner.step()
        return False

    def averaged(self) -> bool:
        self._inner.step()
        if self._pending is not None and self._pending.done:
            failed = self._pending.result().failed
            self._pending = None
            return not failed
        if self._pending is None and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + ROUND_EVERY_S
            self._pending = self._averager.step(wait=False, apply="delta", timeout_s=TIMEOUT_S)
        return False

    def settle(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def partner(self) -> None:
        self._averager.step(timeout_s=TIMEOUT_S)


class Streaming:
    """`swarm.Optimizer` in streaming DiLoCo compared with the bare inner optimizer."""

    def __init__(self, node: swarm.Node, model: torch.nn.Module) -> None:
        self._inner = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self._optimizer = swarm.Optimizer(
            self._inner,
            node=node,
            run="behind",
            target_batch_size=EPOCH_STEPS * BATCH_SAMPLES,
            batch_size_per_step=BATCH_SAMPLES,
            mode=swarm.Diloco(streaming=FRAGMENTS),
            codec="int4",
        )
        self._model = model

    def plain(self) -> bool:
        self._inner.step()
        return False

    def averaged(self) -> bool:
        report = self._optimizer.step()
        return report.stepped and not report.alone

    def settle(self) -> None:
        return None

    def partner(self) -> None:
        for p in self._model.parameters():
            p.grad = torch.zeros_like(p)
        self._optimizer.step(batch_size=1)
        time.sleep(PARTNER_STEP_S)


VARIANTS: dict[str, type[Averaging] | type[Streaming]] = {"averager": Averaging, "streaming": Streaming}


def window(model: torch.nn.Module, generator: torch.Generator, step: Step) -> tuple[float, float, int]:
    """Train for a while. Return (mean seconds of a step, processor seconds of it in this thread, completed
    rounds).
    """
    began_s, began_cpu_s, steps, rounds = time.monotonic(), time.thread_time(), 0, 0
    while time.monotonic() - began_s < WINDOW_S:
        model.zero_grad()
        backward(model, generator)
        rounds += step()
        steps += 1
    return (time.monotonic() - began_s) / steps, (time.thread_time() - began_cpu_s) / steps, rounds


def main() -> None:
    channel = WorkerChannel()
    settings: dict[str, Any] = channel.configuration
    torch.set_num_threads(1)
    if settings["cores"] == 1:  # one for the trainer, another one for its partner
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[settings["rank"] % len(cores)]})
    bootstrap = [] if settings["rank"] == 0 else [channel.published("address")]
    with swarm.Node(bootstrap=bootstrap, listen="127.0.0.1:0") as node:
        if settings["rank"] == 0:
            channel.publish("address", node.addresses[0])
        model = build_model()
        variant = VARIANTS[settings["variant"]](node, model)
        if settings["rank"]:
            channel.send("ready")
            while True:  # until the command ends this process
                variant.partner()
        generator = torch.Generator().manual_seed(0)
        while not window(model, generator, variant.averaged)[2]:  # until the first common round
            continue
        channel.send("ready")
        for _ in range(settings["pairs"]):
            variant.settle()
            without_s, without_cpu_s, _ = window(model, generator, variant.plain)
            with_s, with_cpu_s, rounds = window(model, generator, variant.averaged)
            channel.send(
                "pair",
                without_s=without_s,
                with_s=with_s,
                more_cpu=with_cpu_s / without_cpu_s - 1.0,
                rounds=rounds,
            )
        channel.send("done")


if __name__ == "__main__":
    main()
