"""Batches that are larger than a server takes in one request are cut into parts. Simulated servers."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from moe.client.remote import RemoteExpert
from moe.client.replicas.calling import ReplicaCalls
from moe.client.replicas.splitting import SplitCalls
from moe.protocol.calls import ExpertCalls, ForwardReply, ForwardRequest
from moe.protocol.errors import ExpertRefused
from swarm.core.errors import DeadlineExceeded, NotEnoughPeers, SwarmError
from swarm.testing.expert_swarm import ExpertSwarm
from swarm.testing.virtual_loop import run_virtual
from tests.sim.mixture_scenarios import (
    MODULES,
    assert_close,
    batch,
    gradients,
    layer_of,
    local_mixture,
    output_of,
    serve_rows,
)
from tests.sim.scripted_experts import REPLICAS, SCHEMA, UID

NAME = "ffn.0.0"
MODULE = MODULES[NAME]


@pytest.fixture
def swarm() -> Iterator[ExpertSwarm]:
    with ExpertSwarm(seed=21) as one:
        yield one


@pytest.mark.parametrize("samples", [5, 6, 7, 100, 1000])
def test_a_large_batch_equals_the_local_module(swarm: ExpertSwarm, samples: int) -> None:
    server = swarm.serve({NAME: MODULE})
    server.batch_size_max = 6
    expert, x = RemoteExpert(swarm.node, NAME), batch(samples)
    outputs = expert(x), MODULE(x)
    assert torch.allclose(*outputs, atol=1e-6)
    assert torch.allclose(*(torch.autograd.grad(one.square().sum(), x)[0] for one in outputs), atol=1e-6)
    assert server.forwards[NAME] == server.backwards[NAME] == -(-samples // 6)
    assert server.rows[NAME] == samples


def test_every_part_is_applied_once_when_an_answer_is_lost(swarm: ExpertSwarm) -> None:
    server = swarm.serve({NAME: MODULE}, learning_rate=0.1)
    server.batch_size_max = 10
    expert = RemoteExpert(swarm.node, NAME, backward_timeout_s=10.0)
    server.lose_replies = 1
    expert(batch(32)).square().sum().backward()
    assert list(server.versions.values()) == [4]
    assert server.backwards[NAME] > 4, "repeated"


def test_a_mixture_whose_servers_take_few_samples_equals_the_local_one(swarm: ExpertSwarm) -> None:
    """Regression: each expert that got more samples than that was avoided, and the others got its samples."""
    servers = serve_rows(swarm)
    for server in servers:
        server.batch_size_max = 16
    layer, x = layer_of(swarm, k_best=2), batch(512)
    output, wanted = output_of(layer, x), local_mixture(layer, MODULES, x)
    assert torch.allclose(output, wanted, atol=1e-5)
    assert_close(gradients(layer, output, x), gradients(layer, wanted, x))
    assert layer.last_forward is not None
    assert not layer.last_forward.failed
    assert max(max(server.rows.values()) for server in servers) > 64
    stats = swarm.node.service(ReplicaCalls.from_node).stats
    assert not any(
        stats.why_avoided(str(uid), server.peer.peer_id, swarm.now_s)
        for server in servers
        for uid in server.modules
    )


def test_a_limit_is_learned_by_one_refusal(swarm: ExpertSwarm) -> None:
    server = swarm.serve({NAME: MODULE})
    expert = RemoteExpert(swarm.node, NAME)
    expert(batch(32))
    server.batch_size_max = 8  # it was restarted with another option
    for _ in range(3):
        assert torch.allclose(expert(batch(32)), MODULE(batch(32)), atol=1e-6)
    assert server.refused == 1


def test_a_server_that_takes_one_sample_at_a_time_is_refused_a_large_batch(swarm: ExpertSwarm) -> None:
    server = swarm.serve({NAME: MODULE})
    server.batch_size_max = 1
    expert = RemoteExpert(swarm.node, NAME)
    with pytest.raises(ExpertRefused, match=r"takes 1 samples of ffn\.0\.0 in one request"):
        expert(batch(257))
    assert not server.forwards
    swarm.sleep(5.0)  # it was avoided
    assert torch.allclose(expert(batch(256)), MODULE(batch(256)), atol=1e-6)


def test_a_backward_pass_that_timed_out_and_is_repeated_is_applied_once(swarm: ExpertSwarm) -> None:
    server = swarm.serve({NAME: MODULE}, learning_rate=0.1)
    expert, x = RemoteExpert(swarm.node, NAME, backward_timeout_s=2.0), batch()
    loss = expert(x).square().sum()
    server.lose_replies = 100
    with pytest.raises(DeadlineExceeded):
        loss.backward(retain_graph=True)
    server.lose_replies = 0
    loss.backward(retain_graph=True)
    assert list(server.versions.values()) == [1]
    local = copy.deepcopy(MODULE)
    local(batch()).square().sum().backward()
    for there, parameter in zip(
        next(iter(server.modules.values())).parameters(), local.parameters(), strict=True
    ):
        assert torch.allclose(there, parameter - 0.1 * parameter.grad, atol=1e-6)
    loss.backward(retain_graph=True)
    assert list(server.versions.values()) == [2], "a further pass is applied as well"


def test_a_pass_with_other_gradients_after_a_timeout_is_another_pass(swarm: ExpertSwarm) -> None:
    server = swarm.serve({NAME: MODULE}, learning_rate=0.1)
    expert, x = RemoteExpert(swarm.node, NAME, backward_timeout_s=2.0), batch()
    y = expert(x)
    server.lose_replies = 100
    with pytest.raises(DeadlineExceeded):
        y.sum().backward(retain_graph=True)
    server.lose_replies = 0
    y.square().sum().backward(retain_graph=True)
    y.sum().backward(retain_graph=True)
    assert list(server.versions.values()) == [2]


def test_a_mixtures_backward_pass_that_timed_out_and_is_repeated_is_applied_once(swarm: ExpertSwarm) -> None:
    servers = serve_rows(swarm, learning_rate=0.1)
    layer, x = layer_of(swarm, backward_k_min=4, backward_timeout_s=2.0), batch()
    loss = output_of(layer, x).sum()
    servers[0].lose_replies = 100
    with pytest.raises(NotEnoughPeers, match="backward_k_min = 4"):
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    servers[0].lose_replies = 0
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    assert {version for server in servers for version in server.versions.values()} == {1}


class SmallServer:
    """A stand-in for `ExpertCalls` whose server takes 6 samples at a time, and answers after `delays_s`."""

    def __init__(self, *delays_s: float) -> None:
        self._delays_s = list(delays_s)

    async def describe(self, *_: object, **settings: object) -> Sequence[object]:
        return [SimpleNamespace(batch_size_max=6)]

    async def forward_all(
        self, replica: object, requests: Mapping[int, ForwardRequest], on_replies: Any, **settings: object
    ) -> None:
        await asyncio.sleep(self._delays_s.pop(0) if self._delays_s else 0.1)
        for number, one in requests.items():
            reply = ForwardReply(outputs=[one.inputs[0]], version=1, request_id=b"one", wait_s=0.0)
            on_replies({number: reply if len(one.inputs[0]) <= 6 else ExpertRefused("too many samples")})


def test_a_refused_batch_is_cut_though_another_call_has_learned_the_limit_meanwhile() -> None:
    """Regression: the later of two calls took the limit for the size that was refused, and failed."""

    async def scenario() -> None:
        calls = SplitCalls(cast(ExpertCalls, SmallServer(0.1, 0.5)))
        found: list[dict[int, ForwardReply | SwarmError]] = [{}, {}]
        async with asyncio.TaskGroup() as tasks:
            for own in found:
                request = ForwardRequest(UID, SCHEMA, [torch.ones(32, 2)])
                tasks.create_task(calls.forward_all(REPLICAS[0], {0: request}, own.update, timeout_s=10.0))
        assert [type(own[0]) for own in found] == [ForwardReply, ForwardReply]

    run_virtual(scenario())
