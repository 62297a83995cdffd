"""A peer with a GPU: codecs on the device, a round over its tensors beside one over the host's, and what the
swarm adds to a step.

Refuses where there is no CUDA device. Not yet run on one: the workloads are tested on the host.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from averaging.allreduce.work import ReductionKernels
from averaging.averager import Averager
from averaging.optim.optimizer import Optimizer
from averaging.reduction.averages import Averages, ResultBuffer
from averaging.reduction.partition import plan_parts
from averaging.reduction.staging import Staging
from benchmarks.environments import NoEnvironment
from benchmarks.results import Row, Series
from swarm.compression import find
from swarm.node import Node

CODECS = ("float32", "float16", "int8", "int4", "int2", "sign", "topk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    elements: int = 1 << 26  # of the vector that is encoded and averaged: 256 MiB
    width: int = 2048  # of the model's layers
    layers: int = 8
    batch: int = 256
    rounds: int = 9


def check() -> None:
    """NoEnvironment, in a sentence, unless torch sees a CUDA device."""
    if not torch.cuda.is_available():
        raise NoEnvironment(
            f"the section cuda needs a CUDA device, and torch {torch.__version__} sees none on this machine"
        )


def rows(say: Callable[[str], None], *, device: str = "cuda", size: Size | None = None) -> list[Row]:
    """All of the section. `device`: another one only to see that it runs."""
    size = size or Size()
    found = [
        *_codec_rows(torch.device(device), size),
        *_round_rows(torch.device(device), size),
        _step_row(torch.device(device), size),
    ]
    for row in found:
        peer = f", {row.peer.name} {row.peer.median:.3g}" if row.peer is not None else ""
        say(f"{row.workload}, {row.quantity}: {row.ours.median:.3g} {row.ours.unit}{peer}")
    return found


def _codec_rows(device: torch.device, size: Size) -> list[Row]:
    """From values on the device to messages on the host, as a round's sender works: part by part, copies
    beside encoding.
    """
    found = []
    for name in CODECS:
        codec = find(name)
        rates: dict[torch.device, list[float]] = {}
        for where in (device, torch.device("cpu")):
            staging = Staging([torch.randn(size.elements, device=where)])
            plan = plan_parts(size.elements, [1.0], codec, 1 << 20)
            bench = ReductionKernels(
                plan, codec, 0, staging.take(lent=True), Averages(plan, codec, ResultBuffer(staging.queues))
            )
            rates[where] = []
            for _ in range(size.rounds + 1):
                started_s = time.perf_counter()
                for at in range(0, len(plan.parts), 2):
                    bench.encode(plan.parts[at : at + 2])
                rates[where].append(4e-9 * size.elements / (time.perf_counter() - started_s))
        found.append(
            _row(
                f"codec-{name}",
                f"codec {name}, from the device to messages",
                "rate, of float32",
                "GB/s",
                rates[device][1:],
                rates[torch.device("cpu")][1:],
            )
        )
    return found


def _round_rows(device: torch.device, size: Size) -> list[Row]:
    """Two peers of this process, over loopback."""
    seconds: dict[torch.device, list[float]] = {}
    with Node(listen="127.0.0.1:0") as first, Node(bootstrap=first.addresses, listen="127.0.0.1:0") as second:
        for where in (device, torch.device("cpu")):
            seconds[where] = []
            with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(2) as pool:
                averagers = [
                    stack.enter_context(
                        Averager(
                            node,
                            [torch.randn(size.elements, device=where)],
                            name=f"round-{where.type}",
                            codec="int8",
                        )
                    )
                    for node in (first, second)
                ]
                for _ in range(size.rounds + 1):
                    steps = [pool.submit(averager.step, timeout_s=60.0) for averager in averagers]
                    results = [step.result(90.0) for step in steps]
                    if any(result.failed for result in results):
                        raise RuntimeError(f"a round failed: {results}")
                    seconds[where].append(max(result.seconds["total"] for result in results))
    return [
        _row(
            "round",
            "round of two peers, int8",
            "whole step",
            "s",
            seconds[device][1:],
            seconds[torch.device("cpu")][1:],
        )
    ]


def _step_row(device: torch.device, size: Size) -> Row:
    """A training step that ends no epoch: what the accumulation of gradients adds to torch's own."""
    seconds: dict[bool, list[float]] = {}
    with Node(listen="127.0.0.1:0") as node:
        for swarmed in (True, False):
            layers = [
                torch.nn.Sequential(torch.nn.Linear(size.width, size.width), torch.nn.GELU())
                for _ in range(size.layers)
            ]
            model = torch.nn.Sequential(*layers).to(device)
            inner = torch.optim.AdamW(model.parameters())
            values = torch.randn(size.batch, size.width, device=device)
            seconds[swarmed] = []
            with contextlib.ExitStack() as stack:
                optimizer: torch.optim.Optimizer = inner
                if swarmed:
                    options = Optimizer(
                        inner,
                        node=node,
                        run="bench",
                        target_batch_size=1 << 40,
                        batch_size_per_step=size.batch,
                    )
                    optimizer = stack.enter_context(options)
                for _ in range(size.rounds + 2):
                    _finish(device)
                    started_s = time.perf_counter()
                    optimizer.zero_grad()
                    model(values).square().mean().backward()
                    optimizer.step()
                    _finish(device)
                    seconds[swarmed].append(time.perf_counter() - started_s)
    return _row(
        "step",
        "training step within an epoch",
        "whole step",
        "s",
        seconds[True][2:],
        seconds[False][2:],
        "torch alone",
    )


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _row(
    slug: str,
    workload: str,
    quantity: str,
    unit: str,
    ours: list[float],
    other: list[float],
    beside: str = "the host",
) -> Row:
    return Row(
        identifier=f"cuda-{slug}",
        workload=f"GPU: {workload}",
        quantity=quantity,
        ours=Series(name=f"swarm on the GPU: {quantity}", unit=unit, samples=tuple(ours)),
        peer=Series(name=f"{beside}: {quantity}", unit=unit, samples=tuple(other)),
        aim=None,
        shown="ours / peer",
    )
