"""Computation of one batch: forward, or backward with one optimizer step, in smaller parts when the device
runs out of memory.

A forward batch that runs out of memory is halved, and each half is computed by itself. A backward batch
starts over with smaller parts, whose gradients add up to those of one optimizer step; nothing of the earlier
attempt is left. A single request that does not fit is answered with that reason, and the others are computed
without it.
"""

from __future__ import annotations

from collections.abc import Sequence

from moe.server.batches import concatenate, split
from moe.server.expert import ComputationFailed, Expert, Gradients
from moe.server.jobs import Job, JobTensors, Outcome, samples_of
from moe.server.logic.joint_counts import steps_due
from moe.server.transfers import Answers, ReadyAnswers, StagedJobs, Transfer
from swarm.core.device import is_out_of_memory


class BatchPass:
    """Computes one batch of requests of one kind. The lock of its expert must be held."""

    def __init__(self, expert: Expert, transfer: Transfer) -> None:
        self._expert, self._transfer = expert, transfer
        self._version = expert.version
        self._failed_samples: int | None = None  # samples of the smallest part that ran out of memory
        self._fitted_samples = 0  # samples of the largest part that fitted since then

    @property
    def samples_fit(self) -> int | None:
        """Return how many samples at once had enough memory; None when memory never ran out."""
        if self._failed_samples is None:
            return None
        return max(self._fitted_samples, self._failed_samples // 2, 1)

    def compute(self, jobs: Sequence[Job], staged: StagedJobs | None) -> list[Answers]:
        """Return the answers to all jobs, in parts. Raises DeviceFailed when there are none, and none will be
        computed on this device any more.
        """
        parts = self._parts_by_step(jobs)
        return [
            answer
            for part in parts
            for answer in self._compute_part(part, staged if len(parts) == 1 else None)
        ]

    def _parts_by_step(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Divide the jobs where steps of the target batch are made: how many jobs meet in one batch makes no
        difference.
        """
        expert = self._expert
        left = expert.samples_to_step
        if not jobs[0].is_backward or not left:
            return [list(jobs)]
        parts: list[list[Job]] = [[]]
        for job in jobs:
            if left <= 0:
                parts.append([])
                target = expert.target_batch_size
                left = target - steps_due(target - left, target)[1]  # the rest is carried over
            parts[-1].append(job)
            left -= job.batch
        return parts

    def _compute_part(self, jobs: Sequence[Job], staged: StagedJobs | None) -> list[Answers]:
        progress, self._version = self._expert.progress, self._expert.version
        answers = self._attempt(jobs, staged)
        if len(jobs) > 1 and self._expert.progress == progress and any(map(_has_failed, answers)):
            # compute each by itself to find the request that fails: it costs the others only time
            return [answer for job in jobs for answer in self._attempt([job], None)]
        return answers

    def _attempt(self, jobs: Sequence[Job], staged: StagedJobs | None) -> list[Answers]:
        try:
            return self._backward(jobs, staged) if jobs[0].is_backward else self._forward(jobs, staged)
        except (ComputationFailed, RuntimeError, ValueError, TypeError, MemoryError) as error:
            return [self._failed_answers(jobs, str(error) or type(error).__name__)]

    # --- forward

    def _forward(
        self, jobs: Sequence[Job], staged: StagedJobs | None, *, may_keep: bool = True
    ) -> list[Answers]:
        keeping = may_keep and len(jobs) == 1 and jobs[0].keep and self._expert.keeps_activations
        try:
            answer = self._run_forward(jobs, staged, keeping)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            self._note_fitting(jobs)
            return [answer]
        # not within `except`: its traceback would keep the tensors alive
        if keeping:
            self._release_memory()
            return self._forward(jobs, None, may_keep=False)
        self._on_out_of_memory(jobs)
        if len(jobs) == 1:
            return [self._too_large(jobs[0])]
        middle = len(jobs) // 2
        return [*self._forward(jobs[:middle], None), *self._forward(jobs[middle:], None)]

    def _run_forward(self, jobs: Sequence[Job], staged: StagedJobs | None, keeping: bool) -> Answers:
        given = self._job_tensors(jobs, staged)
        if keeping:
            results: Sequence[Gradients] = [self._expert.forward_keeping(jobs[0].pass_id, given[0][0])]
        else:
            results = split(
                self._expert.forward(concatenate([inputs for inputs, _ in given])),
                [job.batch for job in jobs],
            )
        return self._transfer.answer(jobs, results, self._version)

    # --- backward

    def _backward(self, jobs: Sequence[Job], staged: StagedJobs | None) -> list[Answers]:
        parts, answers = [list(jobs)], list[Answers]()
        while parts:
            results, failed_part = self._try_step(parts, staged)
            if results is not None:
                done = [job for part in parts for job in part]
                return [*answers, *self._answer(done, results)]
            staged = None
            self._on_out_of_memory(parts[failed_part])
            if len(parts[failed_part]) > 1:
                parts = _split_jobs(
                    [job for part in parts for job in part], samples_of(parts[failed_part]) // 2
                )
            else:
                answers.append(self._too_large(parts.pop(failed_part)[0]))
        return answers

    def _try_step(
        self, parts: Sequence[Sequence[Job]], staged: StagedJobs | None
    ) -> tuple[list[Gradients] | None, int]:
        """Make one optimizer step for all parts. Return the results by job, or None and the number of the
        part that ran out of memory.
        """
        expert, results, failed_part = self._expert, list[Gradients](), 0
        expert.discard()
        try:
            for failed_part in range(len(parts)):
                part = parts[failed_part]
                given = self._job_tensors(part, staged)
                results += expert.accumulate(
                    [(job.pass_id, *tensors) for job, tensors in zip(part, given, strict=True)]
                )
                self._note_fitting(part)
            expert.apply()
        except (RuntimeError, MemoryError) as error:
            expert.discard()
            if not is_out_of_memory(error):
                raise
            return None, failed_part
        except BaseException:
            expert.discard()
            raise
        return results, failed_part

    def _answer(self, jobs: Sequence[Job], results: Sequence[Gradients]) -> list[Answers]:
        """Encode the results. Only this is tried again when it runs out of memory, since the step was
        made.
        """
        try:
            return [self._transfer.answer(jobs, results, self._version)]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        self._on_out_of_memory(jobs)
        if len(jobs) == 1:
            outcome_text = (
                "its step was made, but"
                if self._expert.version != self._version
                else "the pass was computed, but"
            )
            return [
                self._failed_answers(
                    jobs,
                    f"{outcome_text} no memory was left for the answer: send fewer samples at a time",
                    is_final=True,
                )
            ]
        middle = len(jobs) // 2
        return [
            *self._answer(jobs[:middle], results[:middle]),
            *self._answer(jobs[middle:], results[middle:]),
        ]

    # --- common parts

    def _job_tensors(self, jobs: Sequence[Job], staged: StagedJobs | None) -> list[JobTensors]:
        return (staged or self._transfer.stage(jobs)).use()

    def _note_fitting(self, jobs: Sequence[Job]) -> None:
        if self._failed_samples is not None:
            self._fitted_samples = max(self._fitted_samples, samples_of(jobs))

    def _on_out_of_memory(self, jobs: Sequence[Job]) -> None:
        """Record that memory ran out with these jobs, and release what can be released."""
        self._failed_samples = min(self._failed_samples or samples_of(jobs), samples_of(jobs))
        self._fitted_samples = min(self._fitted_samples, self._failed_samples)
        self._release_memory()

    def _release_memory(self) -> None:
        self._expert.drop_activations()
        self._transfer.release_memory()

    def _too_large(self, job: Job) -> Answers:
        reason = (
            f"its {job.batch} samples do not fit into the memory of the server's {self._expert.device}: "
            "send fewer at a time"
        )
        return self._failed_answers([job], reason, is_final=True)

    def _failed_answers(self, jobs: Sequence[Job], reason: str, *, is_final: bool = False) -> Answers:
        return ReadyAnswers(jobs, [Outcome((), self._version, reason)] * len(jobs), is_final)


def _has_failed(answers: Answers) -> bool:
    """Return whether some job is known to have failed, and might have succeeded by itself."""
    return (
        isinstance(answers, ReadyAnswers)
        and not answers.is_final
        and any(outcome.failure for outcome in answers.outcomes())
    )


def _split_jobs(jobs: Sequence[Job], samples_max: int) -> list[list[Job]]:
    """Split the jobs into parts of at most `samples_max` samples, or of one job."""
    parts: list[list[Job]] = []
    for job in jobs:
        if parts and samples_of(parts[-1]) + job.batch <= samples_max:
            parts[-1].append(job)
        else:
            parts.append([job])
    return parts
