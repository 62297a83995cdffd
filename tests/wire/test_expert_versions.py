"""Experts that have changed between the forward and the backward pass, and the answers of a server whose
experts are not ready yet.
"""

from __future__ import annotations

import copy

import pytest
import torch

import swarm
from moe.client.replicas.calling import ReplicaCalls
from moe.server.hosting import HostingService
from swarm.core.errors import UsageError
from tests.wire.expert_pair import UID, Pair, expert, pair, sgd


def learn(two: Pair, steps: int) -> None:
    for _ in range(steps):
        two.remote()(torch.ones(2, 16)).sum().backward()


def restarted(two: Pair) -> swarm.ExpertServer:
    """Replace the server by one that has lost what its expert learned."""
    two.server.close()
    return swarm.ExpertServer(two.host, {"ffn.0": expert(optimizer=sgd)})


def version_of(server: swarm.ExpertServer) -> int:
    return server.statistics().experts["ffn.0"].version


def test_steps_of_others_beyond_the_limit_refuse_the_backward_pass() -> None:
    with pair({"ffn.0": expert(optimizer=sgd)}) as two:
        outputs = {limit: two.remote(staleness_max=limit)(torch.ones(2, 16)) for limit in (None, 2, 3)}
        learn(two, 3)
        with pytest.raises(swarm.ExpertStale, match="at version 0 in the forward pass and is at 3 now"):
            outputs[2].sum().backward()
        assert version_of(two.server) == 3, "it was not applied"
        outputs[3].sum().backward()
        outputs[None].sum().backward()
        assert version_of(two.server) == 5

        async def why_avoided() -> str | None:
            calls = two.guest.service(ReplicaCalls.from_node)
            return calls.stats.why_avoided(str(UID), two.host.peer_id, calls.clock.monotonic_s())

        assert two.run(why_avoided()) is None, "the server has done nothing wrong"


def test_a_restart_between_forward_and_backward_is_seen() -> None:
    """Regression: the version of the forward pass was sent and never read."""
    with pair({"ffn.0": expert(optimizer=sgd)}) as two:
        learn(two, 4)
        layer = swarm.RemoteMixtureOfExperts(two.guest, 16, grid="ffn.[0:1]", k_best=1)
        output, refused = layer(torch.ones(2, 16)), two.remote(staleness_max=3)(torch.ones(2, 16))
        assert isinstance(output, torch.Tensor)
        with restarted(two) as server:
            with pytest.raises(swarm.ExpertStale, match="at version 4 in the forward pass and is at 0 now"):
                refused.sum().backward()
            assert version_of(server) == 0
            output.sum().backward()
            assert version_of(server) == 1
        assert layer.last_backward is not None
        assert layer.last_backward.versions_apart == {"ffn.0": -4}


def test_a_stale_expert_of_a_mixture_counts_as_lost_in_the_backward_pass() -> None:
    with pair({"ffn.0": expert(optimizer=sgd)}) as two:
        layers = [swarm.RemoteMixtureOfExperts(two.guest, 16, grid="ffn.[0:1]", k_best=1) for _ in range(2)]
        layers[0].staleness_max, layers[1].staleness_max = 1, 2
        outputs = [layer(torch.ones(2, 16)) for layer in layers]
        learn(two, 2)
        outputs[0].sum().backward()
        assert layers[0].last_backward is not None
        assert "staleness_max = 1 apart" in layers[0].last_backward.failed["ffn.0"]
        assert version_of(two.server) == 2, "it was not applied"
        outputs[1].sum().backward()
        assert version_of(two.server) == 3


def test_a_stale_stage_of_a_pipeline_is_computed_again() -> None:
    with pair({"ffn.0": expert(optimizer=sgd)}) as two:
        pipeline = swarm.RemoteSequential(two.guest, "ffn.[0:1]", micro_batch_size=2)
        pipeline.staleness_max = 1
        x = torch.ones(2, 16, requires_grad=True)
        output = pipeline(x)
        learn(two, 2)
        module = copy.deepcopy(two.server.experts[UID].module)
        output.sum().backward()
        assert version_of(two.server) == 3
        assert pipeline.last_backward is not None
        assert any("staleness_max = 1 apart" in one for one in pipeline.last_backward.rerouted)
        expected = torch.autograd.grad(module(x).sum(), x)[0]
        assert x.grad is not None
        assert torch.allclose(x.grad, expected, atol=1e-6), "the gradient is that of the present parameters"


def test_a_negative_limit_is_refused() -> None:
    with pair({"ffn.0": expert()}) as two, pytest.raises(UsageError, match="staleness_max"):
        two.remote(staleness_max=-1)
    with pair({"ffn.0": expert()}) as two:
        layer = swarm.RemoteMixtureOfExperts(two.guest, 16, grid="ffn.[0:1]", k_best=1)
        with pytest.raises(UsageError, match="staleness_max"):
            layer.staleness_max = -1


def test_callers_hear_that_experts_are_not_ready_yet() -> None:
    with pair({"ffn.0": expert()}) as two:
        remote = two.remote()
        remote(torch.ones(1, 16))
        two.server.close()
        two.host.service(HostingService).expect()
        with pytest.raises(swarm.ExpertOverloaded, match=r"'ffn\.0' is not ready here yet"):
            two.run(two.calls.forward(two.replica, UID, [torch.ones(1, 16)], timeout_s=5.0))
        with swarm.ExpertServer(two.host, {"ffn.0": expert()}):
            assert remote(torch.ones(1, 16)).shape == (1, 16)
        with pytest.raises(swarm.ExpertMissing):
            two.run(two.calls.forward(two.replica, UID, [torch.ones(1, 16)], timeout_s=5.0))
