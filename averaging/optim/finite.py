"""Detection of gradients with NaN or infinity: at once on the host, and without waiting on a device.

On a device the check leaves a flag in device memory. Work on the same stream uses it to leave out the
effect of the gradients, and a copy of it reaches the host later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from averaging.optim.memory import rows_of
from averaging.optim.offload import OffloadLinks
from swarm.core.copies import Arrival

_NAMED_MAX = 3  # parameters named in a message
# copied at a time where a flag decides: bounds the memory for it, unless one row is longer
MASKED_ELEMENTS = 1 << 23

NO_GRADIENT = "no parameter has a gradient"


@dataclass(frozen=True, slots=True)
class RejectedSamples:
    """Samples that were accepted first and found not finite later, with the reason."""

    samples: int = 0
    reason: str = ""


class DeviceCheck:
    """A check whether the gradients of one micro-step are finite. The result is on the devices at once, and
    on the host when `ready` returns True.
    """

    def __init__(self, gradients: Mapping[int, torch.Tensor], links: OffloadLinks) -> None:
        """Start the check of `gradients`: dense tensors by the parameter's index, on devices that have
        links. They are read on the current streams.
        """
        by_device: dict[torch.device, list[int]] = {}
        for place, gradient in gradients.items():
            by_device.setdefault(gradient.device, []).append(place)
        # indices, flags on the device, their copy on the host, and its arrival
        self._read: list[tuple[list[int], torch.Tensor, torch.Tensor, Arrival]] = []
        verdicts: dict[torch.device, torch.Tensor] = {}
        for device, places in by_device.items():
            filled = [place for place in places if gradients[place].numel()]
            if not filled:
                verdicts[device] = torch.ones((), dtype=torch.bool, device=device)
                continue
            # the largest magnitude is finite exactly when all elements are: NaN propagates, and unlike a sum
            # it cannot overflow
            largest = torch._foreach_norm([gradients[place].detach() for place in filled], math.inf)
            mixed = len({one.dtype for one in largest}) > 1
            flags = torch.stack([one.to(torch.float64) if mixed else one for one in largest]).isfinite()
            verdicts[device] = flags.all()
            link = links.of(device)
            here = link.host_memory(len(filled), torch.bool)
            self._read.append((filled, flags, here, link.fetch([(flags, here)])))
        self._finite = {
            device: torch.stack([one.to(device, non_blocking=True) for one in verdicts.values()]).all()
            if len(verdicts) > 1
            else own
            for device, own in verdicts.items()
        }

    def finite(self, device: torch.device) -> torch.Tensor:
        """Return whether all gradients on all devices are finite, as a bool tensor without dimensions on
        `device`. `device` must be one that held gradients.
        """
        return self._finite[device]

    def ready(self) -> bool:
        """Return whether `bad_places` would return without waiting."""
        return all(arrival.ready() for *_, arrival in self._read)

    def bad_places(self) -> list[int]:
        """Wait for the devices, and return the indices of the gradients that are not finite."""
        bad: list[int] = []
        for places, _, here, arrival in self._read:
            arrival.wait()
            bad += [place for place, finite in zip(places, here.tolist(), strict=True) if not finite]
        return sorted(bad)


@dataclass(frozen=True, slots=True)
class _Checked:
    samples: int
    places: tuple[int, ...]  # indices of the parameters that had a gradient
    check: DeviceCheck


class LateChecks:
    """Micro-steps that were accepted before their checks reached the host, oldest first."""

    def __init__(self, names: Sequence[str]) -> None:
        """Store the parameters' `names` for messages."""
        self._names = names
        self._open: deque[_Checked] = deque()
        self._refused: list[RejectedSamples] = []

    def __bool__(self) -> bool:
        return bool(self._open)

    @property
    def places(self) -> set[int]:
        """Return the indices of the parameters that had a gradient in a micro-step whose check is pending."""
        return {place for one in self._open for place in one.places}

    def add(self, samples: int, places: Sequence[int], check: DeviceCheck) -> None:
        """Add a micro-step whose check is pending."""
        self._open.append(_Checked(samples, tuple(places), check))

    def resolved(self, *, wait: bool) -> Iterator[tuple[int, tuple[int, ...], bool]]:
        """Yield each micro-step whose check has reached the host: samples, parameter indices, and whether
        its gradients were finite. `wait`: yield all, waiting for the device.
        """
        while self._open and (wait or self._open[0].check.ready()):
            one = self._open.popleft()
            bad = one.check.bad_places()
            if bad:
                self._refused.append(
                    RejectedSamples(one.samples, not_finite([self._names[place] for place in bad]))
                )
            yield one.samples, one.places, not bad

    def refused(self) -> RejectedSamples:
        """Return the samples found not finite since the last call, all together."""
        found, self._refused = self._refused, []
        return RejectedSamples(
            sum(one.samples for one in found), "; ".join(dict.fromkeys(one.reason for one in found))
        )


def add_where_(
    finite: torch.Tensor, buffers: Sequence[torch.Tensor], values: Sequence[torch.Tensor], factor: float
) -> None:
    """Compute buffers += factor · values where `finite` is true, else leave the buffers unchanged. The host
    does not wait.

    `finite` is a bool tensor without dimensions on the device of the buffers. NaN times zero is NaN, so
    values are replaced by zeros, in a copy of a bounded size.
    """
    targets: list[torch.Tensor] = []
    chosen: list[torch.Tensor] = []
    held = 0
    for buffer, value in zip(buffers, values, strict=True):
        for target, part in zip(
            rows_of(buffer, MASKED_ELEMENTS), rows_of(value, MASKED_ELEMENTS), strict=True
        ):
            if targets and held + part.numel() > MASKED_ELEMENTS:
                torch._foreach_add_(targets, chosen, alpha=factor)
                targets, chosen, held = [], [], 0
            targets.append(target)
            chosen.append(torch.where(finite, part, 0.0))
            held += part.numel()
    if targets:
        torch._foreach_add_(targets, chosen, alpha=factor)


def defect_of_gradients(parameters: Sequence[torch.Tensor], names: Sequence[str] = ()) -> str | None:
    """Return why the gradients in `.grad` cannot be used, or None when they can. `names` are the
    parameters' names for messages.
    """
    gradients = [
        p.grad.coalesce().values() if p.grad is not None and p.grad.is_sparse else p.grad for p in parameters
    ]
    there = [g for g in gradients if g is not None]
    if not there:
        return NO_GRADIENT
    if all_finite(there):
        return None
    names = names or placeholder_names(len(parameters))
    return not_finite(
        [
            name
            for name, g in zip(names, gradients, strict=True)
            if g is not None and not bool(g.isfinite().all())
        ]
    )


def placeholder_names(count: int) -> list[str]:
    """Return names for parameters that have none."""
    return [f"parameter {place}" for place in range(count)]


def not_finite(names: Sequence[str]) -> str:
    """Return the message about non-finite gradients of these parameters."""
    named = [*names[:_NAMED_MAX], *["and others"] * (len(names) > _NAMED_MAX)]
    return f"non-finite gradients: {', '.join(named)}"


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all elements of all tensors are finite.

    A finite sum implies finite terms, so one fast pass over sums suffices in most cases; a second pass
    follows when a sum is not finite, since large finite values can overflow. Waits for each device once,
    and once for each tensor in the second pass.
    """
    sums: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        sums.setdefault((tensor.device, wide), []).append(tensor.detach().sum(dtype=wide))
    if all(bool(torch.stack(values).sum().isfinite()) for values in sums.values()):
        return True
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
