"""The computing thread of a device: it takes batches from the queues, one at a time, and hands results back
to the network loop.

For experts on a CUDA device three threads share the work, each with a batch of its own: one takes the next
batch and begins to copy its tensors to the device, one computes, and one waits until results are on the host
and delivers them. Copies in, computation and copies out of successive batches therefore run at the same time.
For experts on the host there is one thread, and nothing is copied.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch

from moe.server.devices import DeviceFailed, using
from moe.server.jobs import Counts, Job, Outcome, samples_of
from moe.server.links import DeviceLink
from moe.server.logic.batching import Batcher, BatchLimits, QueuedRequest
from moe.server.passes import BatchPass
from moe.server.transfers import Answers, DeviceTransfer, HostTransfer, StagedJobs, Transfer
from swarm.core.ids import PeerId

_log = logging.getLogger(__name__)

_BATCHES_UNDER_WAY_MAX = 3  # batches on a device with a link: copied in, computed, copied out
_RATE_SHARE = 0.1  # weight of the newest batch in the moving averages


@dataclass(slots=True)
class _Throughput:
    """Moving averages over batches."""

    s_per_cost: float = 0.0
    samples_per_s: float = 0.0

    def note(self, seconds: float, cost: float, samples: int) -> None:
        seconds = max(seconds, 1e-6)
        first = not self.samples_per_s
        share = 1.0 if first else _RATE_SHARE
        self.s_per_cost += share * (seconds / cost - self.s_per_cost)
        self.samples_per_s += share * (samples / seconds - self.samples_per_s)


@dataclass(slots=True, eq=False)
class _Batch:
    """One batch on its way from the queues to its callers."""

    jobs: list[Job]
    queue: Hashable
    cost: float
    is_repeated: bool = False  # its job failed in an earlier batch
    staged: StagedJobs | None = None
    answers: list[Answers] = field(default_factory=list)
    has_stepped: bool = False  # computing one of its jobs again would use its gradients twice


def _queued(job: Job) -> QueuedRequest:
    kept = job.keep and job.expert.keeps_activations
    # a request that keeps activations is a batch of its own
    kind: object = (*job.kind, job.number) if kept else job.kind
    return QueuedRequest(job.number, kind, job.caller, job.batch, job.size_bytes, job.cost, job.is_stranger)


class ComputeThread:
    """Computes the requests for the experts of one device.

    `deliver` receives the results of a whole batch, and whether further ones will follow at once; `report`
    receives the failure after which nothing more is computed. Both are called on a thread of this object.
    `link` is the connection to the device (`link_of`); None computes on one thread.
    """

    def __init__(
        self,
        limits: BatchLimits,
        deliver: Callable[[list[tuple[Job, Outcome]], bool], None],
        report: Callable[[DeviceFailed], None],
        device: torch.device,
        link: DeviceLink | None = None,
    ) -> None:
        self._batcher = Batcher(limits)
        self._deliver, self._report = deliver, report
        self._device, self._link = device, link
        self._transfer: Transfer = HostTransfer() if link is None else DeviceTransfer(link)
        self._jobs: dict[int, Job] = {}  # waiting, by number
        self._retries: deque[Job] = deque()  # failed in a batch, and are computed by themselves
        self._lock = threading.Lock()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._asleep = False
        self._done: list[
            tuple[Job, Outcome]
        ] = []  # results of the only thread, before it takes the next batch
        self._stopping = False
        self._failure: DeviceFailed | None = None
        self._reported = False
        # taken and not delivered yet, in the order in which they were taken
        self._under_way: deque[_Batch] = deque()
        self._begun_s = 0.0  # when the oldest was taken, or the one before it delivered
        self._throughput = _Throughput()
        self.counts: dict[str, Counts] = {}
        self._threads = self._start()

    def offer(self, jobs: Sequence[Job], *, wake: bool = True) -> list[str]:
        """Queue jobs. Return for each the reason when there is no room, else "". Any thread may call it.
        Without `wake` they may not begin before `wake` is called: the computing thread and one that queues
        many jobs would otherwise take turns at Python's lock.
        """
        queued = [_queued(job) for job in jobs]
        with self._lock:
            if self._stopping:
                return [self._why_stopping()] * len(jobs)
            now_s = time.monotonic()
            refusals = [self._batcher.offer(one, now_s) for one in queued]
            self._jobs.update(
                (job.number, job) for job, refusal in zip(jobs, refusals, strict=True) if not refusal
            )
        if wake:
            self.wake()
        return refusals

    def wake(self) -> None:
        """Begin with the jobs that were queued."""
        with self._lock:
            wake, self._asleep = self._asleep, False
        if wake:
            self._wake.put(None)

    def refusal(self, caller: PeerId, size_bytes: int, *, is_stranger: bool) -> str:
        """Return what `offer` would return."""
        with self._lock:
            return self._batcher.refusal(caller, size_bytes, is_stranger=is_stranger)

    def withdraw(self, number: int) -> bool:
        """Remove a job from the queue. Return False when it is being computed, or was."""
        with self._lock:
            self._jobs.pop(number, None)
            return self._batcher.withdraw(number)

    @property
    def decodes_on_device(self) -> bool:
        """Return whether jobs bring their tensors encoded (`moe.protocol.tensors.Encoded`), for the device to
        decode.
        """
        return self._link is not None

    @property
    def queued(self) -> int:
        """Return the number of requests that wait."""
        return self._batcher.queued

    @property
    def unfinished(self) -> int:
        """Return the number of requests that wait or are being computed."""
        with self._lock:
            return (
                self._batcher.queued + len(self._retries) + sum(len(batch.jobs) for batch in self._under_way)
            )

    @property
    def wait_s(self) -> float:
        """Return how long a request that comes now would wait, estimated from the recent throughput."""
        with self._lock:
            expected_s = sum(batch.cost for batch in self._under_way) * self._throughput.s_per_cost
            running_s = max(self._begun_s + expected_s - time.monotonic(), 0.0) if self._under_way else 0.0
            return running_s + self._batcher.queued_cost * self._throughput.s_per_cost

    @property
    def samples_per_s(self) -> float:
        """Return the recent throughput while batches were computed; 0 when there was no batch yet."""
        return self._throughput.samples_per_s

    def halt(self) -> None:
        """Take no more batches; those in progress are finished, waiting requests are dropped."""
        with self._lock:
            self._stopping = True
        self._wake.put(None)

    def stop(self, timeout_s: float) -> bool:
        """Call `halt` and wait for batches in progress. Return False when that took longer than
        `timeout_s`.
        """
        self.halt()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    # --- the threads

    def _start(self) -> list[threading.Thread]:
        work: list[tuple[str, Callable[[], None]]] = [("swarm-experts", self._run)]
        if self._link is not None:
            slots = threading.Semaphore(_BATCHES_UNDER_WAY_MAX)
            staged: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
            computed: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()

            def take() -> _Batch | None:
                slots.acquire()
                return self._take()

            def finish(batch: _Batch) -> None:
                self._finish(batch)
                slots.release()

            work = [
                ("swarm-experts-in", lambda: self._work(take, self._stage, staged.put)),
                ("swarm-experts", lambda: self._work(staged.get, self._compute, computed.put)),
                ("swarm-experts-out", lambda: self._work(computed.get, finish, lambda _: None)),
            ]
        threads = [
            threading.Thread(target=self._guard, args=(target,), name=name, daemon=True)
            for name, target in work
        ]
        for thread in threads:
            thread.start()
        return threads

    def _guard(self, target: Callable[[], None]) -> None:
        """Run the work of a thread. A thread that ends early would leave experts declared that nobody
        computes; this is reported like a lost device.
        """
        has_ended = False
        try:
            target()
            has_ended = True
        finally:  # the error continues: Python reports it, unless it is SystemExit
            if not has_ended:
                self._deliver_done()
                self._fail(DeviceFailed(self._device, sys.exception() or RuntimeError("its thread ended")))
                if not self._reported and self._failure is not None:
                    self._reported = True
                    self._report(self._failure)

    def _run(self) -> None:
        """Do all work on one thread."""
        with using(self._device):
            while (batch := self._take()) is not None:
                self._compute(batch)
                self._finish(batch)

    def _work(
        self,
        take: Callable[[], _Batch | None],
        work: Callable[[_Batch], None],
        pass_on: Callable[[_Batch | None], None],
    ) -> None:
        """Run one of three stages: process every batch that comes, until None comes."""
        assert self._link is not None
        with self._link.using():
            while (batch := take()) is not None:
                work(batch)
                pass_on(batch)
            pass_on(None)

    def _take(self) -> _Batch | None:
        """Wait for the next batch; None when this object stops."""
        while True:
            with self._lock:
                now_s, due_s = time.monotonic(), None
                batch = None if self._stopping else self._next_batch(now_s)
                if batch is not None:
                    if not self._under_way:
                        self._begun_s = now_s
                    self._under_way.append(batch)
                elif not self._stopping:
                    due_s = self._batcher.due_s()
                    self._asleep = True
                is_stopping = self._stopping
            # last: the network loop, which this wakes, waits for Python's lock until this thread waits
            self._deliver_done(more_follow=batch is not None)
            if batch is not None or is_stopping:
                return batch
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=None if due_s is None else max(due_s - now_s, 0.0))

    def _deliver_done(self, *, more_follow: bool = False) -> None:
        if self._done:
            done, self._done = self._done, []
            self._deliver(done, more_follow)

    def _next_batch(self, now_s: float) -> _Batch | None:
        """Return the next batch, if one is due. The lock must be held."""
        if self._retries:
            job = self._retries.popleft()
            return _Batch([job], job.kind, 0.0, is_repeated=True)
        taken = self._batcher.take(now_s)
        if not taken:
            return None
        return _Batch(
            [self._jobs.pop(one.number) for one in taken], taken[0].queue, sum(one.cost for one in taken)
        )

    # --- the stages

    def _stage(self, batch: _Batch) -> None:
        if self._failure is not None:
            return
        try:
            batch.staged = self._transfer.stage(batch.jobs)
        except DeviceFailed as failure:
            self._fail(failure)
        # the computing thread tries again, with fewer samples at once if memory ran out
        except (RuntimeError, MemoryError) as error:
            _log.debug("inputs of %s were not copied ahead: %s", batch.jobs[0].uid, error)

    def _compute(self, batch: _Batch) -> None:
        if self._failure is not None:
            return
        expert, jobs = batch.jobs[0].expert, batch.jobs
        if not batch.is_repeated:
            self._count(jobs)
        staged, batch.staged = batch.staged, None
        with expert.lock:
            progress = expert.progress
            compute = BatchPass(expert, self._transfer)
            try:
                batch.answers = compute.compute(jobs, staged)
            except DeviceFailed as failure:
                self._fail(failure)
                return
            batch.has_stepped = expert.progress != progress
        with self._lock:
            if compute.samples_fit is None:
                self._batcher.succeeded(batch.queue)
            else:
                self._batcher.ran_out_of_memory(jobs[0].kind, compute.samples_fit)
        if compute.samples_fit is not None:
            _log.info(
                "%d samples for %s did not fit into memory: %d do",
                samples_of(jobs),
                jobs[0].uid,
                compute.samples_fit,
            )

    def _finish(self, batch: _Batch) -> None:
        """Wait for results and deliver them. A job that failed in a batch, and is only now known to have
        failed, is computed again by itself.
        """
        done, retries = list[tuple[Job, Outcome]](), list[Job]()
        for answers in batch.answers:
            try:
                found = list(zip(answers.jobs, answers.outcomes(), strict=True))
            except DeviceFailed as failure:
                self._fail(failure)
                break
            repeatable = not answers.has_arrived and len(answers.jobs) > 1 and not batch.has_stepped
            retries += [job for job, outcome in found if outcome.failure and repeatable]
            done += [(job, outcome) for job, outcome in found if not outcome.failure or not repeatable]
        if self._failure is not None:
            known = {job.number for job, _ in done}
            reason = str(self._failure)
            done += [
                (job, Outcome((), job.expert.version, reason))
                for job in batch.jobs
                if job.number not in known
            ]
        elif retries:
            self._repeat(retries)
        self._record(batch, done)
        if self._link is not None:
            self._deliver(done, False)
        else:
            self._done += done
        if self._failure is not None and not self._reported:
            self._deliver_done()
            self._reported = True
            self._report(self._failure)

    def _repeat(self, jobs: list[Job]) -> None:
        with self._lock:
            self._retries += jobs
        self.wake()

    def _fail(self, failure: DeviceFailed) -> None:
        """Stop computing. Batches in progress are answered with the failure; the receiver of the report
        handles waiting requests.
        """
        with self._lock:
            self._failure = self._failure or failure
        self.halt()

    def _why_stopping(self) -> str:
        return "this server is leaving" if self._failure is None else str(self._failure)

    def _count(self, jobs: list[Job]) -> None:
        count, samples = self._counts_of(jobs[0].uid), samples_of(jobs)
        if jobs[0].is_backward:
            count.backward_requests += len(jobs)
            count.backward_samples += samples
            count.backward_batches += 1
        else:
            count.forward_requests += len(jobs)
            count.forward_samples += samples
            count.forward_batches += 1

    def _counts_of(self, uid: str) -> Counts:
        count = self.counts.get(uid)
        if count is None:
            count = self.counts[uid] = Counts()
        return count

    def _record(self, batch: _Batch, done: list[tuple[Job, Outcome]]) -> None:
        """Record a finished batch. Its computing time starts when the previous batch finished, or when it was
        taken, if that was later.
        """
        count = self._counts_of(batch.jobs[0].uid)
        for job, outcome in done:
            if outcome.failure:
                count.failed_requests += 1
                _log.info("a call of %s by %s failed: %s", job.uid, job.caller.short, outcome.failure)
        with self._lock:
            now_s = time.monotonic()
            seconds, self._begun_s = now_s - self._begun_s, now_s
            self._under_way.popleft()  # batches finish in order
            if batch.cost:
                self._throughput.note(seconds, batch.cost, samples_of(batch.jobs))
                # a request that keeps activations is always a batch of its own
                if batch.queue == batch.jobs[0].kind and not any(outcome.failure for _, outcome in done):
                    self._batcher.record(batch.queue, samples_of(batch.jobs), seconds)
            count.busy_s += seconds
