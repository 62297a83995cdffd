"""A check whether the gradients that the only other replica brings to a joint step can come from real passes.

With two replicas, neither can prove which one lies, and a median needs three. But gradients of the same
expert on passes of the same callers have similar norms. Noise makes the mean gradient over fewer samples
longer, by at most the square root of the ratio of samples. A much longer one is invented.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import torch

# The same as with three or more contributors, where a contribution is shortened to this many medians.
LONGER_MAX = 16.0
_STEPS_REMEMBERED = 16  # number of steps whose own gradients are kept for the comparison


class OwnGradients:
    """Norms of this replica's mean gradients in its last steps."""

    def __init__(self) -> None:
        # (norm, samples) of each step
        self._norms: deque[tuple[float, float]] = deque(maxlen=_STEPS_REMEMBERED)

    def note(self, norm: float, samples: float) -> None:
        """Record the norm of a mean gradient over this many samples."""
        if samples > 0 and math.isfinite(norm):
            self._norms.append((norm, samples))

    def may_be_real(self, norm: float, samples: float) -> bool:
        """Return whether a mean gradient over this many samples, of another replica, is at most LONGER_MAX
        times as long as this replica's longest one would be over as few samples. Return True while this
        replica has no gradient of its own to compare with.
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
