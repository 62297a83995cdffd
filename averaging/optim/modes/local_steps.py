"""Local steps: peers train independently between two rounds, and all keep the same base.

θ is the model's own parameters. The base is the state after the last round, in float32; peers share, serve
and keep equal the base and the outer optimizer's momentum. The difference θ - base is what this peer has
learned since. The inner optimizer's statistics are local: a newcomer begins without, and its first round
has weight 0.

A step with gradients that are not finite must not be made. A fused optimizer on CUDA skips it by a flag on
the device that the host reads later; any other optimizer steps after the host has read the flag, and waits
for the device each time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from averaging.optim.accumulate import names_of
from averaging.optim.finite import (
    NO_GRADIENT,
    DeviceCheck,
    LateChecks,
    RejectedSamples,
    defect_of_gradients,
    not_finite,
)
from averaging.optim.memory import Fragment, storage_for, zeros_beside
from averaging.optim.modes import ModeParts
from averaging.optim.modes.outer import OuterSGD
from averaging.optim.offload import HostStaging, OffloadLinks
from averaging.optim.parameters import is_trained, parameters_of, set_option
from averaging.optim.ranks import OrderedSteps
from averaging.optim.state.training_state import TrainingState
from averaging.result import RoundFailure
from swarm.core.errors import UsageError

_log = logging.getLogger(__name__)

# a peer that missed at most this many epochs adds its progress to the downloaded state. Larger: the progress
# was made on outdated parameters
CARRIED_EPOCHS_MAX = 3
# arguments: all parameters, and the trained ones
OuterFactory = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], OuterSGD]


@dataclass(slots=True)
class _SuspendedProgress:
    """This peer's progress at the time when it found the swarm in another epoch."""

    epoch: int
    version: int  # version of the state; if it differs afterwards, a state was loaded
    progress: list[torch.Tensor] | None  # θ - base; None: there was no progress


class LocalSteps:
    """The learner of all modes with local steps.

    Progress on a base at most `CARRIED_EPOCHS_MAX` epochs old is added to the loaded base. Older progress is
    dropped, and so is progress made before the first round, on a base that may not have been the swarm's.
    """

    def __init__(self, parts: ModeParts, outer: OuterFactory) -> None:
        self.inner, self._scheduler = parts.inner, parts.scheduler
        parameters = parameters_of(parts.inner)
        self.weights = [p for p in parameters if is_trained(p)]
        if not self.weights:
            raise UsageError(
                "there is nothing to train: no parameter of the optimizer is a floating-point tensor that "
                "requires a gradient"
            )
        self._names = names_of(self.weights, parts.inner)
        storage = storage_for(self.weights, parts.offload)
        self._links = OffloadLinks(self.weights, parts.make_link)
        self._late_checks = LateChecks(self._names)
        self._staging = (
            HostStaging(self.weights, self._links) if self._links and storage is not None else None
        )
        self.base = [torch.nn.Parameter(zeros_beside(p, storage).copy_(p.detach())) for p in self.weights]
        bases = iter(self.base)
        self.outer = outer([next(bases) if is_trained(p) else p for p in parameters], self.base)
        self.state = TrainingState(self.outer, parts.extras, parts.scheduler)
        self.newcomer = False  # the next round must not count this peer's progress
        self.total = 0  # samples since the beginning
        self.counted = 0  # the part of `total` that is in committed rounds, or dropped
        self.dropped = 0  # value of `total` when something was dropped last
        # value of `total` when the running round began
        self._round_began_at: int | None = None
        self._suspended: _SuspendedProgress | None = None
        self._rewrites = False  # an error has left θ half written
        # no step was made yet: the first one sets the base to the parameters as they are then
        self._has_no_steps = True

    # --- the interface of `Learner`

    @property
    def samples(self) -> int:
        return self.total - (self.counted if self._round_began_at is None else self._round_began_at)

    def accumulate(self, samples: int) -> str | None:
        """Make one local step with the gradients in `.grad`. Return the reason when they were refused, else
        None.
        """
        gradients = {place: p.grad.detach() for place, p in enumerate(self.weights) if p.grad is not None}
        if not gradients:
            return NO_GRADIENT
        check: DeviceCheck | None = None
        if self._links and not any(gradient.is_sparse for gradient in gradients.values()):
            check = DeviceCheck(gradients, self._links)
            skips = self._skips_by_itself(gradients)
            bad = [] if skips else check.bad_places()
            defect = not_finite([self._names[place] for place in bad]) if bad else None
        else:
            skips, defect = False, defect_of_gradients(self.weights, self._names)
        if defect is not None:
            return defect
        if self._has_no_steps:
            self._start_from_weights()
        self._rewrite()
        if check is not None and skips:
            self._step_if_finite(check, next(iter(gradients.values())).device)
            self._late_checks.add(samples, tuple(gradients), check)
        else:
            self.inner.step()
        self.total += samples
        return None

    def _skips_by_itself(self, places: Iterable[int]) -> bool:
        """Return whether the inner optimizer skips a step by itself where a flag on the device says so.

        Torch's fused optimizers do, which `GradScaler` uses too, but not in the first step of a parameter,
        when they create its statistics: SGD would keep a momentum that was never written.
        """
        inner = self.inner
        return (
            getattr(inner, "_step_supports_amp_scaling", False)
            and all(group.get("fused") for group in inner.param_groups)
            and all(inner.state.get(self.weights[place]) for place in places)
        )

    def _step_if_finite(self, check: DeviceCheck, device: torch.device) -> None:
        inner: Any = self.inner
        inner.grad_scale, inner.found_inf = None, check.finite(device).logical_not().to(torch.float32)
        try:
            inner.step()
        finally:
            del inner.grad_scale, inner.found_inf

    def resolve_checks(self, *, wait: bool = True) -> None:
        """Subtract the samples of steps that turned out not to be made. `wait`: evaluate all pending
        checks, else only those known by now.
        """
        for samples, _, useful in self._late_checks.resolved(wait=wait):
            self.total -= 0 if useful else samples

    def refused(self, *, wait: bool) -> RejectedSamples:
        self.resolve_checks(wait=wait)
        return self._late_checks.refused()

    def restart(self) -> None:
        self._has_no_steps, self._rewrites = True, False

    def _start_from_weights(self) -> None:
        self._has_no_steps = False
        with self.state.lock:
            self.read(self._whole_parameters(), [base.detach().view(-1) for base in self.base])

    def loaded(self) -> None:
        self.resolve_checks()
        self.failed("")
        self._suspended, self._has_no_steps, self.newcomer = None, False, False
        self._apply_loaded_learning_rates()
        self.set_weights(None)
        self.counted = self.dropped = self.total

    @property
    def has_late_samples(self) -> bool:
        return False  # every loaded base receives the progress made on the previous one

    def suspend(self) -> None:
        if self._suspended is None:
            self.resolve_checks()
            self._rewrite()
            self.failed("")
            progress = self.progress() if self.total > 0 else None
            self._suspended = _SuspendedProgress(self.state.epoch, self.state.version, progress)

    def resume(self, *, parted: bool = False, counted: bool = False) -> int:
        suspended, self._suspended = self._suspended, None
        if suspended is None or self.state.version == suspended.version:
            return 0
        self._has_no_steps = False
        self._apply_loaded_learning_rates()
        progress, late_epochs = suspended.progress, self.state.epoch - suspended.epoch
        is_recent = progress is not None and suspended.epoch > 0 and late_epochs <= CARRIED_EPOCHS_MAX
        self.set_weights(progress if is_recent and not counted else None)
        if is_recent and not counted:
            return 0
        lost = self.samples
        # a peer that contributed a moment ago trains on with the statistics that it has
        self.newcomer |= not (counted and is_recent)
        self.counted = self.dropped = self.total
        return lost

    def state_dict(self) -> dict[str, Any]:
        self.resolve_checks()
        counts = {
            "total": self.total,
            "counted": self.counted,
            "dropped": self.dropped,
            "newcomer": self.newcomer,
        }
        return {**counts, "base": [base.detach() for base in self.base], "outer": self.outer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`. Raise UsageError, with nothing changed, when it belongs to
        another mode or to other parameters.
        """
        saved = state.get("base")
        if not isinstance(saved, list) or "outer" not in state:
            raise UsageError("this was not saved in a mode with local steps")
        if [tuple(t.shape) for t in saved] != [tuple(t.shape) for t in self.base]:
            raise UsageError("the saved base has other shapes than this optimizer's parameters")
        pairs, parameters = [], dict(enumerate(parameters_of(self.outer)))
        for number, statistics in state["outer"]["state"].items():
            own = self.outer.state.get(parameters[number], {}) if number in parameters else {}
            for name, value in statistics.items():
                if name not in own or own[name].shape != value.shape:
                    raise UsageError(
                        f"the saved outer optimizer has {name!r} of parameter {number}, and that of this "
                        "mode has none of that shape"
                    )
                pairs.append((own[name], value))
        self.resolve_checks()
        with torch.no_grad():
            for base, one in zip(self.base, saved, strict=True):
                base.copy_(one)
            for held, value in pairs:
                held.copy_(value)
        self.total, self.counted, self.dropped = (
            int(state["total"]),
            int(state["counted"]),
            int(state["dropped"]),
        )
        self.newcomer = bool(state["newcomer"])
        self._round_began_at = self._suspended = None
        self._has_no_steps = self._rewrites = False

    # --- for the modes

    @property
    def is_suspended(self) -> bool:
        """Return whether progress is suspended: this peer has weight 0."""
        return self._suspended is not None

    def weight(self, since: int) -> float:
        """Return this peer's weight in a round that counts all samples after the first `since`."""
        return 0.0 if self.newcomer or self.is_suspended else float(self.total - max(since, 0))

    def begin_round(self) -> int:
        """Mark the beginning of a round. Return the number of samples so far."""
        self.resolve_checks()
        self._rewrite()
        self._round_began_at = self.total
        return self.total

    @property
    def has_no_new_steps(self) -> bool:
        """Return whether no step was made since the round began."""
        return self._round_began_at == self.total

    def commit_round(self) -> int:
        """Mark the round as committed. Return how many samples were counted by it and all before it."""
        began_at, self._round_began_at = self._round_began_at, None
        self.counted = self.total if began_at is None else began_at
        self.newcomer = False
        return self.counted

    def failed(self, reason: RoundFailure) -> None:
        """Mark the round as failed."""
        self._round_began_at = None
        # all members are newcomers, so their progress must count
        if reason == "nobody contributes":
            self.newcomer = False

    def rewrite_later(self) -> None:
        """Note that an error left θ half written after an outer step: it returns to the base when it is used
        next.
        """
        self._rewrites = True

    def _rewrite(self) -> None:
        if self._rewrites:
            self.reset_to_base("the parameters were not written completely after the last round")

    def reset_to_base(self, why: str) -> None:
        """Return to the base, and drop the local steps since. `why`: as a sentence for the user."""
        _log.warning("%d samples are dropped: %s", self.samples, why)
        self.set_weights(None)
        self.counted = self.dropped = self.total
        if self._round_began_at is not None:
            self._round_began_at = self.total

    def progress(self) -> list[torch.Tensor]:
        """Return θ - base: float32, on the base's device."""
        found = [base.detach().clone() for base in self.base]
        self.progress_(found)
        return found

    def progress_(self, bases: Sequence[torch.Tensor]) -> None:
        """Turn bases, or copies of them, into θ - base, in place. Rounding of the base to θ's dtype does
        not count as progress.
        """
        flat = [one.detach().view(-1) for one in bases]
        with torch.no_grad():
            for nth, inside, values in self._values(self._whole_parameters()):
                one = flat[nth][inside]
                one.copy_(one.to(values.dtype)).neg_().add_(values)

    def pseudo_gradient_(self, pieces: Sequence[Fragment], own: Sequence[torch.Tensor]) -> None:
        """Turn θ's elements, as `read` wrote them, into base - θ, in place."""
        with torch.no_grad():
            for piece, values in zip(pieces, own, strict=True):
                base = self.base[piece.place].detach().view(-1)[piece.start : piece.stop]
                values.neg_().add_(base.to(self.weights[piece.place].dtype))

    def set_weights(self, progress: Sequence[torch.Tensor] | None) -> None:
        """Set θ to base + progress; with None, to the base exactly."""
        self._rewrites = True  # until all of it is written
        bases = (base.detach().view(-1) for base in self.base)
        if progress is None:
            self.write(self._whole_parameters(), bases)
        else:
            self.write(
                self._whole_parameters(),
                (base + one.view(-1) for base, one in zip(bases, progress, strict=True)),
            )
        self._rewrites = False

    def read(self, pieces: Sequence[Fragment], targets: Sequence[torch.Tensor]) -> None:
        """Copy θ's elements to `targets`: flat float32, on the base's device."""
        with torch.no_grad():
            for nth, inside, values in self._values(pieces):
                targets[nth][inside].copy_(values)

    def _values(self, pieces: Sequence[Fragment]) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """Yield θ's elements on the base's device, to be used at once: index of the fragment, slice within
        it, and the flat values.
        """
        self._fetch_from_ranks()
        sources = [
            self.weights[piece.place].detach().reshape(-1)[piece.start : piece.stop] for piece in pieces
        ]
        if self._staging is None:
            for nth, source in enumerate(sources):
                yield nth, slice(None), source.to(self.base[pieces[nth].place].device)
            return
        self._staging.fetch(list(zip(pieces, sources, strict=True)))
        self._staging.wait()
        for nth, piece in enumerate(pieces):
            for low, high, values in self._staging.fetched_values(piece):
                yield nth, slice(low - piece.start, high - piece.start), values

    def write(self, pieces: Sequence[Fragment], values: Iterable[torch.Tensor]) -> None:
        """Copy `values` to θ's elements: flat float32, on the base's device."""
        self._fetch_from_ranks()  # all of θ goes back to the ranks, not only these elements
        with torch.no_grad():
            if self._staging is None:
                for piece, one in zip(pieces, values, strict=True):
                    self._copy_to_weight(piece, one)
                return
            # a non-contiguous parameter gets its values from a contiguous copy
            targets = [
                p.view(-1)[piece.start : piece.stop]
                if p.is_contiguous()
                else torch.empty(piece.numel, dtype=p.dtype, device=p.device)
                for piece, p in ((piece, self.weights[piece.place].detach()) for piece in pieces)
            ]
            self._staging.upload(zip(pieces, values, targets, strict=True))
            for piece, target in zip(pieces, targets, strict=True):
                if not self.weights[piece.place].is_contiguous():
                    self._copy_to_weight(piece, target)

    def _fetch_from_ranks(self) -> None:
        """Bring θ up to date where other processes of this peer hold shards of it."""
        if isinstance(self.inner, OrderedSteps):
            self.inner.fetch()

    def _copy_to_weight(self, piece: Fragment, values: torch.Tensor) -> None:
        p = self.weights[piece.place].detach()
        if p.is_contiguous():
            p.view(-1)[piece.start : piece.stop].copy_(values)
        elif piece.numel == p.numel():
            p.copy_(values.view(p.shape))
        else:
            whole = p.flatten()
            whole[piece.start : piece.stop].copy_(values)
            p.copy_(whole.view(p.shape))

    def _whole_parameters(self) -> list[Fragment]:
        return [Fragment(place, 0, base.numel()) for place, base in enumerate(self.base)]

    def _apply_loaded_learning_rates(self) -> None:
        """Copy the learning rates of a loaded schedule: it writes them to the inner optimizer only when it
        steps.
        """
        rates = self._scheduler.state_dict().get("_last_lr") if self._scheduler is not None else None
        if isinstance(rates, list) and len(rates) == len(self.inner.param_groups):
            for group, rate in zip(self.inner.param_groups, rates, strict=True):
                set_option(group, "lr", rate)
