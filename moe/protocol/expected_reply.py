"""The shape that the tensors of a server's reply must have, and reading them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe.protocol import methods
from moe.protocol.declarations import ExpertReplica
from moe.protocol.errors import ExpertFailed
from moe.protocol.schema import Leaf
from moe.protocol.tensors import check_headers, decode, expected_bytes
from swarm.compression import Buffer, Codec
from swarm.core.errors import PeerError
from swarm.wire.expert_pb2 import ExpertReply


@dataclass(frozen=True, slots=True)
class ExpectedReply:
    """The shape that the tensors of a reply must have."""

    leaves: Sequence[Leaf]
    batch: int
    codec: Codec | None
    may_be_absent: bool

    @property
    def size_bytes(self) -> int:
        return expected_bytes(self.leaves, self.batch, self.codec)

    def read(
        self,
        replica: ExpertReplica,
        reply: ExpertReply,
        payload: Buffer | torch.Tensor,
        *,
        is_finite: bool = False,
    ) -> list[torch.Tensor | None]:
        """Decode the tensors of a reply; `is_finite` as in `decode`. Raises ExpertFailed when they do not fit
        the schema, or contain NaN or infinity.
        """
        absent_from = 0 if self.may_be_absent else len(self.leaves)
        headers = methods.read_headers(reply.tensors)
        try:
            check_headers(headers, self.leaves, self.batch, absent_from=absent_from)
        except PeerError as error:
            raise ExpertFailed(
                f"peer {replica.peer_id} sent a reply that does not fit the expert's schema: {error}"
            ) from None
        try:
            return decode(headers, self.leaves, self.batch, payload, is_finite=is_finite)
        except PeerError as error:
            raise ExpertFailed(f"peer {replica.peer_id} answered with {error}") from None
