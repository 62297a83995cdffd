"""Modes create their tensors with the required dtype and device, whatever torch's defaults are set to
meanwhile.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from averaging.optim.epoch_averager import relative_distance
from averaging.optim.modes.settings import Diloco, Gossip, Gradients, Local
from tests.averaging.optim.late import LateLink
from tests.averaging.optim.seats import backward, model, seat

SETTINGS = [Gradients(), Gradients(delayed=True), Local(), Diloco(), Diloco(streaming=3), Gossip()]
WAYS: dict[str, dict[str, Any]] = {
    "host": {},
    "device": {"make_link": LateLink},
    "offloaded": {"offload": True, "make_link": LateLink},
}


def trained(settings: Any, parts: dict[str, Any], *, odd: bool) -> torch.Tensor:
    net = model()
    inner = torch.optim.AdamW(net.parameters(), lr=0.02, fused=True)
    grads = []
    for seed in range(6):
        backward(net, seed, 4)
        grads.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    before = torch.get_default_dtype()
    try:
        if odd:
            torch.set_default_dtype(torch.bfloat16)
            torch.set_default_device("meta")
        one = seat(settings, net, inner=inner, **parts)
        for epoch, gradients in enumerate(grads):
            for p, gradient in zip(net.parameters(), gradients, strict=True):
                p.grad = gradient
            assert one.mode.learner.accumulate(4) is None
            one.mode.prepare(epoch)
            one.advance()
            one.mode.on_state_averaged([p.detach().clone() for p in one.mode.state.parameters])
        one.mode.learner.refused(wait=True)
        assert relative_distance(list(net.parameters()), list(net.parameters())) == 0.0
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    return one.theta


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: f"{one!r:.40}")
@pytest.mark.parametrize("way", WAYS)
def test_defaults_of_torch_change_nothing(settings: Any, way: str) -> None:
    assert torch.equal(trained(settings, WAYS[way], odd=False), trained(settings, WAYS[way], odd=True))
