"""A flood of calls of an expert by strangers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import torch

import swarm
from benchmarks.workers.attacked_node import EXPERT, EXPERT_BATCH_MAX, EXPERT_WIDTH
from swarm.core.errors import SwarmError
from swarm.core.identity import Identity

if TYPE_CHECKING:
    from benchmarks.workers.attacker import Target

_CALLERS = 4


async def experts(target: Target, seconds: float) -> int:
    """Call an expert forward and backward as several peers, in batches of the largest allowed size."""
    address = str(target.contact.multiaddrs[0])
    deadline_s = time.monotonic() + seconds

    def call() -> int:
        calls = 0
        with swarm.Node([address], listen=None, identity=Identity.generate()) as node:
            expert = swarm.RemoteExpert(node, EXPERT)
            inputs = torch.randn(EXPERT_BATCH_MAX, EXPERT_WIDTH, requires_grad=True)
            while time.monotonic() < deadline_s:
                with contextlib.suppress(SwarmError):
                    expert(inputs).sum().backward()
                    calls += 2
        return calls

    return sum(await asyncio.gather(*(asyncio.to_thread(call) for _ in range(_CALLERS))))
