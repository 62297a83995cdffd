"""The peers that host experts: which of them to ask for an expert, and what their answers say about them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from moe.client.logic.replica_stats import ReplicaStats
from moe.client.replicas.together import run_together
from moe.protocol.calls import ExpertClient
from moe.protocol.declarations import ExpertReplica
from moe.protocol.errors import ExpertApplied, ExpertOverloaded, ExpertStale
from moe.protocol.names import ExpertUid
from moe.protocol.schema import ExpertSchema, Leaf
from swarm.core.clock import Clock
from swarm.core.errors import (
    DeadlineExceeded,
    NetworkError,
    NotEnoughPeers,
    PeerError,
    SwarmError,
    UsageError,
)

_SCHEMAS_AT_ONCE = 16  # schemas of a peer that are asked for at a time


class ReplicaPeers:
    """The peers that host experts. Failures are recorded in `stats`, so that all layers learn from them."""

    def __init__(self, calls: ExpertClient, stats: ReplicaStats, clock: Clock) -> None:
        self.calls, self.stats, self.clock = calls, stats, clock

    def available(
        self, uid: ExpertUid, replicas: Sequence[ExpertReplica], include_avoided_since_s: float | None = None
    ) -> bool:
        """Return whether some replica can be asked for this expert now."""
        peers = [replica.peer_id for replica in replicas]
        if include_avoided_since_s is not None:
            return bool(self.stats.not_failed_since(str(uid), peers, include_avoided_since_s))
        return bool(self.stats.available(str(uid), peers, self.clock.monotonic_s()))

    async def schemas_of(
        self, hosts: Mapping[int, tuple[ExpertUid, ExpertReplica]], deadline_s: float
    ) -> tuple[dict[int, ExpertSchema], dict[int, SwarmError]]:
        """Return the schemas of experts on one peer, and the errors where there is none. The peer is asked
        once for what replicas of one digest share.
        """
        by_digest: dict[bytes | int, list[int]] = {}
        for number, (_, replica) in hosts.items():
            by_digest.setdefault(replica.schema or number, []).append(number)
        schemas: dict[int, ExpertSchema] = {}
        failed: dict[int, SwarmError] = {}
        work = [
            self._ask_schema(numbers, hosts, deadline_s, schemas, failed) for numbers in by_digest.values()
        ]
        if len(work) == 1:
            await work[0]
        else:
            await run_together(work, _SCHEMAS_AT_ONCE)
        return schemas, failed

    async def _ask_schema(
        self,
        numbers: Sequence[int],
        hosts: Mapping[int, tuple[ExpertUid, ExpertReplica]],
        deadline_s: float,
        schemas: dict[int, ExpertSchema],
        failed: dict[int, SwarmError],
    ) -> None:
        """Add the schema that these experts share, or errors."""
        for place, number in enumerate(numbers):
            uid, replica = hosts[number]
            timeout_s = deadline_s - self.clock.monotonic_s()
            try:
                schema = await self.calls.schema_of(replica, uid, timeout_s=timeout_s)
            except NetworkError as error:
                failed.update((other, copy.copy(error)) for other in numbers[place:])
                return
            except SwarmError as error:  # this one is not there; others may be
                failed[number] = error
            else:
                schemas.update(dict.fromkeys(numbers[place:], schema))
                return

    def record_failure(self, uid: ExpertUid, replica: ExpertReplica, error: SwarmError) -> None:
        now_s, peer = self.clock.monotonic_s(), replica.peer_id
        if isinstance(error, ExpertOverloaded | ExpertApplied | ExpertStale):  # the peer is alive and honest
            if isinstance(error, ExpertOverloaded):
                self.stats.overloaded(peer, now_s)
            return
        if isinstance(error, NetworkError) and not isinstance(error, DeadlineExceeded):
            self.stats.unreachable(peer, now_s, str(error))
        elif isinstance(error, PeerError | NetworkError) or not isinstance(error, UsageError):
            self.stats.failed(str(uid), peer, now_s, str(error))

    def in_order(
        self,
        uid: ExpertUid,
        replicas: Sequence[ExpertReplica],
        now_s: float,
        include_avoided_since_s: float | None,
    ) -> list[ExpertReplica]:
        """Return the replicas to ask, the best first."""
        if len(replicas) == 1:  # most experts have one: there is nothing to draw
            is_usable = self.available(uid, replicas) or (
                include_avoided_since_s is not None and self.available(uid, replicas, include_avoided_since_s)
            )
            return list(replicas) if is_usable else []
        name, by_peer = str(uid), {replica.peer_id: replica for replica in replicas}
        order = self.stats.order(
            name, list(by_peer), now_s, [replica.load.wait_s for replica in by_peer.values()]
        )
        if include_avoided_since_s is not None:
            order += [
                peer
                for peer in self.stats.not_failed_since(name, by_peer, include_avoided_since_s)
                if peer not in order
            ]
        return [by_peer[peer] for peer in order]

    def no_replica_error(
        self, uid: ExpertUid, replicas: Sequence[ExpertReplica], now_s: float
    ) -> NotEnoughPeers:
        if not replicas:
            return NotEnoughPeers(
                f"nobody hosts {uid}: no live declaration of it is in the DHT. "
                "Is its server up, and in this swarm?"
            )
        why = self.stats.why_avoided(str(uid), replicas[0].peer_id, now_s) or "they failed just now"
        return NotEnoughPeers(f"no replica of {uid} can be asked: all {len(replicas)} are avoided, {why}")


TensorT = TypeVar("TensorT", torch.Tensor, torch.Tensor | None)


def cast_to_schema(leaves: Sequence[Leaf], tensors: Sequence[TensorT]) -> list[TensorT]:
    """Return the tensors with floating-point ones in the dtype that the expert takes. Callers under autocast
    compute in another precision.
    """
    if len(leaves) != len(tensors):
        return list(tensors)  # the schema check refuses it with a message
    return [
        tensor.to(leaf.dtype)
        if tensor is not None
        and tensor.dtype != leaf.dtype
        and tensor.is_floating_point()
        and leaf.is_floating
        else tensor
        for leaf, tensor in zip(leaves, tensors, strict=True)
    ]
