"""A trainer that is interrupted by Ctrl-C in the middle of a step, and continues."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from averaging.averager import Averager
from averaging.optim.background_round import BackgroundRound
from averaging.optim.closing import EpochCloser
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


def step_on_after_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainers call `Optimizer.step` again whenever it was interrupted."""
    step = Optimizer.step

    def patient_step(optimizer: Optimizer, *args: Any) -> StepReport:
        while True:
            try:
                return step(optimizer, *args)
            except KeyboardInterrupt:
                continue

    monkeypatch.setattr(Optimizer, "step", patient_step)


@pytest.mark.parametrize("mode", ["gradients", "local"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_trainer_that_catches_an_interrupt_continues(
    moment: str, mode: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: a round that ran on unseen, or that nobody could take, made all further steps fail
    with "this averager is already averaging", or with "take its result, or cancel it, first".
    """
    caplog.set_level(logging.CRITICAL)
    (kind, name, after), interrupts, begins = MOMENTS[moment], 0, False
    called, step_averager = getattr(kind, name), Averager.step

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

    def begin(averager: Averager, *args: Any, **options: Any) -> Any:
        nonlocal begins
        begins = True
        try:
            return step_averager(averager, *args, **options)
        finally:
            begins = False

    monkeypatch.setattr(kind, name, interrupted)
    step_on_after_interrupts(monkeypatch)
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


LATE_MOMENTS = {
    "before its averages are written": (Averager, "_write_back"),
    "before its certificate is known": (EpochCloser, "committed"),
    "before the state advances": (EpochCloser, "_advance"),
}


def interrupt_each_once(moment: str, after_s: float, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Interrupt each trainer once at this moment, in the two seconds after `after_s`, in
    which a round ends. Return the times of the
    interrupts, a list that grows. Trainers continue.
    """
    kind, name = LATE_MOMENTS[moment]
    called, interrupted = getattr(kind, name), list[Any]()
    times_s: list[float] = []

    def interrupt_once(self: Any, *args: Any, **options: Any) -> Any:
        now_s = asyncio.get_running_loop().time()
        if after_s < now_s < after_s + 2.0 and self not in interrupted:
            interrupted.append(self)
            times_s.append(now_s)
            raise KeyboardInterrupt
        return called(self, *args, **options)

    monkeypatch.setattr(kind, name, interrupt_once)
    step_on_after_interrupts(monkeypatch)
    return times_s


@pytest.mark.parametrize("mode", ["gradients", "local"])
@pytest.mark.parametrize("moment", LATE_MOMENTS)
def test_two_trainers_that_lose_a_committed_round_meet_again(
    moment: str, mode: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: they did not know that their votes in it bind them. One waited for a quorum, the other
    loaded the state again and again, until after 50 s the first one continued alone. Where the certificate
    was in the history and its result not in the state, what they certified afterwards could not be compared.
    """
    caplog.set_level(logging.CRITICAL)
    times_s = interrupt_each_once(moment, 10.0, monkeypatch)

    async def main() -> list[int]:
        network = SimulatedNetwork(1, LinkConfig(delay_s=0.03, jitter=0.5))
        async with asyncio.TaskGroup() as group:
            config = TrainingConfig(target_batch_size=16, mode=mode)
            swarm = TrainingSwarm(network, config, lambda *step: None, group)
            peers = [await swarm.add(compute_s=0.5) for _ in range(2)]
            await asyncio.sleep(45.0)
            epochs = [one.optimizer.epoch if one.optimizer is not None else 0 for one in peers]
            await swarm.close()
        return epochs

    epochs = run_virtual(main())
    assert len(times_s) == 2, "in the same round"
    assert min(epochs) > 12, "they had made 5, and wait 15 s for a quorum"
    assert max(epochs) - min(epochs) <= 1


def test_a_newcomer_can_join_a_trainer_that_lost_a_step_of_its_own(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: its history had two certificates of one epoch, so that nobody could compare it."""
    caplog.set_level(logging.CRITICAL)
    times_s = interrupt_each_once("before the state advances", 5.0, monkeypatch)

    async def main() -> tuple[list[int], bool]:
        network, reports = SimulatedNetwork(1, LinkConfig(delay_s=0.03, jitter=0.5)), list[StepReport]()
        async with asyncio.TaskGroup() as group:
            config = TrainingConfig(target_batch_size=16)
            swarm = TrainingSwarm(network, config, lambda one, report, _: reports.append(report), group)
            peers = [await swarm.add(compute_s=0.5)]
            await asyncio.sleep(30.0)
            assert len(times_s) == 1
            peers.append(await swarm.add(compute_s=0.5))
            await asyncio.sleep(45.0)
            epochs = [one.optimizer.epoch if one.optimizer is not None else 0 for one in peers]
            await swarm.close()
        return epochs, any(one.round is not None and len(one.round.peers) == 2 for one in reports)

    epochs, have_met = run_virtual(main())
    assert have_met
    assert min(epochs) > 10
    assert max(epochs) - min(epochs) <= 1
