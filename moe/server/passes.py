"""Computing one batch: forward, or backward with one optimizer step, in smaller parts where the device's
memory does not suffice.

A forward batch that runs out of memory is halved, and each half is computed by itself. A backward batch
begins anew with smaller parts, whose gradients add up to those of one optimizer step: nothing of the attempt
before is left. A single request that does not fit is answered so, and the others are computed without it.
"""

from __future__ import annotations

from collections.abc import Sequence

from moe.server.expert import ComputationFailed, Expert, Gradients, joined, split
from moe.server.jobs import Given, Job, Outcome, samples_of
from moe.server.transfers import Answers, Arrived, Staged, Transfer
from swarm.core.device import is_out_of_memory


class BatchPass:
    """One batch of requests of one kind, with the lock of its expert held.

    `samples_fit` afterwards: None when memory sufficed, else how many samples at once did.
    """

    def __init__(self, expert: Expert, transfer: Transfer) -> None:
        self._expert, self._transfer = expert, transfer
        self._version = expert.version
        self._failed_samples: int | None = None  # of the smallest part that ran out of memory
        self._fitted_samples = 0  # of the largest part that did not, since then

    @property
    def samples_fit(self) -> int | None:
        """How many samples at once had enough memory; None when all had."""
        if self._failed_samples is None:
            return None
        return max(self._fitted_samples, self._failed_samples // 2, 1)

    def compute(self, jobs: Sequence[Job], staged: Staged | None) -> list[Answers]:
        """The answers to all jobs, in parts. DeviceFailed: there are none, and none will be made on this
        device.
        """
        answers = self._attempted(jobs, staged)
        if len(jobs) > 1 and self._expert.version == self._version and any(map(_has_failed, answers)):
            # whose request it was is found by computing each by itself: it costs the others nothing but time
            return [answer for job in jobs for answer in self._attempted([job], None)]
        return answers

    def _attempted(self, jobs: Sequence[Job], staged: Staged | None) -> list[Answers]:
        try:
            return self._backward(jobs, staged) if jobs[0].is_backward else self._forward(jobs, staged)
        except (ComputationFailed, RuntimeError, ValueError, TypeError, MemoryError) as error:
            return [self._refused(jobs, str(error) or type(error).__name__)]

    # --- forward

    def _forward(self, jobs: Sequence[Job], staged: Staged | None, *, may_keep: bool = True) -> list[Answers]:
        keeping = may_keep and len(jobs) == 1 and jobs[0].keep and self._expert.keeps
        try:
            answer = self._forwarded(jobs, staged, keeping)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            self._note_fitting(jobs)
            return [answer]
        # not within `except`: the traceback keeps the tensors
        if keeping:
            self._make_room()
            return self._forward(jobs, None, may_keep=False)
        self._relieve(jobs)
        if len(jobs) == 1:
            return [self._too_large(jobs[0])]
        middle = len(jobs) // 2
        return [*self._forward(jobs[:middle], None), *self._forward(jobs[middle:], None)]

    def _forwarded(self, jobs: Sequence[Job], staged: Staged | None, keeping: bool) -> Answers:
        given = self._given(jobs, staged)
        if keeping:
            results: Sequence[Gradients] = [self._expert.forward_keeping(jobs[0].name, given[0][0])]
        else:
            results = split(
                self._expert.forward(joined([inputs for inputs, _ in given])), [job.batch for job in jobs]
            )
        return self._transfer.answer(jobs, results, self._version)

    # --- backward

    def _backward(self, jobs: Sequence[Job], staged: Staged | None) -> list[Answers]:
        parts, answers = [list(jobs)], list[Answers]()
        while parts:
            results, reached = self._stepped(parts, staged)
            if results is not None:
                done = [job for part in parts for job in part]
                return [*answers, *self._answered(done, results)]
            staged = None
            self._relieve(parts[reached])
            if len(parts[reached]) > 1:
                parts = _cut([job for part in parts for job in part], samples_of(parts[reached]) // 2)
            else:
                answers.append(self._too_large(parts.pop(reached)[0]))
        return answers

    def _stepped(
        self, parts: Sequence[Sequence[Job]], staged: Staged | None
    ) -> tuple[list[Gradients] | None, int]:
        """One optimizer step for all parts: the results by job, or None and the number of the part that ran
        out of memory.
        """
        expert, results, reached = self._expert, list[Gradients](), 0
        expert.discard()
        try:
            for reached in range(len(parts)):
                part = parts[reached]
                given = self._given(part, staged)
                results += expert.accumulate(
                    [(job.name, *tensors) for job, tensors in zip(part, given, strict=True)]
                )
                self._note_fitting(part)
            expert.apply()
        except (RuntimeError, MemoryError) as error:
            expert.discard()
            if not is_out_of_memory(error):
                raise
            return None, reached
        except BaseException:
            expert.discard()
            raise
        return results, reached

    def _answered(self, jobs: Sequence[Job], results: Sequence[Gradients]) -> list[Answers]:
        """Only this is tried again when it runs out of memory: the step was made."""
        try:
            return [self._transfer.answer(jobs, results, self._version)]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        self._relieve(jobs)
        if len(jobs) == 1:
            said = (
                "its step was made, but"
                if self._expert.version != self._version
                else "the pass was computed, but"
            )
            return [
                self._refused(
                    jobs,
                    f"{said} no memory was left for the answer: send fewer samples at a time",
                    is_final=True,
                )
            ]
        middle = len(jobs) // 2
        return [
            *self._answered(jobs[:middle], results[:middle]),
            *self._answered(jobs[middle:], results[middle:]),
        ]

    # ---

    def _given(self, jobs: Sequence[Job], staged: Staged | None) -> list[Given]:
        return (staged or self._transfer.stage(jobs)).use()

    def _note_fitting(self, jobs: Sequence[Job]) -> None:
        if self._failed_samples is not None:
            self._fitted_samples = max(self._fitted_samples, samples_of(jobs))

    def _relieve(self, jobs: Sequence[Job]) -> None:
        """Memory ran out with these jobs."""
        self._failed_samples = min(self._failed_samples or samples_of(jobs), samples_of(jobs))
        self._fitted_samples = min(self._fitted_samples, self._failed_samples)
        self._make_room()

    def _make_room(self) -> None:
        self._expert.forget_kept()
        self._transfer.relieve()

    def _too_large(self, job: Job) -> Answers:
        reason = f"its {job.batch} samples do not fit into the memory of the server's {self._expert.device}: send fewer at a time"
        return self._refused([job], reason, is_final=True)

    def _refused(self, jobs: Sequence[Job], reason: str, *, is_final: bool = False) -> Answers:
        return Arrived(jobs, [Outcome((), self._version, reason)] * len(jobs), is_final)


def _has_failed(answers: Answers) -> bool:
    """Whether some job failed, as far as is known yet, and might have succeeded by itself."""
    return (
        isinstance(answers, Arrived)
        and not answers.is_final
        and any(outcome.failure for outcome in answers.outcomes())
    )


def _cut(jobs: Sequence[Job], samples_max: int) -> list[list[Job]]:
    """The jobs in parts of at most so many samples, or of one job."""
    parts: list[list[Job]] = []
    for job in jobs:
        if parts and samples_of(parts[-1]) + job.batch <= samples_max:
            parts[-1].append(job)
        else:
            parts.append([job])
    return parts
