"""Jobs: requests on their way through a server, their outcomes, and counts of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from moe.protocol.tensors import Encoded, TensorPayload, payload_bytes
from moe.server.expert import Expert, Gradients, Tensors
from swarm.compression import Codec
from swarm.core.ids import PeerId

# a received tensor, on the host; Encoded for experts whose device decodes
ReceivedTensor: TypeAlias = torch.Tensor | Encoded
# the decoded inputs of a job and gradients of its outputs, on the device that uses them
JobTensors: TypeAlias = tuple[Tensors, Gradients]


BACKWARD_COST = 3.0  # cost of a backward pass in forward passes: it computes forward again


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request that has been checked."""

    number: int
    uid: str
    expert: Expert
    caller: PeerId
    pass_id: tuple[PeerId, bytes]  # (caller, request id), under which activations are kept
    inputs: Sequence[ReceivedTensor]
    gradients: Sequence[ReceivedTensor | None] | None  # None: a forward pass
    keep: bool
    batch: int
    size_bytes: int
    codec: Codec | None  # for encoding the results
    is_stranger: bool = False  # its caller, when it came
    sequence_length: int = 0  # length of the inputs' sequences, where the schema lets it vary

    @property
    def is_backward(self) -> bool:
        """Return whether this is a backward pass."""
        return self.gradients is not None

    @property
    def kind(self) -> tuple[str, bool, int]:
        """Return the properties that requests of one batch share: the expert, the direction, and the length
        of sequences.
        """
        return self.uid, self.is_backward, self.sequence_length

    @property
    def cost(self) -> float:
        """Return the work that the job takes, in samples of a forward pass with sequences of full length."""
        longest = self.expert.schema.sequence_length
        share = self.sequence_length / longest if longest else 1.0
        return self.batch * share * (BACKWARD_COST if self.is_backward else 1.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a job: encoded tensors, or the reason why there are none."""

    payloads: Sequence[TensorPayload]
    version: int
    failure: str = ""

    @property
    def size_bytes(self) -> int:
        """Return the size of all tensors with their padding."""
        return payload_bytes(self.payloads)

    def copied(self) -> Outcome:
        """Return the same outcome with tensors in memory of their own: those of a batch are views of it."""
        payloads = [
            TensorPayload(one.codec, one.version, bytes(one.payload), one.absent) for one in self.payloads
        ]
        return Outcome(payloads, self.version, self.failure)


@dataclass(slots=True)
class Counts:
    """Counts of one expert's requests since the server started."""

    forward_requests: int = 0
    forward_samples: int = 0
    forward_batches: int = 0
    backward_requests: int = 0
    backward_samples: int = 0
    backward_batches: int = 0
    failed_requests: int = 0
    busy_s: float = 0.0


def samples_of(jobs: Sequence[Job]) -> int:
    """Return the number of samples of all jobs together."""
    return sum(job.batch for job in jobs)


def not_finite(job: Job, version: int) -> Outcome:
    """Return the outcome of a job whose results contain NaN or infinity; such results are not sent."""
    return Outcome(
        (),
        version,
        f"the expert made NaN or infinity of this request{', and made its step' if job.is_backward else ''}",
    )
