"""A computing thread without a network, for tests: jobs in, outcomes out."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moe.protocol.tensors import Header, check_payload, decode, encode, join_payloads
from moe.server.compute import ComputeThread
from moe.server.devices import DeviceFailed
from moe.server.expert import Expert
from moe.server.jobs import Job, Outcome
from moe.server.logic.batching import BatchLimits
from swarm.compression import find
from swarm.core.ids import PeerId
from tests.moe.late_link import HOST, LateLink

TIMEOUT_S = 20.0
_numbers = itertools.count(1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def headers_of(payloads: Any) -> list[Header]:
    return [Header(one.codec, one.version, one.size_bytes, one.absent) for one in payloads]


def job_of(
    expert: Expert,
    inputs: list[torch.Tensor],
    gradients: list[torch.Tensor | None] | None = None,
    *,
    codec: str = "",
    encoded: bool = False,
) -> Job:
    """Return a job as `hosting` creates it. With `encoded` its tensors are left for the device to decode."""
    schema, batch, found = expert.schema, len(inputs[0]), find(codec) if codec else None
    leaves = [*schema.input_leaves, *(schema.gradient_leaves if gradients is not None else ())]
    payloads = encode([*inputs, *(gradients or ())], found)
    received: Any = (check_payload if encoded else decode)(
        headers_of(payloads), leaves, batch, join_payloads(payloads)
    )
    number = next(_numbers)
    return Job(
        number=number,
        uid="ffn.0",
        expert=expert,
        caller=PeerId(bytes(32)),
        pass_id=(PeerId(bytes(32)), number.to_bytes(16, "big")),
        inputs=received[: len(inputs)],
        gradients=received[len(inputs) :] if gradients is not None else None,
        keep=False,
        batch=batch,
        size_bytes=1,
        codec=found,
    )


def tensors_of(job: Job, outcome: Outcome) -> list[torch.Tensor | None]:
    """Decode the outcome of a job, as its caller does."""
    assert not outcome.failure, outcome.failure
    schema = job.expert.schema
    leaves = schema.input_gradient_leaves if job.is_backward else schema.output_leaves
    return decode(headers_of(outcome.payloads), leaves, job.batch, join_payloads(outcome.payloads))


class Computing:
    """A computing thread and its outcomes."""

    def __init__(self, link: LateLink | None = None, config: BatchLimits | None = None) -> None:
        self.link = link
        self.outcomes: dict[int, Outcome] = {}
        self.deliveries: list[tuple[int, bool]] = []  # results, and whether more follow at once
        self.failures: list[DeviceFailed] = []
        self._done: queue.SimpleQueue[tuple[Job, Outcome]] = queue.SimpleQueue()
        self.reported: queue.SimpleQueue[DeviceFailed] = queue.SimpleQueue()
        self.thread = ComputeThread(config or BatchLimits(), self._deliver, self.reported.put, HOST, link)

    def _deliver(self, done: list[tuple[Job, Outcome]], more_follow: bool) -> None:
        self.deliveries.append((len(done), more_follow))
        for one in done:
            self._done.put(one)

    def job(self, expert: Expert, inputs: list[torch.Tensor], gradients: Any = None, codec: str = "") -> Job:
        return job_of(expert, inputs, gradients, codec=codec, encoded=self.link is not None)

    def offer(self, *jobs: Job) -> None:
        """Queue jobs; several at once become one batch where the limits allow it."""
        expert = jobs[0].expert
        with expert.lock:  # the thread may take the first job alone, and then waits for the lock
            for job in jobs:
                assert not self.thread.offer([job])[0]

    def results(self, *jobs: Job) -> list[Outcome]:
        """Return the outcomes of these jobs, each of which comes exactly once."""
        while not all(job.number in self.outcomes for job in jobs):
            job, outcome = self._done.get(timeout=TIMEOUT_S)
            assert job.number not in self.outcomes
            self.outcomes[job.number] = outcome
        return [self.outcomes[job.number] for job in jobs]

    def run(self, *jobs: Job) -> list[Outcome]:
        self.offer(*jobs)
        return self.results(*jobs)


def batching_of(count: int, samples_max: int = 4096) -> BatchLimits:
    """Return a config with which batches wait until there are `count` requests of a sample or more, so that
    tests control what is computed together.
    """
    return BatchLimits(batch_samples_max=samples_max, batch_samples_min=count, linger_s=TIMEOUT_S)


@contextmanager
def computing(link: LateLink | None = None, config: BatchLimits | None = None) -> Iterator[Computing]:
    made = Computing(link, config)
    try:
        yield made
    finally:
        if link is not None:
            link.open_landing.set()
        assert made.thread.stop(TIMEOUT_S)
