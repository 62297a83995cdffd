"""`swarm.Optimizer` on a GPU: peers stay equal bit for bit, statistics included, the loss falls, and a
checkpoint loads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from averaging.optim.accumulate import GradientAccumulator
from averaging.optim.optimizer import Diloco, Gradients, Local, Optimizer
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
                    **{"codec": "float16", "state_sync_epochs": 4, **options},
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


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_micro_step_with_a_bad_gradient_changes_no_sum_and_is_reported(
    dtype: torch.dtype, bad: float, offload: bool, device: torch.device
) -> None:
    """Among tensors of every size, and next to the largest number of the type, which is no bad gradient."""
    shapes = [(1,), (31,), (257, 129), (70_001,), (0,)]
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) for shape in shapes]
    home = torch.device("cpu") if offload else None
    sums = GradientAccumulator(parameters, storage=home)
    for place in range(4):
        for p in parameters:
            p.grad = torch.ones_like(p)
        last = parameters[place].grad
        assert last is not None
        last.view(-1)[-1] = bad
        refused = sums.add(3) or ""
        sums.resolve_checks()
        assert f"parameter {place}" in (refused or sums.refused().reason)
        assert sums.samples == 0
        assert not any(bool(buffer.any()) for buffer in sums.buffers)
    for p in parameters:
        p.grad = torch.full_like(p, torch.finfo(dtype).max / 4)
    assert sums.add(2) is None
    sums.resolve_checks()
    assert sums.refused().samples == 0
    assert sums.samples == 2
    expected = 2 * torch.tensor(torch.finfo(dtype).max / 4).to(dtype).float()
    assert all(bool((buffer.cpu() == expected).all()) for buffer in sums.buffers)
