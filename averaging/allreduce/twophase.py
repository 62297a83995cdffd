"""A round of PowerSGD: two all-reduces of one group, with a computation between them.
`averaging.reduction.powersgd` has the arithmetic.

The group is the first one's; the second has a name derived from it, so that neither's messages can be taken
for the other's. A member that dies between the two is left out of the second as of any round. Only the second
decides: if it fails, nothing has changed.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import torch
from blake3 import blake3

from averaging.allreduce.allreduce import AllReduce, RoundMemory, uninterrupted
from averaging.allreduce.config import RoundConfig
from averaging.allreduce.offload import ComputeOffload, OutOfMemory
from averaging.allreduce.outcome import RoundOutcome
from averaging.history.round_lineage import RoundLineage
from averaging.matchmaking.logic.group import GROUP_ID_BYTES, Group
from averaging.reduction.averages import Averages
from averaging.reduction.powersgd import START_DIGEST_BYTES, LowRank
from swarm.core.ids import PeerId


@dataclass(frozen=True, slots=True)
class _Second:
    """The committed second all-reduce, as work for the pool."""

    outcome: RoundOutcome
    sent: bool


class TwoPhase:
    """The rounds of one step of an averager whose strategy is PowerSGD."""

    # bytes of every member's metadata before the user's gathered value
    gathered_prefix_bytes = START_DIGEST_BYTES

    def __init__(
        self,
        low_rank: LowRank,
        all_reduce: AllReduce,
        own: PeerId,
        pool: Executor,
        config: RoundConfig,
        history: RoundLineage | None = None,
    ) -> None:
        """`history`: of the run, which only the second all-reduce extends."""
        self._low_rank, self._all_reduce, self._own = low_rank, all_reduce, own
        self._pool, self._config, self._history = pool, config, history

    async def run(self, group: Group, deadline_s: float) -> RoundOutcome:
        """Run one round with this group; the low-rank strategy's `take` came before. Its outcome is that of
        the second all-reduce.
        """
        # between the all-reduces whole matrices are multiplied: in the pool, unless there is only the loop
        offload = ComputeOffload(self._pool, self._low_rank.queues, heavy=True)
        try:
            return await self._run(group, deadline_s, offload)
        except OutOfMemory as error:
            return RoundOutcome.broken(f"peer {self._own} {error}", out_of_memory=True)
        finally:
            await offload.finish()

    async def _run(self, group: Group, deadline_s: float, offload: ComputeOffload) -> RoundOutcome:
        first: RoundOutcome | None = None
        mean: torch.Tensor | None = None
        if self._low_rank.layout.matrices:
            phase = first_group(group)
            alike = bool(phase.members[group.index(self._own)].weight)
            vector = await offload.work(self._low_rank.first, alike)
            first = await self._all_reduce.run(
                phase,
                vector,
                deadline_s=deadline_s,
                config=self._config,
                memory=RoundMemory(self._low_rank.result_buffers[0]),
                history=replace(self._history, extends=False) if self._history is not None else None,
            )
            if first.failed:
                return replace(first, reason=f"{first.reason} (in the first of two all-reduces)")
            if first.averages is not None:
                mean = await offload.work(Averages.decoded, first.averages)
        receives = not group.members[group.index(self._own)].auxiliary
        if receives and mean is None:  # there are no matrices
            mean = torch.empty(0, dtype=torch.float32, device="cpu")
        vector = await offload.work(self._low_rank.second, mean)
        feedback = self._low_rank.others
        sent_before = feedback.sent
        outcome = await self._all_reduce.run(
            _second(group),
            vector,
            deadline_s=deadline_s,
            config=self._config,
            memory=RoundMemory(self._low_rank.result_buffers[1], feedback),
            history=self._history,
        )
        if not outcome.failed:  # the round is committed, so a cancellation comes too late
            second = _Second(outcome, feedback.sent > sent_before)
            await uninterrupted(offload.start(self._commit, second))
        return _merged(first, outcome) if first is not None else outcome

    def _commit(self, second: _Second) -> None:
        self._low_rank.commit(second.outcome.vector, sent=second.sent)


def first_group(group: Group) -> Group:
    """Return the group of the first all-reduce: a member whose start differs from that of most contributors
    would only blur their directions, and therefore only listens. The metadata of each contributor name its
    start. Every member sees the same metadata, and comes to the same conclusion.
    """
    starts = [gathered[:START_DIGEST_BYTES] for gathered in group.gathered]
    votes = Counter(start for start, member in zip(starts, group.members, strict=True) if member.weight > 0)
    most = max(votes, key=lambda start: (votes[start], start), default=b"")
    members = tuple(
        member if start == most else replace(member, weight=0.0)
        for start, member in zip(starts, group.members, strict=True)
    )
    return replace(group, members=members)


def _second(group: Group) -> Group:
    return replace(group, group_id=blake3(b"second all-reduce" + group.group_id).digest()[:GROUP_ID_BYTES])


def _merged(first: RoundOutcome, second: RoundOutcome) -> RoundOutcome:
    """Return the second outcome, with the costs of the first and the members that it lost."""
    seconds = {phase: first.seconds.get(phase, 0.0) + spent for phase, spent in second.seconds.items()}
    digest = (
        blake3(bytes.fromhex(first.digest) + bytes.fromhex(second.digest)).hexdigest()
        if second.digest
        else ""
    )
    return replace(
        second,
        accused={**first.accused, **second.accused},
        left_out={**first.left_out, **second.left_out},
        faults={**first.faults, **second.faults},
        clipped={
            peer: max(first.clipped.get(peer, 0.0), second.clipped.get(peer, 0.0))
            for peer in {**first.clipped, **second.clipped}
        },
        digest=digest,
        bytes_sent=first.bytes_sent + second.bytes_sent,
        bytes_received=first.bytes_received + second.bytes_received,
        seconds=seconds,
    )
