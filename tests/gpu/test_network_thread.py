"""The network thread never waits for the GPU: heartbeats and other peers' messages are answered while a
training step takes a second.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from averaging.averager import Averager
from averaging.reduction.lowrank import PowerSgd
from benchmarks.cuda.device import Figure, Load, finish, kept_busy
from benchmarks.cuda.peers import recorded_waits, step_all, watched_loop
from swarm.node import Node

NETWORK_THREADS = ["swarm-network"]
SETTINGS: dict[str, dict[str, Any]] = {
    "int8": {"codec": "int8"},
    "int8, error feedback": {"codec": "int8", "error_feedback": True},
    "median": {"codec": "float16", "aggregation": "median"},
    "audited": {"codec": "float16", "audit": 1.0},
    "powersgd": {"strategy": PowerSgd(rank=4)},
}


def averagers_on(
    nodes: list[Node], device: torch.device, elements: int, settings: dict[str, Any], stack: ExitStack
) -> list[Averager]:
    return [
        stack.enter_context(
            Averager(node, [torch.randn(elements // 1000, 1000, device=device)], name="thread", **settings)
        )
        for node in nodes
    ]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_no_wait_for_the_device_and_no_pinned_allocation_on_the_network_thread(
    settings: dict[str, Any], nodes: list[Node], device: torch.device, figure: Figure, small: bool
) -> None:
    with ExitStack() as stack:
        averagers = averagers_on(nodes, device, 100_000 if small else 8_000_000, settings, stack)
        found = stack.enter_context(recorded_waits(NETWORK_THREADS))
        for _ in range(3):
            results = step_all(averagers)
            assert not any(result.failed for result in results), results
    figure("waits and pinned allocations on the network thread", len(found), "calls")
    assert not found, sorted(set(found))


@pytest.mark.parametrize("apply", ["replace", "delta"])
def test_the_network_thread_stands_still_for_less_than_50_ms_beside_steps_of_a_second(
    apply: Any, nodes: list[Node], device: torch.device, figure: Figure, small: bool
) -> None:
    step_s = 0.1 if small else 1.0
    with ExitStack() as stack:
        averagers = averagers_on(nodes, device, 100_000 if small else 64_000_000, {"codec": "int8"}, stack)
        assert not any(result.failed for result in step_all(averagers))  # one-time allocations are done
        watches = [stack.enter_context(watched_loop(node)) for node in nodes]
        load = Load.on(device)
        with kept_busy(device, step_s):
            for _ in range(3):
                load.launch(step_s)
                results = step_all(averagers, apply=apply)
                assert not any(result.failed for result in results), results
        finish(device)
    assert all(watch.stalls_s for watch in watches)
    figure(
        f"longest stall of the network thread, {apply}",
        1e3 * max(watch.longest_s for watch in watches),
        "ms",
        at_most=50.0,
    )
