"""Error feedback in rounds of the real service: over committed, failed and cancelled rounds nothing is lost,
and nothing counted twice.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

import pytest
import torch

from averaging.allreduce.allreduce import RoundMemory
from averaging.allreduce.config import RoundConfig
from averaging.allreduce.kernels import ReductionKernels
from averaging.allreduce.logic.versions import Version
from averaging.allreduce.outcome import RoundOutcome
from averaging.matchmaking.logic.group import Group, Member
from averaging.reduction.feedback import Feedback
from swarm.compression import find
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.rounds import all_reduce_of
from swarm.testing.virtual_loop import run_virtual

NUMEL = 20_000
CONFIG = RoundConfig(chunk_bytes=2048)
ROUNDS = 8


@pytest.mark.parametrize("codec", ["int4", "int2", "topk"])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_in_committed_and_failed_rounds(codec: str, seed: int) -> None:
    run_virtual(_rounds(codec, seed))


async def _rounds(codec: str, seed: int) -> None:
    rng, chance = random.Random(seed), torch.Generator().manual_seed(seed)
    network = SimulatedNetwork(seed, LinkConfig(delay_s=0.02, bandwidth=1e6))
    peers = [network.peer() for _ in range(3)]
    services = [all_reduce_of(peer) for peer in peers]
    feedback = [Feedback(NUMEL, find(codec)) for _ in peers]
    members = tuple(Member(contact=peer.contact, weight=1.0, bandwidth=1.0) for peer in peers)
    wanted, got = torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
    ended = []
    for nth in range(ROUNDS):
        group = Group(group_id=rng.randbytes(32), members=members, codec=codec, gathered=(b"",) * 3)
        vectors = [torch.randn(NUMEL, generator=chance) + 0.2 for _ in peers]
        limit_s = 0.05 if nth % 3 == 1 else 30.0  # too short for this link
        before = [state.state_dict()["sender"].clone() for state in feedback]

        async def run(
            place: int, group: Group = group, limit_s: float = limit_s, vectors: list[torch.Tensor] = vectors
        ) -> RoundOutcome:
            deadline_s = peers[place].clock.monotonic_s() + limit_s
            return await services[place].run(
                group,
                vectors[place],
                deadline_s=deadline_s,
                config=CONFIG,
                memory=RoundMemory(feedback=feedback[place]),
            )

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(place)) for place in range(3)]
        outcomes = [task.result() for task in running]
        assert len({outcome.failed for outcome in outcomes}) == 1
        ended.append(outcomes[0].failed)
        if outcomes[0].failed:
            assert all(
                torch.equal(state.state_dict()["sender"], was)
                for state, was in zip(feedback, before, strict=True)
            )
            continue
        average = outcomes[0].vector
        assert average is not None
        assert len({outcome.digest for outcome in outcomes}) == 1
        wanted += sum(vector.double() for vector in vectors) / 3
        got += average.double()
        held = sum(state.state_dict()["sender"].double() for state in feedback) / 3
        for state in feedback:
            start, stop, _ = state.state_dict()["span"]
            held[start:stop] += state.state_dict()["reducer"].double()
        assert float((wanted - got - held).abs().max()) < 1e-4
    assert set(ended) == {True, False}
    for service in services:
        service.close()
    await network.close()


def test_a_cancellation_after_the_commit_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residuals have moved with the others', so the caller gets the result, and no cancellation."""
    network = SimulatedNetwork(1, LinkConfig(delay_s=0.02))
    peers = [network.peer() for _ in range(3)]
    services = [all_reduce_of(peer) for peer in peers]
    feedback = [Feedback(NUMEL, find("int4")) for _ in peers]
    members = tuple(Member(contact=peer.contact, weight=1.0, bandwidth=1.0) for peer in peers)
    group = Group(group_id=bytes(32), members=members, codec="int4", gathered=(b"",) * 3)
    running: list[asyncio.Task[RoundOutcome]] = []
    conclude = ReductionKernels.conclude

    def cancelled_meanwhile(self: ReductionKernels, held: Mapping[int, Version]) -> None:
        running[self.own].cancel()
        conclude(self, held)

    monkeypatch.setattr(ReductionKernels, "conclude", cancelled_meanwhile)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for place, peer in enumerate(peers):
            round_ = services[place].run(
                group,
                torch.randn(NUMEL),
                deadline_s=peer.clock.monotonic_s() + 30.0,
                config=CONFIG,
                memory=RoundMemory(feedback=feedback[place]),
            )
            running.append(loop.create_task(round_))
        await asyncio.wait(running)
        for place, task in enumerate(running):
            assert not task.cancelled()
            assert not task.result().failed
            assert feedback[place].committed == 1
            services[place].close()
        await network.close()

    run_virtual(main())
