"""Trackers of a run of several shards on virtual time: epochs continue, liars do not move them, and the run
is split and merged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from averaging.optim.progress.logic.reports import ProgressTotal
from averaging.optim.progress.logic.shards import AGGREGATORS, aggregators
from averaging.optim.progress.tree import Tree
from swarm.testing.network import SimulatedNetwork
from swarm.testing.progress_swarm import LINK, ProgressRun, Trainer, measure
from swarm.testing.virtual_loop import run_virtual

PEERS, RATE, EPOCH_S = 90, 4.0, 20.0
TARGET = round(PEERS * RATE * EPOCH_S)


def play(scenario: Callable[[ProgressRun, asyncio.TaskGroup], Awaitable[None]], seed: int = 1) -> None:
    async def main() -> None:
        network = SimulatedNetwork(seed, LINK)
        run = ProgressRun(network, TARGET)
        async with asyncio.TaskGroup() as group:
            await scenario(run, group)
        assert not network.errors
        await network.close()

    run_virtual(main(), limit_s=3600)


def true_samples(run: ProgressRun) -> int:
    return sum(trainer.samples for trainer in run.trainers)


def test_ninety_peers_make_four_shards_and_their_epochs_keep_to_the_target() -> None:
    figures = measure(90, epoch_s=20.0, settle_s=40.0, measured_s=45.0)
    assert figures.shards == 4
    assert figures.epochs >= 1
    assert all(0.75 <= share <= 1.35 for share in figures.gathered), figures.gathered
    assert figures.entries_most <= 48, "nobody reads a dictionary of the whole run"
    assert figures.reads <= 60
    assert figures.writes <= 60


@pytest.mark.parametrize("members", [0, 20])
def test_lying_members_and_one_lying_aggregator_a_shard_do_not_advance_the_epoch(
    monkeypatch: pytest.MonkeyPatch, members: int
) -> None:
    """Every fifth member reports a thousand times its samples, or one of the three aggregators of every
    shard invents its sums.
    """
    liars: set[Any] = set()
    climb = Tree.publish_sums

    async def lying(self: Tree, own: ProgressTotal, now_s: float) -> ProgressTotal | None:
        if self.own not in liars:
            return await climb(self, own, now_s)
        told = await climb(
            self,
            replace(own, samples=1e11, rate=1e11, peers=10**6, median_rate=1e9, epoch=own.epoch + 3),
            now_s,
        )
        return (
            None if told is None else replace(told, samples=1e11, epoch=told.epoch + 3, peers=10**6, bits=9)
        )

    monkeypatch.setattr(Tree, "publish_sums", lying)

    async def scenario(run: ProgressRun, group: asyncio.TaskGroup) -> None:
        trainers = [
            run.add(RATE, (lambda samples: samples * 1000) if number < members else None)
            for number in range(PEERS)
        ]
        for trainer in trainers:
            trainer.tracker.tree.bits = 2
        tasks = run.start(group, trainers)
        await asyncio.sleep(15.0)
        if not members:
            by_shard: dict[Any, list[Trainer]] = {}
            for trainer in trainers:
                by_shard.setdefault(trainer.tracker.tree.leaf, []).append(trainer)
            for leaf, there in by_shard.items():
                adding = aggregators(
                    leaf, "a" * 20, [trainer.peer_id for trainer in there], there[0].peer.clock.swarm_s()
                )
                assert len(adding) == AGGREGATORS
                liars.add(adding[0])
        first = max(run.gathered, default=0) + 1
        await asyncio.sleep(50.0)
        whole = [epoch for epoch in run.gathered if epoch >= first and len(run.ends[epoch]) == PEERS]
        assert whole, "and they do not hold it up"
        # a fifth of all counts three times each: 5/7 of the target is honest then
        honest_min = 0.75 if not members else 0.4
        assert all(run.gathered[epoch] >= honest_min * TARGET for epoch in whole), run.gathered
        assert max(trainer.epoch for trainer in trainers) - first <= 50.0 / (EPOCH_S * honest_min) + 1
        assert {trainer.tracker.tree.bits for trainer in trainers} == {2}
        for task in tasks:
            task.cancel()

    play(scenario)


@pytest.mark.slow
def test_a_run_that_shrinks_is_one_dictionary_again_and_a_newcomer_finds_its_shard() -> None:
    async def scenario(run: ProgressRun, group: asyncio.TaskGroup) -> None:
        trainers = [run.add(RATE) for _ in range(PEERS)]
        tasks = run.start(group, trainers)
        await asyncio.sleep(40.0)
        late = run.add(RATE)
        joined = run.start(group, [late])
        await asyncio.sleep(8.0)
        assert late.tracker.tree.bits == 2, "it looked before it said anything"
        assert late.tracker.view().peers_total >= 80
        for task in tasks[2 * 20 :]:
            task.cancel()
        await asyncio.sleep(150.0)
        assert {trainer.tracker.tree.bits for trainer in [*trainers[:20], late]} == {0}
        assert late.tracker.view().peers_total == 21
        for task in [*tasks, *joined]:
            task.cancel()

    play(scenario)
