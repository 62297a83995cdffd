"""Rounds over tensors on a GPU, on the host, and on both: all members end with the same bits, also while the
GPU is kept busy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from averaging.averager import Averager
from averaging.reduction.lowrank import PowerSgd
from benchmarks.cuda.device import kept_busy
from benchmarks.cuda.peers import step_all
from swarm.compression import names
from swarm.node import Node

SETTINGS: list[dict[str, Any]] = [
    *({"codec": name} for name in names() if name not in ("int2", "sign", "topk")),
    *({"codec": name, "error_feedback": True} for name in ("int2", "int8", "sign", "topk")),
    {"strategy": PowerSgd(rank=4)},
]
PLACES = {"on the GPU": "ddddddd", "mixed": "dhddhhd", "all but one on the host": "hhhdhhh"}


def tensors(places: str, device: torch.device, seed: int) -> list[torch.Tensor]:
    """Return tensors of several types, shapes and strides, on the device ("d") or on the host ("h")."""
    chance = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=chance) for shape in ((30_000,), (400, 50), (), (0,), (70, 1000))]
    made += [
        torch.randn(500, 40, generator=chance).t(),
        torch.randn(999, generator=chance).to(torch.bfloat16),
    ]
    where = [device if place == "d" else torch.device("cpu") for place in places]
    return [
        torch.empty_like(tensor, device=one).copy_(tensor) for tensor, one in zip(made, where, strict=True)
    ]


def same(one: list[torch.Tensor], other: list[torch.Tensor], *, exactly: bool = True) -> bool:
    """Return whether the lists hold the same bits, on whatever device; if not `exactly`, nearly the same."""
    pairs = [(a.detach().cpu(), b.detach().cpu()) for a, b in zip(one, other, strict=True)]
    return all(
        torch.equal(a, b) if exactly else torch.allclose(a.float(), b.float(), atol=2e-2) for a, b in pairs
    )


def refill(mine: list[torch.Tensor], seed: int) -> None:
    for tensor, value in zip(mine, tensors("hhhhhhh", torch.device("cpu"), seed), strict=True):
        tensor.copy_(value)


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("apply", ["replace", "delta"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: " ".join(map(str, settings.values())))
def test_members_on_gpu_and_host_end_with_the_same_values(
    settings: dict[str, Any], apply: Any, places: str, nodes: list[Node], device: torch.device
) -> None:
    mine = [tensors("hhhhhhh", device, 1), tensors(places, device, 2)]
    before = [[tensor.detach().cpu().clone() for tensor in one] for one in mine]
    with ExitStack() as stack:
        averagers = [
            stack.enter_context(Averager(node, one, name="round", **settings))
            for node, one in zip(nodes, mine, strict=True)
        ]
        for _ in range(3):
            results = step_all(averagers, apply=apply)
            assert not any(result.failed for result in results), results
            assert results[0].digest == results[1].digest
            assert same(*mine, exactly=apply == "replace")
    if settings.get("codec") in ("float32", "float16", "int8"):
        mean = [(one.float() + other.float()) / 2 for one, other in zip(*before, strict=True)]
        assert all(
            torch.allclose(tensor.float().cpu(), value, atol=0.1)
            for tensor, value in zip(mine[1], mean, strict=True)
        )


@pytest.mark.parametrize("codec", ["float16", "int8"])
def test_repeated_rounds_beside_a_matmul_loop_are_equal_every_time(
    codec: str, nodes: list[Node], device: torch.device, small: bool
) -> None:
    """Run two hundred rounds: while the GPU is never idle, a copy that is read too early shows up in one."""
    mine = [tensors("hhhhhhh", device, 0), tensors(PLACES["mixed"], device, 0)]
    oracle = [tensors("hhhhhhh", device, 0) for _ in range(2)]
    with ExitStack() as stack:
        averagers = [
            stack.enter_context(Averager(node, one, name="busy", codec=codec))
            for node, one in zip(nodes, mine, strict=True)
        ]
        plain = [
            stack.enter_context(Averager(node, one, name="host", codec=codec))
            for node, one in zip(nodes, oracle, strict=True)
        ]
        stack.enter_context(kept_busy(device, 0.05))
        for repeat in range(3 if small else 100):
            for place in range(2):
                refill(mine[place], 2 * repeat + place)
                refill(oracle[place], 2 * repeat + place)
            results, expected = step_all(averagers), step_all(plain)
            assert not any(result.failed for result in (*results, *expected)), (results, expected)
            assert same(*mine), f"repeat {repeat}: GPU and host differ"
            assert same(mine[1], oracle[1], exactly=False), (
                f"repeat {repeat}: not the average of peers on the host"
            )


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Torch's calls within go to a stream of their own, which begins after what was asked so far."""
    if device.type == "cpu":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def test_a_round_takes_the_values_of_its_beginning_on_the_trainers_own_stream(
    nodes: list[Node], device: torch.device, small: bool
) -> None:
    """Fifty additions are queued before the round and one after: others get the fifty, and the trainer keeps
    the last one.
    """
    numel = 10_000 if small else 1 << 24
    mine, theirs = torch.zeros(numel, device=device), torch.zeros(numel)
    averagers = [
        Averager(node, [tensor], name="moment", codec="float32")
        for node, tensor in zip(nodes, (mine, theirs), strict=True)
    ]
    with averagers[0], averagers[1], side_stream(device):
        for _ in range(50):
            mine.add_(1.0)
        pending = averagers[0].step(apply="delta", wait=False, timeout_s=30.0)
        mine.add_(1000.0)
        received = averagers[1].step(weight=0.0, timeout_s=30.0)
        sent = pending.result(40.0)
    assert not received.failed, received
    assert not sent.failed, sent
    assert theirs.unique().tolist() == [50.0]
    assert mine.cpu().unique().tolist() == [1050.0]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_values_that_cannot_be_sent_are_found_on_the_device(
    bad: float, nodes: list[Node], device: torch.device
) -> None:
    mine = [
        torch.randn(100_000, generator=torch.Generator().manual_seed(place)).to(device) for place in range(2)
    ]
    before, mean = mine[1].clone(), (mine[0] + mine[1]) / 2
    mine[0][77_777] = bad
    with (
        Averager(nodes[0], [mine[0]], name="bad", codec="int8") as one,
        Averager(nodes[1], [mine[1]], name="bad", codec="int8") as other,
    ):
        results = step_all([one, other])
    assert any(
        "77777" in f"{result.detail} {result.left_out}" or nodes[0].peer_id in result.left_out
        for result in results
    ), results
    assert bool(mine[1].isfinite().all())
    # what was sent before the value was found counts, the rest does not
    alone, both = ((mine[1] - value).abs() < 0.1 for value in (before, mean))
    assert results[1].failed or bool((alone | both).all())
