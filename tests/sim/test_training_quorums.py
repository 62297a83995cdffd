"""The checks of breaks and of pauses in simulated trainings: each promise is broken on purpose, and found."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from averaging.history import grace
from averaging.history.certificate import Proposal
from averaging.optim.history import RunHistory
from averaging.optim.progress.tracker import Tracker
from swarm.core.ids import PeerId
from swarm.testing.checkers import Violations
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.training_checkers import TrainingChecks
from swarm.testing.training_scenarios import TrainingScenario, run_training
from swarm.testing.training_swarm import TrainingConfig, TrainingPeer, TrainingSwarm
from swarm.testing.virtual_loop import run_virtual, until

BEGUN_S = 25.0
WATCH_S = 2.0
LONG = pytest.mark.simulation
FAULTS = ("one-way cut", "split beside a slow peer", "split beside a frozen peer")


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # each fault is a warning of many peers


def violations_during(fault: str, lasting_s: float) -> list[str]:
    """Return the violations of a training of five peers, of which the last two suffer a fault."""

    async def scenario() -> list[str]:
        violations, loop = Violations(), asyncio.get_running_loop()
        network = SimulatedNetwork(1, LinkConfig(delay_s=0.03, jitter=0.5))
        checks = TrainingChecks(violations, step_s_max=600.0)
        async with asyncio.TaskGroup() as group:
            config = TrainingConfig(target_batch_size=40)
            swarm = TrainingSwarm(network, config, checks.on_step, group)
            peers = [await swarm.add(batch=4, compute_s=0.5) for _ in range(5)]
            assert await until(lambda: all(one.optimizer and one.optimizer.epoch >= 3 for one in peers), 60.0)
            await _watch(checks, peers, BEGUN_S)
            await _begin(fault, swarm, peers)
            await _watch(checks, peers, loop.time() + lasting_s)
            await swarm.close()
        return [line.partition(" s: ")[2] for line in violations.lines]

    return run_virtual(scenario())


async def _begin(fault: str, swarm: TrainingSwarm, peers: list[TrainingPeer]) -> None:
    first, second = ([one.peer for one in side] for side in (peers[:3], peers[3:]))
    if fault == "one-way cut":
        swarm.network.cut(first[:1], second[:1])
    elif fault == "quorum lost":  # one of the electors that are missing lives
        for one in peers[:2]:
            await swarm.kill(one)
        first[2].frozen = True
        del peers[:2]
    else:
        swarm.network.partition(second)
        second[0].slowness, second[1].frozen = 10.0, "frozen" in fault


async def _watch(checks: TrainingChecks, peers: Sequence[TrainingPeer], until_s: float) -> None:
    loop = asyncio.get_running_loop()
    while loop.time() < until_s:
        await asyncio.sleep(WATCH_S)
        checks.watch(peers, loop.time())


@LONG
@pytest.mark.parametrize("fault", [*FAULTS, "quorum lost"])
def test_the_checks_find_nothing_where_a_part_of_the_swarm_fails(fault: str) -> None:
    assert not violations_during(fault, 40.0)


@pytest.mark.parametrize("fault", [FAULTS[0], *(pytest.param(one, marks=LONG) for one in FAULTS[1:])])
def test_a_connected_quorum_that_does_not_commit_is_detected(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_vote = RunHistory.may_vote

    def refuses(history: RunHistory, proposal: Proposal, result: bytes, *, outside: bool = False) -> str:
        if asyncio.get_running_loop().time() > BEGUN_S:
            return "planted"
        return may_vote(history, proposal, result, outside=outside)

    monkeypatch.setattr(RunHistory, "may_vote", refuses)
    found = violations_during(fault, 30.0)
    assert any("are a quorum of head" in one and "have committed nothing for" in one for one in found), found


def test_a_break_before_the_end_of_the_grace_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grace, "grace_s", lambda epoch_s, *, refused=False: 1.0)
    found = violations_during("quorum lost", 25.0)
    assert any("with a break" in one and "after it" in one for one in found), found


def test_a_break_of_peers_that_can_reach_a_quorum_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for the whole grace on their head, and could have continued with the others all the time."""
    voters = Tracker.voters

    def nobody(tracker: Tracker) -> list[PeerId]:
        return voters(tracker) if asyncio.get_running_loop().time() < BEGUN_S else []

    monkeypatch.setattr(Tracker, "voters", nobody)
    found = violations_during("one-way cut", 30.0)
    assert any("with a break" in one and "could reach a quorum" in one for one in found), found


@pytest.mark.parametrize("seed", [11])
def test_a_training_under_faults_keeps_both_promises(seed: int) -> None:
    """Regression test: a restarted peer took an elector that was cut off for dead (seed 11). A broken promise
    raises TrainingFailed.
    """
    figures = run_training(TrainingScenario(seed=seed, peers=4, hours=0.02))
    assert figures.faults["checkpoint"]
    assert figures.faults["freeze"]
