"""Several requests of one caller to one server in one message, and their answers: the parts of a message.

The first part is the message itself, the others are its `more`; a message without `more` is a single request.
The tensors of all parts form one payload, in their order. Each part is admitted, computed and answered by
itself, as if it had come alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from moe.protocol.tensors import ALIGNMENT
from swarm.compression import Buffer
from swarm.core.errors import PeerError
from swarm.wire.expert_pb2 import ExpertRequest

PARTS_MAX = 64
# Size of the tensors of several parts together, each way. More gains nothing: these bytes take longer than a
# message, and the server computes nothing of it before all of it has arrived.
PARTS_BYTES_MAX = 4 << 20


def parts_of(request: ExpertRequest) -> list[ExpertRequest]:
    """Return the requests in a message that a peer sent. Raises PeerError when they are too many, or a part
    has parts or a payload of its own.
    """
    if not request.more:
        return [request]
    if len(request.more) >= PARTS_MAX:
        raise PeerError(
            f"at most {PARTS_MAX} requests to experts share a message, not {len(request.more) + 1}"
        )
    for number, part in enumerate(request.more, start=2):
        if part.more or part.payload or part.payload_bytes:
            raise PeerError(
                f"request {number} of {len(request.more) + 1} in a message has requests or a payload "
                "of its own"
            )
    return [request, *request.more]


def announced_bytes(sizes: Iterable[int]) -> int:
    """Return the size of a payload of tensors of these sizes, with padding."""
    return sum(size + -size % ALIGNMENT for size in sizes)


def cut(payload: Buffer | torch.Tensor, sizes: Sequence[int]) -> list[Buffer | torch.Tensor]:
    """Return the payload of each part, as views. Raises PeerError when all together have another size."""
    if len(payload) != sum(sizes):
        raise PeerError(f"the payload has {len(payload)} bytes, not {sum(sizes)}")
    if len(sizes) == 1:
        return [payload]
    whole = payload if isinstance(payload, torch.Tensor) else memoryview(payload)
    found: list[Buffer | torch.Tensor] = []
    start = 0
    for size in sizes:
        found.append(whole[start : start + size])
        start += size
    return found
