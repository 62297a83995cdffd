"""The trainers of `tests.wire.trainers` on the simulated network: the same model, batches and oracle, without
late peers unless a test wants one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from averaging.optim.config import OptimizerConfig
from averaging.optim.optimizer import Optimizer
from averaging.optim.reports import StepReport
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.training_swarm import GreenNode
from tests.wire.trainers import BATCH, TARGET, Peer, adam, build, halving

STEP_S = 0.3
RUN = "simulated trainers"


@dataclass
class SimulatedTrainer(Peer):
    """A peer whose step takes `step_s`."""

    step_s: float = STEP_S

    def train_once(self) -> StepReport:
        network: Any = self.node.network
        network.waits.event().wait(self.step_s)
        return super().train_once()


class SimulatedTrainers:
    """Peers that train on one simulated network."""

    def __init__(self, seed: int, config: OptimizerConfig, **options: Any) -> None:
        """`options`: of every `Optimizer`."""
        self.network = SimulatedNetwork(seed, LinkConfig(delay_s=0.01, jitter=0.5))
        self.peers: list[SimulatedTrainer] = []
        self._config, self._options = config, options

    async def add(self, count: int) -> None:
        """Start peers, and wait until each has an optimizer."""
        for _ in range(count):
            node: Any = GreenNode(self.network.peer(), 0)
            if self.peers:
                await node.dht.service.join([self.peers[0].node.contact])
            await node.network.run_thread(lambda node=node: self.peers.append(self._made(node)))

    def _made(self, node: Any) -> SimulatedTrainer:
        net = build()
        options: dict[str, Any] = {
            "codec": "float32",
            "scheduler": halving,
            "state_sync_epochs": 0,
            "target_batch_size": TARGET,
            **self._options,
        }
        opt = Optimizer(
            adam(net), node=node, run=RUN, batch_size_per_step=BATCH, config=self._config, **options
        )
        return SimulatedTrainer(len(self.peers), node, net, opt)

    async def together(self, work: Callable[[SimulatedTrainer], Any], peers: Sequence[Any] = ()) -> None:
        """Run `work` on a green thread of every peer, or of those named, until all have returned."""
        async with asyncio.TaskGroup() as group:
            for one in peers or self.peers:
                node: Any = one.node
                group.create_task(node.network.run_thread(lambda one=one: work(one)))

    async def kill(self, one: Peer) -> None:
        node: Any = one.node
        node.network.kill()
        await self.network.crash(node.peer)


@asynccontextmanager
async def trainers(
    seed: int, count: int, config: OptimizerConfig, **options: Any
) -> AsyncIterator[SimulatedTrainers]:
    """Start peers, wait until all are ready to train, and kill them at the end."""
    made = SimulatedTrainers(seed, config, **options)
    await made.add(count)
    await made.together(lambda one: one.opt.wait_for_peers(count))
    yield made
    for one in made.peers:
        await made.kill(one)
