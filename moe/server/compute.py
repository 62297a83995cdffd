"""The computing thread of a server: takes batches from the queues, one at a time, and hands results back to
the network loop.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moe.protocol.tensors import TensorPayload, encode, finite
from moe.server.expert import ComputationFailed, Expert, Tensors, joined, split
from moe.server.logic.batching import Batcher, BatchingConfig, Queued
from swarm.compression import Codec
from swarm.core.ids import PeerId

_log = logging.getLogger(__name__)

BACKWARD_COST = 3.0  # of a backward pass that computes forward again, in forward passes
_RATE_SHARE = 0.1  # of the newest batch in the moving averages


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request, checked."""

    number: int
    uid: str
    expert: Expert
    caller: PeerId
    name: tuple[PeerId, bytes]  # of the pass, for activations that are kept
    inputs: Tensors
    gradients: Sequence[torch.Tensor | None] | None  # None: a forward pass
    keep: bool
    batch: int
    size_bytes: int
    codec: Codec | None  # for the answer


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a job: tensors as they travel, or a reason why there are none."""

    pieces: Sequence[TensorPayload]
    version: int
    failure: str = ""


@dataclass(slots=True)
class Counts:
    """Of one expert, since the server started."""

    forward_requests: int = 0
    forward_samples: int = 0
    forward_batches: int = 0
    backward_requests: int = 0
    backward_samples: int = 0
    backward_batches: int = 0
    failed_requests: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class _Pace:
    """Moving averages over batches."""

    s_per_cost: float = 0.0
    samples_per_s: float = 0.0

    def note(self, seconds: float, cost: float, samples: int) -> None:
        seconds = max(seconds, 1e-6)
        first = not self.samples_per_s
        share = 1.0 if first else _RATE_SHARE
        self.s_per_cost += share * (seconds / cost - self.s_per_cost)
        self.samples_per_s += share * (samples / seconds - self.samples_per_s)


class ComputeThread:
    """Requests in, results out. `deliver` gets the results of a whole batch, on this thread."""

    def __init__(self, config: BatchingConfig, deliver: Callable[[list[tuple[Job, Outcome]]], None]) -> None:
        self._batcher = Batcher(config)
        self._deliver = deliver
        self._jobs: dict[int, Job] = {}  # that wait
        self._lock = threading.Lock()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._asleep = False
        self._stopping = False
        self._computing = 0  # requests of the batch in progress
        self._begun_s = 0.0
        self._batch_s = 0.0  # expected, of the batch in progress
        self._pace = _Pace()
        self.counts: dict[str, Counts] = {}
        self._thread = threading.Thread(target=self._run, name="swarm-experts", daemon=True)
        self._thread.start()

    def offer(self, job: Job) -> str:
        """Queue it; a reason when there is no room. Any thread."""
        cost = job.batch * (1.0 if job.gradients is None else BACKWARD_COST)
        kept = job.keep and job.expert.keeps
        # what keeps activations is a batch of its own
        kind: object = (job.uid, job.gradients is not None, job.number if kept else None)
        queued = Queued(job.number, kind, job.caller, job.batch, job.size_bytes, cost)
        with self._lock:
            refusal = (
                "this server is leaving" if self._stopping else self._batcher.offer(queued, time.monotonic())
            )
            if refusal:
                return refusal
            self._jobs[job.number] = job
            wake, self._asleep = self._asleep, False
        if wake:
            self._wake.put(None)
        return ""

    def refusal(self, caller: PeerId, size_bytes: int) -> str:
        """What `offer` would say."""
        with self._lock:
            return self._batcher.refusal(caller, size_bytes)

    def withdraw(self, number: int) -> bool:
        """False when it is being computed, or was."""
        with self._lock:
            self._jobs.pop(number, None)
            return self._batcher.withdraw(number)

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return self._batcher.queued

    @property
    def unfinished(self) -> int:
        """Requests that wait or are being computed."""
        with self._lock:
            return self._batcher.queued + self._computing

    @property
    def wait_s(self) -> float:
        """How long a request that comes now would wait, as far as the pace until now tells."""
        running_s = max(self._begun_s + self._batch_s - time.monotonic(), 0.0) if self._computing else 0.0
        return running_s + self._batcher.queued_cost * self._pace.s_per_cost

    @property
    def samples_per_s(self) -> float:
        """Of the last batches, while they were computed; 0: there was none yet."""
        return self._pace.samples_per_s

    def halt(self) -> None:
        """Take nothing more; the batch in progress is finished, what waits is dropped."""
        with self._lock:
            self._stopping = True
        self._wake.put(None)

    def stop(self, timeout_s: float) -> bool:
        """`halt`, and wait for the batch in progress; False when that took too long."""
        self.halt()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._stopping:
                    return
                now_s = time.monotonic()
                batch = self._batcher.take(now_s)
                jobs = [self._jobs.pop(one.number) for one in batch]
                due_s = self._batcher.due_s() if not batch else None
                self._asleep = not batch
                self._computing = len(jobs)
                cost = sum(one.cost for one in batch)
                self._begun_s, self._batch_s = now_s, cost * self._pace.s_per_cost
            if not jobs:
                with contextlib.suppress(queue.Empty):
                    self._wake.get(timeout=None if due_s is None else max(due_s - now_s, 0.0))
                continue
            outcomes = self._compute(jobs)
            samples = sum(job.batch for job in jobs)
            seconds = time.monotonic() - now_s
            self._pace.note(seconds, cost, samples)
            self.counts.setdefault(jobs[0].uid, Counts()).busy_s += seconds
            self._deliver(list(zip(jobs, outcomes, strict=True)))
            with self._lock:
                self._computing = 0

    def _compute(self, jobs: list[Job]) -> list[Outcome]:
        expert, count = jobs[0].expert, self.counts.setdefault(jobs[0].uid, Counts())
        samples = sum(job.batch for job in jobs)
        if jobs[0].gradients is None:
            count.forward_requests += len(jobs)
            count.forward_samples += samples
            count.forward_batches += 1
        else:
            count.backward_requests += len(jobs)
            count.backward_samples += samples
            count.backward_batches += 1
        with expert.lock:
            version = expert.version
            outcomes = _attempt(expert, jobs)
            if any(outcome.failure for outcome in outcomes) and len(jobs) > 1 and expert.version == version:
                # whose request it was is found by computing each by itself: it costs the others nothing but
                # time
                outcomes = [_attempt(expert, [job])[0] for job in jobs]
        for job, outcome in zip(jobs, outcomes, strict=True):
            if outcome.failure:
                count.failed_requests += 1
                _log.info("a call of %s by %s failed: %s", job.uid, job.caller.short, outcome.failure)
        return outcomes


def _attempt(expert: Expert, jobs: list[Job]) -> list[Outcome]:
    """One batch, with the expert's lock held."""
    version = expert.version
    try:
        if jobs[0].gradients is None:
            parts = _forward(expert, jobs)
        else:
            parts = expert.backward([(job.name, job.inputs, job.gradients or ()) for job in jobs])
        return [_outcome(job, tensors, version) for job, tensors in zip(jobs, parts, strict=True)]
    # also of a device that is full
    except (ComputationFailed, RuntimeError, ValueError, TypeError, MemoryError) as error:
        return [Outcome((), version, str(error) or type(error).__name__)] * len(jobs)


def _forward(expert: Expert, jobs: list[Job]) -> list[list[torch.Tensor | None]]:
    if len(jobs) == 1 and jobs[0].keep and expert.keeps:
        return [list(expert.forward_keeping(jobs[0].name, jobs[0].inputs))]
    outputs = expert.forward(joined([job.inputs for job in jobs]))
    return split(outputs, [job.batch for job in jobs])


def _outcome(job: Job, tensors: Sequence[torch.Tensor | None], version: int) -> Outcome:
    """Nobody is sent NaN or infinity."""
    if all(tensor is None or finite(tensor) for tensor in tensors):
        return Outcome(encode(tensors, job.codec), version)
    return Outcome(
        (),
        version,
        f"the expert made NaN or infinity of this request{'' if job.gradients is None else ', and made its step'}",
    )
