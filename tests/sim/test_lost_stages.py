"""Two trainers and eight servers: a pipeline of four stages with two replicas each, of which one stage loses
both. Training continues, servers move by the production plan, and the throughput recovers. Virtual time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from moe.client.pipeline.passes import PipelinePass
from moe.client.pipeline.sequential import PipelineConfig, RemoteSequential
from moe.client.replicas.calling import ReplicaCalls
from moe.protocol.declarations import RENEW_S, Directory
from moe.protocol.names import ExpertGrid
from moe.server.logic.placement import Placement
from moe.server.places import choose_places, read_load
from swarm.testing.expert_swarm import ExpertSwarm, SimulatedExperts

WIDTH, STAGES, BATCH, MICRO_BATCH = 6, 4, 32, 4
COMPUTE_S = 0.3
GRID = ExpertGrid.parse(f"block.[0:{STAGES}]")
SAMPLE = torch.zeros(1, WIDTH)
MOVED_S = 120.0  # declarations expire after 45 s, are read within 15 s, and a plan is valid for 20 s
WINDOW_S = 60.0


def module(name: str) -> nn.Module:
    """Return a new stage, initialized from the seed of the grid."""
    with torch.random.fork_rng():
        torch.manual_seed(int(name.partition(".")[2]))
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Scene:
    """Servers that choose their own places, and trainers that do not stop."""

    def __init__(self, seed: int) -> None:
        self.swarm = ExpertSwarm(seed)
        self.chance = random.Random(seed)
        self.batches: list[float] = []  # when each batch of either trainer ended
        self.losses: list[float] = []
        self.errors: list[BaseException] = []
        self.moves: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        for stage in range(STAGES):
            for _ in range(2):
                self.start(f"block.{stage}")
        for node in (self.swarm.node, self.swarm.new_node()):
            pipeline = RemoteSequential(
                node,
                str(GRID),
                micro_batch_size=MICRO_BATCH,
                forward_timeout_s=400.0,
                backward_timeout_s=400.0,
                config=PipelineConfig(stage_timeout_s=10.0, in_flight_max=4),
            )
            self.spawn(self._train(pipeline, node.service(ReplicaCalls.from_node), len(self._tasks)))

    def spawn(self, work) -> None:  # type: ignore[no-untyped-def]
        async def start() -> None:
            self._tasks.append(asyncio.get_running_loop().create_task(work))

        self.swarm.run(start())

    def start(self, name: str) -> SimulatedExperts:
        server = self.swarm.serve(
            {name: module(name)}, sample=SAMPLE, learning_rate=0.02, compute_s=COMPUTE_S
        )
        self.spawn(self._place(server))
        return server

    def join(self) -> str:
        """Start a server at the stage that needs one most, and return the name of that stage."""

        async def choose() -> str:
            directory = Directory(self.swarm.node.dht.service)
            load = await read_load(directory, [GRID], timeout_s=10.0)
            return str(choose_places([GRID], load, self.swarm.node.peer_id, 1, self.chance)[0])

        name = self.swarm.run(choose())
        self.start(name)
        return name

    def hosts(self, name: str) -> list[SimulatedExperts]:
        return [one for one in self.swarm.servers if one.peer.up and str(*one.modules) == name]

    def throughput(self) -> float:
        """Wait a minute, and return the number of batches that both trainers completed in it."""
        before = len(self.batches)
        self.swarm.sleep(WINDOW_S)
        assert not self.errors, self.errors
        return len(self.batches) - before

    def close(self) -> None:
        async def cancel() -> None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        self.swarm.run(cancel())
        self.swarm.__exit__(None, None, None)

    async def _train(self, pipeline: RemoteSequential, calls: ReplicaCalls, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        options = pipeline.pass_options(BATCH, 400.0)
        try:
            while True:
                x = torch.randn(BATCH, WIDTH, generator=generator)
                target = 0.5 * x.flip(1).tanh()
                parts = await PipelinePass(calls, options).forward([x], keep=True)
                difference = torch.cat([part.outputs[0] for part in parts]) - target
                await PipelinePass(calls, options).backward(parts, [2 * difference / difference.numel()], 0)
                self.losses.append(float(difference.square().mean()))
                self.batches.append(asyncio.get_running_loop().time())
        except Exception as error:
            self.errors.append(error)
            raise

    async def _place(self, server: SimulatedExperts) -> None:
        """Read the declarations and move, as `swarm serve --num-experts 1` does."""
        directory, placement = Directory(server.service), Placement(server.peer.peer_id)
        await asyncio.sleep(RENEW_S * self.chance.random())
        while server.peer.up:
            load = await read_load(directory, [GRID], timeout_s=10.0)
            move = placement.step(load, asyncio.get_running_loop().time())
            if move is not None:
                self.moves.append(f"{move.source} -> {move.target}")
                await server.move({str(move.target): module(str(move.target))})
            await asyncio.sleep(RENEW_S)


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    one = Scene(request.param)
    yield one
    one.close()


@pytest.mark.parametrize("scene", [1, 2], indirect=True)
def test_a_stage_that_loses_both_replicas_is_served_again_and_throughput_recovers(scene: Scene) -> None:
    scene.swarm.sleep(20.0)
    before = scene.throughput()
    lost = "block.2"
    for _ in range(2):
        scene.swarm.crash(scene.hosts(lost)[0])
        scene.swarm.sleep(10.0)
    assert not scene.hosts(lost)
    scene.swarm.sleep(MOVED_S)
    assert len(scene.hosts(lost)) == 1, scene.moves
    assert len(scene.moves) == 1, "one server moves, and nobody else"
    # six servers of four stages: at least one stage has a single one, so the best placement gives half
    assert scene.throughput() >= 0.8 * before / 2
    joined = {scene.join(), scene.join()}
    assert lost in joined, "newcomers take what the grid lacks most"
    assert len(joined) == 2
    scene.swarm.sleep(20.0)
    assert scene.throughput() >= 0.8 * before
    assert len(scene.moves) == 1
    tenth = len(scene.losses) // 10
    assert sum(scene.losses[-tenth:]) < sum(scene.losses[:tenth]), "it has learned all the while"
