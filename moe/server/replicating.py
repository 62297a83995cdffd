"""Replicas: an expert that several servers host has nearly the same parameters on all of them.

A server takes over the state of an expert, with optimizer and buffers, from an existing replica before it
declares its own. Afterwards all servers average at the same moments of swarm time (multiples of a period),
while they compute: what an expert learns during a round is added to the average. Two replicas count by the
steps since their last common version, within limits; from three on the median counts, so that one liar among
three changes little. All shared experts are averaged in turn, however many there are.

A replica whose state is not known to be that of the others, because it resumed from a checkpoint or the
others were not found when it started, compares its lineage with theirs before the first averages, and takes
over their state where it lies behind (`moe.server.logic.lineage`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from averaging.averager import Averager
from moe.protocol.declarations import Directory, ExpertReplica
from moe.protocol.names import ExpertUid
from moe.server.expert import Expert
from moe.server.logic.lineage import NAME_BYTES, donors, next_version
from moe.server.logic.turns import is_due, turns_for
from moe.server.replica_states import ReplicaLineage, ReplicaStates
from swarm.core.backoff import Backoff
from swarm.core.errors import SwarmError, UsageError
from swarm.core.ids import PeerId

if TYPE_CHECKING:
    from averaging.result import RoundResult
    from swarm.node import Node

_log = logging.getLogger(__name__)

_NAME_MAX = 50
_ROUND_TIMEOUT_S = 20.0  # time limit of a round; at most half the period is used
_GROUP_SIZE = 8
_CODEC = "float16"
_READ_TIMEOUT_S = 5.0
_UNSETTLED_PERIODS = 10  # a server that was alone for this long continues from its own state
# A server that starts asks again for states that replicas did not give, with these pauses, for at most this
# long: a hostile replica never gives its state. None of its experts is declared before.
_TAKE_OVER_S_MAX = 60.0
_PAUSE_FIRST_S, _PAUSE_S_MAX = 0.5, 8.0
_TAKEN_OVER_AT_ONCE = 4  # states: each is in memory twice for a moment

_Others = Mapping[ExpertUid, list[ExpertReplica]]
_Lineages = Mapping[ExpertUid, Mapping[PeerId, ReplicaLineage]]


class Replicating:
    """Keeps one server's experts and their replicas together. Lives on the network loop; blocking calls run
    in a thread of its own.
    """

    def __init__(self, node: Node, experts: Mapping[ExpertUid, Expert], period_s: float) -> None:
        self._node, self._experts, self._period_s = node, dict(experts), period_s
        # a frozen expert keeps its owner's parameters, no matter what others declare
        self._learning = [uid for uid, expert in experts.items() if not expert.frozen]
        self._directory = Directory(node.dht.service)
        self._states = ReplicaStates(node)
        self._averagers: dict[ExpertUid, Averager] = {}
        # experts that receive in their next round and do not contribute
        self._receiving: set[ExpertUid] = set()
        self._periods = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="swarm-replicas")
        self.rounds = 0  # number of successful rounds

    async def take_over(self) -> None:
        """Take over the states of experts that other servers host, too, where theirs are better. Call this
        before this server's own experts are declared. While replicas answer and give no state, they are asked
        again: callers would train random weights.
        """
        loop, uids = asyncio.get_running_loop(), self._learning
        until_s, pauses = loop.time() + _TAKE_OVER_S_MAX, Backoff(_PAUSE_FIRST_S, _PAUSE_S_MAX, random)
        while True:
            try:
                others = await self._find_others(uids)
                uids = await self._take_over(others, await self._states.lineages(others), is_declared=False)
            except SwarmError as error:
                _log.info("replicas of this server's experts were not found: %s", error)
                return
            pause_s = pauses.next_s()
            if not uids or loop.time() + pause_s > until_s:
                return
            await asyncio.sleep(pause_s)

    async def run(self) -> None:
        """Average once per period, for as long as the server runs."""
        if not self._period_s:
            return
        while True:
            period_s = self._period_s
            await asyncio.sleep(period_s - self._node.clock.swarm_s() % period_s)
            try:
                await self.average(round(self._node.clock.swarm_s() / period_s))
            except SwarmError as error:
                _log.info("replicas of this server's experts were not averaged: %s", error)

    async def average(self, period: int = 0) -> None:
        """Average the experts of this server that others host, too, and that have their turn in this period
        of swarm time.
        """
        self._periods += 1
        others = await self._find_others(self._learning)
        for uid in [uid for uid in self._averagers if uid not in others]:
            await self._run_on_thread(self._averagers.pop(uid).close)
        own_turns = turns_for(len(others))
        for expert in self._experts.values():
            expert.turns = own_turns
        lineages = await self._states.lineages(others)
        if self._periods <= _UNSETTLED_PERIODS:
            unsettled = {uid: others[uid] for uid in others if not self._experts[uid].settled}
            await self._take_over(unsettled, lineages, is_declared=True)
        due = {
            uid: self._weight(uid, len(others[uid]), lineages[uid])
            for uid in others
            # replicas that step jointly are equal already
            if not self._experts[uid].is_joint
            and is_due(uid, max([own_turns, *(one.turns for one in lineages[uid].values())]), period)
        }
        if due:
            await self._run_on_thread(self._run_rounds, due)

    def close(self) -> None:
        """Leave the groups. Must not be called on the network thread. A node that closes ends its averagers
        by itself.
        """
        self._thread.shutdown(wait=False, cancel_futures=True)
        for averager in list(self._averagers.values()):
            averager.close()

    async def _find_others(self, uids: list[ExpertUid]) -> dict[ExpertUid, list[ExpertReplica]]:
        """Return the replicas of these experts on other servers, without experts that nobody else hosts."""
        if not uids:
            return {}
        found = await self._directory.replicas(uids, timeout_s=_READ_TIMEOUT_S)
        others = {
            uid: [
                one
                for one in replicas
                if one.peer_id != self._node.peer_id and one.schema == self._experts[uid].schema.digest
            ]
            for uid, replicas in found.items()
        }
        return {uid: replicas for uid, replicas in others.items() if replicas}

    async def _take_over(self, others: _Others, lineages: _Lineages, *, is_declared: bool) -> list[ExpertUid]:
        """Take over the states that are better than this server's, and return the experts of which nobody
        gave one.
        """
        slots, failed = asyncio.Semaphore(_TAKEN_OVER_AT_ONCE), list[ExpertUid]()

        async def take_over(uid: ExpertUid) -> None:
            theirs = {peer: one.lineage for peer, one in lineages[uid].items()}
            own = self._experts[uid].lineage
            chosen = donors(own, theirs, self._node.peer_id, is_declared=is_declared)
            if not chosen:
                return
            by_peer = {one.peer_id: one for one in others[uid]}
            async with slots:
                taken = await self._states.take_over(
                    uid, self._experts[uid], [by_peer[peer] for peer in chosen]
                )
            # One of several replicas may lie, so a state counts only after a median has corrected it. A state
            # that is behind never counts.
            if not taken or len(others[uid]) > 1:
                self._receiving.add(uid)
            else:
                self._receiving.discard(uid)
            if not taken:
                failed.append(uid)

        async with asyncio.TaskGroup() as tasks:
            for uid in others:
                tasks.create_task(take_over(uid))
        return failed

    def _weight(self, uid: ExpertUid, others: int, lineages: Mapping[PeerId, ReplicaLineage]) -> float:
        """Return the weight in the next round: 0 only receives. Its size matters only between two
        replicas.
        """
        if uid in self._receiving:
            return 0.0
        if others > 1 or not lineages:
            return 1.0
        (other,) = lineages.values()
        return 1.0 + self._experts[uid].lineage.steps_since_common(other.lineage)

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
                averager = self._averagers.get(uid) or self._open_averager(uid)
                with expert.lock:
                    pending[uid] = averager.step(
                        weight, timeout_s, gather=expert.version, wait=False, apply="delta"
                    )
            except UsageError as error:
                _log.info("%s is not averaged with its replicas: %s", uid, error)
        for uid, step in pending.items():
            expert = self._experts[uid]
            if not step.wait(timeout_s + 1.0):
                step.cancel()
                continue
            with expert.lock:  # the difference is added, so steps made meanwhile are kept
                result = step.result()
                if not result.failed:
                    expert.averaged(_name_of(result), next_version(expert.version, result.gathered.values()))
                    expert.settled = True
                    self._receiving.discard(uid)
                    self.rounds += 1
            if result.failed:
                _log.info("%s was not averaged with its replicas: %s", uid, result.reason)
                if result.reason == "nobody contributes":
                    self._receiving.discard(uid)  # all of them were waiting to receive

    def _open_averager(self, uid: ExpertUid) -> Averager:
        expert = self._experts[uid]
        name = (
            str(uid)
            if len(str(uid)) <= _NAME_MAX
            else hashlib.sha256(str(uid).encode()).hexdigest()[:_NAME_MAX]
        )
        averager = self._averagers[uid] = Averager(
            self._node,
            expert.averaged_tensors(),
            name=f"expert-{name}",
            target_group_size=_GROUP_SIZE,
            codec=_CODEC,
            aggregation="median_of_three",
        )
        return averager


def _name_of(result: RoundResult) -> bytes:
    """Return the name of the common version that a round made: equal on all members."""
    return hashlib.blake2b(f"{result.group_id} {result.digest}".encode(), digest_size=NAME_BYTES).digest()
