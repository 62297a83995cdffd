"""The tensor work of one round, chunk by chunk: averages that arrived are checked, and chunks that are ready
are averaged. Values and averages on their way through this member are kept here.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from averaging.allreduce.kernels import Arrived, Averaged, Spoiled
from averaging.allreduce.logic import effects as do
from averaging.allreduce.logic import events as on
from averaging.reduction.reduce import Contribution, ReductionJob
from swarm.core.errors import PeerError
from swarm.core.notify import ChangeEvent

if TYPE_CHECKING:
    from averaging.allreduce.driver import RoundDriver

_BATCH_CHUNKS = 2  # chunks averaged in one call to the pool; larger: fewer calls, later first bytes
_CHECKS_MAX = 8  # averages checked in one call


class ChunkWork:
    """Queues of chunks, and the values that belong to them. `check` and `reduce` run until cancelled."""

    def __init__(self, driver: RoundDriver) -> None:
        self._driver = driver
        self._values: dict[tuple[int, int], memoryview] = {}  # (chunk, member)
        self._inputs: dict[int, dict[int, memoryview]] = {}  # contributions to chunks that are being reduced
        self._unchecked: dict[int, memoryview] = {}  # received averages
        self._to_check: deque[do.CheckAverage] = deque()
        self._to_reduce: deque[do.Reduce] = deque()
        self._has_checks, self._has_reductions = ChangeEvent(), ChangeEvent()

    def perform(self, effect: do.CheckAverage | do.Reduce) -> None:
        """Queue a piece of work."""
        if isinstance(effect, do.Reduce):
            self._to_reduce.append(effect)
            self._has_reductions.notify()
        else:
            self._to_check.append(effect)
            self._has_checks.notify()

    def halt(self) -> None:
        """Drop the work that was not started."""
        self._to_reduce.clear()
        self._to_check.clear()

    def drop(self) -> None:
        """Drop everything."""
        self.halt()
        self._values.clear()
        self._inputs.clear()
        self._unchecked.clear()

    def keep_value(self, place: int, chunk: int, payload: memoryview) -> None:
        """Keep a member's values of a chunk."""
        self._values[chunk, place] = payload

    def on_average(self, event: on.AverageArrived, payload: memoryview) -> None:
        """Keep an average that arrived, and tell the machine. Raises PeerError when it contradicts its
        header.
        """
        known = self._unchecked.get(event.chunk)
        self._unchecked[event.chunk] = payload
        try:
            self._driver.feed(event)
        except PeerError:
            if known is None:
                del self._unchecked[event.chunk]
            else:
                self._unchecked[event.chunk] = known
            raise

    async def check(self) -> None:
        """Check and keep averages as they arrive, all that wait in one batch."""
        driver, kernels = self._driver, self._driver.kernels
        while True:
            while not self._to_check:
                await self._has_checks.wait()
            batch = [self._to_check.popleft() for _ in range(min(len(self._to_check), _CHECKS_MAX))]
            arrived = [
                Arrived(
                    kernels.plan.chunks[one.chunk],
                    self._unchecked.pop(one.chunk),
                    one.contributors,
                    one.clipped,
                )
                for one in batch
            ]
            digests = await driver.offload.work(kernels.settle, arrived)
            for one, digest in zip(arrived, digests, strict=True):
                flaw = kernels.codec.flaw(one.payload, one.chunk.numel) if digest is None else ""
                driver.feed(on.AverageChecked(one.chunk.index, digest, flaw))

    async def reduce(self) -> None:
        """Average chunks as they become ready, all that wait in one batch."""
        driver, kernels = self._driver, self._driver.kernels
        while True:
            while not self._to_reduce:
                await self._has_reductions.wait()
            batch = [self._to_reduce.popleft() for _ in range(min(len(self._to_reduce), _BATCH_CHUNKS))]
            jobs = [await self._job(one) for one in batch]
            full = [job for job in jobs if not job.empty]
            done = await driver.offload.work(kernels.reduce, full) if full else []
            for job in jobs:
                if job.empty:  # it has no contributor left
                    self._on_averaged(job, kernels.nothing(job.chunk))
            for job, outcome in zip(full, done, strict=True):
                if isinstance(outcome, Averaged):
                    self._on_averaged(job, outcome)
                else:
                    await self._on_spoiled(job, outcome)

    async def _job(self, reduce: do.Reduce) -> ReductionJob:
        driver, kernels = self._driver, self._driver.kernels
        inputs = self._inputs.setdefault(reduce.chunk, {})
        for place in reduce.places:
            value = self._values.pop((reduce.chunk, place), None)
            if value is not None:
                inputs[place] = value
        chunk = kernels.plan.chunks[reduce.chunk]
        own = reduce.own and kernels.excluded_reason is None
        found = [Contribution(place, kernels.weights[place], inputs[place]) for place in reduce.places]
        # averaged values must be available to auditors later, in encoded form
        if own and driver.auditor is not None:
            payload = await driver.offload.work(driver.auditor.own, chunk)
            found.append(Contribution(kernels.own, kernels.weights[kernels.own], payload))
            found.sort(key=lambda contribution: contribution.place)
        return ReductionJob(chunk, found, own and driver.auditor is None)

    def _on_averaged(self, job: ReductionJob, done: Averaged) -> None:
        driver, chunk = self._driver, done.chunk
        self._inputs.pop(chunk.index, None)
        if driver.auditor is not None:
            driver.auditor.keep(chunk.index, job.contributions)
        if chunk.reducer == driver.kernels.own:
            driver.give(done.message)
        driver.feed(on.ChunkReduced(chunk.index, done.contributors, done.digest, done.clipped))

    async def _on_spoiled(self, job: ReductionJob, spoiled: Spoiled) -> None:
        driver, kernels = self._driver, self._driver.kernels
        flaws: dict[int, str] = {}
        for place in spoiled.places:
            if place == kernels.own:
                await driver.offload.work(kernels.exclude_self_for, spoiled.chunk)
                flaws[place] = str(kernels.excluded_reason)
                driver.feed(on.OwnValuesExcluded(flaws[place]))
            else:
                flaws[place] = kernels.flaw(spoiled.chunk, job.contributions, place)
        driver.feed(on.ChunkSpoiled(spoiled.chunk.index, flaws))
