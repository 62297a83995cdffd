"""A remote expert over simulated servers equals the local module, survives dead replicas, and is trained once
per backward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from moe.client.remote import RemoteExpert
from moe.client.replicas.calling import ReplicaCalls
from swarm.core.errors import NetworkError, NotEnoughPeers, UsageError
from swarm.testing.expert_swarm import ExpertSwarm
from tests.sim.mixture_scenarios import MODULES, WIDTH, batch, layer_of, output_of

NAME = "ffn.0.0"
MODULE = MODULES[NAME]


@pytest.fixture
def swarm() -> Iterator[ExpertSwarm]:
    with ExpertSwarm(seed=12) as one:
        yield one


def check_both_ways(expert: RemoteExpert) -> None:
    x = batch()
    outputs = expert(x), MODULE(x)
    assert torch.allclose(*outputs, atol=1e-6)
    assert torch.allclose(*(torch.autograd.grad(one.square().sum(), x)[0] for one in outputs), atol=1e-6)


def test_calls_succeed_while_one_replica_is_alive(swarm: ExpertSwarm) -> None:
    servers = [swarm.serve({NAME: MODULE}) for _ in range(3)]
    expert = RemoteExpert(swarm.node, NAME, forward_timeout_s=5.0)
    for server in servers[:2]:
        check_both_ways(expert)
        swarm.crash(server)
    check_both_ways(expert)
    swarm.serve({NAME: MODULE})
    swarm.crash(servers[2])
    check_both_ways(expert)
    swarm.crash(swarm.servers[3])
    with pytest.raises(NetworkError, match="peer"):
        expert(batch())
    swarm.sleep(60.0)
    with pytest.raises(NotEnoughPeers, match=r"nobody hosts ffn\.0\.0"):
        expert(batch())


def test_experts_and_layers_of_a_node_share_what_they_avoid(swarm: ExpertSwarm) -> None:
    one, two = swarm.serve(MODULES), swarm.serve(MODULES)
    layer, expert = layer_of(swarm), RemoteExpert(swarm.node, NAME)
    output_of(layer, batch())
    expert(batch())
    swarm.crash(one)
    while not swarm.node.service(ReplicaCalls.from_node).stats.why_avoided(
        "ffn.3.3", one.peer.peer_id, swarm.now_s
    ):
        expert(batch())
    output_of(layer, batch())
    assert layer.last_forward is not None
    assert not layer.last_forward.failed
    assert two.forwards


def test_a_backward_pass_whose_answer_was_lost_is_repeated_and_applied_once(swarm: ExpertSwarm) -> None:
    server = swarm.serve({NAME: MODULE}, learning_rate=0.1)
    expert, local = RemoteExpert(swarm.node, NAME, backward_timeout_s=10.0), copy.deepcopy(MODULE)
    server.lose_replies = 1
    begun_s = swarm.now_s
    expert(batch().detach()).square().sum().backward()
    assert 6.0 < swarm.now_s - begun_s < 7.0
    local(batch()).square().sum().backward()
    assert server.backwards[NAME] == 2
    for there, parameter in zip(
        next(iter(server.modules.values())).parameters(), local.parameters(), strict=True
    ):
        assert torch.allclose(there, parameter - 0.1 * parameter.grad, atol=1e-6)


def test_a_second_backward_is_applied_and_a_nonfinite_loss_is_not(swarm: ExpertSwarm) -> None:
    server = swarm.serve({NAME: MODULE}, learning_rate=0.1)
    expert, x = RemoteExpert(swarm.node, NAME), batch()
    y = expert(x)
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    assert list(server.versions.values()) == [2]
    x.grad = None
    (y * float("inf")).sum().backward()
    assert x.grad is not None
    assert x.grad.isnan().all()
    assert list(server.versions.values()) == [2]


def test_invalid_inputs_reach_no_server(swarm: ExpertSwarm) -> None:
    server = swarm.serve({NAME: MODULE})
    expert = RemoteExpert(swarm.node, NAME)
    with pytest.raises(UsageError, match="NaN"):
        expert(torch.full((2, WIDTH), float("nan")))
    with pytest.raises(UsageError, match="float32"):
        expert(torch.zeros(2, WIDTH + 1))
    assert not server.forwards


def test_a_copy_of_a_module_calls_the_same_expert(swarm: ExpertSwarm) -> None:
    server = swarm.serve({NAME: MODULE})
    expert = RemoteExpert(swarm.node, NAME)
    x = torch.ones(2, WIDTH)
    assert torch.equal(copy.deepcopy(nn.Sequential(expert))(x), expert(x))
    assert server.forwards[NAME] == 2
