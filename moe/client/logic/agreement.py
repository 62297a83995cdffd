"""Agreement among several replicas of one expert, none of which is trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

Named = Mapping[str, torch.Tensor]


def largest_agreeing(states: Sequence[Named]) -> list[int]:
    """Return the places of the states that have the same names, shapes and dtypes; the largest such group,
    and of equal ones the first.
    """
    groups: dict[object, list[int]] = {}
    for place, state in enumerate(states):
        kind = tuple(sorted((name, one.dtype, tuple(one.shape)) for name, one in state.items()))
        groups.setdefault(str(kind), []).append(place)
    return max(groups.values(), key=len, default=[])


def median_of(states: Sequence[Named]) -> dict[str, torch.Tensor]:
    """Return the median of each element, so that one wrong state among three changes little. Of one or two
    states it is the first, and tensors of whole numbers are those of the first.
    """
    first = states[0]
    if len(states) < 3:
        return dict(first)
    return {
        name: torch.stack([state[name] for state in states]).median(dim=0).values
        if one.is_floating_point() and one.numel()
        else one
        for name, one in first.items()
    }


def distance(one: Named, other: Named) -> float:
    """Return the norm of the difference of the floating-point tensors, as a fraction of the norm of
    `other`.
    """
    difference = total = 0.0
    for name, tensor in other.items():
        if tensor.is_floating_point():
            reference = tensor.to(torch.float64)
            difference += float((one[name].to(torch.float64) - reference).square().sum())
            total += float(reference.square().sum())
    return (difference / total) ** 0.5 if total else float(difference > 0)
