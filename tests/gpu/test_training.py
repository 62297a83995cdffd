"""`swarm.Optimizer` on a GPU: peers stay equal bit for bit, statistics included, the loss falls, and a
checkpoint loads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from averaging.optim.optimizer import Diloco, Gradients, Local, Optimizer
from benchmarks.cuda.companion import QUICK
from benchmarks.cuda.peers import at_once
from swarm.node import Node

EPOCHS = 8
MODES: dict[str, dict[str, Any]] = {
    "gradients": {"mode": Gradients()},
    "gradients, offload": {"mode": Gradients(), "offload": True},
    "gradients, error feedback": {"mode": Gradients(), "codec": "int8", "error_feedback": True},
    "delayed": {"mode": Gradients(delayed=True)},
    "local": {"mode": Local()},
    "diloco": {"mode": Diloco(outer_lr=0.7, momentum=0.3)},
    "diloco, offload": {"mode": Diloco(outer_lr=0.7, momentum=0.3), "offload": True},
    "streaming diloco": {"mode": Diloco(outer_lr=0.7, momentum=0.3, streaming=2)},
}


def build(device: torch.device) -> torch.nn.Module:
    """Drawn on the host, so that it is the same on every device."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)


def trains(
    optimizer: Optimizer, net: torch.nn.Module, device: torch.device, seed: int
) -> Callable[[], list[float]]:
    def train() -> list[float]:
        chance, losses = torch.Generator().manual_seed(seed), []
        while optimizer.epoch < EPOCHS:
            x = torch.randn(16, 16, generator=chance).to(device)
            loss = (net(x) - x[:, :1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
        return losses

    return train


@pytest.mark.parametrize("second", ["device", "host"])
@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_two_peers_train_to_equal_states(
    options: dict[str, Any], second: str, nodes: list[Node], device: torch.device
) -> None:
    where = [device, device if second == "device" else torch.device("cpu")]
    with ExitStack() as stack:
        nets = [build(one) for one in where]
        optimizers = [
            stack.enter_context(
                Optimizer(
                    torch.optim.AdamW(net.parameters(), lr=0.01),
                    node=node,
                    run="equal",
                    target_batch_size=64,
                    batch_size_per_step=16,
                    **{"codec": "float16", "state_sync_epochs": 4, "config": QUICK, **options},
                )
            )
            for node, net in zip(nodes, nets, strict=True)
        ]
        calls = [
            trains(optimizer, net, one, seed)
            for seed, (optimizer, net, one) in enumerate(zip(optimizers, nets, where, strict=True))
        ]
        losses = at_once(calls, 90.0)
        assert [optimizer.epoch for optimizer in optimizers] == [EPOCHS, EPOCHS]
        assert sum(losses[0][-8:]) < sum(losses[0][:8])
        canonical = optimizers[0].mode == "gradients" and not getattr(options["mode"], "delayed", False)
        digests = [optimizer.state_digest() for optimizer in optimizers]
        if canonical:  # the last epoch averaged the state, statistics included
            assert digests[0] == digests[1]
            for one, other in zip(*(optimizer.inner.state.values() for optimizer in optimizers), strict=True):
                assert all(torch.equal(one[key].cpu(), other[key].cpu()) for key in ("exp_avg", "exp_avg_sq"))
        # in other modes peers differ by what they learned since the last round
        tolerance = 0.0 if canonical else 0.2
        for one, other in zip(*(net.parameters() for net in nets), strict=True):
            assert torch.allclose(one.cpu(), other.cpu(), atol=tolerance, rtol=0.0)
        assert next(nets[0].parameters()).device == device
        kept = optimizers[0].state_dict()
        optimizers[0].load_state_dict(kept)
        assert optimizers[0].state_digest() == digests[0]
