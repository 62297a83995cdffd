"""Mixture layers, switch layers and pipelines over real servers and sockets; the examples train to the loss
of local models.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial

import experts_bytelm
import experts_digits
import pytest
import torch
from torch import nn

import swarm
from moe.protocol.names import ExpertGrid
from tests.wire.local_mixture import LocalMixture

WAIT_S = 60.0


@pytest.fixture
def nodes() -> Iterator[tuple[swarm.Node, list[swarm.Node]]]:
    """Return a trainer's node and four for servers."""
    with contextlib.ExitStack() as stack:
        trainer = stack.enter_context(swarm.Node(listen="127.0.0.1:0"))
        hosts = [swarm.Node(bootstrap=trainer.addresses, listen="127.0.0.1:0") for _ in range(4)]
        for node in hosts:
            stack.enter_context(node)
        yield trainer, hosts


def experts_for(names: list[str], make: Callable[[], swarm.Expert]) -> dict[str, swarm.Expert]:
    torch.manual_seed(5)
    return {name: make() for name in names}


def test_digits_train_to_the_loss_of_the_local_model(nodes: tuple[swarm.Node, list[swarm.Node]]) -> None:
    trainer, hosts = nodes
    names = [str(name) for name in ExpertGrid.parse(experts_digits.GRID).names()]
    experts = experts_for(names, experts_digits.make_expert)
    modules = {name: copy.deepcopy(expert.module) for name, expert in experts.items()}
    with (
        swarm.ExpertServer(hosts[0], {name: experts[name] for name in names[::2]}),
        swarm.ExpertServer(hosts[1], {name: experts[name] for name in names[1::2]}),
    ):
        remote = lambda: swarm.RemoteMixtureOfExperts(  # noqa: E731
            trainer, experts_digits.WIDTH, grid=experts_digits.GRID, k_best=2, k_min=2, backward_k_min=2
        )
        loss, accuracy = experts_digits.train(remote, 40, lambda _: None)
    local = partial(
        LocalMixture, experts_digits.WIDTH, experts_digits.GRID, 2, modules, experts_digits.LEARNING_RATE
    )
    local_loss, _ = experts_digits.train(local, 40, lambda _: None)
    assert loss == pytest.approx(local_loss, rel=0.05)
    assert accuracy > 0.6
    assert all(expert.version > 10 for expert in experts.values())


def test_a_language_model_trains_to_the_loss_of_the_local_model(
    nodes: tuple[swarm.Node, list[swarm.Node]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts_bytelm, "DATA_BYTES", 500_000)
    trainer, hosts = nodes
    names = [
        str(name)
        for layer in range(experts_bytelm.LAYERS)
        for name in ExpertGrid.parse(experts_bytelm.grid_of(layer)).names()
    ]
    experts = experts_for(names, experts_bytelm.make_expert)
    modules = {name: copy.deepcopy(expert.module) for name, expert in experts.items()}
    width, steps = experts_bytelm.WIDTH, 30

    def remote(layer: int) -> nn.Module:
        return swarm.RemoteMixtureOfExperts(
            trainer, width, grid=experts_bytelm.grid_of(layer), k_best=2, k_min=2, backward_k_min=2
        )

    def local(layer: int) -> nn.Module:
        return LocalMixture(width, experts_bytelm.grid_of(layer), 2, modules, experts_bytelm.LEARNING_RATE)

    with contextlib.ExitStack() as stack:
        for place, node in enumerate(hosts):  # sixteen experts on four servers
            stack.enter_context(swarm.ExpertServer(node, {name: experts[name] for name in names[place::4]}))
        loss = experts_bytelm.train(remote, steps, lambda _: None)
    local_loss = experts_bytelm.train(local, steps, lambda _: None)
    assert loss == pytest.approx(local_loss, rel=0.05)
    assert loss < 4.2


def test_a_switch_layer_and_a_pipeline_over_real_servers(nodes: tuple[swarm.Node, list[swarm.Node]]) -> None:
    trainer, hosts = nodes
    torch.manual_seed(0)
    blocks = {f"block.{stage}": nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for stage in range(4)}
    experts = {f"sw.{place}": nn.Linear(8, 8) for place in range(4)}
    hosted = {
        name: swarm.Expert(copy.deepcopy(module), (torch.zeros(1, 8),))
        for name, module in (blocks | experts).items()
    }
    again = {
        name: swarm.Expert(copy.deepcopy(module), (torch.zeros(1, 8),)) for name, module in blocks.items()
    }
    x = torch.randn(10, 8, requires_grad=True)
    with swarm.ExpertServer(hosts[0], hosted), swarm.ExpertServer(hosts[1], again):
        pipeline = swarm.RemoteSequential(trainer, "block.[0:4]", micro_batch_size=3)
        output = pipeline(x)
        wanted = nn.Sequential(*blocks.values())(x)
        assert isinstance(output, torch.Tensor)
        assert torch.allclose(output, wanted, atol=1e-6)
        found, expected = (torch.autograd.grad(one.square().sum(), x)[0] for one in (output, wanted))
        assert torch.allclose(found, expected, atol=1e-6)
        switch = swarm.RemoteSwitchMixtureOfExperts(trainer, 8, grid="sw.[0:4]").eval()
        mixture, loss = switch(x)
        probabilities = switch.gate(x)[0].softmax(dim=1)
        value, best = probabilities.max(dim=1)
        outputs = torch.stack([module(x) for module in experts.values()], dim=1)
        assert isinstance(mixture, torch.Tensor)
        assert torch.allclose(mixture, value[:, None] * outputs[torch.arange(10), best], atol=1e-6)
        assert loss.item() == pytest.approx(1.0, rel=1e-5), "even utilization: the probabilities sum to one"
