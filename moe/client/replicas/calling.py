"""Calls of one expert, whoever holds it: forward at the replica that is best now, and at another when that
fails or dawdles; backward where forward was answered, repeated until it is known to be applied.

What peers do wrong is kept in the node's `ReplicaStats`, so that all layers learn from it.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from moe.client.logic.hedging import HedgedCall
from moe.client.logic.replica_stats import ReplicaStats
from moe.client.replicas.directory_cache import ExpertDirectoryCache
from moe.protocol.calls import (
    BackwardReply,
    ExpertCalls,
    ExpertClient,
    ForwardReply,
    GradientPass,
    WireCodecs,
)
from moe.protocol.declarations import Directory, ExpertReplica
from moe.protocol.errors import ExpertApplied, ExpertMissing, ExpertOverloaded
from moe.protocol.names import ExpertUid
from moe.protocol.schema import ExpertSchema, Leaf
from swarm.core.backoff import Backoff
from swarm.core.clock import Clock
from swarm.core.errors import (
    DeadlineExceeded,
    NetworkError,
    NotEnoughPeers,
    PeerError,
    SwarmError,
    UsageError,
)
from swarm.core.ids import PeerId

if TYPE_CHECKING:
    from swarm.node import Node

_REPEATS_MAX = 3  # of a backward pass that got no answer
_REPEAT_FIRST_S = 0.05  # before the first repetition; doubles
# of the time that is left: an answer that was lost is asked for again while there is time for it
_WAIT_SHARE = 0.6
_ATTEMPTS_MAX = 8  # replicas that a call asks for which there is no other expert


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ForwardResult:
    """A forward pass of one expert that was answered, and by whom."""

    uid: ExpertUid
    replica: ExpertReplica
    forwarded: ForwardReply

    def without_outputs(self) -> ForwardResult:
        """What a backward pass needs of it."""
        return replace(self, forwarded=replace(self.forwarded, outputs=[]))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ForwardCall:
    """One forward pass to make. `inputs`: flat, with the same first dimension."""

    uid: ExpertUid
    replicas: Sequence[ExpertReplica]
    inputs: Sequence[torch.Tensor]
    keep: bool  # a backward pass is likely to follow
    # ask those that are avoided, too, but for those that failed since then
    desperate_since_s: float | None = None
    attempts_max: int | None = None  # replicas that are asked; None: as the fleet's hedging says


class ReplicaCalls:
    """Calls to any replica of an expert. A node has one (`node.service(ReplicaCalls.from_node)`), on its network loop."""

    def __init__(
        self, calls: ExpertClient, fleet: ReplicaStats, atlas: ExpertDirectoryCache, clock: Clock
    ) -> None:
        self.calls, self.fleet, self.atlas, self.clock = calls, fleet, atlas, clock

    @classmethod
    def from_node(cls, node: Node, rng: random.Random | None = None) -> ReplicaCalls:
        """Make the one of a node. `rng` draws which replica is asked; None: the system's randomness."""
        directory = ExpertDirectoryCache(Directory(node.dht.service), node.clock, node.supervisor)
        stats = ReplicaStats(rng or random.SystemRandom())
        return cls(node.service(ExpertCalls.from_node), stats, directory, node.clock)

    async def schema(self, uid: ExpertUid, *, deadline_s: float) -> ExpertSchema:
        """The expert's, as the first of its replicas says that answers. Errors as of `forward_of`."""
        begun_s = self.clock.monotonic_s()
        replicas = await self.atlas.replicas(uid, timeout_s=deadline_s - begun_s)
        if not replicas:
            replicas = await self.atlas.replicas(uid, timeout_s=deadline_s - begun_s, anew=True)
        error: SwarmError = self._nobody(uid, replicas, begun_s)
        for replica in self._ordered(uid, replicas, begun_s, begun_s):
            timeout_s = deadline_s - self.clock.monotonic_s()
            try:
                return await self.calls.schema_of(replica, uid, timeout_s=max(timeout_s, 0.001))
            except (PeerError, NetworkError) as failure:
                self._blame(uid, replica, failure)
                error = failure
        raise error

    async def forward_of(
        self,
        uid: ExpertUid,
        inputs: Sequence[torch.Tensor],
        *,
        keep: bool,
        deadline_s: float,
        travel: WireCodecs,
    ) -> ForwardResult:
        """Ask whoever holds this expert, those that are avoided last; when all who were known fail, those who
        came since.

        NotEnoughPeers when nobody declares it, NetworkError when the DHT cannot say who does, else the error
        of the last that failed.
        """
        begun_s = self.clock.monotonic_s()
        known = await self.atlas.replicas(uid, timeout_s=deadline_s - begun_s)
        try:
            call = ForwardCall(uid, known, inputs, keep, begun_s, _ATTEMPTS_MAX)
            return await self.forward(call, deadline_s=deadline_s, travel=travel)
        except (NetworkError, NotEnoughPeers, ExpertMissing):
            now_s = self.clock.monotonic_s()
            if now_s >= deadline_s:
                raise
            asked = {replica.peer_id for replica in known}
            found = await self.atlas.replicas(uid, timeout_s=deadline_s - now_s, anew=True)
            call = replace(call, replicas=[replica for replica in found if replica.peer_id not in asked])
            if not call.replicas:
                raise
        return await self.forward(call, deadline_s=deadline_s, travel=travel)

    async def forward(self, call: ForwardCall, *, deadline_s: float, travel: WireCodecs) -> ForwardResult:
        """Ask replicas until one answers. NotEnoughPeers when all are avoided, else the error of the last
        that failed.

        `deadline_s` is on the node's monotonic clock. Cancelling it counts as lateness of those that were
        asked.
        """
        begun_s = self.clock.monotonic_s()
        by_peer = {
            replica.peer_id: replica
            for replica in self._ordered(call.uid, call.replicas, begun_s, call.desperate_since_s)
        }
        order = list(by_peer)
        if not order:
            raise self._nobody(call.uid, call.replicas, begun_s)
        config = self.fleet.config.hedging
        if call.attempts_max is not None:
            config = replace(config, attempts_max=call.attempts_max)
        hedged = HedgedCall(
            order, self.fleet.hedge_after_s(str(call.uid), order[0]), self.fleet.budget, config
        )
        error: SwarmError = DeadlineExceeded(f"no replica of {call.uid} answered in time")
        running: dict[asyncio.Task[ForwardReply | SwarmError], Hashable] = {}
        asked_s: dict[Hashable, float] = {}
        async with asyncio.TaskGroup() as tasks:
            try:
                while not hedged.over and (now_s := self.clock.monotonic_s()) < deadline_s:
                    for peer in hedged.poll(now_s):
                        asked_s[peer] = now_s
                        replica = by_peer[peer]  # type: ignore[index]
                        # counted here, so that calls of the same moment spread
                        self.fleet.begin(replica.peer_id)
                        task = tasks.create_task(self._attempt(call, replica, deadline_s, travel))
                        task.add_done_callback(functools.partial(self._ended, replica.peer_id))
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
                            answer = outcome
                            hedged.answered(peer)
            finally:
                now_s, winner = self.clock.monotonic_s(), hedged.winner
                for task, peer in running.items():
                    if task.cancel() and winner is not None and asked_s[peer] < asked_s[winner]:
                        self.fleet.overtaken(str(call.uid), peer, now_s)  # type: ignore[arg-type]
                    # it had half of the time that there was
                    elif winner is None and asked_s[peer] < (begun_s + now_s) / 2.0:
                        self.fleet.failed(str(call.uid), peer, now_s, "it was too slow to be waited for")  # type: ignore[arg-type]
        if hedged.winner is None:
            raise error
        return ForwardResult(call.uid, by_peer[hedged.winner], answer)  # type: ignore[index]

    async def backward(
        self, made: ForwardResult, tensors: GradientPass, *, deadline_s: float, travel: WireCodecs
    ) -> BackwardReply:
        """At the replica that answered forward, again while there is no answer: it is applied once. Its last
        error otherwise.
        """
        backoff, peer = Backoff(_REPEAT_FIRST_S, math.inf), made.replica.peer_id
        schema = await self.calls.schema_of(
            made.replica, made.uid, timeout_s=deadline_s - self.clock.monotonic_s()
        )
        tensors = GradientPass(
            cast_to_schema(schema.input_leaves, tensors.inputs),
            cast_to_schema(schema.gradient_leaves, tensors.gradients),
        )
        for left in range(_REPEATS_MAX, -1, -1):
            timeout_s = (deadline_s - self.clock.monotonic_s()) * (_WAIT_SHARE if left else 1.0)
            self.fleet.begin(peer)
            try:
                answer = await self.calls.backward(
                    made.replica, made.uid, made.forwarded, tensors, timeout_s=timeout_s, travel=travel
                )
                self.fleet.said(peer, answer.wait_s, self.clock.monotonic_s())
                return answer
            except (NetworkError, ExpertOverloaded) as error:
                pause_s = backoff.next_s()
                if not left or self.clock.monotonic_s() + pause_s >= deadline_s:
                    self._blame(made.uid, made.replica, error)
                    raise
            except PeerError as error:
                self._blame(made.uid, made.replica, error)
                raise
            finally:
                self.fleet.end(peer)
            await asyncio.sleep(pause_s)
        raise AssertionError("the last repetition returns or raises")

    def available(
        self, uid: ExpertUid, replicas: Sequence[ExpertReplica], desperate_since_s: float | None = None
    ) -> bool:
        """Whether anybody can be asked for it now."""
        peers = [replica.peer_id for replica in replicas]
        if desperate_since_s is not None:
            return bool(self.fleet.untried(str(uid), peers, desperate_since_s))
        return bool(self.fleet.available(str(uid), peers, self.clock.monotonic_s()))

    def late(self, made: ForwardResult) -> None:
        """Its backward pass was not waited for."""
        self.fleet.failed(
            str(made.uid), made.replica.peer_id, self.clock.monotonic_s(), "it was late with a backward pass"
        )

    async def _attempt(
        self, call: ForwardCall, replica: ExpertReplica, deadline_s: float, travel: WireCodecs
    ) -> ForwardReply | SwarmError:
        peer, begun_s = replica.peer_id, self.clock.monotonic_s()
        try:
            schema = await self.calls.schema_of(replica, call.uid, timeout_s=deadline_s - begun_s)
            inputs = cast_to_schema(schema.input_leaves, call.inputs)
            timeout_s = deadline_s - self.clock.monotonic_s()
            answer = await self.calls.forward(
                replica, call.uid, inputs, timeout_s=timeout_s, travel=travel, keep=call.keep
            )
        except SwarmError as error:
            self._blame(call.uid, replica, error)
            return error
        now_s = self.clock.monotonic_s()
        self.fleet.answered(str(call.uid), peer, now_s - begun_s)
        self.fleet.said(peer, answer.wait_s, now_s)
        return answer

    def _ended(self, peer: PeerId, task: asyncio.Task[ForwardReply | SwarmError]) -> None:
        self.fleet.end(peer)

    def _blame(self, uid: ExpertUid, replica: ExpertReplica, error: SwarmError) -> None:
        now_s, peer = self.clock.monotonic_s(), replica.peer_id
        if isinstance(error, ExpertOverloaded | ExpertApplied):  # it is alive and honest
            if isinstance(error, ExpertOverloaded):
                self.fleet.full(peer, now_s)
            return
        if isinstance(error, NetworkError) and not isinstance(error, DeadlineExceeded):
            self.fleet.unreachable(peer, now_s, str(error))
        elif isinstance(error, PeerError | NetworkError) or not isinstance(error, UsageError):
            self.fleet.failed(str(uid), peer, now_s, str(error))

    def _ordered(
        self, uid: ExpertUid, replicas: Sequence[ExpertReplica], now_s: float, desperate_since_s: float | None
    ) -> list[ExpertReplica]:
        """Whom to ask, the best first."""
        name, by_peer = str(uid), {replica.peer_id: replica for replica in replicas}
        order = self.fleet.order(
            name, list(by_peer), now_s, [replica.load.wait_s for replica in by_peer.values()]
        )
        if desperate_since_s is not None:
            order += [
                peer for peer in self.fleet.untried(name, by_peer, desperate_since_s) if peer not in order
            ]
        return [by_peer[peer] for peer in order]

    def _nobody(self, uid: ExpertUid, replicas: Sequence[ExpertReplica], now_s: float) -> NotEnoughPeers:
        if not replicas:
            return NotEnoughPeers(
                f"nobody hosts {uid}: no live declaration of it is in the DHT. Is its server up, and in this swarm?"
            )
        why = self.fleet.why_avoided(str(uid), replicas[0].peer_id, now_s) or "they failed just now"
        return NotEnoughPeers(
            f"nobody can be asked for {uid}: all of its {len(replicas)} replicas are avoided, {why}"
        )


def with_new_request_id(made: ForwardResult) -> ForwardResult:
    """The same answer under another request id: its backward pass is applied beside the one under the first."""
    forwarded = made.forwarded
    return replace(
        made, forwarded=replace(forwarded, request_id=os.urandom(len(forwarded.request_id)), kept=False)
    )


TensorT = TypeVar("TensorT", torch.Tensor, torch.Tensor | None)


def cast_to_schema(leaves: Sequence[Leaf], tensors: Sequence[TensorT]) -> list[TensorT]:
    """Floating tensors in the dtype that the expert takes: callers compute in another precision under
    autocast.
    """
    if len(leaves) != len(tensors):
        return list(tensors)  # refused where the schema is checked, with words
    return [
        tensor.to(leaf.dtype)
        if tensor is not None and tensor.is_floating_point() and leaf.is_floating
        else tensor
        for leaf, tensor in zip(leaves, tensors, strict=True)
    ]
