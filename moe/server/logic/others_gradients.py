"""A check that the gradients which one other replica brings to a joint step can be of real passes.

Two replicas cannot tell which of them lies, and a median needs three. But gradients of the same expert on
passes of the same callers have similar norms: the mean gradient of one replica is longer than that of the
other by the noise of fewer samples, at most by the root of their ratio. A much longer one was invented.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import torch

# The same as for a contribution among three or more, which is shortened to this many medians.
LONGER_MAX = 16.0
_STEPS_REMEMBERED = 16  # of which this replica's own gradients are compared


class OwnGradients:
    """Norms of this replica's mean gradients in its last steps."""

    def __init__(self) -> None:
        self._norms: deque[tuple[float, float]] = deque(maxlen=_STEPS_REMEMBERED)  # norm, samples

    def note(self, norm: float, samples: float) -> None:
        """Record the norm of a mean gradient over this many samples."""
        if samples > 0 and math.isfinite(norm):
            self._norms.append((norm, samples))

    def may_be_real(self, norm: float, samples: float) -> bool:
        """Return whether a mean gradient over this many samples, of another replica, is at most LONGER_MAX
        times as long as this replica's longest one would be with as few samples. Without a gradient of its
        own a replica has nothing to compare with.
        """
        if samples <= 0 or not self._norms:
            return math.isfinite(norm)
        longest = max(own * math.sqrt(max(count / samples, 1.0)) for own, count in self._norms)
        return norm <= LONGER_MAX * longest  # false for NaN


def mean_norm(own: Mapping[int, torch.Tensor], samples: float) -> float:
    """Return the norm of a replica's mean gradient; `own` has the sums over its samples, by parameter."""
    return _norm(list(own.values())) / samples if samples > 0 else 0.0


def others_norm(
    averaged: Sequence[torch.Tensor], samples: float, own: Mapping[int, torch.Tensor], own_share: float
) -> float:
    """Return the norm of the sum of the others' gradients in an average over `samples` samples, to which this
    replica has contributed `own_share` times its sums `own`, by the place of a parameter in `averaged`.
    """
    rest = [
        torch.sub(one * samples, own[place].to(one.device), alpha=own_share)
        if place in own
        else one * samples
        for place, one in enumerate(averaged)
    ]
    return _norm(rest)


def _norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm([one.float() for one in tensors])) if tensors else 0.0
