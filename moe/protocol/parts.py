"""Several requests of one caller to one server in one message, and their answers: the parts of a message.

The first part is the message itself, the others are its `more`; a message without `more` is a single request.
The tensors of all parts form one payload, in their order. Each part is admitted, computed and answered by
itself, as if it had come alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from moe.protocol.tensors import ALIGNMENT
from swarm.core.errors import PeerError
from swarm.wire.expert_pb2 import ExpertRequest, TensorHeader

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


def announced_bytes(tensors: Iterable[TensorHeader]) -> int:
    """Return the size of the payload of the tensors that a request or a reply announces, with padding."""
    return sum(one.payload_bytes + -one.payload_bytes % ALIGNMENT for one in tensors)


def cut(payload: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the payload of each part, as views of the payload of all, which is flat uint8. Raises PeerError
    when all together have another size.
    """
    if len(payload) != sum(sizes):
        raise PeerError(f"the payload has {len(payload)} bytes, not {sum(sizes)}")
    ends = itertools.accumulate(sizes)
    return [payload[end - size : end] for size, end in zip(sizes, ends, strict=True)]
