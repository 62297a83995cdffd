"""Several batches in a pipeline at a time, over simulated servers: the losses and gradients of plain torch,
stages kept full, errors that end everything. Virtual time.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from moe.client.pipeline.sequential import PipelineConfig, RemoteSequential
from swarm.core.errors import NotEnoughPeers, UsageError
from swarm.testing.expert_swarm import ExpertSwarm

WIDTH, STAGES, BATCH, MICRO_BATCHES = 6, 4, 16, 4
COMPUTE_S = 0.1


@pytest.fixture
def swarm() -> Iterator[ExpertSwarm]:
    with ExpertSwarm(seed=12) as one:
        yield one


def modules() -> dict[str, nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return {
            f"block.{stage}": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for stage in range(STAGES)
        }


def pipeline_of(swarm: ExpertSwarm, **config: float) -> RemoteSequential:
    return RemoteSequential(
        swarm.node,
        f"block.[0:{STAGES}]",
        micro_batch_size=BATCH // MICRO_BATCHES,
        forward_timeout_s=20.0,
        backward_timeout_s=20.0,
        config=PipelineConfig(**config),  # type: ignore[arg-type]
    )


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(BATCH, WIDTH, generator=generator) for _ in range(count)]
    return [(one.requires_grad_(), one.detach().flip(0)) for one in made]


def serve_each(swarm: ExpertSwarm, compute_s: float = 0.0) -> None:
    for name, module in modules().items():
        swarm.serve({name: module}, compute_s=compute_s)


def test_losses_and_input_gradients_are_those_of_plain_torch(swarm: ExpertSwarm) -> None:
    serve_each(swarm)
    pipeline, local = pipeline_of(swarm), nn.Sequential(*modules().values())
    losses = pipeline.train_batches(batches_remote := batches(3), nn.functional.mse_loss)
    for loss, (x, _), (same, target) in zip(losses, batches_remote, batches(3), strict=True):
        expected = nn.functional.mse_loss(local(same), target)
        expected.backward()  # type: ignore[no-untyped-call]
        assert loss == pytest.approx(expected.item(), abs=1e-6)
        assert x.grad is not None
        assert same.grad is not None
        assert torch.allclose(x.grad, same.grad, atol=1e-6)
    assert pipeline.last_training is not None
    assert pipeline.last_training.micro_batches == 3 * MICRO_BATCHES


def test_four_stages_reach_eighty_percent_of_the_ideal_throughput(swarm: ExpertSwarm) -> None:
    """Regression: a batch waited until the one before had left the pipeline, and stages stood still. Every
    stage computes a micro-batch in 0.1 s, in each direction: the ideal is one micro-batch in 0.2 s.
    """
    serve_each(swarm, COMPUTE_S)
    pipeline = pipeline_of(swarm, in_flight_max=2 * STAGES)
    pipeline.train_batches(batches(1), nn.functional.mse_loss)  # replicas and schemas are known from now on
    count = 16
    begun_s = swarm.now_s
    pipeline.train_batches(batches(count), nn.functional.mse_loss)
    took_s = swarm.now_s - begun_s
    ideal_s = count * MICRO_BATCHES * 2 * COMPUTE_S
    assert ideal_s / took_s >= 0.8, (ideal_s, took_s)
    assert pipeline.last_training is not None
    filled = pipeline.last_training.bubbles
    assert filled < 0.2
    begun_s = swarm.now_s
    for x, target in batches(4):
        nn.functional.mse_loss(pipeline(x), target).backward()  # type: ignore[no-untyped-call]
    assert 4 * MICRO_BATCHES * 2 * COMPUTE_S / (swarm.now_s - begun_s) < 0.65, "one batch after the other"
    assert pipeline.last_forward is not None
    assert pipeline.last_forward.bubbles > filled


def test_the_slots_limit_what_is_under_way(swarm: ExpertSwarm) -> None:
    serve_each(swarm, COMPUTE_S)
    pipeline = pipeline_of(swarm, in_flight_max=1)
    pipeline.train_batches(batches(1), nn.functional.mse_loss)
    begun_s = swarm.now_s
    pipeline.train_batches(batches(1), nn.functional.mse_loss)
    assert swarm.now_s - begun_s >= MICRO_BATCHES * STAGES * 2 * COMPUTE_S


def test_a_stage_that_is_lost_ends_the_call_with_its_name(swarm: ExpertSwarm) -> None:
    serve_each(swarm)
    pipeline = pipeline_of(swarm)
    pipeline.train_batches(batches(1), nn.functional.mse_loss)
    swarm.crash(swarm.servers[2])
    with pytest.raises(NotEnoughPeers, match=r"stage block\.2"):
        pipeline.train_batches(batches(4), nn.functional.mse_loss)


def test_a_loss_that_is_no_number_is_refused(swarm: ExpertSwarm) -> None:
    serve_each(swarm)
    with pytest.raises(UsageError, match="loss returns one number"):
        pipeline_of(swarm).train_batches(batches(1), lambda output, target: output - target)
