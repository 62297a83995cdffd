"""The inner optimizer and its schedule follow the specification."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from averaging.optim.muon import MuonWithAdamW
from swarm.core.errors import UsageError
from swarm.run.inner_optimizer import build_optimizer, rate_factor, schedule_factory
from swarm.run.specification import OptimizerChoice, Schedule


@pytest.mark.parametrize(
    ("name", "kind"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)]
)
def test_each_name_builds_its_optimizer_and_decays_matrices_only(name: str, kind: type) -> None:
    model = torch.nn.Linear(3, 2)
    choice = OptimizerChoice(name=name, learning_rate=0.5, weight_decay=0.1)  # type: ignore[arg-type]
    optimizer = build_optimizer(model, choice)
    assert type(optimizer) is kind
    decays = {
        id(parameter): group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert decays == {id(model.weight): 0.1, id(model.bias): 0.0}
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}


def test_muon_has_the_hidden_matrices_and_adafactor_all() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    muon = build_optimizer(model, OptimizerChoice(name="muon", learning_rate=0.5, momentum=0.95))
    assert isinstance(muon, MuonWithAdamW)
    by_muon = [id(p) for group in muon.param_groups if group["muon"] for p in group["params"]]
    assert by_muon == [id(model[0].weight)]
    adafactor = build_optimizer(model, OptimizerChoice(name="adafactor"))
    assert type(adafactor) is torch.optim.Adafactor


class TaskWithAnOptimizer:
    """A task with an optimizer of its own, named "lion"."""

    def build_optimizer(
        self, name: str, model: torch.nn.Module, choice: OptimizerChoice
    ) -> torch.optim.Optimizer:
        assert name == "lion"
        return torch.optim.Rprop(model.parameters(), lr=choice.learning_rate, **choice.settings)


def test_an_optimizer_of_the_task_is_built_by_its_name_with_its_settings() -> None:
    model = torch.nn.Linear(3, 2)
    choice = OptimizerChoice(
        name="task:lion", learning_rate=0.5, settings={"etas": [0.4, 1.1]}, clip_norm=1.0
    )
    optimizer = build_optimizer(model, choice, TaskWithAnOptimizer())
    assert type(optimizer) is torch.optim.Rprop
    assert optimizer.defaults["etas"] == [0.4, 1.1]
    with pytest.raises(UsageError, match="its task provides none"):
        build_optimizer(model, choice, None)


def test_an_optimizer_of_the_task_takes_a_closure_by_its_name() -> None:
    optimizer = build_optimizer(
        torch.nn.Linear(3, 2), OptimizerChoice(name="task:lion"), TaskWithAnOptimizer()
    )
    assert optimizer.step(closure=lambda: 0.5) == 0.5


@pytest.mark.parametrize("name", ["lion", "task:", "task:../x", "task:A", "module.Class"])
def test_a_specification_names_no_other_optimizers(name: str) -> None:
    with pytest.raises(ValidationError):
        OptimizerChoice(name=name)


def test_warm_up_rises_to_one_and_the_cosine_falls_to_its_end() -> None:
    choice = Schedule(name="cosine", warmup_epochs=4, total_epochs=104, final=0.1)
    factors = [rate_factor(choice, epoch) for epoch in range(200)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[54] == pytest.approx(0.55)
    assert factors[104:] == pytest.approx([0.1] * 96)
    assert factors[4:] == sorted(factors[4:], reverse=True)


def test_a_constant_rate_does_not_change() -> None:
    assert [rate_factor(Schedule(), epoch) for epoch in (0, 1, 10_000)] == [1.0, 1.0, 1.0]


def test_the_scheduler_is_a_torch_scheduler_with_a_state() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler = schedule_factory(Schedule(warmup_epochs=1))(optimizer)
    assert optimizer.param_groups[0]["lr"] == 1.0
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 2.0
    assert scheduler.state_dict()["last_epoch"] == 1


def test_long_gradients_are_clipped_before_the_step_and_short_ones_are_not() -> None:
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = build_optimizer(
        model, OptimizerChoice(name="sgd", learning_rate=1.0, momentum=0.0, clip_norm=1.0)
    )
    for length, moved in ((10.0, 1.0), (0.25, 0.25)):
        before = model.weight.detach().clone()
        model.weight.grad = torch.full((1, 4), length / 2)
        optimizer.step()
        assert float((model.weight.detach() - before).norm()) == pytest.approx(moved)
