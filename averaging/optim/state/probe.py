"""Find out which statistics an optimizer keeps before its first step has created them.

A second optimizer of the same class makes that step, with zero gradients, on copies of the parameters:
joining must not move weights, and a real step with zero gradients does (weight decay). Where the optimizer
allows it, the copies have shapes but no memory.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from swarm.core.errors import UsageError

# variants of the same step that need tensors with memory; the resulting shapes and types are the same in all
# of them
_PLAIN_STEP = {"fused": False, "foreach": False, "capturable": False}
# replaces a hyperparameter that is a tensor, perhaps on a device: valid as a learning rate and as a beta
_ANY_NUMBER = 0.5


def is_statistic(p: torch.Tensor, key: str, value: Any) -> bool:
    """Return whether `value` is a tensor of values, not a counter: torch keeps its step counters as tensors
    without dimensions.
    """
    return isinstance(value, torch.Tensor) and key != "step" and (value.dim() > 0 or value.shape == p.shape)


def probe_shapes(
    inner: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
) -> list[dict[str, Any]] | None:
    """Return per parameter the result of a first step: statistics on the meta device, without memory, and
    counters where the step needs them.

    Returns None for an optimizer that reads values, or always keeps a counter on its parameter's device: use
    `probe` for those.
    """
    try:
        probed = _step(inner, parameters, shapes_only=True)
    except UsageError:
        return None
    groups = {p: group for group in inner.param_groups for p in group["params"]}
    for p, statistics in zip(parameters, probed, strict=True):
        for key, value in statistics.items():
            if isinstance(value, torch.Tensor) and not is_statistic(p, key, value):
                if value.is_meta:
                    return None
                statistics[key] = _placed(groups[p], p, key, value)
    return probed


def probe(inner: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """Return per parameter the result of a first step, with values. This takes memory for the parameters,
    their gradients and statistics.

    Raises UsageError when such a step fails.
    """
    return _step(inner, parameters, shapes_only=False)


def _placed(group: dict[str, Any], p: torch.Tensor, key: str, counter: torch.Tensor) -> torch.Tensor:
    """Return a counter as torch's optimizers keep it: on its parameter's device in fused and capturable
    steps, and in float32 in fused ones.
    """
    if not (group.get("fused") or group.get("capturable")):
        return counter
    return counter.to(
        device=p.device, dtype=torch.float32 if group.get("fused") and key == "step" else counter.dtype
    )


def _step(
    inner: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], *, shapes_only: bool
) -> list[dict[str, Any]]:
    copies = {
        p: torch.empty_like(p, device="meta") if shapes_only else p.detach().clone() for p in parameters
    }
    for p, copy in copies.items():
        copy.requires_grad_(p.requires_grad).grad = torch.zeros_like(copy) if p.requires_grad else None
    second = type(inner).__new__(type(inner))
    # a scheduler replaces `step` on the instance
    second.__dict__ = {key: value for key, value in inner.__dict__.items() if key != "step"}
    second.__dict__ |= {
        key: OrderedDict()
        for key in inner.__dict__
        if key.startswith("_optimizer_") and key.endswith("_hooks")
    }
    second.param_groups = [
        {**(_plain_group(group) if shapes_only else group), "params": [copies[p] for p in group["params"]]}
        for group in inner.param_groups
    ]
    second.state = defaultdict(dict)
    try:
        second.step()
    except (RuntimeError, KeyError, TypeError, AttributeError, ValueError, AssertionError) as error:
        raise UsageError(
            f"cannot find out which statistics {type(inner).__name__} keeps: "
            f"a step with zero gradients failed ({error})"
        ) from error
    return [dict(second.state.get(copies[p], {})) for p in parameters]


def _plain_group(group: dict[str, Any]) -> dict[str, Any]:
    without_tensors = {key: _without_tensors(value) for key, value in group.items() if key != "params"}
    return without_tensors | {key: value for key, value in _PLAIN_STEP.items() if key in group}


def _without_tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _ANY_NUMBER
    return type(value)(_without_tensors(one) for one in value) if type(value) in (list, tuple) else value
