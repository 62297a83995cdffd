"""Build the inner optimizer and its learning-rate schedule from a specification.

Every member builds the same optimizer, so that their states are compatible.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from averaging.optim.muon import MuonWithAdamW
from swarm.core.errors import UsageError
from swarm.run.specification import OptimizerChoice, Schedule
from swarm.run.task import Task
from swarm.run.task_errors import explained_of


def build_optimizer(
    model: torch.nn.Module, choice: OptimizerChoice, task: Task | None = None
) -> torch.optim.Optimizer:
    """Return the named optimizer for all trainable parameters of the model. A name that begins with "task:"
    is an optimizer of the run's task. Raise UsageError if the task has no such optimizer.

    Weight decay applies to matrices and not to vectors (norms, biases).
    """
    optimizer = _built(model, choice, task)
    if choice.clip_norm is not None:
        _clip(optimizer, choice.clip_norm)
    return optimizer


def _built(model: torch.nn.Module, choice: OptimizerChoice, task: Task | None) -> torch.optim.Optimizer:
    if choice.own_name is not None:
        return _of_task(model, choice, choice.own_name, task)
    if choice.name == "muon":
        return MuonWithAdamW(
            model,
            lr=choice.learning_rate,
            weight_decay=choice.weight_decay,
            momentum=choice.momentum,
            betas=choice.betas,
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() >= 2]
    vectors = [parameter for parameter in trained if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": choice.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if choice.name == "sgd":
        return torch.optim.SGD(groups, lr=choice.learning_rate, momentum=choice.momentum)
    if choice.name == "adafactor":
        return torch.optim.Adafactor(groups, lr=choice.learning_rate)
    kind = torch.optim.AdamW if choice.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=choice.learning_rate, betas=choice.betas)


def _of_task(
    model: torch.nn.Module, choice: OptimizerChoice, name: str, task: Task | None
) -> torch.optim.Optimizer:
    """Return the optimizer `name` that a task builds with `build_optimizer(name, model, choice)`."""
    build = getattr(task, "build_optimizer", None)
    if build is None:
        raise UsageError(
            f"the run's optimizer is {choice.name!r}, and its task provides none: it has no method "
            "build_optimizer"
        )
    optimizer = build(name, model, choice)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"the task's optimizer {name!r} is not a torch optimizer but {optimizer!r:.60}")

    def step(stepping: torch.optim.Optimizer, *arguments: Any, **options: Any) -> Any:
        with explained_of(task, f"failed in a step of its optimizer {name!r}"):
            return type(stepping).step(stepping, *arguments, **options)

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # schedulers ask for a method
    return optimizer


def _clip(optimizer: torch.optim.Optimizer, norm: float) -> None:
    """Clip the gradient before each step. It is the swarm's average and the same on all members, so their
    parameters stay equal.
    """

    def before_step(stepping: torch.optim.Optimizer, arguments: object, options: object) -> None:
        torch.nn.utils.clip_grad_norm_(
            [parameter for group in stepping.param_groups for parameter in group["params"]], norm
        )

    optimizer.register_step_pre_hook(before_step)


def schedule_factory(choice: Schedule) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """Return a factory of the scheduler that `swarm.Optimizer` steps once per epoch."""
    return lambda optimizer: LambdaLR(optimizer, lambda epoch: rate_factor(choice, epoch))


def rate_factor(choice: Schedule, epoch: int) -> float:
    """Return the factor of the learning rate in an epoch. The first epoch is 0."""
    if epoch < choice.warmup_epochs:
        return (epoch + 1) / (choice.warmup_epochs + 1)
    if choice.name == "constant" or choice.total_epochs is None:
        return 1.0
    done = min(1.0, (epoch - choice.warmup_epochs) / max(1, choice.total_epochs - choice.warmup_epochs))
    return choice.final + (1 - choice.final) * 0.5 * (1 + math.cos(math.pi * done))
