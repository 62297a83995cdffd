"""`swarm.Averager` and `swarm.Optimizer` over tensors on a GPU, between real nodes. Skipped where there is no
GPU.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from averaging.averager import Averager
from averaging.optim.optimizer import Optimizer, OptimizerConfig
from averaging.optim.progress.logic.reports import ProgressConfig
from averaging.reduction.lowrank import PowerSgd
from swarm.node import Node
from tests.wire.test_optimizer import together

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device at hand: averagers and optimizers over GPU tensors cannot be run",
)

QUICK = OptimizerConfig(round_timeout_s=30.0, no_donor_wait_s=0.2, progress=ProgressConfig(refresh_s_max=0.5))


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    with Node(listen="127.0.0.1:0") as first, Node(bootstrap=first.addresses, listen="127.0.0.1:0") as second:
        yield [first, second]


@pytest.mark.parametrize(
    "settings",
    [{"codec": "float16"}, {"codec": "int8", "error_feedback": True}, {"strategy": PowerSgd(rank=4)}],
    ids=str,
)
@pytest.mark.parametrize("apply", ["replace", "delta"])
def test_a_round_over_gpu_tensors_is_that_of_the_host(
    nodes: list[Node], settings: dict[str, Any], apply: Any
) -> None:
    """One member on the GPU (and the host, mixed), one on the host: they end with the same bits."""
    chance = torch.Generator().manual_seed(1)
    host = [[torch.randn(300, 700, generator=chance), torch.randn(100_000, generator=chance)] for _ in nodes]
    before = [[tensor.clone() for tensor in mine] for mine in host]
    mixed = [host[1][0].cuda(), host[1][1]]
    with ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(2) as pool:
        name = "".join(filter(str.isalnum, f"{settings}{apply}"))[:60]
        averagers = [
            stack.enter_context(Averager(node, mine, name=name, **settings))
            for node, mine in zip(nodes, (host[0], mixed), strict=True)
        ]
        for _ in range(3):
            steps = [pool.submit(averager.step, timeout_s=20.0, apply=apply) for averager in averagers]
            results = [step.result(30.0) for step in steps]
            assert not any(result.failed for result in results), results
            assert results[0].digest == results[1].digest
            for one, other in zip(host[0], mixed, strict=True):
                close = (
                    torch.equal(one, other.cpu())
                    if apply == "replace"
                    else torch.allclose(one, other.cpu(), atol=1e-5)
                )
                assert close
        assert mixed[0].is_cuda
        assert torch.allclose(mixed[1], (before[0][1] + before[1][1]) / 2, atol=0.1)


def test_an_optimizer_trains_on_the_gpu(nodes: list[Node]) -> None:
    """Two peers on one GPU: equal parameters, a loss that falls, state canonical, a checkpoint that loads."""
    nets, optimizers, losses = [], [], [[], []]  # type: ignore[var-annotated]
    with ExitStack() as stack:
        for node in nodes:
            torch.manual_seed(0)
            nets.append(
                torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).cuda()
            )
            inner = torch.optim.AdamW(nets[-1].parameters(), lr=0.01)
            options: dict[str, Any] = {
                "target_batch_size": 64,
                "batch_size_per_step": 16,
                "codec": "float16",
                "state_sync_epochs": 4,
            }
            optimizers.append(
                stack.enter_context(Optimizer(inner, node=node, run="gpu", config=QUICK, **options))
            )

        def train(place: int) -> None:
            chance = torch.Generator().manual_seed(place)
            while optimizers[place].epoch < 10:
                x = torch.randn(16, 16, generator=chance).cuda()
                loss = (nets[place](x) - x.sum(1, keepdim=True).sin()).square().mean()
                optimizers[place].zero_grad()
                loss.backward()
                losses[place].append(float(loss.detach()))
                optimizers[place].step()

        together([functools.partial(train, place) for place in range(2)], 90.0)
        assert [optimizer.epoch for optimizer in optimizers] == [10, 10]
        for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            assert one.is_cuda
            assert torch.equal(one, other)
        assert sum(losses[0][-4:]) < sum(losses[0][:4])
        assert optimizers[0].state_digest() == optimizers[1].state_digest()
        optimizers[0].load_state_dict(optimizers[0].state_dict())
