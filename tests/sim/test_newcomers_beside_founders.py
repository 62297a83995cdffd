"""A newcomer whose download takes longer than many epochs of two founders, and who is slower to hear of an
epoch than they are to make it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from averaging.optim.config import OptimizerConfig
from averaging.optim.modes.gradients import GradientsMode
from averaging.optim.reports import LoadResult
from averaging.optim.state.donor import Donor
from swarm.testing.virtual_loop import run_virtual
from tests.sim.trainers import SimulatedTrainer, trainers
from tests.wire.trainers import Peer

CONFIG = OptimizerConfig(round_timeout_s=30.0)
STEP_S = 0.005  # of a founder: an epoch takes six of them and a round, 0.14 s in all
IN_A_ROW = 3  # rounds that the newcomer takes part in before a donor gives it anything
EPOCHS_MAX = 60  # of the founders until the newcomer is in a round, and again until its samples count
FIRST = 3  # the founders' epoch when it comes
LAST = FIRST + 2 * EPOCHS_MAX


@pytest.mark.parametrize("seed", range(1, 4))
def test_a_newcomer_takes_part_in_the_rounds_of_founders_that_are_faster_than_its_messages(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression test: a newcomer reported an epoch whose head it did not follow, or continued searching for
    a round that was over. The founders waited for it meanwhile until the account of strangers was empty, and
    from then on they were always further than it knew.
    """
    caplog.set_level(logging.ERROR)
    run_virtual(beside_founders(seed, monkeypatch))


async def beside_founders(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two founders train, add the newcomer, and check in how many of their epochs it is in."""
    released, captured = asyncio.Event(), list[int]()
    on_chunks, capture = Donor.on_chunks, GradientsMode.capture

    async def held(self: Donor, *args: Any) -> None:
        await released.wait()
        await on_chunks(self, *args)

    def counted(self: GradientsMode, epoch: int, told: Any) -> Any:
        captured.append(epoch)
        if captured[-IN_A_ROW:] == list(range(epoch - IN_A_ROW + 1, epoch + 1)):
            released.set()
        return capture(self, epoch, told)

    monkeypatch.setattr(Donor, "on_chunks", held)
    monkeypatch.setattr(GradientsMode, "capture", counted)
    async with trainers(seed, 2, CONFIG) as swarm:
        founders: list[SimulatedTrainer] = list(swarm.peers)
        for one in founders:
            one.step_s = STEP_S
        await swarm.together(lambda one: one.train_to(FIRST))
        await swarm.add(1)
        late = swarm.peers[2]
        node: Any = late.node
        node.peer.slowness = 5.0  # a round trip of 0.1 to 0.15 s
        loads: list[LoadResult] = []

        def until_it_contributes(one: Peer) -> None:
            if one is late:
                loads.append(late.opt.load_state_from_peers(timeout_s=20.0))
            while founders[0].opt.epoch < LAST and not any(report.contributed for report in late.reports):
                one.train_once()

        await swarm.together(until_it_contributes)
        assert loads
        assert loads[0].loaded, loads
        assert loads[0].replayed >= IN_A_ROW - 1
        assert captured[0] <= FIRST + EPOCHS_MAX
        assert any(report.contributed for report in late.reports), founders[0].opt.epoch
