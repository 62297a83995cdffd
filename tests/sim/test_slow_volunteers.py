"""A slow volunteer among fast peers: what it computes counts, and it costs the others little."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from statistics import mean

import pytest

from averaging.optim.reports import StepReport
from swarm.run.microbatches import StepSize
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.training_swarm import TrainingConfig, TrainingPeer, TrainingSwarm
from swarm.testing.virtual_loop import run_virtual

FAST_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Fast peers that fill an epoch of `target` samples in `epoch_s`, and a volunteer of a part of the speed
    of one of them, whose steps have `batch` samples, or as many as `swarm join` chooses.
    """

    fast: int
    target: int
    epoch_s: float
    speed: float
    batch: int | None = None
    unmeasured_s: float  # after the volunteer has come
    measured_s: float

    @property
    def fast_per_s(self) -> float:
        return self.target / self.epoch_s / self.fast


@dataclass
class Work:
    """The work of one peer in the time that is measured."""

    computed: int = 0
    counted: int = 0
    dropped: int = 0
    loads: int = 0
    last_reason: str = ""

    def add(self, samples: int, report: StepReport) -> None:
        self.computed += samples
        self.counted += report.contributed
        self.dropped += report.dropped
        self.loads += report.resynchronised is not None
        self.last_reason = report.reason or self.last_reason


def measure(plan: Plan, seed: int = 1) -> tuple[float, Work, int]:
    """Return the samples/s of the fast peers relative to those without the volunteer, the volunteer's work,
    and the samples of its last step.
    """
    work: dict[int, Work] = {}
    size = StepSize(emit=lambda event: None)

    def on_step(one: TrainingPeer, report: StepReport, _: float) -> None:
        work.setdefault(one.index, Work()).add(one.batch, report)
        if one.index == plan.fast and plan.batch is None and one.optimizer is not None:
            one.batch = size.next(FAST_BATCH, one.optimizer.progress, one.peer.peer_id)
            one.compute_s = one.batch / (plan.fast_per_s * plan.speed)

    async def main() -> tuple[float, Work, int]:
        network = SimulatedNetwork(seed, LinkConfig(delay_s=0.001, jitter=0.5))
        async with asyncio.TaskGroup() as group:
            swarm = TrainingSwarm(network, TrainingConfig(target_batch_size=plan.target), on_step, group)
            for _ in range(plan.fast):
                await swarm.add(batch=FAST_BATCH, compute_s=FAST_BATCH / plan.fast_per_s)
            speeds = []
            for unmeasured_s in (5.0, plan.unmeasured_s):
                await asyncio.sleep(unmeasured_s)
                work.clear()
                await asyncio.sleep(plan.measured_s)
                speeds.append(sum(work[index].computed for index in range(plan.fast)) / plan.measured_s)
                batch = plan.batch or FAST_BATCH
                if len(speeds) == 1:
                    compute_s = batch / (plan.fast_per_s * plan.speed)
                    slow = await swarm.add(batch=batch, compute_s=compute_s)
            await swarm.close()
        return speeds[1] / speeds[0], work.get(plan.fast, Work()), slow.batch

    return run_virtual(main())


@pytest.mark.simulation
@pytest.mark.parametrize(("speed", "batch"), [(1 / 4, 8), (1 / 20, 2), (1 / 100, 1)])
def test_samples_of_a_slow_volunteer_count_once_it_has_chosen_its_micro_batch(
    speed: float, batch: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression test: a volunteer whose first steps all ended in a download reported no speed. Its steps
    stayed too long, and nothing of what it computed ever counted.
    """
    caplog.set_level(logging.CRITICAL)
    plan = Plan(fast=2, target=512, epoch_s=1.0, speed=speed, unmeasured_s=45.0, measured_s=20.0)
    fast, work, last_batch = measure(plan)
    assert last_batch == batch
    assert work.counted >= 0.9 * work.computed > 0
    assert not work.dropped
    assert not work.loads
    assert fast >= 0.95


@pytest.mark.simulation
def test_a_volunteer_whose_step_takes_many_epochs_costs_the_others_little(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regression test: an epoch of 30 ms waited for a step of 150 ms, for 5 s in all, and then a tenth of
    the time forever, which was too short for the volunteer to come. Waits come when the volunteer's account
    covers a whole step, so that the mean of several runs is compared.
    """
    caplog.set_level(logging.CRITICAL)
    speed = 2 / 0.15 * 0.03 / FAST_BATCH
    plan = Plan(fast=1, target=32, epoch_s=0.03, speed=speed, batch=2, unmeasured_s=5.0, measured_s=8.0)
    shares = []
    for seed in range(1, 4):
        fast, work, _ = measure(plan, seed)
        shares.append(fast)
        assert abs(work.computed - work.counted - work.dropped) <= 4, "the others are reported"
        assert "make its steps smaller, or target_batch_size larger" in work.last_reason
    assert mean(shares) >= 0.9, f"of the speed without a volunteer: {shares}"
