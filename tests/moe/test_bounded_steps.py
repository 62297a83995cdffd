"""The steps of callers that may train are bounded, and an older version of an expert is kept."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from averaging.optim.state.checkpoint import Checkpoints
from moe.protocol.names import ExpertUid
from moe.server.checkpoints import ExpertCheckpoints, saved_names
from moe.server.expert import Expert
from swarm.core.errors import UsageError


@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, lr=1e6), partial(torch.optim.Adam, lr=0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_changes_parameters_by_a_bounded_norm(optimizer: Any, dtype: torch.dtype) -> None:
    """Regression: Adam makes a step of its full rate of whatever gradient, clipped or not."""
    torch.manual_seed(0)
    module = torch.nn.Linear(16, 16).to(dtype)
    one = Expert(module, (torch.zeros(1, 16, dtype=dtype),), optimizer, clip_norm=1.0)
    one.update_norm_max = 0.01
    x = torch.randn(4, 16).to(dtype)
    for _ in range(3):
        before = torch.cat([tensor.flatten().clone() for tensor in one.averaged_tensors()])
        one.backward([(None, [x], [torch.full((4, 16), 1e15).to(dtype)])])
        after = torch.cat([tensor.flatten() for tensor in one.averaged_tensors()])
        assert float((after - before).norm() / before.norm()) == pytest.approx(0.01, rel=0.02)
    assert one.version == 3


def test_an_older_version_is_kept_for_the_case_that_callers_ruin_an_expert(tmp_path: Path) -> None:
    one = Expert(torch.nn.Linear(4, 4), (torch.zeros(1, 4),), partial(torch.optim.SGD, lr=0.1))
    uid = ExpertUid.parse("ffn.0")
    checkpoints = ExpertCheckpoints(tmp_path, {uid: one})
    older = Checkpoints(tmp_path / "ffn.0" / "older")
    good = one.module.weight.detach().clone()
    for step in range(5):
        if step:
            one.backward([(None, [torch.ones(2, 4)], [torch.full((2, 4), 1e6)])])
        one.version = step
        checkpoints.save()
        if step == 3:  # an hour passes
            for path in (tmp_path / "ffn.0").rglob("*.safetensors"):
                written_s = path.stat().st_mtime - 4000.0
                os.utime(path, (written_s, written_s))
    assert [path.name for path in older.newest_first()] == [
        f"epoch-{epoch:010d}.safetensors" for epoch in (4, 0)
    ]
    # the owner goes back: a copy of the older file is the newest one
    shutil.copy(older.newest_first()[1], tmp_path / "ffn.0")
    ExpertCheckpoints(tmp_path, {uid: one}).load()
    assert torch.equal(one.module.weight, good)
    assert saved_names(tmp_path) == [uid]


def test_an_older_version_is_loaded_where_both_generations_are_damaged(tmp_path: Path) -> None:
    """Regression: the expert began again from its initial parameters, although an older version was there."""
    uid = ExpertUid.parse("ffn.0")
    one, again = (
        Expert(torch.nn.Linear(4, 4), (torch.zeros(1, 4),), partial(torch.optim.SGD, lr=0.1))
        for _ in range(2)
    )
    checkpoints = ExpertCheckpoints(tmp_path, {uid: one})
    for _ in range(4):  # the first one is kept when its generation is gone
        one.backward([(None, [torch.ones(2, 4)], [torch.ones(2, 4)])])
        checkpoints.save()
    for path in checkpoints.generations(uid).newest_first():
        path.write_bytes(path.read_bytes()[:-1])
    assert ExpertCheckpoints(tmp_path, {uid: again}).load() == [uid]
    assert again.version == 1


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan")])
def test_a_bound_is_above_0(wrong: float) -> None:
    one = Expert(torch.nn.Linear(4, 4), (torch.zeros(1, 4),))
    with pytest.raises(UsageError, match="update_norm_max is above 0"):
        one.update_norm_max = wrong
