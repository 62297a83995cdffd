"""A trainer that is interrupted by Ctrl-C in the middle of a step, and goes on."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from averaging.averager import Averager
from averaging.optim.background_round import BackgroundRound
from averaging.optim.optimizer import Optimizer
from averaging.optim.reports import StepReport
from averaging.result import PendingRound
from swarm.testing.green_threads import GreenNetwork
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.training_swarm import TrainingConfig, TrainingSwarm
from swarm.testing.virtual_loop import run_virtual

# (class, method, whether the interrupt comes after it and not before)
MOMENTS = {
    "before the round is handed to the network thread": (GreenNetwork, "submit", False),
    "after it was handed over": (GreenNetwork, "submit", True),
    "before its future is known": (PendingRound, "attach", False),
    "before anybody has the round": (BackgroundRound, "__init__", False),
    "before anybody waits for it": (BackgroundRound, "result", False),
    "while it is waited for": (PendingRound, "wait", True),
}


@pytest.mark.parametrize("mode", ["gradients", "local"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_trainer_that_catches_an_interrupt_goes_on(
    moment: str, mode: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: a round that ran on unseen, or that nobody could take, made all further steps fail
    with "this averager is already averaging", or with "take its result, or cancel it, first".
    """
    caplog.set_level(logging.CRITICAL)
    (kind, name, after), interrupts, begins = MOMENTS[moment], 0, False
    called, step, step_averager = getattr(kind, name), Optimizer.step, Averager.step

    def interrupted(*args: Any, **options: Any) -> Any:
        nonlocal interrupts
        due = interrupts < 3 and (begins or kind is not GreenNetwork)
        interrupts += due
        if due and not after:
            for one in args:
                if asyncio.iscoroutine(one):
                    one.close()
            raise KeyboardInterrupt
        result = called(*args, **options)
        if due:
            raise KeyboardInterrupt
        return result

    def patient_step(optimizer: Optimizer, *args: Any) -> StepReport:
        while True:
            try:
                return step(optimizer, *args)
            except KeyboardInterrupt:
                continue

    def begin(averager: Averager, *args: Any, **options: Any) -> Any:
        nonlocal begins
        begins = True
        try:
            return step_averager(averager, *args, **options)
        finally:
            begins = False

    monkeypatch.setattr(kind, name, interrupted)
    monkeypatch.setattr(Optimizer, "step", patient_step)
    monkeypatch.setattr(Averager, "step", begin)

    async def main() -> int:
        network = SimulatedNetwork(1, LinkConfig(delay_s=0.03, jitter=0.5))
        async with asyncio.TaskGroup() as group:
            swarm = TrainingSwarm(
                network, TrainingConfig(target_batch_size=16, mode=mode), lambda *step: None, group
            )
            peers = [await swarm.add(compute_s=0.5) for _ in range(2)]
            await asyncio.sleep(60.0)
            epochs = [one.optimizer.epoch if one.optimizer is not None else 0 for one in peers]
            await swarm.close()
        return min(epochs)

    assert run_virtual(main()) > 5
    assert interrupts == 3
