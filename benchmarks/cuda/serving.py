"""Measure how a peer with a GPU serves others while it trains: its state to newcomers, experts to callers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from averaging.optim.state.checkpoint import read, write
from benchmarks.cuda.companion import (
    EXPERT,
    HERE,
    STATE_TENSORS,
    callers,
    companions,
    counting_optimizer,
    newcomer,
)
from benchmarks.cuda.device import Load, finish
from benchmarks.cuda.model import Size
from moe.server.expert_server import Expert, ExpertServer
from swarm.node import Node

_QUIET_STEPS = 20
_EPOCH_STEPS = 50  # from one change of the state to the next
_LOAD_S = 60.0


@dataclass(slots=True)
class Served:
    """A trainer's steps, and how fast its state was read meanwhile."""

    quiet_s: list[float] = field(default_factory=list)  # steps in which nobody read the state
    busy_s: list[float] = field(default_factory=list)  # steps in which somebody did
    bytes_per_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # reads that failed, or were not of one moment

    @property
    def slowdown(self) -> float:
        """Return how many times as long a step takes while the state is read; 1: no step began in a read."""
        return statistics.median(self.busy_s) / statistics.median(self.quiet_s) if self.busy_s else 1.0


class Donor:
    """A peer that trains on one device and whose state tells the epoch in every element
    (`counting_optimizer`).
    """

    def __init__(
        self, node: Node, device: torch.device, size: Size, stream: torch.cuda.Stream | None
    ) -> None:
        """`stream`: the trainer's own; None for the default stream."""
        self.device, self.stream, self._step_s = device, stream, size.step_s
        self.state_bytes = 4 * (size.state_elements // STATE_TENSORS) * STATE_TENSORS
        with self._on_stream():
            self.parameters, self.optimizer = counting_optimizer(
                node, device, size.state_elements, _EPOCH_STEPS
            )
        self._load = Load.on(device)
        self.found = Served()

    def step(self) -> float:
        """One training step; how long it took until the device was done."""
        with self._on_stream():
            finish(self.device)
            started_s = time.perf_counter()
            self._load.launch(self._step_s)
            self.optimizer.step()
            finish(self.device)
            return time.perf_counter() - started_s

    def read_beside(self, work: Callable[[], float]) -> None:
        """Train while `work` reads the state in another thread. It returns the seconds it took, and raises
        when it read something wrong.
        """
        self.found.quiet_s += [self.step() for _ in range(_QUIET_STEPS)]
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            reading = pool.submit(work)
            self.found.busy_s.append(self.step())
            while not reading.done():
                self.found.busy_s.append(self.step())
            try:
                self.found.bytes_per_s.append(self.state_bytes / reading.result())
            except (ValueError, RuntimeError) as error:
                self.found.wrong.append(str(error))

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext()


def state_to_newcomers(
    size: Size, device: torch.device, *, times: int, stream: torch.cuda.Stream | None = None
) -> Served:
    """Measure `times` downloads of the state by a newcomer in another process, during training."""
    with Node(listen=HERE) as node:
        donor = Donor(node, device, size, stream)
        with (
            donor.optimizer,
            companions([newcomer(node.addresses[0], device, size.state_elements)]) as [worker],
        ):

            def load() -> float:
                worker.send({"do": "load"})
                loaded = worker.receive("loaded", time.monotonic() + _LOAD_S)
                if not loaded["ok"]:
                    raise ValueError(loaded["reason"])
                return float(loaded["seconds"])

            for _ in range(times):
                donor.read_beside(load)
        return donor.found


def state_to_disk(
    size: Size, device: torch.device, folder: Path, *, times: int, stream: torch.cuda.Stream | None = None
) -> Served:
    """Measure `times` checkpoints during training, into files that are read again and checked afterwards."""
    with Node(listen=HERE) as node:
        donor = Donor(node, device, size, stream)
        names = [str(place) for place in range(STATE_TENSORS)]
        path = folder / "epoch.safetensors"

        def save() -> float:
            started_s = time.perf_counter()
            view = donor.optimizer.state_view()
            try:
                write(view, path, names)
            finally:
                view.close()
            return time.perf_counter() - started_s

        with donor.optimizer:
            for _ in range(times):
                donor.read_beside(save)
                kept = read(path)
                if not all(bool((tensor == -float(kept.epoch)).all()) for tensor in kept.tensors.values()):
                    donor.found.wrong.append(f"the checkpoint of epoch {kept.epoch} is not of one moment")
        return donor.found


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """The service that callers had from an expert's server."""

    calls_per_s: float  # forward and backward passes
    busy: float  # share of the time in which the server computed
    failed: int
    failures: list[str]
    samples_per_batch: float


def experts(size: Size, device: torch.device) -> Called:
    """Callers of one feed-forward expert in bfloat16, each with one forward and backward pass in flight; an
    AdamW step per batch.
    """
    width = size.expert_width
    with torch.random.fork_rng(devices=[]), Node(listen=HERE) as node:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)]
        module = torch.nn.Sequential(*layers).to(torch.bfloat16)
        expert = Expert(
            module, (torch.zeros(1, width, dtype=torch.bfloat16),), torch.optim.AdamW, device=device
        )
        crowd = callers(node.addresses[0], size.callers // size.caller_processes, size.call_samples, width)
        with (
            ExpertServer(node, {EXPERT: expert}) as server,
            companions([crowd] * size.caller_processes) as workers,
        ):

            def call(seconds: float) -> list[dict[str, Any]]:
                for worker in workers:
                    worker.send({"do": "call", "seconds": seconds})
                return [worker.receive("called", time.monotonic() + seconds + 60.0) for worker in workers]

            call(size.calls_s / 4)  # connections, schemas
            before = server.statistics().experts[EXPERT].counts
            started_s = time.perf_counter()
            done = call(size.calls_s)
            wall_s = time.perf_counter() - started_s
            after = server.statistics().experts[EXPERT].counts
    batches = (
        after.forward_batches + after.backward_batches - before.forward_batches - before.backward_batches
    )
    samples = (
        after.forward_samples + after.backward_samples - before.forward_samples - before.backward_samples
    )
    return Called(
        calls_per_s=sum(one["calls"] for one in done) / wall_s,
        busy=(after.busy_s - before.busy_s) / wall_s,
        failed=sum(one["failed"] for one in done),
        failures=[text for one in done for text in one["failures"]][:3],
        samples_per_batch=samples / max(batches, 1),
    )
