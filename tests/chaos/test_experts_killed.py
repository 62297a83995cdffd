"""Training with sixteen experts continues while their four server processes are killed, stopped and restarted
every few seconds.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

import swarm
from tests.chaos.processes import Worker

pytestmark = pytest.mark.chaos

WIDTH = 16
EVERY_S = 2.5  # between two failures
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
for column in range(4):
    torch.manual_seed(4 * setup["row"] + column)
    module = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
    optimizer = partial(torch.optim.Adam, lr=3e-3)
    name = f"ffn.{setup['row']}.{column}"
    experts[name] = swarm.Expert(module, (torch.zeros(1, 16),), optimizer)
config = swarm.ExpertServerConfig(checkpoints=Path(setup["folder"]), checkpoint_s=0.5)
server = swarm.ExpertServer(node, experts, config=config)
print(json.dumps(server.resumed), flush=True)
sys.stdin.readline()
"""


class Servers:
    """One server process per row of the grid. A killed process is restarted from its checkpoints, with
    another identity and address.
    """

    def __init__(self, bootstrap: list[str], folder: Path) -> None:
        self._bootstrap, self._folder = bootstrap, folder
        self.workers = [self._start(row) for row in range(4)]
        for worker in self.workers:
            worker.hear()

    def _start(self, row: int) -> Worker:
        worker = Worker(SERVER)
        worker.tell({"bootstrap": self._bootstrap, "row": row, "folder": str(self._folder / str(row))})
        return worker

    def signal(self, row: int, what: signal.Signals) -> None:
        os.kill(self.workers[row].process.pid, what)

    def restart(self, row: int) -> None:
        self.workers[row].end()
        self.workers[row] = self._start(row)

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


@dataclass
class Model:
    """A mixture layer between two local layers, which learns a fixed function of random inputs."""

    layer: swarm.RemoteMixtureOfExperts
    losses: list[float] = field(default_factory=list)
    slowest_s: float = 0.0
    answered: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
        self.truth = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).requires_grad_(False)
        parameters = [*self.before.parameters(), *self.layer.parameters(), *self.after.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=3e-3)
        self.data = torch.Generator().manual_seed(0)

    def step(self) -> None:
        begun_s = time.monotonic()
        x = torch.randn(64, 8, generator=self.data)
        hidden = self.before(x)
        mixed = self.layer(hidden)
        assert isinstance(mixed, torch.Tensor)
        loss = (self.after(hidden + mixed) - 3.0 * self.truth(x)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        assert all(
            one.grad is not None and torch.isfinite(one.grad).all() for one in self.before.parameters()
        )
        self.optimizer.step()
        self.losses.append(loss.item())
        self.slowest_s = max(self.slowest_s, time.monotonic() - begun_s)
        forward, backward = self.layer.last_forward, self.layer.last_backward
        assert forward is not None
        assert backward is not None
        self.answered.update(backward.answered)
        self.failed.update([*forward.failed, *backward.failed])


@pytest.mark.parametrize("seconds", [22.0, 150.0], ids=["short", "long"])
def test_training_survives_servers_that_are_killed_stopped_and_restarted(
    trainer: swarm.Node, servers: Servers, seconds: float
) -> None:
    rng = random.Random(7)
    layer = swarm.RemoteMixtureOfExperts(
        trainer,
        WIDTH,
        grid="ffn.[0:4].[0:4]",
        k_best=4,
        k_min=1,
        forward_timeout_s=15.0,
        timeout_after_k_min_s=0.4,
    )
    model = Model(layer)
    model.step()
    begun_s = time.monotonic()
    events = itertools.cycle(["kill", "restart", "freeze", "thaw"])
    row, counts, event_s = 0, Counter[str](), begun_s + 1.0
    while time.monotonic() < begun_s + seconds:
        model.step()  # no step fails
        if time.monotonic() > event_s:
            event_s = time.monotonic() + EVERY_S
            what = next(events)
            counts[what] += 1
            row = rng.randrange(4) if what in ("kill", "freeze") else row
            if what == "kill":
                servers.signal(row, signal.SIGKILL)
            elif what == "restart":
                servers.restart(row)
            else:
                servers.signal(row, signal.SIGSTOP if what == "freeze" else signal.SIGCONT)
    assert min(counts[what] for what in ("kill", "restart", "freeze")) >= 2, counts
    assert len(model.answered) == 16, "all experts learned something"
    assert sum(model.failed.values()) >= 8, "the events were felt"
    assert model.slowest_s < 5.0
    tenth = max(len(model.losses) // 10, 1)
    first, last = sum(model.losses[:tenth]) / tenth, sum(model.losses[-tenth:]) / tenth
    assert last < 0.5 * first, (first, last)
    assert sum(model.answered.values()) > 4 * len(model.losses), "gradients flowed through most of them"


@pytest.mark.parametrize("allowed", [False, True])
def test_a_layer_without_live_experts_follows_its_setting(
    trainer: swarm.Node, servers: Servers, allowed: bool
) -> None:
    layer = swarm.RemoteMixtureOfExperts(
        trainer, WIDTH, grid="ffn.[0:4].[0:4]", forward_timeout_s=5.0, allow_zero_outputs=allowed
    )
    model = Model(layer)
    model.step()
    for row in range(4):
        servers.signal(row, signal.SIGKILL)
    x = torch.randn(4, WIDTH)
    if allowed:
        for _ in range(3):
            output = layer(x)
            assert isinstance(output, torch.Tensor)
            assert not output.any()
        servers.restart(2)
        deadline_s = time.monotonic() + WAIT_S
        while not layer(x).any():
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
    else:
        with pytest.raises(swarm.NotEnoughPeers, match="k_min = 1"):
            layer(x)
