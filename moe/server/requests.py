"""A server's records of requests: the caller, the announced tensors, the calls that wait for a result, and
refusals.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from moe.protocol.names import ExpertUid
from moe.protocol.schema import Leaf
from moe.protocol.tensors import Encoded, Header
from moe.server.compute import ComputeThread
from moe.server.expert import Expert
from moe.server.jobs import Job, Outcome, ReceivedTensor
from swarm.compression import Codec
from swarm.core.ids import PeerId
from swarm.wire import expert_pb2
from swarm.wire.expert_pb2 import ExpertRequest, ExpertStatus


class RequestRefused(Exception):
    """The request is answered with a reason instead of a result."""

    def __init__(self, status: ExpertStatus, reason: str, queued: int = 0) -> None:
        super().__init__(reason)
        self.status, self.reason, self.queued = status, reason, queued


@dataclass(frozen=True, slots=True)
class HostedExpert:
    """An expert, the thread that computes it, and its limits."""

    uid: ExpertUid
    expert: Expert
    compute: ComputeThread
    batch_size_max: int
    refusals: Counter[str] = field(default_factory=Counter)  # by status


@dataclass(slots=True)
class PendingJob:
    """A job, and what is called with its outcome for each call that waits, by a name of the call."""

    hosted: HostedExpert
    job: Job
    waiting: dict[Hashable, Callable[[Outcome | RequestRefused], None]] = field(default_factory=dict)

    def join(self) -> asyncio.Future[Outcome]:
        """Return a future of the outcome for one more call, which is its name."""
        future = asyncio.get_running_loop().create_future()
        self.waiting[future] = functools.partial(_settle, future)
        return future

    def settle(self, outcome: Outcome | RequestRefused) -> None:
        """Give the outcome to all calls that wait."""
        waiting, self.waiting = self.waiting, {}
        for give in waiting.values():
            give(outcome)


@dataclass(frozen=True, slots=True)
class KeptInputs:
    """The inputs of a forward pass, kept for the backward pass."""

    tensors: Sequence[ReceivedTensor]
    shape: tuple[int, int]  # samples, and the length of their sequences
    versions: list[int]  # torch's versions of the tensors: a module may write into its inputs

    @classmethod
    def snapshot(cls, job: Job) -> KeptInputs:
        """Record the inputs of a job with their present versions."""
        return cls(job.inputs, (job.batch, job.sequence_length), _versions(job.inputs))

    @property
    def is_unmodified(self) -> bool:
        """Return whether no module has written into the tensors since they were received."""
        return self.versions == _versions(self.tensors)

    @property
    def size_bytes(self) -> int:
        """Return the memory that the tensors take on the host."""
        return sum((one.raw if isinstance(one, Encoded) else one).nbytes for one in self.tensors)


def _versions(tensors: Sequence[ReceivedTensor]) -> list[int]:
    return [(one.raw if isinstance(one, Encoded) else one)._version for one in tensors]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedRequest:
    """A request whose announcement has been checked."""

    hosted: HostedExpert
    caller: PeerId
    request: ExpertRequest
    headers: list[Header]
    leaves: Sequence[Leaf]  # leaves of the payload's tensors
    size_bytes: int
    answer_bytes: int
    codec: Codec | None
    is_backward: bool
    kept: KeptInputs | None  # for a backward pass that was sent without inputs

    @property
    def pass_id(self) -> tuple[PeerId, bytes]:
        """Return the identity of the pass: the caller and its request id."""
        return self.caller, self.request.request_id


def _settle(future: asyncio.Future[Outcome], outcome: Outcome | RequestRefused) -> None:
    if future.done():
        return
    if isinstance(outcome, RequestRefused):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def request_refused(reason: str) -> RequestRefused:
    return RequestRefused(expert_pb2.EXPERT_REFUSED, reason)


def request_overloaded(hosted: HostedExpert, reason: str) -> RequestRefused:
    return RequestRefused(expert_pb2.EXPERT_OVERLOADED, f"overloaded, {reason}", hosted.compute.queued)


def check_staleness(hosted: HostedExpert, request: ExpertRequest) -> None:
    """Raise RequestRefused when the expert has changed too much since the forward pass. Steps of requests
    that wait before this one are not counted.
    """
    version = hosted.expert.version
    if abs(version - request.version) > request.staleness_max:
        raise RequestRefused(
            expert_pb2.EXPERT_STALE,
            f"the expert was at version {request.version} in the forward pass and is at {version} now: "
            f"more than staleness_max = {request.staleness_max} apart",
        )
