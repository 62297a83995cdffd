"""Newcomers to a run that lives do not begin it a second time, whatever they can reach."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from averaging.optim.optimizer import Optimizer
from averaging.optim.progress.logic.reports import ProgressReport
from averaging.optim.reports import LoadResult
from swarm.core.errors import NetworkError
from swarm.core.ids import Key
from swarm.dht.service.dht_service import DhtService
from swarm.testing.checkers import Violations
from swarm.testing.dht_swarm import DhtSwarm, service_of
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.training_checkers import TrainingChecks
from swarm.testing.training_swarm import RUN, GreenNode, TrainingConfig, TrainingPeer, TrainingSwarm
from swarm.testing.virtual_loop import run_virtual

SEEDS = range(2)
STEP_S_MAX = 600.0
KEY = Key("things", "one")


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


class Bench:
    """A swarm of three peers that have trained for a minute, and what they and others have committed."""

    def __init__(self, seed: int, group: asyncio.TaskGroup, *, load_timeout_s: float) -> None:
        self.network = SimulatedNetwork(seed, LinkConfig(delay_s=0.03, jitter=0.5))
        self.checks = TrainingChecks(Violations(), STEP_S_MAX)
        config = TrainingConfig(target_batch_size=24, load_timeout_s=load_timeout_s)
        self.swarm = TrainingSwarm(self.network, config, self.checks.on_step, group)

    async def begin(self) -> list[TrainingPeer]:
        first = [await self.swarm.add() for _ in range(3)]
        await asyncio.sleep(60.0)
        assert all(one.optimizer is not None and one.optimizer.epoch > 3 for one in first)
        return first

    def head(self, one: TrainingPeer) -> bytes:
        assert one.optimizer is not None
        return bytes.fromhex(one.optimizer.history_head)

    @property
    def foundings(self) -> int:
        """Certificates without a predecessor, after the first one."""
        self.checks.watch(list(self.swarm.live.values()), asyncio.get_running_loop().time())
        return self.checks.ledger.foundings


def play(seed: int, scenario: Callable[[Bench], Awaitable[None]], *, load_timeout_s: float = 600.0) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            bench = Bench(seed, group, load_timeout_s=load_timeout_s)
            await scenario(bench)
            await bench.swarm.close()
        assert not bench.network.errors
        assert not bench.checks.violations.lines

    run_virtual(main())


@pytest.mark.simulation
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", [1, 2])
def test_newcomers_that_reach_nobody_wait_for_the_swarm_that_they_came_to(seed: int, count: int) -> None:
    async def scenario(bench: Bench) -> None:
        first = await bench.begin()
        bench.network.partition([one.peer for one in first])
        newcomers = [await bench.swarm.add() for _ in range(count)]
        await asyncio.sleep(90.0)
        assert not any(bench.head(one) in bench.checks.ledger.certificates for one in newcomers)
        bench.network.partition()
        await asyncio.sleep(90.0)
        assert bench.foundings == 0
        heads = [bench.head(one) for one in (*first, *newcomers)]
        newest = bench.checks.newest([*first, *newcomers])
        assert newest is not None
        behind = [bench.checks.ledger.distance(head, newest) for head in heads]
        assert all(one is not None and one <= 4 for one in behind), behind

    play(seed, scenario)


@pytest.mark.simulation
@pytest.mark.parametrize("seed", SEEDS)
def test_newcomers_that_come_when_most_peers_have_died_join_those_that_live(seed: int) -> None:
    async def scenario(bench: Bench) -> None:
        first = [*await bench.begin(), *[await bench.swarm.add() for _ in range(2)]]
        await asyncio.sleep(30.0)
        for one in first[1:4]:
            await bench.swarm.kill(one)
        await asyncio.sleep(2.0)
        newcomers = [await bench.swarm.add() for _ in range(4)]
        await asyncio.sleep(60.0)
        assert bench.foundings == 0
        assert all(bench.head(one) in bench.checks.ledger.certificates for one in newcomers)

    play(seed, scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_newcomer_that_reaches_nobody_begins_after_its_time_limit(seed: int) -> None:
    async def scenario(bench: Bench) -> None:
        first = await bench.begin()
        bench.network.partition([one.peer for one in first])
        newcomer = await bench.swarm.add()
        await asyncio.sleep(40.0)
        assert bench.head(newcomer) not in bench.checks.ledger.certificates
        await asyncio.sleep(40.0)
        assert bench.foundings == 1

    play(seed, scenario, load_timeout_s=45.0)


@pytest.mark.simulation
@pytest.mark.parametrize("seed", SEEDS)
def test_a_newcomer_that_reaches_nobody_does_not_conclude_that_it_is_alone(seed: int) -> None:
    async def scenario(bench: Bench) -> None:
        first = await bench.begin()
        bench.network.partition([one.peer for one in first])
        peer = bench.network.peer()
        node: Any = GreenNode(peer, 0)
        results: list[LoadResult] = []

        def load() -> None:
            inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
            with Optimizer(inner, node=node, run=RUN, target_batch_size=24) as optimizer:
                results.append(optimizer.load_state_from_peers(timeout_s=60.0))

        peer.supervisor.spawn("joining", lambda: node.dht.service.join([one.peer.contact for one in first]))
        await node.network.run_thread(load)
        assert (results[0].loaded, results[0].alone) == (False, False)
        assert "no other peer has answered" in results[0].reason

    play(seed, scenario)


async def lie_about_the_epoch(liar: DhtService, run: str) -> None:
    """Keep a report of a later epoch alive, with a head whose history nobody gets."""
    while True:
        now_s = liar.clock.swarm_s()
        report = ProgressReport(
            epoch=7, samples=20, rate=4.0, at_s=now_s, since_s=now_s - 5.0, head=bytes([7]) * 32
        )
        value = {**report.encode(), "addresses": liar.own().published}
        await liar.store(Key(f"run.{run}", "progress"), value, ttl_s=15.0)
        await asyncio.sleep(3.0)


@pytest.mark.simulation
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("liars", [1, 3])
def test_reports_without_a_certificate_delay_the_first_epoch_by_a_minute_at_most(
    seed: int, liars: int
) -> None:
    async def scenario(bench: Bench) -> None:
        wrong = [service_of(bench.network.peer()) for _ in range(liars)]
        first = await bench.swarm.add()
        for liar in wrong:
            await liar.join([first.peer.contact])
            liar.supervisor.spawn("lying", functools.partial(lie_about_the_epoch, liar, RUN))
        second = await bench.swarm.add()
        await asyncio.sleep(120.0)
        for one in (first, second):
            assert one.optimizer is not None
            assert one.optimizer.epoch > 3
        assert bench.foundings <= 1
        assert bench.head(first) in bench.checks.ledger.certificates

    play(seed, scenario, load_timeout_s=600.0)


def test_a_confirmed_read_needs_an_answer_of_those_that_the_peer_came_to() -> None:
    async def main() -> None:
        network = SimulatedNetwork(1)
        swarm = DhtSwarm(network)
        one, other, founder = swarm.add(), swarm.add(), swarm.add()
        assert await founder.service.get_confirmed(KEY) is None, "nobody else is known"
        await founder.service.store(KEY, {"n": 1}, ttl_s=60.0)
        network.partition([one.peer])
        await other.service.join([one.peer.contact])
        await other.service.store(KEY, {"n": 2}, ttl_s=60.0)
        assert await other.service.get(KEY) is not None
        with pytest.raises(NetworkError):
            await other.service.get_confirmed(KEY)
        await founder.service.join([one.peer.contact], remembered=True)
        assert await founder.service.get_confirmed(KEY) is not None, (
            "nothing is expected of a remembered peer"
        )
        network.partition()
        await other.service.join([one.peer.contact])
        assert await other.service.get_confirmed(KEY) is not None
        network.partition([one.peer])
        with pytest.raises(NetworkError):  # its own record is no answer
            await other.service.get_confirmed(KEY)
        network.partition()
        await network.crash(one.peer)
        await asyncio.sleep(120.0)
        assert await other.service.get_confirmed(KEY) is None, "it expired, and the only other peer has ended"
        await network.close()

    run_virtual(main())
