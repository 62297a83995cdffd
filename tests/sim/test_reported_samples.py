"""Samples are where the reports of their peers say that they are: the model that a swarm trains is that of
one machine that takes these batches, with the parameters and weights that follow from the reports.
"""

from __future__ import annotations

import pytest
import torch

from averaging.optim.optimizer import OptimizerConfig
from swarm.testing.virtual_loop import run_virtual
from tests.sim.trainers import SimulatedTrainer, SimulatedTrainers, trainers
from tests.wire.trainers import BATCH, Batch, assert_close, oracle

CONFIG = OptimizerConfig(publish_metrics=False)
SEEDS = [1, 2, 3]


def taken(swarm: SimulatedTrainers) -> list[Batch]:
    return [one for peer in swarm.peers for one in peer.taken]


def assert_trained(swarm: SimulatedTrainers, epochs: int) -> None:
    """Assert that all peers hold the model of one machine, and that no sample is lost without a word."""
    expected = oracle(epochs, taken(swarm))
    for peer in swarm.peers:
        assert_close(peer.net, expected)
        told = sum(report.contributed + report.dropped for report in peer.reports)
        assert told + peer.reports[-1].accumulated == BATCH * peer.steps


@pytest.mark.parametrize("seed", SEEDS)
def test_a_newcomer_that_trains_faster_than_all_members_counts_with_the_weight_that_its_report_names(
    seed: int,
) -> None:
    async def scene() -> None:
        async with trainers(seed, 2, CONFIG) as swarm:
            await swarm.together(lambda one: one.train_to(3))
            await swarm.add(1)
            late = swarm.peers[-1]
            late.step_s /= 20.0

            def train(one: SimulatedTrainer) -> None:
                if one is late:
                    assert one.opt.load_state_from_peers(timeout_s=30).loaded
                one.train_to(7)

            await swarm.together(train)
            assert_trained(swarm, 7)
            assert {one.weight for one in late.taken} > {BATCH}, "some of its batches counted less"

    run_virtual(scene())


async def _train_with_one_long_step(seed: int, long_s: float) -> SimulatedTrainer:
    """Let one of three peers make a step of `long_s` seconds in the middle. Return that peer."""
    async with trainers(seed, 3, CONFIG) as swarm:
        slow = swarm.peers[-1]
        await swarm.together(lambda one: one.train_to(4))

        def train(one: SimulatedTrainer) -> None:
            if one is slow:
                usual_s, one.step_s = one.step_s, long_s
                one.train_once()
                one.step_s = usual_s
            one.train_to(9)

        await swarm.together(train)
        assert_trained(swarm, 9)
        return slow


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_of_a_missed_round_are_in_the_next_one_or_dropped_as_reported(seed: int) -> None:
    slow = [run_virtual(_train_with_one_long_step(seed, long_s)) for long_s in (7.0, 8.0, 9.0, 12.0)]
    assert any(report.resynchronised for peer in slow for report in peer.reports)
    assert any(one.computed < one.epoch for peer in slow for one in peer.taken), "of one of them"


@pytest.mark.parametrize("seed", SEEDS)
def test_samples_of_a_peer_without_weight_are_reported_as_dropped(seed: int) -> None:
    """Regression test: gradients that are finite and whose sum is not are never sent. The average took their
    place, and the report said that they were contributed.
    """

    async def scene() -> None:
        async with trainers(seed, 3, CONFIG) as swarm:
            spoiled = swarm.peers[-1]
            await swarm.together(lambda one: one.train_to(2))
            weights = next(spoiled.net.parameters())
            hook = weights.register_hook(lambda gradient: torch.full_like(gradient, 3e38))
            await swarm.together(lambda one: one.train_to(3))
            hook.remove()
            await swarm.together(lambda one: one.train_to(5))
            assert_trained(swarm, 5)
            [report] = [report for report in spoiled.reports if report.dropped]
            assert report.stepped
            assert (report.epoch, report.contributed) == (3, 0)
            assert report.round is not None
            assert spoiled.node.peer_id not in report.round.contributions
            assert "are in no average: this peer had no weight in the round" in report.reason

    run_virtual(scene())
