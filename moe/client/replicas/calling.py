"""Calls of experts at any of their replicas. A forward pass goes to the replica that is best now, and to
another one when that fails or is slow (`forward_calls`); a backward pass goes to the replica that answered
forward, and is repeated until it is known to be applied (`backward_calls`).

Failures are recorded in the node's `ReplicaStats`, so that all layers learn from them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from moe.client.logic.replica_stats import ReplicaStats
from moe.client.replicas.backward_calls import BackwardCalls
from moe.client.replicas.directory_cache import ExpertDirectoryCache
from moe.client.replicas.forward_calls import ForwardCall as ForwardCall
from moe.client.replicas.forward_calls import ForwardCalls, OnForwardResults
from moe.client.replicas.forward_calls import ForwardResult as ForwardResult
from moe.client.replicas.peers import ReplicaPeers
from moe.client.replicas.splitting import SplitCalls
from moe.protocol.calls import (
    BackwardReply,
    ExpertCalls,
    ExpertClient,
    GradientPass,
    OnBackward,
    WireCodecs,
    reply_or_raise,
)
from moe.protocol.declarations import Directory, ExpertReplica
from moe.protocol.errors import ExpertMissing
from moe.protocol.names import ExpertUid
from moe.protocol.schema import ExpertSchema
from swarm.core.clock import Clock
from swarm.core.errors import (
    NetworkError,
    NotEnoughPeers,
    NotInvited,
    PeerError,
    SwarmError,
)
from swarm.core.ids import PeerId

if TYPE_CHECKING:
    from swarm.node import Node

_ATTEMPTS_MAX = 8  # replicas to ask when no other expert can replace this one


class ReplicaCalls:
    """Makes calls to any replica of an expert. A node has one instance
    (`node.service(ReplicaCalls.from_node)`), on its network loop.
    """

    def __init__(
        self, calls: ExpertClient, stats: ReplicaStats, directory: ExpertDirectoryCache, clock: Clock
    ) -> None:
        self.peers = ReplicaPeers(calls, stats, clock)
        self.calls, self.stats, self.directory, self.clock = calls, stats, directory, clock

    @classmethod
    def from_node(cls, node: Node, rng: random.Random | None = None) -> ReplicaCalls:
        """Create the instance for a node. `rng` draws the replica that is asked; None uses the system's
        randomness.
        """
        directory = ExpertDirectoryCache(Directory(node.dht.service), node.clock, node.supervisor)
        stats = ReplicaStats(rng or random.SystemRandom())
        return cls(SplitCalls(node.service(ExpertCalls.from_node)), stats, directory, node.clock)

    async def schema(self, uid: ExpertUid, *, deadline_s: float) -> ExpertSchema:
        """Return the expert's schema from the first of its replicas that answers. Raises the same errors as
        `forward_any`.
        """
        begun_s = self.clock.monotonic_s()
        error: SwarmError | None = None
        asked: set[PeerId] = set()
        for refresh in (False, True):  # the cached replicas may all fail, so retry with a fresh directory
            left_s = max(deadline_s - self.clock.monotonic_s(), 0.001)
            found = await self.directory.replicas(uid, timeout_s=left_s, refresh=refresh)
            replicas = [replica for replica in found if replica.peer_id not in asked]
            asked.update(replica.peer_id for replica in replicas)
            for replica in self.peers.in_order(uid, replicas, begun_s, begun_s):
                timeout_s = deadline_s - self.clock.monotonic_s()
                try:
                    return await self.calls.schema_of(replica, uid, timeout_s=max(timeout_s, 0.001))
                except (PeerError, NetworkError) as failure:
                    self.peers.record_failure(uid, replica, failure)
                    error = failure
            error = error or self.peers.no_replica_error(uid, replicas, begun_s)
        assert error is not None
        raise error

    async def forward_any(
        self,
        uid: ExpertUid,
        inputs: Sequence[torch.Tensor],
        *,
        keep: bool,
        deadline_s: float,
        codecs: WireCodecs,
    ) -> ForwardResult:
        """Run a forward pass at any replica of this expert, avoided replicas last. When all known replicas
        fail, the directory is read again, and replicas that were not known before are asked.

        Raises NotEnoughPeers when nobody declares the expert, NetworkError when the DHT cannot be read, else
        the error of the last replica that failed.
        """
        begun_s = self.clock.monotonic_s()
        known = await self.directory.replicas(uid, timeout_s=deadline_s - begun_s)
        try:
            call = ForwardCall(uid, known, inputs, keep, begun_s, _ATTEMPTS_MAX)
            return await self.forward(call, deadline_s=deadline_s, codecs=codecs)
        except (NetworkError, NotEnoughPeers, ExpertMissing, NotInvited):
            now_s = self.clock.monotonic_s()
            if now_s >= deadline_s:
                raise
            asked = {replica.peer_id for replica in known}
            found = await self.directory.replicas(uid, timeout_s=deadline_s - now_s, refresh=True)
            call = replace(call, replicas=[replica for replica in found if replica.peer_id not in asked])
            if not call.replicas:
                raise
        return await self.forward(call, deadline_s=deadline_s, codecs=codecs)

    async def forward(self, call: ForwardCall, *, deadline_s: float, codecs: WireCodecs) -> ForwardResult:
        """Make one call, as `forward_all` does. Raises its error."""
        found: dict[int, ForwardResult | SwarmError] = {}
        await self.forward_all([call], found.update, deadline_s=deadline_s, codecs=codecs)
        return reply_or_raise(found[0])

    async def forward_all(
        self,
        calls: Sequence[ForwardCall],
        on_results: OnForwardResults,
        *,
        deadline_s: float,
        codecs: WireCodecs,
    ) -> None:
        """Ask the replicas of each call until one answers; requests to one peer share messages. `on_results`
        is called with results or errors by their number in `calls`, several at a time, as they come; each
        number occurs once. `deadline_s` is a time of the node's monotonic clock.

        The error of a call is NotEnoughPeers when all its replicas are avoided, else that of the last one
        that failed. When this is cancelled, the replicas that were asked count as late.
        """
        await ForwardCalls(self.peers, calls, on_results, deadline_s, codecs).run()

    async def backward(
        self, result: ForwardResult, tensors: GradientPass, *, deadline_s: float, codecs: WireCodecs
    ) -> BackwardReply:
        """Run one backward pass, as `backward_all` does. Raises its error."""
        found: dict[int, BackwardReply | SwarmError] = {}
        await self.backward_all([(result, tensors)], found.update, deadline_s=deadline_s, codecs=codecs)
        return reply_or_raise(found[0])

    async def backward_all(
        self,
        passes: Sequence[tuple[ForwardResult, GradientPass]],
        on_replies: OnBackward,
        *,
        deadline_s: float,
        codecs: WireCodecs,
    ) -> None:
        """Run backward passes, each at the replica that answered forward; those at one peer share messages.
        Each is repeated while no reply comes, and applied once. `on_replies` is called with replies, or the
        replica's last errors, by their number in `passes`, several at a time; each number occurs once.
        """
        if passes:
            await BackwardCalls(self.peers, passes, on_replies, deadline_s, codecs).run()

    def available(
        self, uid: ExpertUid, replicas: Sequence[ExpertReplica], include_avoided_since_s: float | None = None
    ) -> bool:
        """Return whether some replica can be asked for this expert now."""
        return self.peers.available(uid, replicas, include_avoided_since_s)

    def backward_timed_out(self, result: ForwardResult) -> None:
        """Record that the backward pass of `result` took too long and was given up."""
        self.stats.failed(
            str(result.uid),
            result.replica.peer_id,
            self.clock.monotonic_s(),
            "it was late with a backward pass",
        )
