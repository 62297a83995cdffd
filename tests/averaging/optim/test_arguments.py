"""Wrong arguments of `swarm.Optimizer` are refused when it is made, and not in the middle of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from averaging.optim.arguments import (
    TrainedParameters,
    check_arguments,
    check_config,
    check_extras,
    check_node,
    make_scheduler,
)
from averaging.optim.epoch_averager import AveragingOptions, check_extra_tensors
from averaging.optim.modes.settings import ModeName
from averaging.optim.state.training_state import TrainingState
from swarm.core.errors import UsageError

SCHEDULERS: dict[str, tuple[Any, str]] = {
    "a scheduler": (torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], 0.1), 1), "a function"),
    "one without a result": (lambda inner: None, "which has no step, state_dict, load_state_dict"),
    "one whose step needs a loss": (torch.optim.lr_scheduler.ReduceLROnPlateau, "step needs metrics"),
    "one of another optimizer": (
        lambda inner: torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], 0.1), 1),
        "of another optimizer",
    ),
}


def net() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_that_cannot_follow_the_epochs_is_refused(name: str) -> None:
    make, complaint = SCHEDULERS[name]
    with pytest.raises(UsageError, match=complaint):
        make_scheduler(make, sgd(net()))


def test_schedulers_of_torch_that_follow_the_epochs_are_accepted() -> None:
    schedulers = torch.optim.lr_scheduler
    for make in (
        lambda inner: schedulers.StepLR(inner, 2),
        lambda inner: schedulers.OneCycleLR(inner, 0.1, total_steps=10),
        lambda inner: schedulers.SequentialLR(
            inner, [schedulers.ConstantLR(inner), schedulers.ExponentialLR(inner, 0.9)], [3]
        ),
        lambda inner: schedulers.ChainedScheduler([schedulers.ConstantLR(inner)]),
    ):
        assert make_scheduler(make, sgd(net())) is not None
    assert make_scheduler(None, sgd(net())) is None


@pytest.mark.parametrize("mode", ["gradients", "diloco"])
def test_optimizer_whose_step_needs_a_closure_is_refused(mode: ModeName) -> None:
    with pytest.raises(UsageError, match=r"LBFGS\.step needs closure"):
        check_arguments(torch.optim.LBFGS(net().parameters()), mode, None, None)


def test_optimizer_that_had_a_scheduler_before_is_accepted() -> None:
    """A scheduler replaces `step` on the optimizer, which is used a second time, as after a reconnection."""
    inner = torch.optim.AdamW(net().parameters())
    for _ in range(2):
        assert check_arguments(inner, "gradients", None, None).name == "gradients"
        assert make_scheduler(lambda one: torch.optim.lr_scheduler.StepLR(one, 2), inner) is not None


def test_optimizer_that_needs_sparse_gradients_is_refused_where_gradients_are_averaged() -> None:
    inner = torch.optim.SparseAdam(net().parameters())
    with pytest.raises(UsageError, match="averaged gradients are dense"):
        check_arguments(inner, "gradients", None, None)
    assert check_arguments(inner, "local", None, None).name == "local"


@pytest.mark.parametrize(
    "call",
    [
        lambda: check_config({"round_timeout_s": 3.0}),  # type: ignore[arg-type]
        lambda: check_extras([1, 2]),  # type: ignore[list-item]
        lambda: check_node(None),  # type: ignore[arg-type]
        lambda: AveragingOptions(codec="float16", audit=5.0),
    ],
    ids=["config", "extra tensors", "node", "audit"],
)
def test_value_of_a_wrong_kind_is_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(UsageError):
        call()


def test_extra_tensors_that_share_memory_are_refused_where_the_state_is_averaged() -> None:
    model = net()
    state = TrainingState(sgd(model), [next(model.parameters())])
    with pytest.raises(UsageError, match="share memory"):
        check_extra_tensors(state, are_averaged=True)
    check_extra_tensors(state, are_averaged=False)


@pytest.mark.parametrize("way", ["unfrozen", "added"])
def test_gradient_of_a_parameter_that_peers_do_not_average_is_refused(way: str) -> None:
    """The inner optimizer would step it with this peer's own gradient, and peers would grow apart."""
    model = net()
    model[1].requires_grad_(way != "unfrozen")
    inner = sgd(model if way == "unfrozen" else model[0])
    trained = TrainedParameters(inner)
    model(torch.ones(4, 2)).sum().backward()
    trained.check()
    if way == "unfrozen":
        model[1].requires_grad_(True)
    else:
        inner.add_param_group({"params": list(model[1].parameters())})
    model(torch.ones(4, 2)).sum().backward()
    with pytest.raises(UsageError, match="parameter 2 has a gradient, although it was frozen"):
        trained.check()
    model[1].zero_grad()
    trained.check()
