"""A round with a bad reducer that wants others to pass an honest member over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from averaging.allreduce import wire
from averaging.allreduce.config import HEARTBEAT
from averaging.allreduce.kernels import Averaged, ReductionKernels, Spoiled
from averaging.allreduce.logic.values import RoundState
from averaging.reduction.reduce import ReductionJob
from swarm.core.ids import PeerId
from swarm.testing.sabotage import go_silent
from swarm.testing.virtual_loop import run_virtual
from swarm.wire.reduce_pb2 import HeartbeatReply, HeartbeatRequest
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


def test_two_reducers_that_stall_are_not_waited_for_as_each_others_successors() -> None:
    """Regression test: the member after a lost reducer takes its chunks over; the second one lived and made
    nothing of them, until the deadline of 60 s.
    """
    scene = Scene(3, [1.0] * 8)
    stalling, honest = (2, 3), (0, 1, 4, 5, 6, 7)
    for place in stalling:
        go_silent(scene.peers[place])

    async def main() -> None:
        began_s = asyncio.get_running_loop().time()
        outcomes = await asyncio.gather(*(scene.run(place, 60.0) for place in honest))
        took_s = asyncio.get_running_loop().time() - began_s
        assert not any(outcome.failed for outcome in outcomes), [outcome.reason for outcome in outcomes]
        assert took_s < 20.0, "15 s until both are given up, and the repair"
        assert len({outcome.digest for outcome in outcomes}) == 1
        bad = {scene.peers[place].peer_id for place in stalling}
        assert all(outcome.faults.keys() == bad for outcome in outcomes)
        await scene.close()

    run_virtual(main())


def test_members_with_slightly_earlier_deadlines_are_not_blamed_for_stalled_ones() -> None:
    """Regression test: each member gives up at its own deadline, and the others took that for a fault."""
    scene = Scene(4, [1.0] * 4)
    stalling = (2, 3)  # without them there is no majority
    for place in stalling:
        go_silent(scene.peers[place])

    async def main() -> None:
        outcomes = await asyncio.gather(*(scene.run(place, 25.0 + place) for place in range(2)))
        assert all(outcome.failed for outcome in outcomes)
        bad = {scene.peers[place].peer_id for place in stalling}
        assert [outcome.faults.keys() for outcome in outcomes] == [bad] * 2
        await scene.close()

    run_virtual(main())


def test_a_member_that_stalls_and_then_gives_up_is_blamed() -> None:
    """A bad member must not be excused by a sentence about its deadline."""
    scene = Scene(5, [1.0] * 4)
    stalling, quitting = 3, 2
    go_silent(scene.peers[stalling])
    go_silent(scene.peers[quitting])

    async def quit_late() -> None:
        await asyncio.sleep(11.0)
        scene.peers[quitting].handlers.remove(HEARTBEAT.name)
        scene.peers[quitting].handlers.unary(HEARTBEAT, _gave_up)

    async def main() -> None:
        leaving = asyncio.create_task(quit_late())
        outcomes = await asyncio.gather(*(scene.run(place, 14.0) for place in range(2)))
        await leaving
        bad = {scene.peers[place].peer_id for place in (stalling, quitting)}
        assert all(outcome.failed for outcome in outcomes)
        assert [outcome.faults.keys() for outcome in outcomes] == [bad] * 2
        await scene.close()

    run_virtual(main())


async def _gave_up(caller: PeerId, request: HeartbeatRequest) -> HeartbeatReply:
    return wire.state_to_wire(RoundState.FAILED, "deadline")
