"""PowerSGD asked for by its users: averagers and optimizers on real sockets."""

from __future__ import annotations

import concurrent.futures
import functools
from contextlib import ExitStack

import pytest
import torch

from averaging.averager import Averager
from averaging.optim.optimizer import Optimizer, OptimizerConfig
from averaging.reduction.lowrank import PowerSgd
from swarm.core.errors import UsageError
from swarm.node import Node, NodeConfig
from tests.wire.trainers import together

LOCAL = NodeConfig(preset="local")
QUICK = OptimizerConfig(round_timeout_s=30.0)


def test_averagers_agree_before_they_meet_and_hold_the_same_afterwards() -> None:
    with (
        Node(listen="127.0.0.1:0", config=LOCAL) as first,
        Node(bootstrap=first.addresses, listen="127.0.0.1:0", config=LOCAL) as second,
        ExitStack() as stack,
    ):
        generator = torch.Generator().manual_seed(1)
        tensors = [
            [torch.randn(200, 300, generator=generator), torch.randn(50, generator=generator)]
            for _ in range(2)
        ]
        strategy = PowerSgd(rank=4)
        averagers = [
            stack.enter_context(Averager(node, mine, name="factors", strategy=strategy))
            for node, mine in zip((first, second), tensors, strict=True)
        ]
        other = stack.enter_context(Averager(second, tensors[1], name="factors2", strategy=PowerSgd(rank=5)))
        assert other.schema.digest != averagers[0].schema.digest
        assert "powersgd 4" in averagers[0].schema.text
        mean = (tensors[0][1] + tensors[1][1]) / 2
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for nth in range(2):
                steps = [
                    pool.submit(averager.step, timeout_s=20.0, gather={"me": place})
                    for place, averager in enumerate(averagers)
                ]
                results = [step.result(30.0) for step in steps]
                assert not any(result.failed for result in results), results
                assert torch.equal(tensors[0][0], tensors[1][0])
                assert [dict(result.gathered) for result in results] == [
                    {first.peer_id: {"me": 0}, second.peer_id: {"me": 1}}
                ] * 2
                assert results[0].digest == results[1].digest
                if not nth:
                    assert torch.allclose(tensors[0][1], mean, atol=2e-3)
                    assert int(torch.linalg.matrix_rank(tensors[0][0], rtol=1e-4)) == 4
            assert 0 < sum(result.bytes_sent for result in results) < 2 * 2 * (4 * 500 + 50) * 1.2
        for wrong in (
            {"codec": "int8"},
            {"min_fraction": 0.5},
            {"strategy": "powersgd:4"},
            {"codec": "powersgd:4"},
        ):
            settings = {"strategy": strategy, **wrong}
            with pytest.raises(UsageError):
                Averager(first, tensors[0], name="wrong", **settings)  # type: ignore[arg-type]
        with Averager(first, [torch.zeros(3)], name="partial", min_fraction=0.5) as partial:
            assert partial.min_fraction == 0.5


@pytest.mark.parametrize("codec", ["adaptive", "float32"])
def test_optimizers_train_by_factors(codec: str) -> None:
    """The same parameters on both, a loss that falls, and residuals that are saved and come back."""
    target = torch.randn(40, 3, generator=torch.Generator().manual_seed(9))

    def loss_on(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (net(x)[:, :3] - x @ target).square().mean()

    with (
        Node(listen="127.0.0.1:0", config=LOCAL) as first,
        Node(bootstrap=first.addresses, listen="127.0.0.1:0", config=LOCAL) as second,
        ExitStack() as stack,
    ):
        nets, optimizers = [], []
        for node in (first, second):
            torch.manual_seed(0)
            nets.append(torch.nn.Linear(40, 30))
            optimizers.append(
                stack.enter_context(
                    Optimizer(
                        torch.optim.SGD(nets[-1].parameters(), lr=0.1),
                        node=node,
                        run=f"factors {codec}",
                        target_batch_size=32,
                        batch_size_per_step=8,
                        codec=codec,
                        strategy=PowerSgd(rank=1),
                        state_sync_epochs=0,
                        config=QUICK,
                    )
                )
            )

        def train(place: int) -> None:
            chance = torch.Generator().manual_seed(place)
            while optimizers[place].epoch < 12:
                x = torch.randn(8, 40, generator=chance)
                loss = loss_on(nets[place], x)
                optimizers[place].zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizers[place].step()

        held_out = torch.randn(256, 40, generator=torch.Generator().manual_seed(5))
        before = loss_on(nets[0], held_out).item()
        together([functools.partial(train, place) for place in range(2)], 120.0)
        assert [optimizer.epoch for optimizer in optimizers] == [12, 12]
        assert torch.equal(nets[0].weight, nets[1].weight)
        assert loss_on(nets[0], held_out).item() < 0.5 * before
        saved = optimizers[0].state_dict()
        feedback = saved["swarm"]["feedback"]
        assert feedback["powersgd"] == [1, 2.0]
        assert float(feedback["held"][0].norm()) > 0
        optimizers[0].load_state_dict(saved)
        with pytest.raises(UsageError, match="with PowerSGD the codec"):
            Optimizer(
                torch.optim.SGD(nets[0].parameters()),
                node=first,
                run="x",
                target_batch_size=1,
                codec="int8",
                strategy=PowerSgd(),
            )
