"""The steps of experts on a device wait for it once. The host plays the device: what would be read without a
wait on the host is not read.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe.server import learning
from moe.server.expert import ComputationFailed, Expert


class HostReads(TorchDispatchMode):
    """Counts the numbers that are read from tensors: on a device each read waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(function) == "aten._local_scalar_dense.default"
        return function(*args, **(kwargs or {}))


def made(**options: Any) -> Expert:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = torch.nn.Linear(6, 6)
    return Expert(module, (torch.zeros(1, 6),), partial(torch.optim.SGD, lr=0.1, momentum=0.9), **options)


def learn(one: Expert, scale: float = 1.0) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    one.backward([(None, [x], [scale * x])])


def values(one: Expert) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in one.averaged_tensors()]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "_is_on_host", lambda tensor: False)


@pytest.mark.parametrize("clip_norm", [None, 0.5, 1e9], ids=["unlimited", "clipped", "short"])
@pytest.mark.parametrize("update_norm_max", [None, 0.01, 1e9], ids=["unlimited", "bounded", "short"])
def test_a_step_reads_one_number_and_changes_what_it_changes_on_the_host(
    clip_norm: float | None, update_norm_max: float | None, request: pytest.FixtureRequest
) -> None:
    """Regression: the norm of the gradient, two norms of a bounded update and the verdict were read."""
    there, here = made(clip_norm=clip_norm), made(clip_norm=clip_norm)
    there.update_norm_max = here.update_norm_max = update_norm_max
    for _ in range(3):
        learn(here)
    request.getfixturevalue("device")
    for _ in range(3):
        with HostReads() as reads:
            learn(there)
        assert reads.count == 1
    assert there.version == here.version == 3
    for found, wanted in zip(values(there), values(here), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("scale", [math.inf, math.nan, 3e38])
def test_gradients_that_are_not_finite_change_nothing(scale: float, clip_norm: float | None) -> None:
    one, spared = made(clip_norm=clip_norm), made(clip_norm=clip_norm)
    for each in (one, spared):
        learn(each)
    before = values(one)
    with pytest.raises(ComputationFailed, match="the gradients of its parameters are not finite"):
        learn(one, scale)
    assert all(map(torch.equal, values(one), before))
    assert one.version == 1
    for each in (one, spared):
        learn(each)
    assert all(map(torch.equal, values(one), values(spared)))
