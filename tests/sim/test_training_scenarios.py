"""Whole swarms that train under faults, for a few virtual minutes; `make sim SCENARIO=training` is the long
form. A failure names the command that replays it.
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import os
import weakref
from collections.abc import Collection
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from averaging.optim.modes.gradients import GradientsMode
from swarm.testing.training_checkers import TrainingChecks
from swarm.testing.training_scenarios import (
    SEEDS_PER_PROCESS,
    ScenarioFigures,
    TrainingFailed,
    TrainingScenario,
    run_training,
    run_trainings,
)
from swarm.testing.training_swarm import TrainingPeer, TrainingSwarm

SEEDS_SHORT = (1, 2, 3, 4)  # about ten seconds of processor time each


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # each fault is a warning of many peers


@functools.cache
def figures_of(seed: int) -> ScenarioFigures:
    return run_training(TrainingScenario(seed=seed, peers=4, hours=0.03, faults_s=100.0))


@pytest.mark.simulation
@pytest.mark.parametrize("seed", SEEDS_SHORT)
def test_a_training_under_faults_breaks_no_promise(seed: int) -> None:
    assert figures_of(seed).steps > 100


def test_trainings_under_faults_complete_epochs() -> None:
    """Single seeds complete 8 to 31 epochs, and the mean of 60 seeds is 18.6."""
    assert sum(figures_of(seed).epochs for seed in SEEDS_SHORT) > 15 * len(SEEDS_SHORT)


@pytest.mark.parametrize("over", [0, 1, SEEDS_PER_PROCESS])
def test_many_seeds_run_in_batches_and_each_failure_is_that_of_its_seed(over: int) -> None:
    batch = (os.cpu_count() or 1) * SEEDS_PER_PROCESS
    scenarios = [TrainingScenario(seed=seed) for seed in range(2 * batch + over)]
    pools: list[Executor] = []

    def pool_of(workers: int) -> Executor:
        pools.append(ThreadPoolExecutor(workers))
        return pools[-1]

    def run(scenario: TrainingScenario) -> str:
        return f"promise {scenario.seed} broken" if scenario.seed % 7 == 0 else ""

    found = list(run_trainings(scenarios, run, pool_of))
    assert sorted(one.seed for one, _ in found) == list(range(len(scenarios)))
    assert all(failure == run(one) for one, failure in found)
    assert len(pools) == 2 + (over > 0), "a process keeps the memory that it has used"
    for pool in pools:
        with pytest.raises(RuntimeError, match="shutdown"):
            pool.submit(run, scenarios[0])


def test_an_exception_of_one_seed_is_its_failure_and_the_others_continue() -> None:
    def run(scenario: TrainingScenario) -> str:
        if scenario.seed == 2:
            raise ValueError("a fault of the simulation itself")
        return ""

    scenarios = [TrainingScenario(seed=seed) for seed in range(5)]
    found = {one.seed: failure for one, failure in run_trainings(scenarios, run, ThreadPoolExecutor)}
    assert "a fault of the simulation itself" in found.pop(2)
    assert set(found) == {0, 1, 3, 4}
    assert not any(found.values())


def test_the_same_seed_repeats_the_training() -> None:
    scenario = TrainingScenario(seed=3, peers=3, hours=0.01, faults_s=30.0)
    assert run_training(scenario).digest == run_training(scenario).digest


def test_memory_of_a_killed_process_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two hours of faults take gigabytes, and each run of the garbage collector visits all of it."""
    add, check = TrainingSwarm.add, TrainingChecks.check_sizes
    begun: list[weakref.ref[TrainingPeer]] = []
    ended: list[int] = []  # at the end of each time of faults: processes that have ended
    kept: list[int] = []  # and those of them that are still in memory

    async def counted(swarm: TrainingSwarm, **options: Any) -> TrainingPeer:
        made = await add(swarm, **options)
        begun.append(weakref.ref(made))
        return made

    def count(checks: TrainingChecks, live: Collection[TrainingPeer], now_s: float) -> None:
        gc.collect()
        ended.append(len(begun) - len(live))
        kept.append(sum(one() is not None for one in begun) - len(live))
        check(checks, live, now_s)

    monkeypatch.setattr(TrainingSwarm, "add", counted)
    monkeypatch.setattr(TrainingChecks, "check_sizes", count)
    scenario = TrainingScenario(
        seed=2, peers=4, hours=0.02, faults_s=60.0, kinds=("kill", "restart", "split")
    )
    run_training(scenario)
    assert ended[-1] >= 2
    assert kept == [0] * len(kept)


def test_a_peer_with_other_parameters_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    apply, numbers = GradientsMode.apply, itertools.count()

    def noisy(mode: GradientsMode, metadata: Any) -> None:
        apply(mode, metadata)
        if next(numbers) == 10:
            with torch.no_grad():
                mode.state.parameters[0].add_(1e-3)

    monkeypatch.setattr(GradientsMode, "apply", noisy)
    with pytest.raises(TrainingFailed, match="different parameters") as caught:
        run_training(TrainingScenario(seed=2, peers=3, hours=0.01, faults_s=30.0, kinds=("slow",)))
    assert str(caught.value).endswith("replay: make sim SEED=2 PEERS=3 HOURS=0.01 SCENARIO=training")


@pytest.mark.simulation
def test_samples_of_a_checkpoint_are_those_that_a_restarted_peer_carries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression test: they were not known, so that those which were in a round after the first step were
    taken for samples that nobody had trained.
    """
    scenario = TrainingScenario(seed=11, peers=4, hours=0.02, chosen_mode="gradients-delayed")
    assert run_training(scenario).faults["checkpoint"] == 1
    load = GradientsMode.load_state_dict

    def forgetful(mode: GradientsMode, state: dict[str, Any]) -> None:
        load(mode, {**state, "samples": state["samples"] // 2})

    monkeypatch.setattr(GradientsMode, "load_state_dict", forgetful)
    with pytest.raises(TrainingFailed, match="samples were carried"):
        run_training(scenario)
