"""A node that trains in a run while strangers flood it: it measures its own event loop and memory."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import sys
import time
from typing import Any

import torch

import swarm
from benchmarks.worker_channel import WorkerChannel
from swarm.core.identity import Identity
from swarm.core.ids import Key
from swarm.runtime.collector import keep_present_objects
from swarm.testing.records import fill

RUN = "attacked"
PARAMETERS = 1 << 20
EXPERT, EXPERT_WIDTH, EXPERT_BATCH_MAX = "flooded.0", 1024, 256  # one that the first node hosts
LARGE_KEY, LONG_KEY = Key("public", "large"), Key("public", "long")
_LARGE_ENTRIES, _LARGE_VALUE_BYTES, _LONG_ENTRIES = 15, 64 << 10, 4096
_TURN_S = 0.005  # a turn of the watched loop
_STATM = os.open("/proc/self/statm", os.O_RDONLY)  # read 200 times a second


class LoopWatch:
    """The lateness of the network thread's event loop, and the memory of the process."""

    def __init__(self) -> None:
        self._late_s: list[float] = []
        self._wall_late_s = 0.0
        self._memory_bytes: list[int] = []

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            began_s, began_processor_s = time.monotonic(), time.process_time()
            await asyncio.sleep(_TURN_S)
            late_s = time.monotonic() - began_s - _TURN_S
            self._wall_late_s = max(self._wall_late_s, late_s)
            # processor time of this process meanwhile, because on a busy machine it also waits for others
            self._late_s.append(max(min(late_s, time.process_time() - began_processor_s), 0.0))
            self._memory_bytes.append(memory_bytes())

    def take(self) -> dict[str, Any]:
        """Return the largest figures since the last call."""
        late_s, self._late_s = sorted(self._late_s) or [0.0], []
        memory, self._memory_bytes = self._memory_bytes or [0], []
        wall_late_s, self._wall_late_s = self._wall_late_s, 0.0
        return {
            "wall_late_s": wall_late_s,
            "late_s": late_s[-1],
            "late_99_s": late_s[len(late_s) * 99 // 100],
            "memory_bytes": max(memory),
            "memory_after_bytes": memory_bytes(),
            "processor_s": time.process_time(),
        }


def memory_bytes() -> int:
    """Return the resident memory of this process."""
    return int(os.pread(_STATM, 100, 0).split()[1]) * resource.getpagesize()


async def _fill(node: swarm.Node) -> None:
    """Store the records that expensive queries ask for, as if they had been validated."""
    storage, now_us = node.dht.service.storage, node.dht.service.overlay.now_us
    fill(storage, LARGE_KEY, _LARGE_ENTRIES, bytes(_LARGE_VALUE_BYTES), now_us)
    fill(storage, LONG_KEY, _LONG_ENTRIES, b"", now_us)


def _serve_expert(node: swarm.Node) -> swarm.ExpertServer:
    """Host one small expert, for as long as the node is open."""
    example = (torch.zeros(1, EXPERT_WIDTH),)
    expert = swarm.Expert(
        torch.nn.Linear(EXPERT_WIDTH, 16), example, lambda own: torch.optim.SGD(own, lr=0.0)
    )
    return swarm.ExpertServer(node, {EXPERT: expert}, max_batch_size=EXPERT_BATCH_MAX)


def main() -> None:
    channel = WorkerChannel()
    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.zeros(PARAMETERS))]
    inner = torch.optim.SGD(parameters, lr=1e-3)  # imports more of torch
    keep_present_objects()  # as `swarm join` does
    is_first = channel.configuration["rank"] == 0
    bootstrap = [] if is_first else [channel.published("address")]
    with (
        swarm.Node(bootstrap, listen="127.0.0.1:0", identity=Identity.generate()) as node,
        swarm.Optimizer(
            inner,
            node=node,
            run=RUN,
            target_batch_size=channel.configuration["target"],
            batch_size_per_step=1,
        ) as optimizer,
    ):
        if is_first:
            node.network.run(_fill(node), 30.0)
            _serve_expert(node)
            channel.publish("address", node.addresses[0])
        watch = LoopWatch()
        if is_first:
            node.network.submit(watch.run())
        is_ready, epoch, began_s = False, 0, time.monotonic()
        while True:
            if select.select([sys.stdin], [], [], channel.configuration["step_s"])[0]:
                if channel.receive()["do"] == "measure":
                    channel.send("measured", epoch=epoch, epoch_began_s=began_s, **watch.take())
                continue
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            if optimizer.epoch != epoch:
                epoch, began_s = optimizer.epoch, time.monotonic()
            if not is_ready and epoch >= channel.configuration["epochs"]:
                is_ready = True
                channel.send("ready", address=node.addresses[0])


if __name__ == "__main__":
    main()
