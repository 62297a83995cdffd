"""Checks of the arguments of `swarm.Optimizer`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from averaging.optim.accumulate import names_of
from averaging.optim.config import OptimizerConfig
from averaging.optim.delegating import DelegatingOptimizer
from averaging.optim.modes import ModeSettings
from averaging.optim.modes.settings import Gradients, ModeName, settings_of
from averaging.optim.parameters import is_trained, parameters_of
from averaging.optim.progress.logic.reports import SAMPLES_MAX
from averaging.optim.state.encoding import EXACT, check_state_codec
from averaging.optim.state.schedule import Scheduler
from swarm.core.errors import UsageError

if TYPE_CHECKING:
    from swarm.node import Node


def check_arguments(
    inner: torch.optim.Optimizer,
    mode: ModeName | ModeSettings,
    batch_size_per_step: int | None,
    state_sync_epochs: int | None,
) -> ModeSettings:
    """Return the settings of a mode. Raise UsageError for wrong arguments of `swarm.Optimizer`."""
    if not isinstance(inner, torch.optim.Optimizer) or isinstance(inner, DelegatingOptimizer):
        raise UsageError(
            "the first argument is a torch optimizer such as torch.optim.AdamW(model.parameters()), "
            f"not {inner!r:.60}"
        )
    if batch_size_per_step is not None:
        check_samples(batch_size_per_step)
    if state_sync_epochs is not None and (not isinstance(state_sync_epochs, int) or state_sync_epochs < 0):
        raise UsageError(
            f"state_sync_epochs is a whole number of epochs, 0 for never, not {state_sync_epochs!r}"
        )
    settings = settings_of(mode)
    kind = type(inner).__name__
    if needed := _needed_arguments(inner):
        raise UsageError(
            f"{kind}.step needs {', '.join(needed)}: swarm.Optimizer calls step() without arguments, so pass "
            "an optimizer that works with gradients alone"
        )
    if isinstance(inner, torch.optim.SparseAdam) and isinstance(settings, Gradients):
        raise UsageError(
            "SparseAdam needs sparse gradients, and averaged gradients are dense: pass torch.optim.Adam, or "
            "a mode with local steps"
        )
    return settings


def check_node(node: Node) -> Node:
    """Return the node. Raise UsageError when it is something else."""
    if not hasattr(node, "network"):
        raise UsageError(f"node is a swarm.Node(…), not {node!r:.60}")
    return node


def check_config(config: OptimizerConfig | None) -> OptimizerConfig:
    """Return the settings, or the defaults for None. Raise UsageError when it is something else."""
    if config is not None and not isinstance(config, OptimizerConfig):
        raise UsageError(f"config is a swarm.OptimizerConfig(…), not {config!r:.60}")
    return config or OptimizerConfig()


def check_extras(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the extra tensors. Raise UsageError when one of them is no tensor."""
    extras = tuple(tensors)
    for place, one in enumerate(extras):
        if not isinstance(one, torch.Tensor):
            raise UsageError(f"extra tensor {place} is a {type(one).__name__}, not a torch.Tensor")
    return extras


def make_scheduler(
    make: Callable[[torch.optim.Optimizer], Scheduler] | None, inner: torch.optim.Optimizer
) -> Scheduler | None:
    """Return the scheduler that the caller's function makes, or None without a function. Raise UsageError
    when it cannot be stepped once an epoch by `step()`, or drives another optimizer.
    """
    if make is None:
        return None
    if not callable(make):
        raise UsageError(
            "scheduler is a function that makes one, such as lambda inner: StepLR(inner, 10), "
            f"not {make!r:.60}"
        )
    scheduler = make(inner)
    missing = [name for name in ("step", "state_dict", "load_state_dict") if not hasattr(scheduler, name)]
    if missing:
        raise UsageError(
            f"the function for the scheduler returned {scheduler!r:.60}, which has no {', '.join(missing)}"
        )
    kind = type(scheduler).__name__
    if needed := _needed_arguments(scheduler):
        raise UsageError(
            f"{kind}.step needs {', '.join(needed)}, which would differ from peer to peer: "
            "pass a scheduler that follows the number of epochs"
        )
    if getattr(scheduler, "optimizer", inner) is not inner:
        raise UsageError(
            f"the {kind} is of another optimizer: make it of the one that the function gets, "
            "as in scheduler=lambda inner: StepLR(inner, 10)"
        )
    return scheduler


def _needed_arguments(stepped: object) -> list[str]:
    """Return the names of the arguments that the `step` of an optimizer or a scheduler must have."""
    # of the class: torch's schedulers replace `step` on the optimizer by a function that seems to need `self`
    step: Any = getattr(type(stepped), "step", None)
    try:
        _, *parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # a function without a signature
        return []
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    kinds = (*named, inspect.Parameter.KEYWORD_ONLY)
    return [one.name for one in parameters if one.default is one.empty and one.kind in kinds]


class TrainedParameters:
    """The parameters that an optimizer trained when `swarm.Optimizer` was made: those that peers average."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        # by id; the references keep an id from being used again
        self._known = {id(p): p for p in parameters_of(inner) if is_trained(p)}

    def check(self) -> None:
        """Raise UsageError when another parameter has a gradient: the inner optimizer would step it with this
        peer's own gradient, so that peers would grow apart.
        """
        for group in self._inner.param_groups:  # no list of them: every step checks this
            for p in group["params"]:
                if p.grad is not None and id(p) not in self._known:
                    raise UsageError(
                        f"{names_of([p], self._inner)[0]} has a gradient, although it was frozen or not in "
                        "the optimizer when swarm.Optimizer was made: peers agreed on the parameters to "
                        "train. Set its .grad to None, or make a new swarm.Optimizer on all peers, with "
                        "another name of the run"
                    )


def check_samples(value: int | None) -> int:
    """Return a number of samples. Raise UsageError when it is none, or not given."""
    if value is None:
        raise UsageError(
            "say how many samples are behind the gradients: "
            "step(batch_size) or Optimizer(batch_size_per_step=…)"
        )
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= SAMPLES_MAX:
        raise UsageError(f"a number of samples is a positive whole number, not {value!r:.60}")
    return value


def check_peers(count: int) -> None:
    """Raise UsageError unless `count` is a positive number of peers."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UsageError(f"a number of peers is at least 1, not {count!r:.60}")


def check_load(timeout_s: float, codec: str, *, may_round: bool) -> None:
    """Raise UsageError for wrong arguments of a download of the state. `may_round`: a later round over the
    state removes the difference that a codec other than float32 makes.
    """
    if check_state_codec(codec) != EXACT and not may_round:
        raise UsageError(
            f"codec={codec!r} rounds what is loaded, and with state_sync_epochs=0 this peer would differ "
            "from the others forever: leave one of the two out"
        )
    if not 0 < timeout_s < float("inf"):
        raise UsageError(f"timeout_s must be a positive number of seconds, not {timeout_s!r}")
