"""A byte-level transformer with sixteen experts trains to the loss of a local one while their four server
processes are killed, stopped and restarted every few seconds.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from experts_bytelm import BATCH, CONTEXT, LAYERS, LEARNING_RATE, WIDTH, ByteModel, grid_of
from torch import nn

import swarm
from swarm.run.tasks.bytelm_model import ByteData
from swarm.run.tasks.corpus import read_corpus
from tests.chaos.processes import Worker
from tests.wire.local_mixture import LocalMixture

pytestmark = pytest.mark.chaos

K_BEST = 4
LOSS_RATIO_MAX = 1.1  # compared with the local model after as many steps
EVERY_S = 2.5  # at least, between two failures
EVERY_STEPS = 8  # at least, between two failures: on a busy machine steps take seconds
FORWARD_TIMEOUT_S = 30.0
WAIT_S = 120.0
SERVER = """
import json, sys
from functools import partial
from pathlib import Path

import torch

import swarm

setup = json.loads(sys.stdin.readline())
node = swarm.Node(bootstrap=setup["bootstrap"], listen="127.0.0.1:0")
experts = {}
for number, name in enumerate(setup["names"]):
    torch.manual_seed(4 * setup["server"] + number)
    module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    experts[name] = swarm.Expert(module, (torch.zeros(1, 64),), partial(torch.optim.Adam, lr=2e-3))
config = swarm.ExpertServerConfig(checkpoints=Path(setup["folder"]), checkpoint_s=0.5)
server = swarm.ExpertServer(node, experts, config=config)
print(json.dumps(server.resumed), flush=True)
sys.stdin.readline()
"""
# the grids of both layers have two rows of four experts
NAMES = [
    [f"bytelm{layer}.{row}.{column}" for column in range(4)] for layer in range(LAYERS) for row in range(2)
]


def local_experts() -> dict[str, nn.Module]:
    """Return the modules with which the servers begin."""
    made: dict[str, nn.Module] = {}
    with torch.random.fork_rng():
        for server, names in enumerate(NAMES):
            for number, name in enumerate(names):
                torch.manual_seed(4 * server + number)
                made[name] = nn.Sequential(
                    nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
                )
    return made


class Servers:
    """One server process per row of a grid. A killed process is restarted from its checkpoints, with
    another identity and address.
    """

    def __init__(self, bootstrap: list[str], folder: Path) -> None:
        self._bootstrap, self._folder = bootstrap, folder
        self.workers = [self._start(server) for server in range(4)]
        for worker in self.workers:
            worker.hear()

    def _start(self, server: int) -> Worker:
        worker = Worker(SERVER)
        folder = str(self._folder / str(server))
        setup = {"bootstrap": self._bootstrap, "server": server, "names": NAMES[server], "folder": folder}
        worker.tell(setup)
        return worker

    def signal(self, server: int, what: signal.Signals) -> None:
        os.kill(self.workers[server].process.pid, what)

    def restart(self, server: int) -> None:
        self.workers[server].end()
        self.workers[server] = self._start(server)

    def end(self) -> None:
        for worker in self.workers:
            worker.end()


@pytest.fixture
def trainer() -> Iterator[swarm.Node]:
    with swarm.Node(listen="127.0.0.1:0") as node:
        yield node


@pytest.fixture
def servers(trainer: swarm.Node, tmp_path: Path) -> Iterator[Servers]:
    started = Servers(trainer.addresses, tmp_path)
    yield started
    started.end()


class Training:
    """The byte-level model of the example with these mixtures, one step at a time."""

    def __init__(self, make_mixture: Callable[[int], nn.Module]) -> None:
        torch.manual_seed(0)
        corpus = read_corpus(None, bytes_max=500_000, sample_bytes=CONTEXT + 1)
        self.data = ByteData(corpus, context=CONTEXT, device=torch.device("cpu"))
        self.model = ByteModel(make_mixture)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)
        self.steps, self.slowest_s = 0, 0.0
        self.answered, self.failed = Counter[str](), Counter[str]()  # by expert

    def step(self) -> None:
        begun_s = time.monotonic()
        loss = self.data.loss(self.model, BATCH)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [one.grad for one in self.model.parameters()]
        assert all(one is None or bool(torch.isfinite(one).all()) for one in gradients)
        self.optimizer.step()
        self.steps += 1
        self.slowest_s = max(self.slowest_s, time.monotonic() - begun_s)
        for block in self.model.blocks:
            layer = block.mixture
            if isinstance(layer, swarm.RemoteMixtureOfExperts):
                assert layer.last_forward is not None
                assert layer.last_backward is not None
                self.answered.update(layer.last_backward.answered)
                self.failed.update([*layer.last_forward.failed, *layer.last_backward.failed])

    def validation_loss(self) -> float:
        return self.data.validation_loss(self.model)


class Scene:
    """Training, and failures of its servers between the steps. One server at a time is killed or stopped, and
    returns. Both layers always have a server: the two of a layer fail only after the other has answered since
    its return, however long that takes.
    """

    def __init__(self, training: Training, servers: Servers) -> None:
        self.training, self._servers = training, servers
        self._returning: dict[int, int] = {}  # server: its answers before its return
        self._event_s, self._event_step = time.monotonic(), 0

    def fail(self, server: int, what: signal.Signals) -> None:
        """Kill or stop a server, and train until the failure was felt."""
        self._train_until(lambda: self._has_returned(server) and self._has_returned(server ^ 1))
        self._pause()
        self._servers.signal(server, what)
        failed = self._failed(server)
        self._train_until(lambda: self._failed(server) > failed)

    def end_failure(self, server: int, what: signal.Signals) -> None:
        """Restart or continue a server."""
        self._pause()
        self._returning[server] = self._answered(server)
        if what == signal.SIGKILL:
            self._servers.restart(server)
        else:
            self._servers.signal(server, signal.SIGCONT)

    def end(self) -> None:
        """Train until all servers have returned."""
        self._train_until(lambda: all(self._has_returned(server) for server in range(4)))

    def _pause(self) -> None:
        """Train for a while between two events."""
        self._train_until(
            lambda: (
                time.monotonic() >= self._event_s + EVERY_S
                and self.training.steps >= self._event_step + EVERY_STEPS
            )
        )
        self._event_s, self._event_step = time.monotonic(), self.training.steps

    def _train_until(self, has_happened: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not has_happened():
            assert time.monotonic() < deadline_s
            self.training.step()  # no step fails

    def _has_returned(self, server: int) -> bool:
        return server not in self._returning or self._answered(server) > self._returning[server]

    def _answered(self, server: int) -> int:
        return sum(self.training.answered[name] for name in NAMES[server])

    def _failed(self, server: int) -> int:
        return sum(self.training.failed[name] for name in NAMES[server])


@pytest.mark.parametrize("failures", [4, 30], ids=["short", "long"])
def test_training_survives_servers_that_are_killed_stopped_and_restarted(
    trainer: swarm.Node, servers: Servers, failures: int
) -> None:
    rng = random.Random(7)

    def remote(layer: int) -> nn.Module:
        return swarm.RemoteMixtureOfExperts(
            trainer,
            WIDTH,
            grid=grid_of(layer),
            k_best=K_BEST,
            k_min=1,
            forward_timeout_s=FORWARD_TIMEOUT_S,
            timeout_after_k_min_s=0.4,
        )

    training = Training(remote)
    scene = Scene(training, servers)
    for _, what in zip(range(failures), itertools.cycle([signal.SIGKILL, signal.SIGSTOP]), strict=False):
        server = rng.randrange(4)
        scene.fail(server, what)
        scene.end_failure(server, what)
    scene.end()
    assert len(training.answered) == 16, "all experts learned something"
    assert training.slowest_s < FORWARD_TIMEOUT_S, "no pass waited until its timeout"
    experts = local_experts()
    local = Training(lambda layer: LocalMixture(WIDTH, grid_of(layer), K_BEST, experts, LEARNING_RATE))
    before = local.validation_loss()
    for _ in range(training.steps):
        local.step()
    loss, wanted = training.validation_loss(), local.validation_loss()
    assert wanted < 0.8 * before, "the training is worth something"
    assert loss < LOSS_RATIO_MAX * wanted, (loss, wanted, training.steps)


@pytest.mark.parametrize("allowed", [False, True])
def test_a_layer_without_live_experts_follows_its_setting(
    trainer: swarm.Node, servers: Servers, allowed: bool
) -> None:
    layer = swarm.RemoteMixtureOfExperts(
        trainer, WIDTH, grid=grid_of(0), forward_timeout_s=15.0, allow_zero_outputs=allowed
    )
    x = torch.randn(4, WIDTH)
    layer(x).square().mean().backward()
    for server in range(4):
        servers.signal(server, signal.SIGKILL)
    if allowed:
        for _ in range(3):
            output = layer(x)
            assert isinstance(output, torch.Tensor)
            assert not output.any()
        servers.restart(1)
        deadline_s = time.monotonic() + WAIT_S
        while not layer(x).any():
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
    else:
        with pytest.raises(swarm.NotEnoughPeers, match="k_min = 1"):
            layer(x)
