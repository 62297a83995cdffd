"""Backward passes of several experts that are made together, each at the replica that answered forward. A
pass is repeated until it is known to be applied. Requests to one peer share messages.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Mapping, Sequence

from moe.client.replicas.forward_calls import ForwardResult
from moe.client.replicas.peers import ReplicaPeers, cast_to_schema
from moe.client.replicas.together import start
from moe.protocol.calls import BackwardReply, BackwardRequest, GradientPass, OnBackward, WireCodecs
from moe.protocol.errors import ExpertOverloaded
from swarm.core.backoff import backoff_s
from swarm.core.errors import NetworkError, PeerError, SwarmError
from swarm.core.ids import PeerId

_REPEATS_MAX = 3  # repetitions of a backward pass that got no reply
_REPEAT_FIRST_S = 0.05  # pause before the first repetition; doubles
# share of the remaining time that one attempt may take, so that a lost reply can be asked for again
_WAIT_SHARE = 0.6


class BackwardCalls:
    """Backward passes that are made together (`ReplicaCalls.backward_all`)."""

    def __init__(
        self,
        peers: ReplicaPeers,
        passes: Sequence[tuple[ForwardResult, GradientPass]],
        on_replies: OnBackward,
        deadline_s: float,
        codecs: WireCodecs,
    ) -> None:
        self._peers, self._stats, self._clock = peers, peers.stats, peers.clock
        self._passes, self._on_replies = passes, on_replies
        self._deadline_s, self._codecs = deadline_s, codecs

    async def run(self) -> None:
        by_peer: dict[PeerId, list[int]] = {}
        for number, (result, _) in enumerate(self._passes):
            by_peer.setdefault(result.replica.peer_id, []).append(number)
        async with asyncio.TaskGroup() as tasks:
            *others, last = by_peer.values()
            for numbers in others:
                await start(tasks, self._try(tasks, numbers, 0))
            await self._try(tasks, last, 0)

    async def _try(self, tasks: asyncio.TaskGroup, numbers: Sequence[int], failures: int) -> None:
        """Ask a peer for some passes, after a pause if they have failed before."""
        if failures:
            await asyncio.sleep(_pause_s(failures))
        left_s = self._deadline_s - self._clock.monotonic_s()
        take = functools.partial(self._take, tasks, failures)
        await self._ask(numbers, take, left_s * (_WAIT_SHARE if failures < _REPEATS_MAX else 1.0))

    def _take(
        self, tasks: asyncio.TaskGroup, failures: int, found: Mapping[int, BackwardReply | SwarmError]
    ) -> None:
        """Pass replies on, and try again what got none."""
        pause_s = _pause_s(failures + 1)
        again = [
            number
            for number, one in found.items()
            if isinstance(one, NetworkError | ExpertOverloaded)
            and failures < _REPEATS_MAX
            and self._clock.monotonic_s() + pause_s < self._deadline_s
        ]
        if again:
            work = self._try(tasks, again, failures + 1)
            try:
                tasks.create_task(work)
            except RuntimeError:  # the passes have just been cancelled, and nobody waits for them
                work.close()
            found = {number: one for number, one in found.items() if number not in again}
        for number, one in found.items():
            if isinstance(one, PeerError | NetworkError):
                result = self._passes[number][0]
                self._peers.record_failure(result.uid, result.replica, one)
        if found:
            self._on_replies(found)

    async def _ask(self, numbers: Sequence[int], on_replies: OnBackward, timeout_s: float) -> None:
        """Ask a peer once."""
        replica, unanswered = self._passes[numbers[0]][0].replica, set(numbers)
        peer, begun_s = replica.peer_id, self._clock.monotonic_s()
        for _ in numbers:
            self._stats.begin(peer)

        def take(found: Mapping[int, BackwardReply | SwarmError]) -> None:
            for number, one in found.items():
                unanswered.remove(number)
                self._stats.end(peer)
                if isinstance(one, BackwardReply):
                    self._stats.wait_reported(peer, one.wait_s, self._clock.monotonic_s())
            on_replies(found)

        try:
            results = {number: self._passes[number][0] for number in numbers}
            hosts = {number: (result.uid, result.replica) for number, result in results.items()}
            schemas, failed = await self._peers.schemas_of(hosts, begun_s + timeout_s)
            if failed:
                take(failed)
            requests = {}
            for number, schema in schemas.items():
                result, tensors = self._passes[number]
                cast = GradientPass(
                    cast_to_schema(schema.input_leaves, tensors.inputs),
                    cast_to_schema(schema.gradient_leaves, tensors.gradients),
                    tensors.staleness_max,
                )
                requests[number] = BackwardRequest(result.uid, schema, result.forward_reply, cast)
            if requests:
                left_s = begun_s + timeout_s - self._clock.monotonic_s()
                await self._peers.calls.backward_all(
                    replica, requests, take, timeout_s=left_s, codecs=self._codecs
                )
        finally:
            for _ in unanswered:
                self._stats.end(peer)


def _pause_s(failures: int) -> float:
    return backoff_s(failures, _REPEAT_FIRST_S, math.inf)
