"""Mixture layers over simulated servers equal the same mixture computed locally. Virtual time."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moe.client.replicas.calling import ReplicaCalls
from swarm.core.errors import UsageError
from swarm.testing.expert_swarm import ExpertSwarm
from tests.sim.mixture_scenarios import (
    MODULES,
    WIDTH,
    assert_close,
    batch,
    gradients,
    layer_of,
    local_mixture,
    output_of,
    serve_rows,
)


@pytest.fixture
def swarm() -> Iterator[ExpertSwarm]:
    with ExpertSwarm(seed=5) as one:
        yield one


def test_values_and_all_gradients_equal_the_local_mixture(swarm: ExpertSwarm) -> None:
    serve_rows(swarm)
    layer, x = layer_of(swarm), batch()
    output, wanted = output_of(layer, x), local_mixture(layer, MODULES, x)
    assert torch.allclose(output, wanted, atol=1e-5)
    assert_close(gradients(layer, output, x), gradients(layer, wanted, x))


def test_the_experts_learn_as_local_ones_would(swarm: ExpertSwarm) -> None:
    servers = serve_rows(swarm, learning_rate=0.1)
    layer, x, here = layer_of(swarm), batch().detach(), copy.deepcopy(MODULES)
    output_of(layer, x).square().sum().backward()
    local_mixture(layer, here, x).square().sum().backward()
    for server in servers:
        for uid, module in server.modules.items():
            for there, parameter in zip(module.parameters(), here[str(uid)].parameters(), strict=True):
                assert parameter.grad is not None
                assert torch.allclose(there, parameter - 0.1 * parameter.grad, atol=1e-5)


def test_each_expert_is_called_once_per_batch(swarm: ExpertSwarm) -> None:
    servers = serve_rows(swarm)
    layer = layer_of(swarm)
    for _ in range(3):
        output_of(layer, batch(256)).sum().backward()  # type: ignore[no-untyped-call]
    for counts in ("forwards", "backwards"):
        calls = {name: count for server in servers for name, count in getattr(server, counts).items()}
        assert calls == dict.fromkeys(MODULES, 3), counts
    assert sum(server.rows.total() for server in servers) == 3 * 256 * 4


def test_a_second_backward_pass_of_one_forward_is_applied_as_well(swarm: ExpertSwarm) -> None:
    servers = serve_rows(swarm, learning_rate=0.1)
    layer, x = layer_of(swarm), batch()
    output = output_of(layer, x)
    for _ in range(2):
        output.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    assert {version for server in servers for version in server.versions.values()} == {2}


def test_the_gradient_goes_to_the_replica_that_answered(swarm: ExpertSwarm) -> None:
    one, two = serve_rows(swarm), serve_rows(swarm)
    layer, x = layer_of(swarm), batch()
    for _ in range(5):
        output_of(layer, x).sum().backward()  # type: ignore[no-untyped-call]
    for servers in (one, two):
        for server in servers:
            assert server.forwards == server.backwards
    assert all(server.forwards for server in one + two)


def test_inputs_and_losses_that_are_not_finite_reach_no_expert(swarm: ExpertSwarm) -> None:
    servers = serve_rows(swarm, learning_rate=0.1)
    layer, x = layer_of(swarm), batch()
    broken = x.detach().clone()
    broken[3, 3] = float("nan")
    with pytest.raises(UsageError, match="NaN or infinity"):
        layer(broken)
    output = output_of(layer, x)
    (output * float("inf")).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert not torch.isfinite(x.grad).any(), "a GradScaler sees it"
    assert not any(server.backwards for server in servers)


def test_inputs_of_another_precision_or_without_gradient_work(swarm: ExpertSwarm) -> None:
    servers = serve_rows(swarm, learning_rate=0.1)
    layer, x = layer_of(swarm), batch()
    output = output_of(layer, x.to(torch.bfloat16))
    assert output.dtype == torch.bfloat16
    assert torch.allclose(
        output.float(), local_mixture(layer, MODULES, x.to(torch.bfloat16).float()), atol=0.05
    )
    output_of(layer, x.detach()).sum().backward()  # type: ignore[no-untyped-call]
    assert {version for server in servers for version in server.versions.values()} == {1}, (
        "experts learn though no input does"
    )
    with torch.no_grad():
        assert not output_of(layer, x).requires_grad


def test_inputs_with_middle_dimensions_are_gated_by_their_mean(swarm: ExpertSwarm) -> None:
    sample = torch.zeros(1, 3, WIDTH)
    swarm.serve(MODULES, sample=sample)
    layer = layer_of(swarm)
    x = torch.randn(6, 3, WIDTH)
    output = output_of(layer, x)
    assert output.shape == x.shape
    weights = torch.stack([output_of(layer, x)[0], output[0]])
    assert torch.equal(weights[0], weights[1])


def test_the_gate_trains_saves_loads_and_copies(swarm: ExpertSwarm) -> None:
    serve_rows(swarm)
    layer, other, x = layer_of(swarm), layer_of(swarm), batch()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    output_of(layer, x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(output_of(layer, x), output_of(other, x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(output_of(layer, x), output_of(other, x))
    assert torch.equal(output_of(copy.deepcopy(layer), x), output_of(layer, x))
    assert set(layer.state_dict()) == {"gate.projection.weight", "gate.projection.bias"}


def test_steps_do_not_wait_for_the_dht(swarm: ExpertSwarm) -> None:
    serve_rows(swarm)
    layer, x = layer_of(swarm), batch()
    output_of(layer, x)
    directory = swarm.node.service(ReplicaCalls.from_node).directory
    reads = directory.reads
    for _ in range(8):
        output_of(layer, x)
        assert layer.last_forward is not None
        assert layer.last_forward.seconds < 0.03
    assert directory.reads - reads <= 1


def test_wrong_arguments_raise_usage_errors(swarm: ExpertSwarm) -> None:
    serve_rows(swarm)
    for wrong in (
        {"k_best": 0},
        {"k_best": 17},
        {"k_min": 5},
        {"grid": "ffn"},
        {"forward_timeout_s": 0.0},
        {"timeout_after_k_min_s": -1.0},
    ):
        with pytest.raises(UsageError):
            layer_of(swarm, **wrong)
    layer = layer_of(swarm)
    for x in (torch.zeros(3, 5), torch.zeros(WIDTH)):
        with pytest.raises(UsageError):
            layer(x)
    with pytest.raises(UsageError, match="1 input tensors, not 2"):
        layer_of(swarm)(torch.zeros(2, WIDTH), torch.zeros(2, WIDTH))  # these experts take one input


def at_the_end(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return calls whose replies all come when they are cancelled."""

    async def made(what: Any, on_replies: Any, **settings: Any) -> None:
        found: dict[int, Any] = {}
        try:
            await call(what, found.update, **settings)
            await asyncio.sleep(1e6)
        finally:
            on_replies(found)

    return made


def test_a_reply_that_comes_when_a_pass_ends_is_not_counted_as_failed(
    swarm: ExpertSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it was both in the report's `answered` and in its `failed`, and the replica was avoided."""
    servers = serve_rows(swarm)
    layer = layer_of(swarm, forward_timeout_s=1.0, backward_timeout_s=1.0)
    calls = swarm.node.service(ReplicaCalls.from_node)
    for name in ("forward_all", "backward_all"):
        monkeypatch.setattr(calls, name, at_the_end(getattr(calls, name)))
    output_of(layer, batch()).sum().backward()  # type: ignore[no-untyped-call]
    for report in (layer.last_forward, layer.last_backward):
        assert report is not None
        assert set(report.answered) == set(report.asked)
        assert not report.failed
    assert not any(
        calls.stats.why_avoided(str(uid), server.peer.peer_id, swarm.now_s)
        for server in servers
        for uid in server.modules
    )
