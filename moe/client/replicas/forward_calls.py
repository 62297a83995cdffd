"""Forward calls of several experts that are made together: each goes to the replica that is best now, and to
another one when that fails or is slow. Requests to one peer share messages.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from moe.client.logic.hedging import ATTEMPTS_MAX, HedgedCall
from moe.client.replicas.peers import ReplicaPeers, cast_to_schema
from moe.client.replicas.together import start
from moe.protocol.calls import ForwardReply, ForwardRequest, WireCodecs
from moe.protocol.declarations import ExpertReplica
from moe.protocol.names import ExpertUid
from swarm.core.errors import DeadlineExceeded, SwarmError
from swarm.core.ids import PeerId
from swarm.core.notify import ChangeEvent

_TOO_SLOW = "it was too slow to be waited for"
_OVERTAKEN = "it was overtaken by another replica"


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


# called with the results or errors of calls that are made together, by their numbers, as they come
OnForwardResults: TypeAlias = Callable[[Mapping[int, "ForwardResult | SwarmError"]], None]


@dataclass(slots=True, eq=False)
class _Attempt:
    """Requests of several calls to one peer."""

    peer: PeerId
    asked_s: float
    numbers: set[int]  # calls that wait for it
    task: asyncio.Task[None] | None = None  # None: no other one is under way


@dataclass(slots=True, eq=False)
class _OpenCall:
    """A call that has no result yet."""

    call: ForwardCall
    replicas: dict[PeerId, ExpertReplica]
    hedged: HedgedCall[PeerId]
    error: SwarmError | None = None  # the last one


class ForwardCalls:
    """Forward calls that are made together (`ReplicaCalls.forward_all`)."""

    def __init__(
        self,
        peers: ReplicaPeers,
        calls: Sequence[ForwardCall],
        on_results: OnForwardResults,
        deadline_s: float,
        codecs: WireCodecs,
    ) -> None:
        self._peers, self._stats, self._clock = peers, peers.stats, peers.clock
        self._calls, self._on_results = calls, on_results
        self._begun_s, self._deadline_s, self._codecs = self._clock.monotonic_s(), deadline_s, codecs
        self._open: dict[int, _OpenCall] = {}
        self._attempts: list[_Attempt] = []
        self._changed = ChangeEvent()

    async def run(self) -> None:
        asked = self._begin()
        try:
            if len(asked) == 1 and not any(one.hedged.has_more for one in self._open.values()):
                await self._ask(asked[0])  # no other request will be needed
            else:
                await self._ask_until_answered(asked)
        finally:
            now_s = self._clock.monotonic_s()
            for attempt in self._attempts:
                for number in attempt.numbers:
                    self._stats.end(attempt.peer)
                    # it had at least half of the available time
                    if number in self._open and attempt.asked_s < (self._begun_s + now_s) / 2.0:
                        uid = self._open[number].call.uid
                        self._stats.slow(str(uid), attempt.peer, now_s, _TOO_SLOW)
        if self._open:
            self._on_results(
                {
                    number: one.error or DeadlineExceeded(f"no replica of {one.call.uid} answered in time")
                    for number, one in self._open.items()
                }
            )

    def _begin(self) -> list[_Attempt]:
        """Choose the replica to ask first for each call. Return the requests by peer."""
        failed: dict[int, ForwardResult | SwarmError] = {}
        asked: dict[PeerId, _Attempt] = {}
        for number, call in enumerate(self._calls):
            in_order = self._peers.in_order(
                call.uid, call.replicas, self._begun_s, call.include_avoided_since_s
            )
            if not in_order:
                failed[number] = self._peers.no_replica_error(call.uid, call.replicas, self._begun_s)
                continue
            replicas = {replica.peer_id: replica for replica in in_order}
            order = list(replicas)
            hedge_after_s = self._stats.hedge_after_s(str(call.uid), order[0])
            hedged = HedgedCall(order, hedge_after_s, self._stats.budget, call.attempts_max)
            self._open[number] = _OpenCall(call, replicas, hedged)
            self._poll(number, self._begun_s, asked)
        if failed:
            self._on_results(failed)
        return list(asked.values())

    def _poll(self, number: int, now_s: float, asked: dict[PeerId, _Attempt]) -> None:
        for peer in self._open[number].hedged.poll(now_s):
            self._stats.begin(peer)  # here, so that simultaneous calls spread over replicas
            attempt = asked.get(peer)
            if attempt is None:
                attempt = asked[peer] = _Attempt(peer, now_s, set())
                self._attempts.append(attempt)
            attempt.numbers.add(number)

    async def _ask_until_answered(self, asked: Sequence[_Attempt]) -> None:
        async with asyncio.TaskGroup() as tasks:
            try:
                while self._open and (now_s := self._clock.monotonic_s()) < self._deadline_s:
                    for attempt in asked:
                        attempt.task = await start(tasks, self._ask(attempt))
                    until_s, more = self._deadline_s, dict[PeerId, _Attempt]()
                    for one in self._open.values():
                        if one.hedged.has_more:
                            until_s = min(until_s, one.hedged.deadline_s() or until_s)
                    await self._changed.wait(max(until_s - now_s, 0.0))
                    now_s = self._clock.monotonic_s()
                    for number, one in self._open.items():
                        if one.hedged.has_more:
                            self._poll(number, now_s, more)
                    asked = list(more.values())
            finally:
                for attempt in self._attempts:
                    if attempt.task is not None:
                        attempt.task.cancel()

    async def _ask(self, attempt: _Attempt) -> None:
        """Send the requests of an attempt."""
        peer, opened = attempt.peer, self._open
        hosts = {}
        for number in attempt.numbers:
            one = opened[number]
            hosts[number] = (one.call.uid, one.replicas[peer])
        take = functools.partial(self._take, attempt, hosts)
        schemas, failed = await self._peers.schemas_of(hosts, self._deadline_s)
        if failed:
            take(failed)
        requests = {}
        for number, schema in schemas.items():
            call = self._calls[number]
            inputs = cast_to_schema(schema.input_leaves, call.inputs)
            requests[number] = ForwardRequest(call.uid, schema, inputs, call.keep)
        if requests:
            timeout_s = self._deadline_s - self._clock.monotonic_s()
            replica = hosts[next(iter(requests))][1]
            await self._peers.calls.forward_all(
                replica, requests, take, timeout_s=timeout_s, codecs=self._codecs
            )

    def _take(
        self,
        attempt: _Attempt,
        hosts: Mapping[int, tuple[ExpertUid, ExpertReplica]],
        found: Mapping[int, ForwardReply | SwarmError],
    ) -> None:
        now_s, peer = self._clock.monotonic_s(), attempt.peer
        results: dict[int, ForwardResult | SwarmError] = {}
        for number, reply in found.items():
            if number not in attempt.numbers:
                continue  # another replica was quicker
            attempt.numbers.remove(number)
            self._stats.end(peer)
            uid, replica = hosts[number]
            one = self._open[number]
            if isinstance(reply, SwarmError):
                self._peers.record_failure(uid, replica, reply)
                if isinstance(reply, DeadlineExceeded) and attempt.asked_s < (self._begun_s + now_s) / 2.0:
                    self._stats.slow(str(uid), peer, now_s, _TOO_SLOW)
                one.error = reply
                one.hedged.failed(peer)
                if one.hedged.over:
                    results[number] = reply
                continue
            self._stats.answered(str(uid), peer, now_s - attempt.asked_s)
            self._stats.wait_reported(peer, reply.wait_s, now_s)
            one.hedged.answered(peer)
            if len(self._attempts) > 1:
                self._withdraw(number, attempt, now_s)
            results[number] = ForwardResult(uid, replica, reply)
        for number in results:
            del self._open[number]
        if results:
            self._on_results(results)
        self._changed.notify()

    def _withdraw(self, number: int, winner: _Attempt, now_s: float) -> None:
        """Stop waiting for the other replicas that were asked for a call."""
        for attempt in self._attempts:
            if number in attempt.numbers:
                attempt.numbers.remove(number)
                self._stats.end(attempt.peer)
                if attempt.asked_s < winner.asked_s:
                    self._stats.slow(str(self._calls[number].uid), attempt.peer, now_s, _OVERTAKEN)
                if not attempt.numbers and attempt.task is not None:
                    attempt.task.cancel()
