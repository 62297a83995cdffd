"""The strides of `.grad` for the inner optimizer: fused kernels walk through parameter and gradient in
parallel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from averaging.optim.memory import gradient_for
from averaging.optim.modes.settings import Diloco, Gradients, Local
from tests.averaging.optim.late import LateLink
from tests.averaging.optim.seats import seat

INNER: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda ps, fused: torch.optim.Adam(ps, lr=0.01, fused=fused),
    "adamw": lambda ps, fused: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1, fused=fused),
    "sgd": lambda ps, fused: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=fused),
}
WAYS: dict[str, dict[str, Any]] = {
    "beside": {},
    "offloaded": {"offload": True},
    "device": {"offload": True, "make_link": LateLink},
}


def pictures(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.Tanh(),
        torch.nn.Conv2d(8, 4, 1),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 2),
    )
    return net.to(dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def backward(net: torch.nn.Module, seed: int) -> None:
    net.zero_grad()
    x = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(seed)).to(
        memory_format=torch.channels_last
    )
    net(x.to(next(net.parameters()).dtype)).square().mean().backward()


@pytest.mark.parametrize(
    ("settings", "name", "dtype", "way"),
    [
        *(
            (Gradients(), name, dtype, "beside")
            for name in INNER
            for dtype in (torch.float32, torch.bfloat16)
        ),
        *(
            (Gradients(delayed=delayed), "adamw", torch.float32, way)
            for delayed in (False, True)
            for way in WAYS
        ),
        (Gradients(delayed=True), "sgd", torch.bfloat16, "device"),
    ],
    ids=repr,
)
def test_a_fused_optimizer_steps_on_averages_for_channels_last_weights(
    settings: Any, name: str, dtype: torch.dtype, way: str
) -> None:
    net, plain = pictures(dtype), pictures(dtype)
    assert any(not p.is_contiguous() for p in net.parameters())
    ours = seat(settings, net, inner=INNER[name](net.parameters(), True), **WAYS[way])
    # in bfloat16 the two kinds of kernels round differently
    theirs = INNER[name](plain.parameters(), dtype != torch.float32)
    for epoch in range(3):
        sums = [torch.zeros(p.shape) for p in plain.parameters()]
        for nth in range(2):
            backward(net, 10 * epoch + nth)
            backward(plain, 10 * epoch + nth)
            for total, p in zip(sums, plain.parameters(), strict=True):
                assert p.grad is not None
                total.add_(p.grad, alpha=4)
            assert ours.mode.learner.accumulate(4) is None
        ours.mode.prepare(epoch)
        ours.advance()
        for p, total in zip(plain.parameters(), sums, strict=True):
            p.grad = (
                (total / 8)
                .to(p.dtype)
                .to(memory_format=torch.channels_last if p.dim() == 4 else torch.contiguous_format)
            )
        theirs.step()
        close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-3}
        for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, other, **close)
            assert mine.stride() == other.stride()
        with torch.no_grad():  # from equal parameters again: what is compared is one step
            for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
                other.copy_(mine)


@pytest.mark.parametrize("settings", [Local(), Diloco(), Diloco(streaming=2)], ids=lambda one: f"{one!r:.40}")
@pytest.mark.parametrize("way", WAYS)
def test_local_steps_of_a_fused_optimizer_keep_channels_last_weights(settings: Any, way: str) -> None:
    thetas = []
    for fused in (True, False):
        net = pictures(torch.float32)
        one = seat(settings, net, inner=INNER["adamw"](net.parameters(), fused), **WAYS[way])
        for epoch in range(4):
            backward(net, epoch)
            assert one.mode.learner.accumulate(4) is None
            one.mode.prepare(epoch)
            one.advance()
        thetas.append(one.theta)
        weight = net[0].weight  # type: ignore[index]
        assert weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr]
    torch.testing.assert_close(thetas[0], thetas[1], rtol=1e-5, atol=1e-6)


def test_a_gradient_that_fits_is_not_copied() -> None:
    p = torch.nn.Parameter(torch.randn(2, 3, 4, 4))
    values = torch.randn(2, 3, 4, 4)
    assert gradient_for(p, values) is values
    strided = torch.nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    found = gradient_for(strided, values)
    assert found.stride() == strided.stride()
    assert torch.equal(found, values)
    assert not found.requires_grad
