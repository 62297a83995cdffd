"""Accumulation of gradients over many small batches until the swarm's batch is full (DeDLOC, arXiv
2106.10207, section 3.2).

`zero_grad` may clear `.grad` at any time: the accumulated sums are kept here. All arithmetic is in place,
in `torch._foreach` calls.

On the host, gradients that are not finite are refused at once. On CUDA the host does not wait for that
check: the sums change only where a flag on the device allows it, and the host reads the flag later
(`averaging.optim.finite`). With offloaded sums, gradients are copied to pinned memory, and the host adds
them at the next micro-step while the device computes that one. The copies hold up the trainer's stream,
because `.grad` may be overwritten as soon as `add` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from averaging.optim.finite import (
    NO_GRADIENT,
    DeviceCheck,
    LateChecks,
    RejectedSamples,
    add_where_,
    all_finite,
    defect_of_gradients,
    placeholder_names,
)
from averaging.optim.memory import Fragment, gradient_for, zeros_beside
from averaging.optim.offload import HostLink, HostStaging, OffloadLinks, link_of
from averaging.optim.parameters import parameters_of
from swarm.core.errors import UsageError


class GradientAccumulator:
    """Sum of samples · gradient for each parameter, in float32, on the parameters' devices or on the host.

    Between `average_()` and the next `add` the buffers hold the mean over this peer's samples instead of
    the sum: peers average these means, weighted by samples. Turning means back into sums costs one rounding
    and happens only after a failed round.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        *,
        names: Sequence[str] = (),
        storage: torch.device | None = None,
        make_link: Callable[[torch.device], HostLink | None] = link_of,
    ) -> None:
        """Allocate the buffers.

        `parameters` are the floating-point leaf tensors to be trained, of any shape, dtype and device,
        without repetition. `names` are used in messages. `storage` is the device of the sums; None puts each
        next to its parameter. `make_link` returns the link to a device; tests replace it. Raises UsageError
        when there are no parameters.
        """
        if not parameters:
            raise UsageError(
                "there is nothing to train: no parameter of the optimizer is a floating-point tensor that "
                "requires a gradient"
            )
        self.parameters = tuple(parameters)
        self.names = tuple(names) or tuple(placeholder_names(len(self.parameters)))
        self.buffers = [zeros_beside(p, storage) for p in self.parameters]
        self.samples = 0  # includes micro-steps that may still be refused
        self._touched = [False] * len(self.parameters)
        self._is_mean = False
        self._is_zero = True  # all zeros, and not handed out to be written into
        self._links = OffloadLinks(self.parameters, make_link)
        self._late_checks = LateChecks(self.names)
        self._staging = (
            HostStaging(self.parameters, self._links) if self._links and storage is not None else None
        )

    @property
    def touched(self) -> list[bool]:
        """Return, for each parameter, whether it had a gradient since the reset. The inner optimizer steps
        no other parameter, weight decay included.
        """
        late = self._late_checks.places
        return [touched or place in late for place, touched in enumerate(self._touched)]

    def add(self, samples: int) -> str | None:
        """Add every parameter's `.grad` · `samples`. Return the reason when nothing was added, else None.
        `.grad` is not modified.

        On CUDA, None is preliminary: gradients that turn out not to be finite change nothing and are
        reported by `refused` later.
        """
        gradients = {place: p.grad.detach() for place, p in enumerate(self.parameters) if p.grad is not None}
        if self._links and gradients and not any(gradient.is_sparse for gradient in gradients.values()):
            self._add_unchecked(gradients, samples)
            return None
        defect = defect_of_gradients(self.parameters, self.names) if gradients else NO_GRADIENT
        if defect is not None:
            return defect
        self.resolve_checks(wait=self._staging is not None)
        self._to_sums()
        self._is_zero = False
        with torch.no_grad():
            pairs = [
                (self.buffers[place], gradient.to(self.buffers[place].device))
                for place, gradient in gradients.items()
            ]
            for buffer, gradient in pairs:
                if gradient.is_sparse:
                    buffer.add_(gradient, alpha=samples)
            plain = [(buffer, gradient) for buffer, gradient in pairs if not gradient.is_sparse]
            if plain:
                torch._foreach_add_(
                    [buffer for buffer, _ in plain], [gradient for _, gradient in plain], alpha=samples
                )
        self._count(samples, gradients)
        return None

    def _add_unchecked(self, gradients: dict[int, torch.Tensor], samples: int) -> None:
        """Add gradients on devices before the host knows whether they are finite."""
        self.resolve_checks(
            wait=self._staging is not None
        )  # the staging buffer is in use until its values are added
        check = DeviceCheck(gradients, self._links)
        if self._staging is not None:
            self._staging.fetch(
                [(Fragment(place, 0, one.numel()), one.reshape(-1)) for place, one in gradients.items()]
            )
        else:
            self._to_sums()
            self._is_zero = False
            with torch.no_grad():
                for device in dict.fromkeys(gradient.device for gradient in gradients.values()):
                    places = [place for place, gradient in gradients.items() if gradient.device == device]
                    add_where_(
                        check.finite(device),
                        [self.buffers[place] for place in places],
                        [gradients[place] for place in places],
                        samples,
                    )
        self._late_checks.add(samples, tuple(gradients), check)
        self.samples += samples

    def resolve_checks(self, *, wait: bool = True) -> None:
        """Evaluate the checks of earlier micro-steps and subtract the samples of those that were not
        finite.

        `wait`: evaluate all of them, which may wait for the device; else only those whose flags have
        reached the host.
        """
        for samples, places, useful in self._late_checks.resolved(wait=wait):
            self.samples -= samples
            if useful and self._staging is not None:
                self._staging.wait()
                self._to_sums()
                self._is_zero = False
                pairs = [
                    (self.buffers[place].view(-1)[low:high], values)
                    for place in places
                    for low, high, values in self._staging.fetched_values(
                        Fragment(place, 0, self.buffers[place].numel())
                    )
                ]
                torch._foreach_add_(
                    [buffer for buffer, _ in pairs], [values for _, values in pairs], alpha=samples
                )
            if useful:
                self._count(samples, places)

    def refused(self) -> RejectedSamples:
        """Return the samples that were accepted first and found not finite since the last call."""
        return self._late_checks.refused()

    def gradients_for(
        self, averages: Sequence[torch.Tensor], touched: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Convert averages to what the inner optimizer expects in `.grad`; None for parameters that had no
        gradient on any peer.
        """
        if self._staging is None:
            pairs = zip(self.parameters, averages, touched, strict=True)
            return [gradient_for(p, average) if has_gradient else None for p, average, has_gradient in pairs]
        self.resolve_checks()  # add the contents of the staging buffer before other values go through it
        found = [
            torch.empty(p.shape, dtype=p.dtype, device=p.device) if has_gradient else None
            for p, has_gradient in zip(self.parameters, touched, strict=True)
        ]
        self._staging.upload(
            (Fragment(place, 0, average.numel()), average.view(-1), there.view(-1))
            for place, (average, there) in enumerate(zip(averages, found, strict=True))
            if there is not None
        )
        return [
            None if there is None else gradient_for(p, there)
            for p, there in zip(self.parameters, found, strict=True)
        ]

    def _count(self, samples: int, places: Iterable[int]) -> None:
        for place in places:
            self._touched[place] = True
        self.samples += samples

    def average_(self) -> list[torch.Tensor]:
        """Turn sums into means over this peer's samples, in place, and return the buffers. Without samples
        they are zeros.
        """
        self.resolve_checks()
        self._is_zero = False  # the round writes its average into these buffers
        if not self._is_mean and self.samples:
            torch._foreach_div_(self.buffers, float(self.samples))
            self._is_mean = True
        return self.buffers

    def restore_means(self, means: Sequence[torch.Tensor], samples: int, touched: Sequence[bool]) -> None:
        """Add means over `samples` samples that were taken out for a round which failed."""
        self.resolve_checks(wait=self._staging is not None)
        self._to_sums()
        self._is_zero = False
        torch._foreach_add_(self.buffers, list(means), alpha=samples)
        self.samples += samples
        self._touched = [one or other for one, other in zip(self._touched, touched, strict=True)]

    def finite(self) -> bool:
        """Return False when sums of finite gradients overflowed: such a contribution must not be sent."""
        self.resolve_checks()
        return all_finite(self.buffers)

    def reset(self) -> None:
        """Drop everything that was accumulated."""
        self.resolve_checks()
        if not self._is_zero:
            torch._foreach_zero_(self.buffers)
        self._is_zero = True
        self.samples, self._is_mean = 0, False
        self._touched = [False] * len(self.parameters)

    def touched_bytes(self) -> bytes:
        """Return `touched` as a bit field, least significant bit first: peers exchange it before a round."""
        return bit_field(self.touched)

    def merge_touched(self, fields: Sequence[bytes]) -> list[bool]:
        """Return, for each parameter, whether it has a gradient on any peer. A field of the wrong length
        counts as "all", so that a false field cannot freeze a parameter.
        """
        everything = (1 << len(self.touched)) - 1
        union = 0
        for field in fields:
            union |= (
                int.from_bytes(field, "little") if len(field) == (len(self.touched) + 7) // 8 else everything
            )
        return [bool(union >> place & 1) for place in range(len(self.touched))]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for resuming in the middle of an epoch. Tensors are references, as in torch."""
        self.resolve_checks()
        self._to_sums()
        self._is_zero = False
        return {"samples": self.samples, "touched": list(self.touched), "sums": list(self.buffers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`. Raise UsageError, with nothing changed, when it was saved in
        another mode or for other parameters.
        """
        sums = state.get("sums")
        if not isinstance(sums, list) or len(state["touched"]) != len(self.parameters):
            raise UsageError("this was not saved in a mode that averages gradients, or for another model")
        if [tuple(t.shape) for t in sums] != [tuple(t.shape) for t in self.buffers]:
            raise UsageError("the saved gradients have other shapes than this optimizer's parameters")
        self.resolve_checks()  # discard earlier micro-steps
        self._is_zero = False
        for buffer, saved in zip(self.buffers, sums, strict=True):
            buffer.copy_(saved)
        self.samples, self._is_mean = int(state["samples"]), False
        self._touched = [bool(touched) for touched in state["touched"]]

    def _to_sums(self) -> None:
        if self._is_mean:
            torch._foreach_mul_(self.buffers, float(self.samples))
            self._is_mean = False


def bit_field(flags: Sequence[bool]) -> bytes:
    """Return flags as a bit field, least significant bit first."""
    field = sum(1 << place for place, flag in enumerate(flags) if flag)
    return field.to_bytes((len(flags) + 7) // 8, "little")


def names_of(parameters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of these parameters for messages: their own if the optimizer was given
    `named_parameters()`, else their numbers in it.
    """
    names = {id(p): f"parameter {place}" for place, p in enumerate(parameters_of(optimizer))}
    for group in optimizer.param_groups:
        names |= {
            id(p): str(name) for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }
    return [names[id(p)] for p in parameters]
