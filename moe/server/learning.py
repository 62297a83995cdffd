"""How an expert learns: its optimizer, float32 master weights under 16-bit parameters, steps that are undone
when they would leave NaN or infinity, and its whole state as a snapshot.

Master weights: 16 bits are too few for the small differences of a step, and Adam's epsilon is zero in
float16. The optimizer therefore steps float32 copies of such parameters, which are rounded into the module
after every step (Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740). Replicas average the
master weights.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from averaging.optim.finite import all_finite
from averaging.optim.state.snapshot import DTYPE_NAMES, Blob, encode_snapshot, read_header, read_tensors
from averaging.optim.state.training_state import TrainingState
from averaging.optim.state.view import StateView
from swarm.core.device import is_device_failure, is_out_of_memory
from swarm.core.errors import PeerError

OptimizerFactory: TypeAlias = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
ScheduleFactory: TypeAlias = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]

_log = logging.getLogger(__name__)

_NORM_MIN = 1.0  # parameters that are all zero may change, too
_NARROW = (torch.float16, torch.bfloat16)


class StepRefused(Exception):
    """An optimizer step was not made, or was undone; nothing has changed."""


class ExpertLearner:
    """The part of an expert that changes: the parameters of `module`, and the optimizer over them. Without an
    optimizer the parameters do not change, but the state can be copied and replaced all the same.

    The caller holds the lock of the expert, and has made its device current.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: OptimizerFactory | None,
        schedule: ScheduleFactory | None,
        clip_norm: float | None,
    ) -> None:
        """Create the optimizer and its schedule. Raises UsageError when a tensor of the module has a dtype
        that cannot be shared.
        """
        trainable = [p for p in module.parameters() if p.requires_grad] if optimizer is not None else []
        self.parameters = trainable  # the module's own, whose gradients are used
        self.masters = [_master_of(p) for p in trainable]
        self.optimizer = optimizer(self.masters) if optimizer is not None and trainable else None
        self.schedule = (
            schedule(self.optimizer) if schedule is not None and self.optimizer is not None else None
        )
        self._clip_norm = clip_norm
        # largest norm of a step, as a fraction of the parameters' norm
        self.update_norm_max: float | None = None
        self._gathered: dict[int, torch.Tensor] = {}  # gradients of the masters, by the parameter's number
        self._names, self._state = _state_of(module, self)

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps in the history of these parameters."""
        return self._state.epoch

    @property
    def parameter_names(self) -> list[str]:
        """Return the module's names of the parameters in the state, in its order."""
        return self._names

    def gather(self) -> None:
        """Add the gradients of the module's parameters to those gathered for the next `step_gathered`, and
        forget them. Raises StepRefused, with nothing added, when they are not finite.
        """
        gradients = [None if one.grad is None else one.grad for one in self.parameters]
        if not all_finite([one for one in gradients if one is not None]):
            self.discard()
            raise StepRefused("the gradients of its parameters are not finite, so the pass was not counted")
        for place, (gradient, master) in enumerate(zip(gradients, self.masters, strict=True)):
            if gradient is None:
                continue
            if place in self._gathered:
                self._gathered[place].add_(gradient)
            else:
                self._gathered[place] = gradient.to(master.dtype, copy=True)
        self.discard()

    def step_gathered(self, steps: int) -> int:
        """Make `steps` steps with the gathered gradients, divided among them, and return how many were made.
        The gradients are forgotten, also where a step is refused. Raises StepRefused when the first one is.
        """
        gathered, self._gathered = self._gathered, {}
        for number in range(steps):
            for place, gradient in gathered.items():
                self.masters[place].grad = gradient / steps if steps > 1 else gradient
            try:
                if not self._step():
                    return number
            except StepRefused as refusal:
                if not number:
                    raise
                _log.warning("step %d of %d with one batch was refused: %s", number + 1, steps, refusal)
                return number
        return steps

    def take_gathered(self) -> dict[int, torch.Tensor]:
        """Return the gathered gradients, by the number of their parameter, and gather new ones from now
        on.
        """
        gathered, self._gathered = self._gathered, {}
        return gathered

    def return_gathered(self, gathered: dict[int, torch.Tensor]) -> None:
        """Add gradients that were taken to those gathered since then."""
        for place, gradient in gathered.items():
            self._gathered[place] = (
                self._gathered[place].add_(gradient) if place in self._gathered else gradient
            )

    def step_with(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Make one step with these gradients of all masters, as `step` does. The tensors are not kept."""
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient.to(master.device)
        return self._step()

    def discard(self) -> None:
        """Forget the gradients that are not gathered."""
        for parameter in (*self.parameters, *self.masters):
            parameter.grad = None

    def step(self) -> bool:
        """Make one optimizer step with the gradients of the module's parameters. Returns False when there are
        none. Raises StepRefused, with nothing changed, when gradients are not finite, the optimizer fails, or
        parameters or statistics would not be finite.
        """
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.to(torch.float32)
        return self._step()

    def _step(self) -> bool:
        """Make a step with the gradients of the masters."""
        if self.optimizer is None or all(master.grad is None for master in self.masters):
            return False
        norm = self._clip()
        undo = _UndoPoint(self.masters, self.optimizer)
        try:
            self.optimizer.step()
            self._bound_update(undo)
            self._round()
        except (Exception, SystemExit) as error:
            if is_device_failure(error):
                raise
            self._undo(undo)
            raise StepRefused(f"the optimizer failed: {type(error).__name__}: {error}") from error
        # a parameter of full precision is its own master
        rounded = [
            one for one, master in zip(self.parameters, self.masters, strict=True) if one is not master
        ]
        if not all_finite([norm, *self.masters, *rounded, *undo.statistics()]):  # the only wait for a device
            self._undo(undo)
            _refuse_gradients(norm)
            raise StepRefused("the step would have left parameters that are not finite, so it was undone")
        if self.schedule is not None:
            self.schedule.step()
        self._state.mark_changed(self.steps + 1)
        self.discard()
        return True

    def _bound_update(self, undo: _UndoPoint) -> None:
        """Scale the change that a step has made down to its bound."""
        if self.update_norm_max is None:
            return
        before = undo.copies_of_parameters(len(self.masters))
        with torch.no_grad():
            change = _norm([master - old for master, old in zip(self.masters, before, strict=True)])
            factor = _factor(change, self.update_norm_max * _norm(before).clamp(min=_NORM_MIN))
            if factor is not None:
                for master, old in zip(self.masters, before, strict=True):
                    master.copy_(torch.lerp(old, master, factor.to(master.dtype)))

    def averaged_tensors(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """Return the tensors that replicas average: parameters (master weights where there are some) and
        floating-point buffers.
        """
        masters = dict(zip(map(id, self.parameters), self.masters, strict=True))
        tensors = [*(masters.get(id(one), one) for one in module.parameters()), *module.buffers()]
        return [one.data for one in tensors if one.dtype.is_floating_point and one.numel()]

    def replaced(self) -> None:
        """Record that something else has written the averaged tensors: round master weights into the
        module.
        """
        self._round()
        self._state.mark_changed(self.steps)

    def view(self) -> StateView:
        """Return a copy of the whole state, in host memory. Raises PeerError when there is no memory for
        it.
        """
        self._state.agree_extras()
        view = self._state.view(with_history=False)
        view.complete_copy()
        view.close()
        return view

    def module_state(self, module: torch.nn.Module) -> Blob:
        """Return a copy of the module's own `state_dict`, in host memory. Raises PeerError when it cannot be
        sent.
        """
        named = [(name, one) for name, one in module.state_dict().items() if isinstance(one, torch.Tensor)]
        if any(one.dtype not in DTYPE_NAMES for _, one in named):
            raise PeerError("the expert has tensors of a dtype that cannot be sent")
        try:
            return encode_snapshot(self.steps, {}, named)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise PeerError("there is no memory for a copy of the expert") from error

    @property
    def state_bytes_max(self) -> int:
        """Return the largest size of a state of such an expert."""
        return self._state.bytes_max()

    def load(self, blob: Blob) -> None:
        """Replace the whole state by one of `view`, which is not trusted: names, shapes, dtypes and finite
        values are checked, hyperparameters stay. Raises PeerError when it does not fit; then nothing has
        changed.
        """
        self._state.load(blob)
        self._gathered = {}
        self._round()

    def load_parameters(self, blob: Blob) -> None:
        """Replace parameters and buffers by those of a state of another optimizer, whose statistics are left
        out. Raises PeerError as `load` does.
        """
        header, start = read_header(blob)
        own, named = self._state.parameters, list[tuple[str, torch.Tensor]]()
        for name, tensor in read_tensors(blob, header, start).items():
            kind, _, number = name.partition(".")
            if kind == "s":
                continue
            if kind == "p" and number.isdecimal() and int(number) < len(own):
                tensor = tensor.to(own[int(number)].dtype)  # a frozen expert has no master weights
            named.append((name, tensor))
        self.load(encode_snapshot(header["epoch"], {**header, "state": {}}, named))

    def _clip(self) -> torch.Tensor:
        """Clip the gradients of the masters, and return their norm before. Raises StepRefused when they are
        not finite, if that is known without waiting for a device.
        """
        gradients = [master.grad for master in self.masters if master.grad is not None]
        norm: torch.Tensor = torch.linalg.vector_norm(
            torch.stack([one.float() for one in torch._foreach_norm(gradients)])
        )
        if _is_on_host(norm):
            try:
                _refuse_gradients(norm)
            except StepRefused:
                self.discard()
                raise
        factor = _factor(norm, torch.full_like(norm, self._clip_norm)) if self._clip_norm else None
        if factor is not None:
            torch._foreach_mul_(gradients, factor)
        return norm

    def _round(self) -> None:
        """Write the master weights into the module."""
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)

    def _undo(self, undo: _UndoPoint) -> None:
        undo.restore()
        self._round()
        self.discard()


class _UndoPoint:
    """Copies of parameters and statistics from before a step. Their memory is that of the thread, which makes
    the steps of all experts of a device, one after the other: it is as large as the largest expert needs.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._others: dict[torch.Tensor, dict[str, Any]] = {}  # statistics that are no tensors
        self._tensors: list[torch.Tensor] = [parameter.detach() for parameter in parameters]
        for parameter, statistics in optimizer.state.items():
            self._others[parameter] = {
                key: value if isinstance(value, torch.Tensor) else copy.deepcopy(value)
                for key, value in statistics.items()
            }
            self._tensors += [value for value in statistics.values() if isinstance(value, torch.Tensor)]
        self._copies = _copies_of(self._tensors)

    def copies_of_parameters(self, count: int) -> list[torch.Tensor]:
        """Return the copies of the parameters, of which there are `count`."""
        return self._copies[:count]

    def statistics(self) -> list[torch.Tensor]:
        """Return the present floating-point statistics."""
        return [
            value
            for statistics in self._optimizer.state.values()
            for value in statistics.values()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        ]

    def restore(self) -> None:
        """Make parameters and statistics what they were."""
        with torch.no_grad():
            for tensor, value in zip(self._tensors, self._copies, strict=True):
                tensor.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._others)


_scratch = threading.local()


def _copies_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors, in memory that the next call on this thread uses again: new memory for each
    step would cost more than the copies.
    """
    buffers: dict[tuple[torch.device, torch.dtype], torch.Tensor] = _scratch.__dict__.setdefault(
        "buffers", {}
    )
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for tensor in tensors:
        kind = tensor.device, tensor.dtype
        sizes[kind] = sizes.get(kind, 0) + tensor.numel()
    for kind, size in sizes.items():
        if kind not in buffers or buffers[kind].numel() < size:
            buffers.pop(kind, None)
            buffers[kind] = torch.empty(size, device=kind[0], dtype=kind[1])
    copies, starts = [], dict.fromkeys(sizes, 0)
    for tensor in tensors:
        kind, size = (tensor.device, tensor.dtype), tensor.numel()
        copies.append(buffers[kind][starts[kind] : starts[kind] + size].view(tensor.shape).copy_(tensor))
        starts[kind] += size
    return copies


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.get_total_norm(tensors)


def _is_on_host(tensor: torch.Tensor) -> bool:
    """Return whether a number can be read without waiting for a device."""
    return tensor.device.type == "cpu"


def _factor(norm: torch.Tensor, largest: torch.Tensor) -> torch.Tensor | None:
    """Return the factor, at most 1, by which a vector of this norm gets no longer than `largest`; None when
    it is short enough, if that is known without waiting for a device.
    """
    if _is_on_host(norm) and not bool(norm > largest):  # false for NaN, which is found later
        return None
    return (largest / norm).clamp(max=1.0)


def _refuse_gradients(norm: torch.Tensor) -> None:
    """Raise StepRefused when gradients of this norm are not finite."""
    if not math.isfinite(float(norm)):
        raise StepRefused("the gradients of its parameters are not finite, so the step was not made")


def _master_of(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return the tensor that the optimizer steps: the parameter, or a float32 copy of one with 16 bits."""
    if parameter.dtype not in _NARROW:
        return parameter
    return torch.nn.Parameter(parameter.detach().to(torch.float32))


def _state_of(module: torch.nn.Module, learner: ExpertLearner) -> tuple[list[str], TrainingState]:
    """Return the names of the parameters of a state, and the state: what the optimizer steps, or all
    parameters of a frozen expert; and every other tensor that the module keeps.
    """
    named = dict(module.named_parameters())
    if learner.optimizer is None:
        names = list(named)
        # torch refuses an optimizer without parameters; a rate of 0 is never used
        inner: torch.optim.Optimizer = torch.optim.SGD(
            list(named.values()) or [torch.zeros(0, device="cpu")], lr=0.0
        )
    else:
        places = {id(parameter): name for name, parameter in named.items()}
        own = {
            id(master): places[id(parameter)]
            for parameter, master in zip(learner.parameters, learner.masters, strict=True)
        }
        inner = learner.optimizer
        names = [
            own.get(id(one), str(place))
            for place, one in enumerate(p for group in inner.param_groups for p in group["params"])
        ]
    in_state = {id(one) for group in inner.param_groups for one in group["params"]}
    in_state |= {
        id(parameter)
        for parameter, master in zip(learner.parameters, learner.masters, strict=True)
        if id(master) in in_state
    }
    others = {
        id(value): torch.view_as_real(value.detach()) if value.is_complex() else value
        for value in module.state_dict(keep_vars=True).values()
        if isinstance(value, torch.Tensor) and id(value) not in in_state
    }
    return names, TrainingState(inner, list(others.values()), learner.schedule)
