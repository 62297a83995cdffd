"""Pipelines over simulated servers equal the same stages computed locally, also when peers die, freeze or are
slow. Virtual time.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from moe.client.pipeline.sequential import PipelineConfig, RemoteSequential
from swarm.core.errors import NotEnoughPeers, SwarmError, UsageError
from swarm.testing.expert_swarm import ExpertSwarm, SimulatedExperts

WIDTH, STAGES = 6, 6
torch.manual_seed(0)
MODULES = {f"block.{stage}": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for stage in range(STAGES)}


@pytest.fixture
def swarm() -> Iterator[ExpertSwarm]:
    with ExpertSwarm(seed=11) as one:
        yield one


def serve(
    swarm: ExpertSwarm, servers: int = 3, replicas: int = 1, **settings: float
) -> list[list[SimulatedExperts]]:
    """Split the stages into one run per server; each run is hosted by `replicas` of them."""
    share = STAGES // servers
    return [
        [
            swarm.serve(
                {
                    f"block.{stage}": MODULES[f"block.{stage}"]
                    for stage in range(run * share, (run + 1) * share)
                },
                **settings,
            )  # type: ignore[arg-type]
            for _ in range(replicas)
        ]
        for run in range(servers)
    ]


def pipeline_of(swarm: ExpertSwarm, **settings: object) -> RemoteSequential:
    settings = {"micro_batch_size": 4, **settings}
    return RemoteSequential(swarm.node, f"block.[0:{STAGES}]", **settings)  # type: ignore[arg-type]


def batch(samples: int = 16) -> torch.Tensor:
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def through(pipeline: RemoteSequential, x: torch.Tensor) -> torch.Tensor:
    output = pipeline(x)
    assert isinstance(output, torch.Tensor)
    return output


def local(x: torch.Tensor) -> torch.Tensor:
    for module in MODULES.values():
        x = module(x)
    return x


def check_both_ways(pipeline: RemoteSequential, x: torch.Tensor) -> None:
    output, wanted = through(pipeline, x), local(x)
    assert torch.allclose(output, wanted, atol=1e-6)
    found, expected = (torch.autograd.grad(one.square().sum(), x)[0] for one in (output, wanted))
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("samples", [1, 4, 15, 16])
def test_values_and_gradients_equal_the_local_model(swarm: ExpertSwarm, samples: int) -> None:
    serve(swarm)
    pipeline = pipeline_of(swarm)
    check_both_ways(pipeline, batch(samples))
    assert pipeline.last_forward is not None
    assert pipeline.last_forward.micro_batches == -(-samples // 4)
    assert pipeline.last_forward.rerouted == []


def test_micro_batches_are_processed_concurrently(swarm: ExpertSwarm) -> None:
    serve(swarm, servers=6, compute_s=0.1)
    took_s = {}
    for in_flight in (1, 8):
        pipeline = pipeline_of(swarm, config=PipelineConfig(in_flight_max=in_flight))
        through(pipeline, batch(32))
        begun_s = swarm.now_s
        through(pipeline, batch(32))
        took_s[in_flight] = swarm.now_s - begun_s
    assert took_s[1] > 8 * 6 * 0.1
    assert took_s[8] < (8 + 6) * 0.14, "a filled pipeline takes micro-batches plus stages, not their product"


def test_every_stage_learns_once_per_micro_batch(swarm: ExpertSwarm) -> None:
    servers = serve(swarm, learning_rate=0.1)
    before = copy.deepcopy(MODULES)
    pipeline = pipeline_of(swarm, micro_batch_size=16)
    x = batch()
    through(pipeline, x.detach()).square().sum().backward()
    for module in MODULES.values():
        module.zero_grad()
    local(x).square().sum().backward()
    for (server,) in servers:
        for uid, module in server.modules.items():
            assert server.versions[uid] == 1
            for there, parameter in zip(module.parameters(), MODULES[str(uid)].parameters(), strict=True):
                assert parameter.grad is not None
                assert torch.allclose(there, parameter - 0.1 * parameter.grad, atol=1e-6)
    assert all(
        torch.equal(a, b)
        for name in MODULES
        for a, b in zip(before[name].parameters(), MODULES[name].parameters(), strict=True)
    )


def test_a_backward_pass_that_timed_out_and_is_repeated_is_applied_once(swarm: ExpertSwarm) -> None:
    servers = serve(swarm, learning_rate=0.1)
    pipeline = pipeline_of(swarm, micro_batch_size=8, backward_timeout_s=2.0)
    loss = through(pipeline, batch()).square().sum()
    for (server,) in servers[:2]:
        server.lose_replies = 100
    with pytest.raises(SwarmError):
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    for (server,) in servers[:2]:
        server.lose_replies = 0
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    assert {version for (server,) in servers for version in server.versions.values()} == {2}


@pytest.mark.parametrize("how", ["crash", "freeze"])
def test_a_peer_that_dies_in_the_forward_pass_is_replaced(swarm: ExpertSwarm, how: str) -> None:
    servers = serve(swarm, replicas=2)
    pipeline, x = pipeline_of(swarm, config=PipelineConfig(stage_timeout_s=2.0)), batch()
    check_both_ways(pipeline, x)
    lose(swarm, servers[1][0], how)
    begun_s = swarm.now_s
    check_both_ways(pipeline, x)
    assert swarm.now_s - begun_s < 3.0


@pytest.mark.parametrize("how", ["crash", "freeze"])
@pytest.mark.parametrize("run", [0, 1, 2])
def test_a_peer_that_dies_between_forward_and_backward_is_replaced(
    swarm: ExpertSwarm, how: str, run: int
) -> None:
    servers = serve(swarm, replicas=2)
    pipeline, x = pipeline_of(swarm, config=PipelineConfig(stage_timeout_s=2.0)), batch()
    check_both_ways(pipeline, x)
    output = through(pipeline, x)
    lose(swarm, max(servers[run], key=lambda server: server.forwards.total()), how)
    found = torch.autograd.grad(output.square().sum(), x)[0]
    assert torch.allclose(found, torch.autograd.grad(local(x).square().sum(), x)[0], atol=1e-6)
    assert pipeline.last_backward is not None
    assert any("backward" in line for line in pipeline.last_backward.rerouted)


def lose(swarm: ExpertSwarm, server: SimulatedExperts, how: str) -> None:
    if how == "crash":
        swarm.crash(server)
    else:
        server.peer.frozen = True


def test_a_stage_whose_only_peer_restarts_is_waited_for(swarm: ExpertSwarm) -> None:
    servers = serve(swarm)
    pipeline, x = pipeline_of(swarm), batch()
    through(pipeline, x)
    swarm.crash(servers[2][0])

    async def return_later() -> None:
        await asyncio.sleep(4.0)
        await swarm.restarted(servers[2][0])

    async def begin() -> None:
        swarm.trainer.supervisor.spawn("restart", return_later)

    swarm.run(begin())
    begun_s = swarm.now_s
    assert torch.allclose(through(pipeline, x), local(x), atol=1e-6)
    assert 4.0 < swarm.now_s - begun_s < 8.0


def test_an_error_names_the_stage_that_nobody_hosts(swarm: ExpertSwarm) -> None:
    serve(swarm)
    swarm.crash(swarm.servers[1])
    pipeline = pipeline_of(swarm, forward_timeout_s=5.0)
    begun_s = swarm.now_s
    with pytest.raises(NotEnoughPeers, match=r"stage block\.2 was not computed within 5 s"):
        pipeline(batch())
    assert swarm.now_s - begun_s < 6.0


def test_quick_peers_get_more_of_the_work(swarm: ExpertSwarm) -> None:
    (pair,) = serve(swarm, servers=1, replicas=2, compute_s=0.01)
    pair[1].compute_s = 0.04
    pipeline = pipeline_of(swarm)
    for _ in range(20):
        through(pipeline, batch(32))
    work = Counter({number: server.forwards.total() for number, server in enumerate(pair)})
    assert work[0] > 2 * work[1] > 0


def test_a_second_backward_is_applied_and_a_nonfinite_loss_is_not(swarm: ExpertSwarm) -> None:
    servers = serve(swarm, learning_rate=0.01)
    pipeline, x = pipeline_of(swarm, micro_batch_size=16), batch()
    output = through(pipeline, x)
    for _ in range(2):
        output.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    assert {version for (server,) in servers for version in server.versions.values()} == {2}
    x.grad = None
    (output * float("nan")).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad.isnan().all()
    assert {version for (server,) in servers for version in server.versions.values()} == {2}


def test_wrong_arguments_raise_usage_errors(swarm: ExpertSwarm) -> None:
    serve(swarm)
    for wrong in ({"micro_batch_size": 0}, {"forward_timeout_s": 0.0}, {"backward_timeout_s": -1.0}):
        with pytest.raises(UsageError):
            pipeline_of(swarm, **wrong)
    with pytest.raises(UsageError):
        RemoteSequential(swarm.node, "block")
    with pytest.raises(UsageError):
        RemoteSequential(swarm.node, "block.[0:64].[0:64]")
    pipeline = pipeline_of(swarm, forward_timeout_s=3.0)
    with pytest.raises(UsageError):
        pipeline()
    with pytest.raises(UsageError, match="NaN"):
        pipeline(torch.full((2, WIDTH), float("nan")))
    with pytest.raises(UsageError, match="float32"):
        pipeline(torch.zeros(2, WIDTH + 1))
