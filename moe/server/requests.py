"""What a server knows of a request on its way: whose it is, what it announced, who waits for it, and how it
is refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from moe.protocol.names import ExpertUid
from moe.protocol.schema import Leaf
from moe.protocol.tensors import Encoded, Header
from moe.server.compute import ComputeThread
from moe.server.expert import Expert
from moe.server.jobs import Outcome, ReceivedTensor
from swarm.compression import Codec
from swarm.core.ids import PeerId
from swarm.wire import expert_pb2
from swarm.wire.expert_pb2 import ExpertRequest, ExpertStatus


class RequestRefused(Exception):
    """A request that is answered with a reason."""

    def __init__(self, status: ExpertStatus, reason: str, queued: int = 0) -> None:
        super().__init__(reason)
        self.status, self.reason, self.queued = status, reason, queued


@dataclass(frozen=True, slots=True)
class HostedExpert:
    """An expert, where it is computed, and the backward passes that it has seen."""

    uid: ExpertUid
    expert: Expert
    compute: ComputeThread
    batch_size_max: int
    refusals: Counter[str] = field(default_factory=Counter)  # by status


@dataclass(slots=True)
class PendingJob:
    """A job, and how many calls wait for it."""

    future: asyncio.Future[Outcome]
    compute: ComputeThread
    number: int
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class KeptInputs:
    """Of a forward pass."""

    tensors: list[ReceivedTensor]
    batch: int
    versions: list[int]  # of the tensors: a module may write into what it is given

    @classmethod
    def snapshot(cls, tensors: list[ReceivedTensor], batch: int) -> KeptInputs:
        """As they are now."""
        return cls(tensors, batch, _versions(tensors))

    @property
    def is_unmodified(self) -> bool:
        """Still what was sent."""
        return self.versions == _versions(self.tensors)

    @property
    def size_bytes(self) -> int:
        """What they take on the host."""
        return sum((one.raw if isinstance(one, Encoded) else one).nbytes for one in self.tensors)


def _versions(tensors: list[ReceivedTensor]) -> list[int]:
    return [(one.raw if isinstance(one, Encoded) else one)._version for one in tensors]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedRequest:
    """A request whose announcements are right."""

    hosted: HostedExpert
    caller: PeerId
    request: ExpertRequest
    headers: list[Header]
    leaves: Sequence[Leaf]  # of what the payload holds
    size_bytes: int
    codec: Codec | None
    is_backward: bool
    kept: KeptInputs | None  # of a backward pass that came without

    @property
    def pass_id(self) -> tuple[PeerId, bytes]:
        """Of the pass, whoever computes it."""
        return self.caller, self.request.request_id


def request_refused(reason: str) -> RequestRefused:
    return RequestRefused(expert_pb2.EXPERT_REFUSED, reason)


def request_overloaded(hosted: HostedExpert, reason: str) -> RequestRefused:
    return RequestRefused(expert_pb2.EXPERT_OVERLOADED, f"overloaded, {reason}", hosted.compute.queued)
