"""The steps of a pipeline's stages over real sockets: one per target batch, as in plain torch."""

from __future__ import annotations

import copy

import torch

import swarm
from tests.wire.expert_pair import network, pair, sgd

STAGES, BATCH, STEPS = 4, 32, 6


def test_every_stage_makes_one_step_per_batch_however_micro_batches_meet() -> None:
    """Regression: servers joined what waited: 7.2, 6.7, 5.0 and 3.0 steps a batch along four stages."""
    modules = [network() for _ in range(STAGES)]
    local = torch.nn.Sequential(*map(copy.deepcopy, modules))
    optimizer = sgd(local.parameters())
    hosted = {
        f"block.{number}": swarm.Expert(module, (torch.zeros(1, 16),), sgd)
        for number, module in enumerate(modules)
    }
    for one in hosted.values():
        one.target_batch_size = BATCH
    generator = torch.Generator().manual_seed(1)
    with pair(hosted) as two:
        remote = swarm.RemoteSequential(two.guest, f"block.[0:{STAGES}]", micro_batch_size=4)
        for _ in range(STEPS):
            x = torch.randn(BATCH, 16, generator=generator)
            for model in (remote, local):
                (model(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [one.version for one in hosted.values()] == [STEPS] * STAGES
    for module, expected in zip(modules, local, strict=True):
        for found, wanted in zip(module.parameters(), expected.parameters(), strict=True):
            assert torch.allclose(found, wanted, atol=1e-5)
