"""Averaging of replicas: experts that several servers host are averaged in the background, so that all
replicas give nearly the same answers.

At the same moments of swarm time (multiples of a period) every server looks for experts of its own that
others host, too, and averages their parameters with them, weighted by the samples that each replica has
learned from since the last time. An expert that has learned nothing yet only receives from those that have,
so a new server becomes a replica by its first average. Computation goes on meanwhile: what an expert learns
during a round is added to the average.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from averaging.averager import Averager
from moe.protocol.calls import ExpertCalls
from moe.protocol.declarations import Directory, ExpertReplica
from moe.protocol.names import ExpertUid
from moe.server.expert import Expert
from swarm.core.errors import SwarmError, UsageError

if TYPE_CHECKING:
    from averaging.result import RoundResult
    from swarm.node import Node

_log = logging.getLogger(__name__)

_NAME_MAX = 50
# experts of a server that are averaged in one period: always the first of those that others host, too
_EXPERTS_PER_PERIOD_MAX = 64
_ROUND_TIMEOUT_S = 20.0  # of a round; at most half the period is used
_GROUP_SIZE = 8
_CODEC = "float16"
_READ_TIMEOUT_S = 5.0


@dataclass(slots=True)
class _ReplicaAverager:
    averager: Averager
    samples: int = 0  # the expert's samples when it was last averaged


class Replicating:
    """Averages one server's experts with their replicas. Lives on the network loop; blocking calls run in a
    thread of its own.
    """

    def __init__(self, node: Node, experts: Mapping[ExpertUid, Expert], period_s: float) -> None:
        self._node, self._period_s = node, period_s
        self._experts = {uid: expert for uid, expert in experts.items() if not expert.frozen}
        self._directory = Directory(node.dht.service)
        self._calls = node.service(ExpertCalls.from_node)
        self._averagers: dict[ExpertUid, _ReplicaAverager] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="swarm-replicas")
        self.rounds = 0  # number of successful rounds

    async def run(self) -> None:
        """Average once per period, for as long as the server runs."""
        if not self._period_s or not self._experts:
            return
        while True:
            period_s = self._period_s
            await asyncio.sleep(period_s - self._node.clock.swarm_s() % period_s)
            try:
                await self.average()
            except SwarmError as error:
                _log.info("replicas of this server's experts were not averaged: %s", error)

    async def average(self) -> None:
        """Average once all experts of this server that others host, too."""
        found = await self._directory.replicas(list(self._experts), timeout_s=_READ_TIMEOUT_S)
        shared = {}
        for uid, replicas in found.items():
            others = [
                one
                for one in replicas
                if one.peer_id != self._node.peer_id and one.schema == self._experts[uid].schema.digest
            ]
            if others:
                shared[uid] = others
            elif uid in self._averagers:
                await self._run_on_thread(self._averagers.pop(uid).averager.close)
        selected = dict(list(shared.items())[:_EXPERTS_PER_PERIOD_MAX])
        async with asyncio.TaskGroup() as tasks:
            weights = {uid: tasks.create_task(self._weight(uid, others)) for uid, others in selected.items()}
        if selected:
            await self._run_on_thread(self._run_rounds, {uid: task.result() for uid, task in weights.items()})

    def close(self) -> None:
        """Leave the groups. Must not be called on the network thread. A node that closes ends its averagers
        by itself.
        """
        self._thread.shutdown(wait=False, cancel_futures=True)
        for entry in list(self._averagers.values()):
            entry.averager.close()

    async def _weight(self, uid: ExpertUid, others: list[ExpertReplica]) -> float:
        """Return the samples learned since the last average plus one, so that no replica has weight 0; or 0
        for a new expert when some replica has learned.
        """
        expert, entry = self._experts[uid], self._averagers.get(uid)
        if expert.version == 0:
            for replica in others:
                try:
                    described = (await self._calls.describe(replica, [uid], timeout_s=_READ_TIMEOUT_S))[0]
                except SwarmError:
                    continue
                if described is not None and described.version > 0:
                    return 0.0
        return 1.0 + max(expert.samples - (entry.samples if entry else 0), 0)

    async def _run_on_thread(self, function: Callable[..., object], *arguments: object) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, function, *arguments)

    def _run_rounds(self, weights: Mapping[ExpertUid, float]) -> None:
        """Start all rounds at once, then wait for their results. Runs on the averaging thread."""
        timeout_s = min(_ROUND_TIMEOUT_S, self._period_s / 2)
        pending = {}
        for uid, weight in weights.items():
            expert = self._experts[uid]
            try:
                entry = self._averagers.get(uid) or self._open_averager(uid)
                with expert.lock:
                    version, samples = expert.version, expert.samples
                    step = entry.averager.step(weight, timeout_s, gather=version, wait=False, apply="delta")
                pending[uid] = (entry, samples, step)
            except UsageError as error:
                _log.info("%s is not averaged with its replicas: %s", uid, error)
        for uid, (entry, samples, step) in pending.items():
            expert = self._experts[uid]
            if not step.wait(timeout_s + 1.0):
                step.cancel()
                continue
            with expert.lock:  # the difference is added, so steps made meanwhile are kept
                result = step.result()
                if not result.failed:
                    expert.parameters_replaced(_next_version(result, expert.version))
                    entry.samples = samples
                    self.rounds += 1
            if result.failed:
                _log.info("%s was not averaged with its replicas: %s", uid, result.reason)

    def _open_averager(self, uid: ExpertUid) -> _ReplicaAverager:
        expert = self._experts[uid]
        name = (
            str(uid)
            if len(str(uid)) <= _NAME_MAX
            else hashlib.sha256(str(uid).encode()).hexdigest()[:_NAME_MAX]
        )
        averager = Averager(
            self._node,
            expert.averaged_tensors(),
            name=f"expert-{name}",
            target_group_size=_GROUP_SIZE,
            codec=_CODEC,
        )
        entry = self._averagers[uid] = _ReplicaAverager(averager)
        return entry


def _next_version(result: RoundResult, own: int) -> int:
    """Return a version above that of every replica that took part."""
    versions = [
        value for value in result.gathered.values() if isinstance(value, int) and 0 <= value < 1 << 62
    ]
    return max([own, *versions]) + 1
