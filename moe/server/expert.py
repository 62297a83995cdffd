"""`swarm.Expert`: a module that others may call, with the optimizer that learns from their backward
passes.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from moe.protocol.schema import ExpertSchema, check, flatten, unflatten
from moe.server.devices import using
from swarm.core.device import is_device_failure, is_out_of_memory, resolve_device
from swarm.core.errors import UsageError

OptimizerFactory: TypeAlias = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
ScheduleFactory: TypeAlias = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
Tensors: TypeAlias = list[torch.Tensor]
Gradients: TypeAlias = Sequence[torch.Tensor | None]


class ComputationFailed(Exception):
    """The module raised an error, or its result does not fit its schema; nothing was applied."""


class Expert:
    """A module as an expert. Its schema is that of `sample_inputs` (a tuple of arguments: tensors, or tuples,
    lists and dictionaries of them; the first dimension of each is the batch) and of the module's result for
    them. The module's mode (train or eval) is left as it is.

    `optimizer`: called with the trainable parameters; it makes one step per backward batch. None: the expert
    is frozen, and a backward pass only gives the gradients of its inputs. `schedule`: called with the
    optimizer, returns a learning-rate schedule, which is stepped once per optimizer step. `clip_norm`:
    gradients are scaled down to this norm. `device`: the module is moved there; `cuda` means the current CUDA
    device, and None the device that the module is on.

    `keep_activations_bytes`: keep the activations of forward passes that a backward pass is likely to follow,
    up to this size of their tensors, instead of computing forward again. It pays where no other caller's step
    comes between; each such request is a batch of its own, and dropout is then the same in both directions.

    `autocast`: torch.bfloat16 or torch.float16, the dtype of `torch.autocast` around the module in forward
    and backward passes; None computes in the module's own dtypes. The schema does not depend on it: outputs
    are cast to the dtypes that they have without. Gradients are not scaled, so with float16 small ones may
    become zero.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        sample_inputs: Sequence[Any],
        optimizer: OptimizerFactory | None = None,
        *,
        schedule: ScheduleFactory | None = None,
        clip_norm: float | None = None,
        device: torch.device | str | None = None,
        keep_activations_bytes: int = 0,
        autocast: torch.dtype | None = None,
    ) -> None:
        if not isinstance(sample_inputs, tuple | list) or not sample_inputs:
            raise UsageError(
                "sample_inputs is a tuple of the module's arguments, like (torch.zeros(1, 512),)"
            )
        if clip_norm is not None and not clip_norm > 0:
            raise UsageError(f"clip_norm is above 0, not {clip_norm!r}")
        if autocast not in (None, torch.bfloat16, torch.float16):
            raise UsageError(f"autocast is torch.bfloat16, torch.float16 or None, not {autocast!r}")
        self.device = resolve_device(str(device), "device") if device is not None else _device_of(module)
        self.module = module if device is None else module.to(self.device)
        self.autocast = autocast
        tree, tensors = flatten(tuple(sample_inputs))
        with using(self.device), torch.no_grad():
            outputs = self.module(*unflatten(tree, [tensor.to(self.device) for tensor in tensors]))
        self.schema = ExpertSchema.from_samples(tuple(sample_inputs), outputs)
        trainable = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer = optimizer(trainable) if optimizer is not None and trainable else None
        self.schedule = (
            schedule(self.optimizer) if schedule is not None and self.optimizer is not None else None
        )
        self.clip_norm = clip_norm
        self.version = 0  # counts optimizer steps and averages with replicas
        self.samples = 0  # samples of backward passes
        # held by the computing thread, checkpoints and averaging while they use the expert
        self.lock = threading.Lock()
        self._trainable = trainable if self.optimizer is not None else []
        self._accumulated = 0  # samples whose gradients wait for `apply`
        self._activations = _ActivationCache(keep_activations_bytes)

    @property
    def frozen(self) -> bool:
        """Return whether backward passes change nothing."""
        return self.optimizer is None

    @property
    def keeps_activations(self) -> bool:
        """Return whether forward passes may keep their activations."""
        return self._activations.bytes_max > 0

    def forward(self, inputs: Tensors) -> Tensors:
        """Compute one batch without gradients. `inputs` are flat, on any device; the outputs are on the
        expert's device. Raises ComputationFailed.
        """
        with using(self.device), torch.no_grad():
            return self._outputs(self._to_device(inputs), len(inputs[0]))

    def forward_keeping(self, pass_id: object, inputs: Tensors) -> Tensors:
        """Compute one batch as `forward` does, and keep what the backward pass with this id needs, for as
        long as there is room and no step comes between.
        """
        with using(self.device), torch.enable_grad():
            leaves = self._leaves(inputs)
            outputs = self._outputs(leaves, len(inputs[0]))
        self._activations.put(pass_id, self.version, leaves, outputs)
        return [tensor.detach() for tensor in outputs]

    def drop_activations(self) -> None:
        """Drop all kept activations: backward passes compute forward again."""
        self._activations.clear()

    def backward(
        self, passes: Sequence[tuple[object, Tensors, Gradients]]
    ) -> list[list[torch.Tensor | None]]:
        """Make one optimizer step for several backward passes, each (id, inputs, gradients of floating-point
        outputs or None for zeros).

        Returns the gradients of each pass's floating-point inputs, on the expert's device; None where the
        expert does not depend on one. Raises ComputationFailed when no step was made.
        """
        self.discard()
        try:
            found = self.accumulate(passes)
            self.apply()
        except BaseException:
            self.discard()
            raise
        return found

    def accumulate(
        self, passes: Sequence[tuple[object, Tensors, Gradients]]
    ) -> list[list[torch.Tensor | None]]:
        """Run the first half of `backward`: add the passes' gradients of the parameters to those of earlier
        calls, for `apply`.

        After an exception the parameters' gradients may be those of a part of the passes: `discard` them.
        """
        with using(self.device):
            found: dict[int, list[torch.Tensor | None]] = {}
            recomputed = []
            for number, (pass_id, _, gradients) in enumerate(passes):
                kept = self._activations.take(pass_id, self.version)
                if kept is None:
                    recomputed.append(number)
                else:
                    found[number] = self._differentiate(*kept, gradients)
            if recomputed:
                sizes = [len(passes[number][1][0]) for number in recomputed]
                inputs = concatenate([passes[number][1] for number in recomputed])
                gradients = self._concatenate_gradients([passes[number][2] for number in recomputed], sizes)
                with torch.enable_grad():
                    leaves = self._leaves(inputs)
                    outputs = self._outputs(leaves, sum(sizes))
                input_gradients = self._differentiate(leaves, outputs, gradients)
                for number, parts in zip(recomputed, split(input_gradients, sizes), strict=True):
                    found[number] = parts
        self._accumulated += sum(len(inputs[0]) for _, inputs, _ in passes)
        return [found[number] for number in range(len(passes))]

    def apply(self) -> None:
        """Run the second half of `backward`: one optimizer step with the accumulated gradients. Raises
        ComputationFailed when no step was made.
        """
        if self.optimizer is not None:
            with using(self.device):
                self._step()
        self.samples += self._accumulated
        self._accumulated = 0

    def discard(self) -> None:
        """Discard the accumulated gradients."""
        self._accumulated = 0
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)

    def parameters_replaced(self, version: int) -> None:
        """Record that something else (averaging, a checkpoint) has written the parameters. The lock must be
        held.
        """
        self.version = version
        self._activations.clear()

    def state(self) -> dict[str, Any]:
        """Return a copy on the host of everything that a checkpoint needs. Raises DeviceFailed when the
        device cannot be read any more.
        """
        with using(self.device):
            return {
                "schema": self.schema.digest,
                "version": self.version,
                "samples": self.samples,
                "module": _copy_to_host(self.module.state_dict()),
                "optimizer": _copy_to_host(self.optimizer.state_dict())
                if self.optimizer is not None
                else None,
                "schedule": self.schedule.state_dict() if self.schedule is not None else None,
            }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state. Raises UsageError when it belongs to another expert; the expert may then be half
        loaded and must not be used.
        """
        try:
            if state["schema"] != self.schema.digest:
                raise UsageError("it is of an expert with another schema")
            with using(self.device):
                self.module.load_state_dict(state["module"])
                if self.optimizer is not None and state["optimizer"] is not None:
                    self.optimizer.load_state_dict(state["optimizer"])
            if self.schedule is not None and state["schedule"] is not None:
                self.schedule.load_state_dict(state["schedule"])
            self.parameters_replaced(int(state["version"]))
            self.samples = int(state["samples"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"this is no checkpoint of such an expert: {error}") from error

    def averaged_tensors(self) -> Tensors:
        """Return the tensors that replicas of this expert average: parameters and floating-point buffers."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return [tensor.data for tensor in tensors if tensor.dtype.is_floating_point and tensor.numel()]

    def _to_device(self, tensors: Iterable[torch.Tensor]) -> Tensors:
        return [tensor.to(self.device) for tensor in tensors]

    def _leaves(self, inputs: Tensors) -> Tensors:
        return [
            tensor.detach().requires_grad_(tensor.dtype.is_floating_point)
            for tensor in self._to_device(inputs)
        ]

    def _outputs(self, inputs: Tensors, batch: int) -> Tensors:
        try:
            if self.autocast is None:
                _, outputs = flatten(self.module(*unflatten(self.schema.inputs, inputs)))
            else:
                with torch.autocast(self.device.type, self.autocast):
                    _, outputs = flatten(self.module(*unflatten(self.schema.inputs, inputs)))
                outputs = self._cast(outputs)
            found = check(self.schema.output_leaves, outputs, "output")
        # a module's error is the answer to its caller, and ends nothing else
        except Exception as error:
            _raise_if_of_device(error)
            raise ComputationFailed(f"the module failed: {type(error).__name__}: {error}") from error
        if found != batch:
            raise ComputationFailed(f"the module made {found} samples of {batch}")
        return outputs

    def _cast(self, outputs: Tensors) -> Tensors:
        """Return the floating-point outputs of autocast in the dtypes of the schema."""
        expected = self.schema.output_leaves
        if len(outputs) != len(expected):
            return outputs  # refused by `check`
        return [
            tensor.to(leaf.dtype) if leaf.is_floating and tensor.is_floating_point() else tensor
            for leaf, tensor in zip(expected, outputs, strict=True)
        ]

    def _concatenate_gradients(self, many: list[Gradients], sizes: list[int]) -> list[torch.Tensor | None]:
        """Concatenate the gradients of several passes; None where no pass has one."""
        found: list[torch.Tensor | None] = []
        for number, leaf in enumerate(self.schema.gradient_leaves):
            parts = [gradients[number] for gradients in many]
            given = next((part for part in parts if part is not None), None)
            if given is None:
                found.append(None)
                continue
            filled = [
                torch.zeros((size, *leaf.shape), dtype=leaf.dtype, device=given.device)
                if part is None
                else part
                for part, size in zip(parts, sizes, strict=True)
            ]
            found.append(filled[0] if len(filled) == 1 else torch.cat(filled))
        return found

    def _differentiate(
        self, inputs: Tensors, outputs: Tensors, gradients: Gradients
    ) -> list[torch.Tensor | None]:
        """Return the gradients of floating-point inputs; those of the parameters are added to the accumulated
        ones.
        """
        floating = [tensor for tensor in outputs if tensor.dtype.is_floating_point]
        pairs = [
            (output, gradient.to(output.device))
            for output, gradient in zip(floating, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        if not pairs:
            return [None] * len(wanted)
        try:
            roots, seeds = [output for output, _ in pairs], [gradient for _, gradient in pairs]
            into = [*wanted, *self._trainable]
            if into:
                torch.autograd.backward(roots, seeds, inputs=into)
        except Exception as error:
            _raise_if_of_device(error)
            raise ComputationFailed(f"the module's backward pass failed: {error}") from error
        return [tensor.grad for tensor in wanted]

    def _step(self) -> None:
        assert self.optimizer is not None
        gradients = [parameter.grad for parameter in self._trainable if parameter.grad is not None]
        if not gradients:
            return
        norm = float(
            torch.linalg.vector_norm(torch.stack([one.float() for one in torch._foreach_norm(gradients)]))
        )
        if not math.isfinite(norm):
            raise ComputationFailed(
                "the gradients of its parameters are not finite, so the step was not made"
            )
        if self.clip_norm is not None and norm > self.clip_norm:
            torch._foreach_mul_(gradients, self.clip_norm / norm)
        # counted first: a step that fails half-way has changed parameters
        self.version += 1
        try:
            self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
        except Exception as error:
            if is_device_failure(error):
                raise
            # also when memory ran out: a step that may be half made is not repeated
            raise ComputationFailed(f"the optimizer failed: {type(error).__name__}: {error}") from error
        self.optimizer.zero_grad(set_to_none=True)


class _ActivationCache:
    """Activations of forward passes, by pass id, of one version of the parameters; the oldest are dropped
    first.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._version = 0
        self._bytes = 0
        self._graphs: OrderedDict[object, tuple[Tensors, Tensors, int]] = OrderedDict()

    def put(self, pass_id: object, version: int, inputs: Tensors, outputs: Tensors) -> None:
        if version != self._version:  # a step has overwritten the tensors of the graphs
            self.clear()
            self._version = version
        size = _graph_bytes(inputs, outputs)
        if size > self.bytes_max:
            return
        self._graphs[pass_id] = (inputs, outputs, size)
        self._bytes += size
        while self._bytes > self.bytes_max:
            self._bytes -= self._graphs.popitem(last=False)[1][2]

    def take(self, pass_id: object, version: int) -> tuple[Tensors, Tensors] | None:
        found = self._graphs.pop(pass_id, None)
        if found is None:
            return None
        self._bytes -= found[2]
        return found[:2] if version == self._version else None

    def clear(self) -> None:
        self._graphs.clear()
        self._bytes = 0


def concatenate(many: Sequence[Tensors]) -> Tensors:
    """Return the tensors of several requests as one batch; those of a single request unchanged."""
    return many[0] if len(many) == 1 else [torch.cat(parts) for parts in zip(*many, strict=True)]


def split(tensors: Sequence[torch.Tensor | None], sizes: Sequence[int]) -> list[list[torch.Tensor | None]]:
    """Split a batch's tensors into those of its requests."""
    if len(sizes) == 1:
        return [list(tensors)]
    columns = [
        torch.split(tensor, list(sizes)) if tensor is not None else (None,) * len(sizes) for tensor in tensors
    ]
    return [[column[number] for column in columns] for number in range(len(sizes))]


def _graph_bytes(inputs: Tensors, outputs: Tensors) -> int:
    """Return the memory that an autograd graph holds, as far as it can be seen: its inputs and outputs, and
    the tensors that its nodes have saved.
    """
    size = sum(tensor.nbytes for tensor in (*inputs, *outputs))
    visited: set[object] = set()
    pending = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        for attribute in dir(node):
            if attribute.startswith("_saved_"):
                saved = getattr(node, attribute)
                size += (
                    saved.nbytes
                    if isinstance(saved, torch.Tensor) and not isinstance(saved, torch.nn.Parameter)
                    else 0
                )
        pending.extend(following for following, _ in node.next_functions if following is not None)
    return size


def _copy_to_host(value: Any) -> Any:
    """Return a nested state with its tensors copied to the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy_to_host(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copy_to_host(one) for one in value)
    return value


def _raise_if_of_device(error: Exception) -> None:
    """Raise errors that are not the module's fault unchanged: the device is out of memory, or is lost."""
    if is_out_of_memory(error) or is_device_failure(error):
        raise error


def _device_of(module: torch.nn.Module) -> torch.device:
    tensor = next(iter([*module.parameters(), *module.buffers()]), None)
    return tensor.device if tensor is not None else torch.device("cpu")
