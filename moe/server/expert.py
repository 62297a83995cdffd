"""`swarm.Expert`: a module that others may call, with the optimizer that learns from their passes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from averaging.optim.state.snapshot import Blob
from averaging.optim.state.view import StateView
from moe.protocol.codecs import WireCodecs
from moe.protocol.schema import check, flatten, unflatten
from moe.server.activations import ActivationCache
from moe.server.batches import concatenate, split
from moe.server.devices import using
from moe.server.learning import ExpertLearner, OptimizerFactory, ScheduleFactory, StepRefused
from moe.server.logic.joint_counts import steps_due
from moe.server.logic.lineage import CommonVersion, ExpertLineage
from moe.server.norm_statistics import norm_layers, unchanged_statistics
from moe.server.schemas import schema_of
from swarm.core.device import is_device_failure, is_out_of_memory, resolve_device
from swarm.core.errors import UsageError

Tensors: TypeAlias = list[torch.Tensor]
Gradients: TypeAlias = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class JointBatch:
    """The gradients that an expert has gathered for a joint step with its replicas."""

    samples: int  # samples whose gradients are in the sum
    counted: int  # with samples that an earlier step had too many
    gradients: dict[int, torch.Tensor]  # by the parameter's number


class ComputationFailed(Exception):
    """The module raised an error, or its result does not fit its schema; nothing was applied."""


class Expert:
    """A module as an expert, which other peers call. Its mode (train or eval) is left as it is.

    Args:
        module: The module. The result for the samples decides the schema, together with these.
        sample_inputs: A tuple of arguments: tensors, or tuples, lists and dictionaries of them, whose first
            dimension is the batch. A dictionary means keyword arguments, by name. Where the module has an
            attribute `sequence_dimension`, such as 1, calls may have shorter sequences than the samples.
        optimizer: Called with the trainable parameters (float32 copies of those with 16 bits); makes a step
            per backward batch, undone if it leaves NaN or infinity. None: the expert is frozen.
        schedule: Called with the optimizer; stepped once per optimizer step.
        clip_norm: Gradients are scaled down to this norm.
        device: The module is moved there. "cuda": the current CUDA device; None: where the module is.
        keep_activations_bytes: Keep up to this size of activations for backward passes, instead of computing
            forward again. Pays where no step of another caller comes between; each request is then a batch.
        autocast: torch.bfloat16 or torch.float16 for `torch.autocast` around the module. Outputs are cast
            back to the schema's dtypes. Gradients are not scaled: small ones may become zero in float16.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        sample_inputs: Sequence[Any] | dict[str, Any],
        optimizer: OptimizerFactory | None = None,
        *,
        schedule: ScheduleFactory | None = None,
        clip_norm: float | None = None,
        device: torch.device | str | None = None,
        keep_activations_bytes: int = 0,
        autocast: torch.dtype | None = None,
    ) -> None:
        # a dictionary is one argument on the network
        self._by_keyword = isinstance(sample_inputs, dict)
        if isinstance(sample_inputs, dict):
            sample_inputs = (sample_inputs,) if sample_inputs else ()
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
        # what requests call: the module, or a compiled form of it that somebody has set
        self.called: Callable[..., Any] = self.module
        self.autocast = autocast
        self.schema = schema_of(module, self._call_module, tuple(sample_inputs), self.device)
        self.clip_norm, self._norm_layers = clip_norm, norm_layers(self.module)
        self._learner = ExpertLearner(self.module, optimizer, schedule, clip_norm)
        self.version = 0  # counts optimizer steps and averages with replicas
        self._target_batch_size = 0
        self._gathered = 0  # samples whose gradients wait for a step of the target batch
        self.is_joint = False  # `moe.server.joint_steps` makes its steps, with its replicas
        self._carried = 0  # samples of the last step beyond its target, which count for the next one
        self._past: tuple[CommonVersion, ...] = ()  # the last versions in common with replicas
        # its state is one of its replicas: it was averaged with them, or taken over by this server or another
        self.settled = False
        self.expert_class = ""  # the name by which `swarm serve` made it, for those who download it
        self.turns = 1  # its server averages it once in this many periods
        self.samples = 0  # samples of backward passes
        self.lock = threading.Lock()  # held by all that use the expert: computing, averaging, checkpoints
        self._accumulated = 0  # samples of gradients that wait for `apply`
        self._activations = ActivationCache(keep_activations_bytes)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Return the optimizer; None for a frozen expert."""
        return self._learner.optimizer

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
            return self._outputs([one.to(self.device) for one in inputs], len(inputs[0]))

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
                with torch.enable_grad(), unchanged_statistics(self._norm_layers):
                    leaves = self._leaves(inputs)
                    outputs = self._outputs(leaves, sum(sizes))
                input_gradients = self._differentiate(leaves, outputs, gradients)
                for number, parts in zip(recomputed, split(input_gradients, sizes), strict=True):
                    found[number] = parts
        self._accumulated += sum(len(inputs[0]) for _, inputs, _ in passes)
        return [found[number] for number in range(len(passes))]

    def apply(self) -> None:
        """Run the second half of `backward`: one optimizer step with the accumulated gradients; the due steps
        of a target batch if it is complete. Raises ComputationFailed when the gradients were not used.
        """
        with using(self.device):
            try:
                stepped = self._gather() if self._gathered or self.target_batch_size else self._learner.step()
            except StepRefused as refusal:
                self._activations.clear()  # a step that was undone has written the tensors of their graphs
                raise ComputationFailed(str(refusal)) from refusal
        self.version += stepped
        self.samples += self._accumulated
        self._accumulated = 0

    @property
    def target_batch_size(self) -> int:
        """Return the number of samples of one step: gradients of backward passes are added up until they are
        of that many, so the number of steps does not depend on how requests meet. Samples beyond the target
        count for the next step. 0, the default: one step for each batch of requests. It can be set.
        """
        return self._target_batch_size

    @target_batch_size.setter
    def target_batch_size(self, samples: int) -> None:
        if type(samples) is not int or samples < 0:
            raise UsageError(f"target_batch_size is a number of samples, not {samples!r}")
        self._target_batch_size = samples

    @property
    def codecs(self) -> WireCodecs:
        """Return the codecs in which callers send and get tensors unless they choose others. They belong to
        the schema, so replicas have the same. They can be set before a server hosts the expert.
        """
        return self.schema.codecs

    @codecs.setter
    def codecs(self, codecs: WireCodecs) -> None:
        self.schema = replace(self.schema, codecs=codecs)

    @property
    def update_norm_max(self) -> float | None:
        """Return the largest change of the parameters by one step, as a fraction of their norm; larger
        changes are scaled down. None, the default: no limit. It can be set.
        """
        return self._learner.update_norm_max

    @update_norm_max.setter
    def update_norm_max(self, fraction: float | None) -> None:
        if fraction is not None and not fraction > 0:
            raise UsageError(f"update_norm_max is above 0, not {fraction!r}")
        self._learner.update_norm_max = fraction

    @property
    def samples_to_step(self) -> int:
        """Return the number of further samples of backward passes until a step is made; 0: a step after each
        batch.
        """
        if not self.target_batch_size or self.frozen or self.is_joint:
            return 0
        return max(self.target_batch_size - self.counted, 1)

    @property
    def learning_count(self) -> int:
        """Return the number of parameters that learn."""
        return len(self._learner.masters)

    @property
    def counted(self) -> int:
        """Return the number of samples that count for the next step of the target batch."""
        return self._gathered + self._carried

    def new_joint_tensors(self) -> Tensors:
        """Return new tensors for what replicas average in a joint step: gradients of all parameters that
        learn, and floating-point buffers.
        """
        buffers = self._floating_buffers()
        return [torch.zeros_like(one) for one in (*map(torch.Tensor.detach, self._learner.masters), *buffers)]

    def take_batch(self, into: Tensors) -> JointBatch:
        """Remove the gathered gradients from this expert, for a joint step, and write their mean over the
        samples, and the buffers, into tensors of `new_joint_tensors`. The lock must be held.
        """
        taken = JointBatch(self._gathered, self.counted, self._learner.take_gathered())
        self._gathered = self._carried = 0
        count = self.learning_count
        with using(self.device), torch.no_grad():
            for place, tensor in enumerate(into[:count]):
                gradient = taken.gradients.get(place)
                if gradient is None:
                    tensor.zero_()
                else:
                    torch.div(gradient, max(taken.samples, 1), out=tensor)
            for tensor, value in zip(into[count:], self._floating_buffers(), strict=True):
                tensor.copy_(value)
        return taken

    def return_batch(self, taken: JointBatch) -> None:
        """Put back a batch from `take_batch`, because its joint step was not made. The lock must be held."""
        self._learner.return_gathered(taken.gradients)
        self._gathered += taken.samples
        self._carried += taken.counted - taken.samples

    def step_jointly(self, averaged: Tensors, samples: float, steps: int, carried: int, name: bytes) -> bool:
        """Make `steps` steps with the sum of all replicas' gradients, divided among them: `averaged` is their
        mean over `samples` samples, and the buffers. The result is the common version `name`; `carried`
        samples count for the next step. The lock must be held. Return False when a step was refused; then it
        was on all replicas, and the batch is dropped.
        """
        buffers, count = self._floating_buffers(), self.learning_count
        with using(self.device), torch.no_grad():
            for tensor, value in zip(buffers, averaged[count:], strict=True):
                tensor.copy_(value)
            stepped = True
            for _ in range(steps):
                try:
                    self._learner.step_with([tensor * (samples / steps) for tensor in averaged[:count]])
                except StepRefused:
                    stepped = False
            self._learner.replaced()
        self._carried += carried
        self._continue(self.lineage.averaged(name, self.version + steps))
        return stepped

    def step_alone(self) -> bool:
        """Make the steps of a target batch that is complete, after the replicas are gone. The lock must be
        held. Return whether a batch was used.
        """
        if self.counted < self._target_batch_size or not self._gathered:
            return False
        with using(self.device), contextlib.suppress(StepRefused):
            self.version += self._step_gathered()
        self._activations.clear()
        return True

    def _floating_buffers(self) -> Tensors:
        return [one for one in self.module.buffers() if one.dtype.is_floating_point and one.numel()]

    @property
    def progress(self) -> int:
        """Return a number that changes whenever the gradients of backward passes were used."""
        return 0 if self.frozen else self.samples

    def _gather(self) -> int:
        """Add the accumulated gradients to the target batch, and make its steps when it is complete."""
        self._learner.gather()
        self._gathered += self._accumulated
        return 0 if self.is_joint or self.counted < self.target_batch_size else self._step_gathered()

    def _step_gathered(self) -> int:
        steps, carried = steps_due(self.counted, self.target_batch_size)
        self._gathered, self._carried = 0, carried
        return self._learner.step_gathered(steps)

    def discard(self) -> None:
        """Discard the accumulated gradients."""
        self._accumulated = 0
        self._learner.discard()

    @property
    def lineage(self) -> ExpertLineage:
        """Return the lineage of the parameters. The lock must be held, or only the version used."""
        return ExpertLineage(self.version, self._past)

    def averaged(self, name: bytes, version: int) -> None:
        """Record that an average with replicas has written the averaged tensors: the common version `name`,
        which has this number here. The lock must be held.
        """
        with using(self.device):
            self._learner.replaced()
        self._continue(self.lineage.averaged(name, version))

    @property
    def parameter_names(self) -> list[str]:
        """Return the module's names of the parameters in its state, in the order of the state."""
        return self._learner.parameter_names

    @property
    def state_bytes_max(self) -> int:
        """Return the largest size of a state that `load_state` may accept."""
        return self._learner.state_bytes_max

    def state(self) -> StateView:
        """Return a copy on the host of parameters, optimizer statistics, schedule and buffers. The lock must
        be held. Raises DeviceFailed when the device cannot be read any more, and PeerError when there is no
        memory for the copy.
        """
        with using(self.device):
            return self._learner.view()

    def module_state(self) -> Blob:
        """Return a copy of the module's `state_dict` as a blob, for those who download the expert. The lock
        must be held. Raises PeerError when a tensor's dtype cannot be sent, or there is no memory, and
        DeviceFailed.
        """
        with using(self.device):
            return self._learner.module_state(self.module)

    def load_state(self, blob: Blob, lineage: ExpertLineage, *, parameters_only: bool = False) -> None:
        """Replace everything by a state of such an expert; `parameters_only`: without the statistics of its
        optimizer. The lock must be held. Raises PeerError, with nothing changed, when names, shapes or dtypes
        are not those of this expert, or numbers are not finite."""
        load = self._learner.load_parameters if parameters_only else self._learner.load
        with using(self.device):
            load(blob)
        self._gathered = self._carried = 0
        self._continue(lineage)

    def averaged_tensors(self) -> Tensors:
        """Return the tensors that replicas of this expert average: parameters (float32 master weights of
        those with 16 bits) and floating-point buffers.
        """
        return self._learner.averaged_tensors(self.module)

    def _continue(self, lineage: ExpertLineage) -> None:
        self.version, self._past = lineage.version, lineage.past
        self._activations.clear()

    def _leaves(self, inputs: Tensors) -> Tensors:
        return [
            tensor.to(self.device).detach().requires_grad_(tensor.dtype.is_floating_point)
            for tensor in inputs
        ]

    def _outputs(self, inputs: Tensors, batch: int) -> Tensors:
        schema = self.schema.at(self.schema.length_of(inputs))
        try:
            if self.autocast is None:
                _, outputs = flatten(self._call_module(unflatten(schema.inputs, inputs)))
            else:
                with torch.autocast(self.device.type, self.autocast):
                    _, outputs = flatten(self._call_module(unflatten(schema.inputs, inputs)))
                outputs = self._cast(outputs)
            found = check(schema.output_leaves, outputs, "output")
        # a module's error is the answer to its caller, and ends nothing else
        except (Exception, SystemExit) as error:
            _raise_if_of_device(error)
            raise ComputationFailed(f"the module failed: {type(error).__name__}: {error}") from error
        if found != batch:
            raise ComputationFailed(f"the module made {found} samples of {batch}")
        return outputs

    def _call_module(self, arguments: Sequence[Any]) -> Any:
        return self.called(**arguments[0]) if self._by_keyword else self.called(*arguments)

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
        for number in range(len(self.schema.gradient_leaves)):
            parts = [gradients[number] for gradients in many]
            given = next((part for part in parts if part is not None), None)
            if given is None:
                found.append(None)
                continue
            filled = [
                given.new_zeros((size, *given.shape[1:])) if part is None else part
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
            into = [*wanted, *self._learner.parameters]
            if into:
                torch.autograd.backward(roots, seeds, inputs=into)
        except (Exception, SystemExit) as error:
            _raise_if_of_device(error)
            text = f"the module's backward pass failed: {type(error).__name__}: {error}"
            raise ComputationFailed(text) from error
        return [tensor.grad for tensor in wanted]


def _raise_if_of_device(error: BaseException) -> None:
    """Raise errors that are not the module's fault unchanged: the device is out of memory, or is lost."""
    if is_out_of_memory(error) or is_device_failure(error):
        raise error


def _device_of(module: torch.nn.Module) -> torch.device:
    tensor = next(iter([*module.parameters(), *module.buffers()]), None)
    return tensor.device if tensor is not None else torch.device("cpu")
