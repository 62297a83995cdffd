"""Many callers of experts in one process, each with its own identity, connections and one call in flight."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import torch

from benchmarks.expert_load import WIDTH
from benchmarks.worker_channel import WorkerChannel, wait_until
from moe.protocol.calls import ExpertCalls
from moe.protocol.declarations import ExpertReplica
from moe.protocol.names import ExpertUid
from swarm.core.errors import SwarmError
from swarm.core.identity import Identity
from swarm.core.ids import Contact
from swarm.net.channels import Channels
from swarm.runtime.thread import NetworkThread

UID = ExpertUid.parse("nop.0")
TIMEOUT_S = 30.0


def main() -> None:
    channel = WorkerChannel()
    network = NetworkThread()
    contact = Contact.parse(channel.published("address"))
    callers = network.run(connected(contact, channel.configuration["clients"], network), 120.0)
    channel.send("ready")
    while True:
        order = channel.receive()
        if order["do"] == "calls":
            wait_until(order["at_s"])
            channel.send(
                "done", **network.run(call_concurrently(callers, order["seconds"]), order["seconds"] + 60.0)
            )


async def connected(
    contact: Contact, clients: int, network: NetworkThread
) -> list[tuple[ExpertCalls, ExpertReplica]]:
    """Return `clients` callers, each of which has made a call."""
    callers = []
    for _ in range(clients):
        calls = ExpertCalls(Channels(Identity.generate()), network.pool)
        described = (await calls.describe(ExpertReplica(contact, b""), [UID], timeout_s=TIMEOUT_S))[0]
        assert described is not None
        callers.append((calls, ExpertReplica(contact, described.schema.digest)))
    return callers


async def call_concurrently(
    callers: list[tuple[ExpertCalls, ExpertReplica]], seconds: float
) -> dict[str, Any]:
    """Let all callers make one call after the other for `seconds`."""
    end_s = time.monotonic() + seconds
    latencies: list[float] = []
    reasons: list[str] = []

    async def one(number: int, calls: ExpertCalls, replica: ExpertReplica) -> None:
        x = torch.full((1, WIDTH["nop"]), float(number))
        while time.monotonic() < end_s:
            begun_s = time.monotonic()
            try:
                answer = await calls.forward(replica, UID, [x], timeout_s=TIMEOUT_S)
            except SwarmError as error:
                reasons.append(str(error)[:200])
                continue
            latencies.append(time.monotonic() - begun_s)
            if not torch.equal(answer.outputs[0], x):
                reasons.append("an answer is wrong")

    begun_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for number, (calls, replica) in enumerate(callers):
            tasks.create_task(one(number, calls, replica))
    latencies.sort()
    return {
        "seconds": time.monotonic() - begun_s,
        "performed": len(latencies),
        "failed": len(reasons),
        "reasons": sorted(set(reasons))[:3],
        "median_s": latencies[len(latencies) // 2] if latencies else None,
        "slow_s": latencies[int(0.99 * len(latencies))] if latencies else None,
    }


if __name__ == "__main__":
    main()
