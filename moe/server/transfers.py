"""Transfers: the way of requests to the device of their expert, and of results back. On the host this is
immediate; for a CUDA device it runs during the computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch

from moe.protocol.tensors import (
    ABSENT,
    ALIGNMENT,
    Encoded,
    Header,
    TensorPayload,
    encode,
    encode_on_device,
    finite_flags,
    is_finite,
)
from moe.server.expert import Gradients
from moe.server.jobs import Job, JobTensors, Outcome, not_finite
from moe.server.links import CopyToDevice, CopyToHost, DeviceLink


class StagedJobs(Protocol):
    """The tensors of several jobs on their way to the device."""

    def use(self) -> list[JobTensors]:
        """Return the tensors, by job, for the calls that follow on this thread. May be called once."""
        ...


class Answers(Protocol):
    """The results of several jobs on their way to their callers."""

    @property
    def jobs(self) -> Sequence[Job]: ...

    @property
    def has_arrived(self) -> bool:
        """Return whether `outcomes` returns at once."""
        ...

    def outcomes(self) -> list[Outcome]:
        """Return the outcome of each job. Waits until the results are on the host."""
        ...


class Transfer(Protocol):
    """The way of requests to one device and of results back."""

    def stage(self, jobs: Sequence[Job]) -> StagedJobs:
        """Begin to copy the jobs' tensors to the device."""
        ...

    def answer(self, jobs: Sequence[Job], results: Sequence[Gradients], version: int) -> Answers:
        """Check the results, by job, for NaN and infinity, encode them, and begin to copy them to the
        host.
        """
        ...

    def release_memory(self) -> None:
        """Return memory that no tensor uses to the device."""
        ...


@dataclass(frozen=True, slots=True)
class ReadyAnswers:
    """Outcomes that are already known. `is_final` means that computing a failed job by itself would not help.
    Satisfies `Answers`.
    """

    jobs: Sequence[Job]
    results: list[Outcome]
    is_final: bool = False

    @property
    def has_arrived(self) -> bool:
        return True

    def outcomes(self) -> list[Outcome]:
        return self.results


class HostTransfer:
    """The transfer for the host, and for devices without known streams: everything runs in order. Satisfies
    `Transfer`.
    """

    def stage(self, jobs: Sequence[Job]) -> StagedJobs:
        return _HostStagedJobs(jobs)

    def answer(self, jobs: Sequence[Job], results: Sequence[Gradients], version: int) -> Answers:
        return ReadyAnswers(
            jobs, [_encode_on_host(job, tensors, version) for job, tensors in zip(jobs, results, strict=True)]
        )

    def release_memory(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class _HostStagedJobs:
    jobs: Sequence[Job]

    def use(self) -> list[JobTensors]:
        return [
            (
                [cast(torch.Tensor, tensor) for tensor in job.inputs],
                [cast("torch.Tensor | None", tensor) for tensor in job.gradients or ()],
            )
            for job in self.jobs
        ]


def _encode_on_host(job: Job, tensors: Gradients, version: int) -> Outcome:
    if not all(tensor is None or is_finite(tensor) for tensor in tensors):
        return not_finite(job, version)
    return Outcome(encode(tensors, job.codec), version)


class DeviceTransfer:
    """The transfer for a CUDA device: tensors are decoded and encoded there, and copied during the
    computation. Satisfies `Transfer`.
    """

    def __init__(self, link: DeviceLink) -> None:
        self._link = link

    def stage(self, jobs: Sequence[Job]) -> StagedJobs:
        """Begin one copy for all tensors of all jobs, each still encoded: a codec's bytes are fewer than the
        tensor's.
        """
        tensors = [
            tensor
            for job in jobs
            for tensor in (*job.inputs, *(job.gradients or ()))
            if isinstance(tensor, Encoded)
        ]
        ends = np.cumsum(
            [one.raw.numel() + -one.raw.numel() % ALIGNMENT for one in tensors], dtype=np.int64
        ).tolist()
        with self._link.using():
            staging_buffer = self._link.host_memory(ends[-1] if ends else 0)
            array = staging_buffer.numpy()
            for one, start in zip(tensors, [0, *ends], strict=False):
                array[start : start + one.raw.numel()] = one.raw.numpy()
            return _DeviceStagedJobs(self._link, jobs, self._link.send(staging_buffer))

    def answer(self, jobs: Sequence[Job], results: Sequence[Gradients], version: int) -> Answers:
        """Begin one copy for the encoded bytes of all results and their flags of being finite."""
        with self._link.using():
            flat = [None if tensor is None else tensor.detach() for tensors in results for tensor in tensors]
            codecs = [job.codec for job, tensors in zip(jobs, results, strict=True) for _ in tensors]
            payloads = [
                None if one is None else encode_on_device(one, codec)
                for one, codec in zip(flat, codecs, strict=True)
            ]
            numbers, flags = finite_flags(flat)
            parts = [*(piece[1] for piece in payloads if piece is not None), *([flags] if numbers else [])]
            copy = self._link.fetch(parts[0] if len(parts) == 1 else torch.cat(parts)) if parts else None
        headers = [None if piece is None else piece[0] for piece in payloads]
        return _DeviceAnswers(
            self._link, jobs, [len(tensors) for tensors in results], version, headers, numbers, copy
        )

    def release_memory(self) -> None:
        self._link.empty_cache()


class _DeviceStagedJobs:
    def __init__(self, link: DeviceLink, jobs: Sequence[Job], copy: CopyToDevice) -> None:
        self._link, self._jobs = link, jobs
        self._copy: CopyToDevice | None = copy

    def use(self) -> list[JobTensors]:
        assert self._copy is not None
        copy, self._copy = self._copy, None  # the tensors are views of it: freed with them
        with self._link.using():
            raw, start = copy.use(), 0
            given: list[JobTensors] = []
            for job in self._jobs:
                decoded: list[torch.Tensor | None] = []
                for one in (*job.inputs, *(job.gradients or ())):
                    if not isinstance(one, Encoded):
                        decoded.append(one)
                        continue
                    size = one.raw.numel()
                    decoded.append(one.decode(raw[start : start + size]))
                    start += size + -size % ALIGNMENT
                count = len(job.inputs)
                given.append(([tensor for tensor in decoded[:count] if tensor is not None], decoded[count:]))
            return given


@dataclass(slots=True)
class _DeviceAnswers:
    link: DeviceLink
    jobs: Sequence[Job]
    counts: list[int]  # number of tensors of each job
    version: int
    headers: list[Header | None]  # one for each tensor of all jobs
    numbers: list[int]  # numbers of the tensors that have a flag, in the order of flags
    copy: CopyToHost | None  # None: there is nothing to copy
    is_final: bool = False

    @property
    def has_arrived(self) -> bool:
        return False

    def outcomes(self) -> list[Outcome]:
        with self.link.using():
            host = self.copy.wait().numpy() if self.copy is not None else np.empty(0, np.uint8)
        self.copy = None  # frees the device's memory
        size = sum(header.size_bytes for header in self.headers if header is not None)
        non_finite = {number for number, flag in zip(self.numbers, host[size:], strict=True) if not flag}
        payloads, start = list[TensorPayload](), 0
        for header in self.headers:
            if header is None:
                payloads.append(ABSENT)
                continue
            end = start + header.size_bytes
            # copied: answers that are kept for repetitions must not hold pinned memory
            payloads.append(
                TensorPayload(
                    header.codec, header.version, host[start:end].copy().data if end > start else b""
                )
            )
            start = end
        results, first = list[Outcome](), 0
        for job, count in zip(self.jobs, self.counts, strict=True):
            own = range(first, first + count)
            bad = any(number in non_finite for number in own)
            results.append(
                not_finite(job, self.version)
                if bad
                else Outcome(payloads[first : first + count], self.version)
            )
            first += count
        return results
