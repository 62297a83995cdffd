"""Checkpoints of experts that were written with another optimizer, or by another module."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.protocol.names import ExpertUid
from moe.server.checkpoints import ExpertCheckpoints
from moe.server.expert import Expert
from swarm.core.errors import UsageError

UID = ExpertUid.parse("ffn.3")
OPTIMIZERS: dict[str, Any] = {
    "adam": partial(torch.optim.Adam, lr=0.01),
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "frozen": None,
}


def made(optimizer: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Expert:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4))
    return Expert(module.to(dtype), (torch.zeros(2, 4, dtype=dtype),), OPTIMIZERS[optimizer])


def learn(one: Expert) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).to(one.schema.input_leaves[0].dtype)
    one.forward([x])
    one.backward([(None, [x], [x])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(OPTIMIZERS, 2)))
def test_parameters_and_buffers_are_resumed_with_another_optimizer(
    tmp_path: Path, before: str, after: str, dtype: torch.dtype
) -> None:
    """Regression: such a checkpoint was left out. The expert began with random weights, even where it should
    only be served frozen, and soon replaced the checkpoints.
    """
    written = made(before, dtype)
    learn(written)
    ExpertCheckpoints(tmp_path, {UID: written}).save()
    resumed = made(after, dtype, seed=9)
    checkpoints = ExpertCheckpoints(tmp_path, {UID: resumed})
    assert checkpoints.load() == [UID]
    assert resumed.version == written.version
    found, wanted = resumed.module.state_dict(), written.module.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert checkpoints.save() == 0
    learn(resumed)
    assert resumed.version == written.version + (after != "frozen")


def test_a_checkpoint_of_a_module_with_other_parameters_is_an_error_and_stays(tmp_path: Path) -> None:
    """Regression: the schema alone is the same, so the checkpoint was left out."""
    ExpertCheckpoints(tmp_path, {UID: made("adam")}).save()
    wider = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    other = Expert(wider, (torch.zeros(1, 4),), OPTIMIZERS["adam"])
    with pytest.raises(UsageError, match=r"does not fit ffn\.3: .* the options that it was written with"):
        ExpertCheckpoints(tmp_path, {UID: other}).load()
