"""Gradients with NaN or infinity in them: found at once on the host, and on a device without waiting for it.

On a device the check leaves a flag there, by which the same stream can leave out what the gradients would
have done, and a copy of which reaches the host some time later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from averaging.optim.memory import rows_of
from averaging.optim.offload import Arrival, Links

_NAMED_MAX = 3  # parameters in a message
# copied at once where a flag decides: bounds the memory for it, unless one row is longer
_MASKED_ELEMENTS = 1 << 23

NO_GRADIENT = "no parameter has a gradient"


@dataclass(frozen=True, slots=True)
class Refused:
    """Samples that were taken and turned out to be of no use, and why."""

    samples: int = 0
    reason: str = ""


class DeviceCheck:
    """Whether the gradients of one micro-step are finite. Known on their devices at once, on the host when
    `ready` says so.
    """

    def __init__(self, gradients: Mapping[int, torch.Tensor], links: Links) -> None:
        """`gradients`: by the parameter's place; dense, on devices that have links. They are read on the
        current streams.
        """
        by_device: dict[torch.device, list[int]] = {}
        for place, gradient in gradients.items():
            by_device.setdefault(gradient.device, []).append(place)
        # places; flags there, and here; their copy
        self._read: list[tuple[list[int], torch.Tensor, torch.Tensor, Arrival]] = []
        verdicts: dict[torch.device, torch.Tensor] = {}
        for device, places in by_device.items():
            filled = [place for place in places if gradients[place].numel()]
            if not filled:
                verdicts[device] = torch.ones((), dtype=torch.bool, device=device)
                continue
            # the largest magnitude is finite exactly when all elements are: NaN passes through, and no sum
            # can run over
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
        """Return whether all gradients on all devices are finite: bool without dimensions, on this device,
        where gradients were.
        """
        return self._finite[device]

    def ready(self) -> bool:
        """Return whether `bad_places` would not wait."""
        return all(arrival.ready() for *_, arrival in self._read)

    def bad_places(self) -> list[int]:
        """Wait for the devices, and return the places of the gradients that are not finite."""
        bad: list[int] = []
        for places, _, here, arrival in self._read:
            arrival.wait()
            bad += [place for place, finite in zip(places, here.tolist(), strict=True) if not finite]
        return sorted(bad)


@dataclass(frozen=True, slots=True)
class _Checked:
    samples: int
    places: tuple[int, ...]  # of the parameters that had a gradient
    check: DeviceCheck


class LateChecks:
    """Micro-steps that were taken before anybody knew whether their gradients were finite, oldest first."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: what messages call the parameters."""
        self._names = names
        self._open: deque[_Checked] = deque()
        self._refused: list[Refused] = []

    def __bool__(self) -> bool:
        return bool(self._open)

    @property
    def places(self) -> set[int]:
        """The parameters that had a gradient in a micro-step of which nothing is known yet."""
        return {place for one in self._open for place in one.places}

    def took(self, samples: int, places: Sequence[int], check: DeviceCheck) -> None:
        """Remember a micro-step that was taken."""
        self._open.append(_Checked(samples, tuple(places), check))

    def known(self, *, wait: bool) -> Iterator[tuple[int, tuple[int, ...], bool]]:
        """Yield each micro-step of which the host knows by now: samples, places, and whether it was useful.
        `wait`: yield all.
        """
        while self._open and (wait or self._open[0].check.ready()):
            one = self._open.popleft()
            bad = one.check.bad_places()
            if bad:
                self._refused.append(Refused(one.samples, not_finite([self._names[place] for place in bad])))
            yield one.samples, one.places, not bad

    def refused(self) -> Refused:
        """Return what was found to be of no use since the last call, all together."""
        found, self._refused = self._refused, []
        return Refused(
            sum(one.samples for one in found), "; ".join(dict.fromkeys(one.reason for one in found))
        )


def add_where_(
    finite: torch.Tensor, buffers: Sequence[torch.Tensor], values: Sequence[torch.Tensor], factor: float
) -> None:
    """buffers += factor · values where `finite` (bool without dimensions, on their device) is true, else
    nothing. The host does not wait.

    NaN times zero is NaN: values are replaced by zeros, in a copy of a bounded size.
    """
    targets: list[torch.Tensor] = []
    chosen: list[torch.Tensor] = []
    held = 0
    for buffer, value in zip(buffers, values, strict=True):
        for target, part in zip(
            rows_of(buffer, _MASKED_ELEMENTS), rows_of(value, _MASKED_ELEMENTS), strict=True
        ):
            if targets and held + part.numel() > _MASKED_ELEMENTS:
                torch._foreach_add_(targets, chosen, alpha=factor)
                targets, chosen, held = [], [], 0
            targets.append(target)
            chosen.append(torch.where(finite, part, 0.0))
            held += part.numel()
    if targets:
        torch._foreach_add_(targets, chosen, alpha=factor)


def flaw_of_gradients(parameters: Sequence[torch.Tensor], names: Sequence[str] = ()) -> str | None:
    """Why the gradients in `.grad` are of no use; None when they are. `names`: what messages call the
    parameters.
    """
    gradients = [
        p.grad.coalesce().values() if p.grad is not None and p.grad.is_sparse else p.grad for p in parameters
    ]
    there = [g for g in gradients if g is not None]
    if not there:
        return NO_GRADIENT
    if all_finite(there):
        return None
    names = names or numbered(len(parameters))
    return not_finite(
        [
            name
            for name, g in zip(names, gradients, strict=True)
            if g is not None and not bool(g.isfinite().all())
        ]
    )


def numbered(count: int) -> list[str]:
    """Return what messages call parameters without names."""
    return [f"parameter {place}" for place in range(count)]


def not_finite(names: Sequence[str]) -> str:
    """Return the message about these parameters' gradients."""
    return f"non-finite gradients: {', '.join([*names[:_NAMED_MAX], *['and others'] * (len(names) > _NAMED_MAX)])}"


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """A sum is finite only if all terms are: one fast pass, and a second look when it is not, since sums of
    large values run over, too.

    Waits for each device once, or, after a suspicious sum, once for each tensor.
    """
    sums: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        sums.setdefault((tensor.device, wide), []).append(tensor.detach().sum(dtype=wide))
    if all(bool(torch.stack(values).sum().isfinite()) for values in sums.values()):
        return True
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
