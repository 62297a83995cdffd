"""Stages that exchange codes of their activations: the bytes sent, and the training of a model through
them.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from moe.classes import ExpertSettings
from moe.classes.low_rank import ActivationSubspace
from moe.classes.transformer import causal_transformer
from moe.server.expert import Expert
from swarm.core.errors import UsageError

WIDTH, RANK, LENGTH = 32, 4, 10


def test_what_a_stage_expands_is_what_the_one_before_has_projected() -> None:
    one, same = ActivationSubspace(WIDTH, RANK, seed=3), ActivationSubspace(WIDTH, RANK, seed=3)
    codes = torch.randn(5, RANK)
    assert torch.allclose(same.encoder()(one.decoder()(codes)), codes, atol=1e-5)
    assert not torch.allclose(
        ActivationSubspace(WIDTH, RANK).encoder()(one.decoder()(codes)), codes, atol=0.1
    )


def test_codes_are_sent_in_both_directions_and_all_parts_learn() -> None:
    settings = ExpertSettings(hidden_dim=WIDTH, sequence_length=LENGTH)
    module, sample = causal_transformer(settings)
    subspace = ActivationSubspace(WIDTH, RANK)
    expert = Expert(subspace.stage(module), subspace.sample(sample), torch.optim.Adam)
    assert (
        str(expert.schema)
        == f"(float32(batch, 1 to {LENGTH}, {RANK})) -> float32(batch, 1 to {LENGTH}, {RANK})"
    )
    before = {name: one.detach().clone() for name, one in expert.module.named_parameters()}
    codes = torch.randn(3, 7, RANK)
    gradient = torch.randn(3, 7, RANK)
    ((found,),) = expert.backward([(None, [codes], [gradient])])
    assert found is not None
    assert found.shape == codes.shape
    changed = [name for name, one in expert.module.named_parameters() if not torch.equal(one, before[name])]
    assert {"decode.weight", "encode.weight"} < set(changed)


def test_the_gradient_of_a_code_is_exact() -> None:
    subspace = ActivationSubspace(WIDTH, RANK)
    stage = subspace.stage(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())).double()
    codes = torch.randn(2, RANK, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(stage, (codes,))


class Pair(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * mask, mask


def test_further_tensors_pass_as_they_are() -> None:
    subspace = ActivationSubspace(WIDTH, RANK)
    sample = subspace.sample((torch.zeros(1, WIDTH), torch.ones(1, 1)))
    codes, mask = subspace.stage(Pair())(*sample)
    assert codes.shape == (1, RANK)
    assert torch.equal(mask, torch.ones(1, 1))


@pytest.mark.parametrize("rank", [0, -1, WIDTH + 1])
def test_a_wrong_rank_is_refused(rank: int) -> None:
    with pytest.raises(UsageError, match="the rank of activations is from 1 to their width, 32"):
        ActivationSubspace(WIDTH, rank)


@pytest.mark.parametrize("sample", [(torch.zeros(1, WIDTH + 1),), ({"x": torch.zeros(1, WIDTH)},)])
def test_a_module_of_another_width_is_refused(sample: Any) -> None:
    with pytest.raises(UsageError, match="the first input of a stage"):
        ActivationSubspace(WIDTH, RANK).sample(sample)


def test_a_pipeline_of_codes_learns_what_the_same_pipeline_of_vectors_learns() -> None:
    """Three stages of width 32 with codes of 8: a quarter of the traffic, and nearly the loss."""
    losses = {}
    for rank in (8, None):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        head = nn.Linear(WIDTH, 4)
        if rank is None:
            model = nn.Sequential(*layers, head)
        else:
            subspace = ActivationSubspace(WIDTH, rank)
            stages = [subspace.stage(one) for one in layers]
            model = nn.Sequential(subspace.encoder(), *stages, subspace.decoder(), head)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        generator = torch.Generator().manual_seed(1)
        task = torch.randn(WIDTH, 4, generator=generator) / WIDTH**0.5
        for step in itertools.count():
            x = torch.randn(64, WIDTH, generator=generator)
            loss = nn.functional.mse_loss(model(x), (x @ task).tanh())
            if step == 400:
                losses[rank] = loss.item()
                break
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert max(losses.values()) < 0.02, losses
