"""Whole simulated trainings that 32 newcomers join at once: all contribute, within a time and a number of
messages, and no round begins without a quorum of the electors.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from averaging.history.electors import is_quorum
from averaging.history.round_lineage import RoundLineage
from averaging.matchmaking.logic.group import Group
from averaging.optim.reports import StepReport
from averaging.service import AveragingService
from swarm.testing.chance import Chance
from swarm.testing.checkers import Violations
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.training_checkers import TrainingChecks
from swarm.testing.training_swarm import TrainingConfig, TrainingPeer, TrainingSwarm
from swarm.testing.virtual_loop import run_virtual

NEWCOMERS = 32
STEP_S, TARGET = 0.05, 330  # an epoch of all peers takes half a second
BEGUN_EPOCH = 8
CONTRIBUTED_S_MAX = 8.0
MESSAGES_MAX = 510  # of a newcomer until it has contributed, calls and answers, on average


@dataclass(slots=True)
class _Arrivals:
    """A founder of epoch 8 or later, and newcomers that join it."""

    seed: int
    spread_s: float  # within which all come
    slowness: float  # mean factor on the delays of the newcomers' messages
    contributed_s: dict[int, float] = field(default_factory=dict)  # by index, from the first arrival
    messages: dict[int, int] = field(default_factory=dict)  # sent by then
    rounds: int = 0  # that members began
    without_quorum: int = 0

    async def run(self, limit_s: float) -> None:
        """Let them come, until all have contributed, at most for `limit_s`."""
        violations, loop = Violations(), asyncio.get_running_loop()
        checks = TrainingChecks(violations, step_s_max=600.0)
        network = SimulatedNetwork(self.seed, LinkConfig(delay_s=0.03, jitter=0.5))
        chance, began_s = Chance(self.seed, "arrivals"), 0.0

        def on_step(one: TrainingPeer, report: StepReport, seconds: float) -> None:
            checks.on_step(one, report, seconds)
            if report.contributed and one.index and one.index not in self.contributed_s:
                self.contributed_s[one.index] = loop.time() - began_s
                self.messages[one.index] = one.peer.messages_sent

        async with asyncio.TaskGroup() as group:
            swarm = TrainingSwarm(network, TrainingConfig(target_batch_size=BEGUN_EPOCH), on_step, group)
            founder = await swarm.add(batch=1, compute_s=STEP_S)
            while founder.optimizer is None or founder.optimizer.epoch < BEGUN_EPOCH:  # noqa: ASYNC110
                await asyncio.sleep(STEP_S)
            founder.optimizer.set_target(TARGET)
            swarm.config = replace(swarm.config, target_batch_size=TARGET)
            self._watch(founder)
            began_s = loop.time()

            async def come(wait_s: float, slowness: float) -> None:
                await asyncio.sleep(wait_s)
                newcomer = await swarm.add(batch=1, compute_s=STEP_S)
                newcomer.peer.slowness = slowness
                self._watch(newcomer)

            for _ in range(NEWCOMERS):
                wait_s = self.spread_s * chance.random()
                group.create_task(come(wait_s, self.slowness * chance.uniform(0.5, 1.5)))
            while len(self.contributed_s) < NEWCOMERS and loop.time() < began_s + limit_s:  # noqa: ASYNC110
                await asyncio.sleep(STEP_S)
            await swarm.close()
        assert not violations.count, violations.lines

    def _watch(self, one: TrainingPeer) -> None:
        """Count the rounds that this peer begins."""
        service: Callable[[Any], Any] = one.node.service
        all_reduce = service(AveragingService).all_reduce
        run = all_reduce.run

        async def counted(group: Group, *given: Any, history: RoundLineage | None = None, **more: Any) -> Any:
            if history is not None and not history.is_break:
                contributors = [member.peer_id for member in group.members if member.weight > 0.0]
                self.rounds += 1
                self.without_quorum += not is_quorum(history.electors, contributors)
            return await run(group, *given, history=history, **more)

        all_reduce.run = counted


def _play(arrivals: _Arrivals, limit_s: float) -> _Arrivals:
    run_virtual(arrivals.run(limit_s))
    return arrivals


@pytest.mark.parametrize("seed", range(1, 3))
def test_32_newcomers_at_once_contribute_in_seconds_with_few_messages(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    found = _play(_Arrivals(seed, spread_s=1.0, slowness=1.0), 2 * CONTRIBUTED_S_MAX)
    assert len(found.contributed_s) == NEWCOMERS
    assert max(found.contributed_s.values()) <= CONTRIBUTED_S_MAX
    assert statistics.mean(found.messages.values()) <= MESSAGES_MAX
    assert not found.without_quorum


@pytest.mark.simulation
@pytest.mark.parametrize("seed", [4])
def test_newcomers_that_a_round_left_behind_begin_none_of_their_own(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """On slow links they come to rounds late. Two of them began one that nobody could commit, for 10 s."""
    caplog.set_level(logging.CRITICAL)
    found = _play(_Arrivals(seed, spread_s=12.0, slowness=8.0), 30.0)
    assert found.rounds
    assert not found.without_quorum
