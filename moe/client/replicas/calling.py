"""Calls of one expert at any of its replicas. A forward pass goes to the replica that is best now, and to
another one when that fails or is slow; a backward pass goes to the replica that answered forward, and is
repeated until it is known to be applied.

Failures are recorded in the node's `ReplicaStats`, so that all layers learn from them.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from moe.client.logic.hedging import ATTEMPTS_MAX, HedgedCall
from moe.client.logic.replica_stats import ReplicaStats
from moe.client.replicas.directory_cache import ExpertDirectoryCache
from moe.client.replicas.splitting import SplitCalls
from moe.protocol.calls import (
    BackwardReply,
    ExpertCalls,
    ExpertClient,
    ForwardOptions,
    ForwardReply,
    GradientPass,
    WireCodecs,
)
from moe.protocol.declarations import Directory, ExpertReplica
from moe.protocol.errors import ExpertApplied, ExpertMissing, ExpertOverloaded, ExpertStale
from moe.protocol.names import ExpertUid
from moe.protocol.schema import ExpertSchema, Leaf
from swarm.core.backoff import Backoff
from swarm.core.clock import Clock
from swarm.core.errors import (
    DeadlineExceeded,
    NetworkError,
    NotEnoughPeers,
    NotInvited,
    PeerError,
    SwarmError,
    UsageError,
)
from swarm.core.ids import PeerId

if TYPE_CHECKING:
    from swarm.node import Node

_TOO_SLOW = "it was too slow to be waited for"
_OVERTAKEN = "it was overtaken by another replica"
_REPEATS_MAX = 3  # repetitions of a backward pass that got no reply
_REPEAT_FIRST_S = 0.05  # pause before the first repetition; doubles
# share of the remaining time that one attempt may take, so that a lost reply can be asked for again
_WAIT_SHARE = 0.6
_ATTEMPTS_MAX = 8  # replicas to ask when no other expert can replace this one


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ForwardResult:
    """A forward pass of one expert that was answered, and the replica that answered it."""

    uid: ExpertUid
    replica: ExpertReplica
    forward_reply: ForwardReply

    def for_pass(self, number: int) -> ForwardResult:
        """Return the result for the backward pass with this number (`ForwardReply.for_pass`)."""
        return replace(self, forward_reply=self.forward_reply.for_pass(number)) if number else self


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ForwardCall:
    """One forward pass to make. `inputs` are flat and have the same first dimension."""

    uid: ExpertUid
    replicas: Sequence[ExpertReplica]
    inputs: Sequence[torch.Tensor]
    keep: bool  # a backward pass is likely to follow
    # also ask avoided replicas, except those that failed since this time
    include_avoided_since_s: float | None = None
    attempts_max: int = ATTEMPTS_MAX  # replicas that are asked
    together: bool = False  # share a message with others of the same turn of the event loop


class ReplicaCalls:
    """Makes calls to any replica of an expert. A node has one instance
    (`node.service(ReplicaCalls.from_node)`), on its network loop.
    """

    def __init__(
        self, calls: ExpertClient, stats: ReplicaStats, directory: ExpertDirectoryCache, clock: Clock
    ) -> None:
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
            for replica in self._replicas_in_order(uid, replicas, begun_s, begun_s):
                timeout_s = deadline_s - self.clock.monotonic_s()
                try:
                    return await self.calls.schema_of(replica, uid, timeout_s=max(timeout_s, 0.001))
                except (PeerError, NetworkError) as failure:
                    self._record_failure(uid, replica, failure)
                    error = failure
            error = error or self._no_replica_error(uid, replicas, begun_s)
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
        """Ask the replicas of `call` until one answers. `deadline_s` is a time of the node's monotonic clock.

        Raises NotEnoughPeers when all are avoided, else the error of the last replica that failed. When this
        is cancelled, the replicas that were asked count as late.
        """
        begun_s = self.clock.monotonic_s()
        in_order = self._replicas_in_order(call.uid, call.replicas, begun_s, call.include_avoided_since_s)
        if not in_order:
            raise self._no_replica_error(call.uid, call.replicas, begun_s)
        if len(in_order) == 1:
            return await self._forward_only(call, in_order[0], deadline_s, codecs)
        by_peer = {replica.peer_id: replica for replica in in_order}
        order = list(by_peer)
        hedged = HedgedCall(
            order,
            self.stats.hedge_after_s(str(call.uid), order[0]),
            self.stats.budget,
            call.attempts_max,
        )
        error: SwarmError = DeadlineExceeded(f"no replica of {call.uid} answered in time")
        running: dict[asyncio.Task[ForwardReply | SwarmError], PeerId] = {}
        asked_s: dict[PeerId, float] = {}
        async with asyncio.TaskGroup() as tasks:
            try:
                while not hedged.over and (now_s := self.clock.monotonic_s()) < deadline_s:
                    for peer in hedged.poll(now_s):
                        asked_s[peer] = now_s
                        replica = by_peer[peer]
                        # counted here, so that simultaneous calls spread over replicas
                        self.stats.begin(replica.peer_id)
                        task = tasks.create_task(self._attempt(call, replica, deadline_s, codecs))
                        task.add_done_callback(functools.partial(self._on_call_ended, replica.peer_id))
                        running[task] = peer
                    until_s = min(deadline_s, hedged.deadline_s() or deadline_s)
                    done, _ = await asyncio.wait(
                        running, timeout=max(until_s - now_s, 0.0), return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in done:
                        peer, outcome = running.pop(task), task.result()
                        if isinstance(outcome, SwarmError):
                            error = outcome
                            hedged.failed(peer)
                        else:
                            reply = outcome
                            hedged.answered(peer)
            finally:
                now_s, winner = self.clock.monotonic_s(), hedged.winner
                for task, peer in running.items():
                    if task.cancel() and winner is not None and asked_s[peer] < asked_s[winner]:
                        self.stats.slow(str(call.uid), peer, now_s, _OVERTAKEN)
                    # the attempt had at least half of the available time
                    elif winner is None and asked_s[peer] < (begun_s + now_s) / 2.0:
                        self.stats.slow(str(call.uid), peer, now_s, _TOO_SLOW)
        if hedged.winner is None:
            raise error
        return ForwardResult(call.uid, by_peer[hedged.winner], reply)

    async def _forward_only(
        self, call: ForwardCall, replica: ExpertReplica, deadline_s: float, codecs: WireCodecs
    ) -> ForwardResult:
        """Ask the only replica that there is, as `forward` does, without the tasks that a second request
        would need: a pass may call hundreds of experts.
        """
        peer, begun_s = replica.peer_id, self.clock.monotonic_s()
        self.stats.budget.add_call()
        self.stats.begin(peer)
        try:
            outcome = await self._attempt(call, replica, deadline_s, codecs)
        except BaseException:
            if self.clock.monotonic_s() > begun_s:
                self.stats.slow(str(call.uid), peer, self.clock.monotonic_s(), _TOO_SLOW)
            raise
        finally:
            self.stats.end(peer)
        if isinstance(outcome, DeadlineExceeded):
            self.stats.slow(str(call.uid), peer, self.clock.monotonic_s(), _TOO_SLOW)
        if isinstance(outcome, SwarmError):
            raise outcome
        return ForwardResult(call.uid, replica, outcome)

    async def backward(
        self, result: ForwardResult, tensors: GradientPass, *, deadline_s: float, codecs: WireCodecs
    ) -> BackwardReply:
        """Run a backward pass at the replica that answered forward. It is repeated while no reply comes, and
        applied once. Raises the replica's last error.
        """
        backoff, peer = Backoff(_REPEAT_FIRST_S, math.inf), result.replica.peer_id
        schema = await self.calls.schema_of(
            result.replica, result.uid, timeout_s=deadline_s - self.clock.monotonic_s()
        )
        tensors = GradientPass(
            cast_to_schema(schema.input_leaves, tensors.inputs),
            cast_to_schema(schema.gradient_leaves, tensors.gradients),
            tensors.staleness_max,
            tensors.together,
        )
        for left in range(_REPEATS_MAX, -1, -1):
            timeout_s = (deadline_s - self.clock.monotonic_s()) * (_WAIT_SHARE if left else 1.0)
            self.stats.begin(peer)
            try:
                reply = await self.calls.backward(
                    result.replica,
                    result.uid,
                    result.forward_reply,
                    tensors,
                    timeout_s=timeout_s,
                    codecs=codecs,
                )
                self.stats.wait_reported(peer, reply.wait_s, self.clock.monotonic_s())
                return reply
            except (NetworkError, ExpertOverloaded) as error:
                pause_s = backoff.next_s()
                if not left or self.clock.monotonic_s() + pause_s >= deadline_s:
                    self._record_failure(result.uid, result.replica, error)
                    raise
            except PeerError as error:
                self._record_failure(result.uid, result.replica, error)
                raise
            finally:
                self.stats.end(peer)
            await asyncio.sleep(pause_s)
        raise AssertionError("the last repetition returns or raises")

    def available(
        self, uid: ExpertUid, replicas: Sequence[ExpertReplica], include_avoided_since_s: float | None = None
    ) -> bool:
        """Return whether some replica can be asked for this expert now."""
        peers = [replica.peer_id for replica in replicas]
        if include_avoided_since_s is not None:
            return bool(self.stats.not_failed_since(str(uid), peers, include_avoided_since_s))
        return bool(self.stats.available(str(uid), peers, self.clock.monotonic_s()))

    def backward_timed_out(self, result: ForwardResult) -> None:
        """Record that the backward pass of `result` took too long and was given up."""
        self.stats.failed(
            str(result.uid),
            result.replica.peer_id,
            self.clock.monotonic_s(),
            "it was late with a backward pass",
        )

    async def _attempt(
        self, call: ForwardCall, replica: ExpertReplica, deadline_s: float, codecs: WireCodecs
    ) -> ForwardReply | SwarmError:
        peer, begun_s = replica.peer_id, self.clock.monotonic_s()
        try:
            schema = await self.calls.schema_of(replica, call.uid, timeout_s=deadline_s - begun_s)
            inputs = cast_to_schema(schema.input_leaves, call.inputs)
            timeout_s = deadline_s - self.clock.monotonic_s()
            reply = await self.calls.forward(
                replica,
                call.uid,
                inputs,
                timeout_s=timeout_s,
                codecs=codecs,
                options=_options_of(call.keep, call.together),
            )
        except SwarmError as error:
            self._record_failure(call.uid, replica, error)
            return error
        now_s = self.clock.monotonic_s()
        self.stats.answered(str(call.uid), peer, now_s - begun_s)
        self.stats.wait_reported(peer, reply.wait_s, now_s)
        return reply

    def _on_call_ended(self, peer: PeerId, task: asyncio.Task[ForwardReply | SwarmError]) -> None:
        self.stats.end(peer)

    def _record_failure(self, uid: ExpertUid, replica: ExpertReplica, error: SwarmError) -> None:
        now_s, peer = self.clock.monotonic_s(), replica.peer_id
        if isinstance(error, ExpertOverloaded | ExpertApplied | ExpertStale):  # the peer is alive and honest
            if isinstance(error, ExpertOverloaded):
                self.stats.overloaded(peer, now_s)
            return
        if isinstance(error, NetworkError) and not isinstance(error, DeadlineExceeded):
            self.stats.unreachable(peer, now_s, str(error))
        elif isinstance(error, PeerError | NetworkError) or not isinstance(error, UsageError):
            self.stats.failed(str(uid), peer, now_s, str(error))

    def _replicas_in_order(
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

    def _no_replica_error(
        self, uid: ExpertUid, replicas: Sequence[ExpertReplica], now_s: float
    ) -> NotEnoughPeers:
        if not replicas:
            return NotEnoughPeers(
                f"nobody hosts {uid}: no live declaration of it is in the DHT. "
                "Is its server up, and in this swarm?"
            )
        why = self.stats.why_avoided(str(uid), replicas[0].peer_id, now_s) or "they failed just now"
        return NotEnoughPeers(f"no replica of {uid} can be asked: all {len(replicas)} are avoided, {why}")


_options_of = functools.cache(ForwardOptions)  # there are four, and a pass makes hundreds of calls
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
