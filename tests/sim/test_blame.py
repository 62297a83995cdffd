"""A round with a bad reducer that wants others to pass an honest member over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from averaging.allreduce.kernels import Averaged, ReductionKernels, Spoiled
from averaging.reduction.reduce import ReductionJob
from swarm.testing.virtual_loop import run_virtual
from tests.sim.round_scene import Scene


def test_a_reducer_that_leaves_a_member_out_has_nobody_else_pass_it_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression test: all others believed that the member had sent nothing: one bad reducer kept it out
    of the run.
    """
    scene = Scene(2, [1.0] * 4)
    victim, liar = scene.peers[2].peer_id, scene.peers[1].peer_id
    scene.group = replace(scene.group, reducers=frozenset({liar}))
    reduce = ReductionKernels.reduce

    def spoil(self: ReductionKernels, jobs: Sequence[ReductionJob]) -> list[Averaged | Spoiled]:
        done: list[Averaged | Spoiled] = []
        for job in jobs:
            lies = any(one.place == 2 for one in job.contributions)
            done += [Spoiled(job.chunk, (2,))] if lies else reduce(self, [job])
        return done

    monkeypatch.setattr(ReductionKernels, "reduce", spoil)

    async def main() -> None:
        outcomes = await scene.conduct()
        assert not any(outcome.failed for outcome in outcomes), [outcome.reason for outcome in outcomes]
        assert not any(outcome.contributions.get(victim) for outcome in outcomes), "it was left out"
        assert victim in outcomes[1].faults, "what the liar says itself"
        assert not any(victim in outcomes[place].faults for place in (0, 3))
        await scene.close()

    run_virtual(main())
