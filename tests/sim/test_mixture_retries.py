"""Mixture layers whose servers are all gone for a moment: samples without an expert are tried again until the
deadline. Virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest
import torch

from swarm.core.errors import NotEnoughPeers
from swarm.testing.expert_swarm import ExpertSwarm, SimulatedExperts
from tests.sim.mixture_scenarios import MODULES, batch, layer_of, local_mixture, output_of, serve_rows


@pytest.fixture
def swarm() -> Iterator[ExpertSwarm]:
    with ExpertSwarm(seed=5) as one:
        yield one


def return_after(swarm: ExpertSwarm, servers: Sequence[SimulatedExperts], seconds: float) -> None:
    """Let servers start again later, while a pass runs."""

    async def later() -> None:
        await asyncio.sleep(seconds)
        for server in servers:
            await swarm.restarted(server)

    async def begin() -> None:
        swarm.trainer.supervisor.spawn("restarting servers", later)

    swarm.run(begin())


@pytest.mark.parametrize("away_s", [0.3, 2.0, 8.0])
def test_a_step_waits_for_servers_that_restart(swarm: ExpertSwarm, away_s: float) -> None:
    """Regression: the rounds of replacements were over in milliseconds: connections were refused."""
    servers = serve_rows(swarm)
    layer, x = layer_of(swarm, forward_timeout_s=30.0), batch()
    wanted = output_of(layer, x)
    for server in servers:
        swarm.crash(server)
    return_after(swarm, servers, away_s)
    begun_s = swarm.now_s
    output = output_of(layer, x)
    assert away_s <= swarm.now_s - begun_s < away_s + 2.5
    assert output.any(dim=1).all()
    assert layer.last_forward is not None
    assert layer.last_forward.short_samples == 0
    swarm.sleep(61.0)
    assert torch.allclose(output_of(layer, x), wanted, atol=1e-5)


def test_a_frozen_server_does_not_end_the_attempts_at_others(swarm: ExpertSwarm) -> None:
    """Regression: while one server was silent, those that had refused a connection were not asked again."""
    servers = serve_rows(swarm)
    layer, x = layer_of(swarm, forward_timeout_s=30.0), batch()
    output_of(layer, x)
    servers[0].peer.frozen = True
    for server in servers[1:]:
        swarm.crash(server)
    return_after(swarm, servers[1:], 3.0)
    begun_s = swarm.now_s
    output = output_of(layer, x)
    assert swarm.now_s - begun_s < 7.0
    assert output.any(dim=1).all()


def test_retried_samples_get_what_the_local_mixture_gives(swarm: ExpertSwarm) -> None:
    servers = serve_rows(swarm)
    layer, x = layer_of(swarm, k_best=2, k_min=2), batch()
    output_of(layer, x)
    for server in servers:
        swarm.crash(server)
    return_after(swarm, servers, 1.0)
    output = output_of(layer, x)
    assert output.grad_fn is not None
    selected = layer.last_forward
    assert selected is not None
    assert len(set(selected.answered)) == len(selected.answered), "nobody is asked twice for one sample"
    assert torch.allclose(output, local_mixture(layer, MODULES, x), atol=1e-5)


def test_without_any_server_a_step_fails_at_its_deadline_and_not_before(swarm: ExpertSwarm) -> None:
    servers = serve_rows(swarm)
    layer, x = layer_of(swarm, forward_timeout_s=6.0), batch()
    output_of(layer, x)
    for server in servers:
        swarm.crash(server)
    begun_s = swarm.now_s
    with pytest.raises(NotEnoughPeers, match="32 of 32 samples got fewer than k_min = 1 answers in 6 s"):
        layer(x)
    assert swarm.now_s - begun_s == pytest.approx(6.0, abs=0.5)


def test_a_grid_that_nobody_has_declared_fails_at_once(swarm: ExpertSwarm) -> None:
    serve_rows(swarm)
    begun_s = swarm.now_s
    with pytest.raises(NotEnoughPeers, match="no expert of other"):
        layer_of(swarm, grid="other.[0:4].[0:4]")(batch())
    assert swarm.now_s - begun_s < 2.0


def test_an_expert_that_only_fails_is_not_tried_until_the_deadline(swarm: ExpertSwarm) -> None:
    servers = serve_rows(swarm)
    for server in servers:
        server.poisoned = set(MODULES)
    begun_s = swarm.now_s
    with pytest.raises(NotEnoughPeers, match="NaN"):
        layer_of(swarm)(batch())
    assert swarm.now_s - begun_s < 2.0
