"""The bridge between the trainer's thread and the network thread, and between torch's autograd and calls of
remote experts.

A layer enters the network thread once for a forward pass and once for each of its backward passes.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch.autograd.function import once_differentiable

from moe.client.replicas.calling import ReplicaCalls
from moe.protocol.methods import INLINE_BYTES_MAX
from moe.protocol.tensors import flat_bytes, is_finite
from swarm.core.errors import UsageError

if TYPE_CHECKING:
    from swarm.node import Node

T = TypeVar("T")
ParametersT = ParamSpec("ParametersT")

_MARGIN_S = 10.0  # passes have their own deadlines; this is added for a busy network thread

# (inputs, gradients of the floating-point outputs, number of this backward pass of one forward pass) ->
# gradients of the floating-point inputs, in order. All on the host; None: the outputs do not depend on it.
Backward: TypeAlias = Callable[
    [list[torch.Tensor], list[torch.Tensor | None], int], Sequence[torch.Tensor | None]
]


class NodeBridge:
    """A layer's access to its node and the network loop. Copies of a layer share it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.calls: ReplicaCalls = node.network.run(_calls_of(node), _MARGIN_S)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine on the network loop and block until it is done."""
        return self.node.network.run(work, timeout_s + _MARGIN_S)

    def __deepcopy__(self, memo: dict[int, Any]) -> NodeBridge:
        return self

    def __reduce__(self) -> Any:
        raise UsageError(
            "a layer of remote experts belongs to its node and process: "
            "save its state_dict instead of pickling it"
        )


async def _calls_of(node: Node) -> ReplicaCalls:
    return node.service(ReplicaCalls.from_node)


def attach_backward(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], backward: Backward
) -> tuple[torch.Tensor, ...]:
    """Return the outputs of a remote forward pass as part of the caller's autograd graph: on the inputs'
    device, differentiated by `backward`.

    `backward` is called even when no input needs a gradient, so that experts learn. A loss that overflowed,
    as GradScaler expects to happen, reaches no expert: the input gradients are NaN then.
    """
    if not torch.is_grad_enabled():
        return tuple(_own_tensor(output.to(inputs[0].device)) for output in outputs)
    anchor = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
    remote = _RemoteBackward(backward)
    joined = _RemoteFunction.apply(remote, list(outputs), anchor, *inputs)  # type: ignore[no-untyped-call]
    return tuple(joined)


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors without their autograd graph, contiguous, on the CPU."""
    return [tensor.detach().to("cpu").contiguous() for tensor in tensors]


def to_host_checked(inputs: Sequence[torch.Tensor], what: str) -> list[torch.Tensor]:
    """Return the inputs on the CPU. Raises UsageError when one contains NaN or infinity; `what` names the
    layer in the message.
    """
    host_inputs = to_host(inputs)
    for number, tensor in enumerate(host_inputs):
        if not is_finite(tensor):
            raise UsageError(f"input {number} of the {what} has NaN or infinity; no expert was called")
    return host_inputs


def check_batch(inputs: Sequence[torch.Tensor]) -> None:
    """Raise UsageError unless all inputs are tensors with the same first dimension, which may be 0."""
    for tensor in inputs:
        if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0 or len(tensor) != len(inputs[0]):
            raise UsageError(
                "a layer of experts takes tensors whose first dimension is the batch, the same for all"
            )


def attach_empty(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the outputs for an empty batch as part of the caller's autograd graph. No expert is called for
    them, forward or backward.
    """

    def no_gradients(
        inputs: list[torch.Tensor], gradients: list[torch.Tensor | None], number: int
    ) -> Sequence[torch.Tensor | None]:
        return [torch.zeros_like(tensor) for tensor in inputs if tensor.is_floating_point()]

    return attach_backward(inputs, outputs, no_gradients)


def uncompiled(function: Callable[ParametersT, T]) -> Callable[ParametersT, T]:
    """Decorate a layer's `forward` so that `torch.compile` leaves it as it is: a graph break. It blocks on
    other peers, so there is nothing to compile.
    """
    disabled: list[Callable[ParametersT, T]] = []

    @functools.wraps(function)
    def call(*arguments: ParametersT.args, **named: ParametersT.kwargs) -> T:
        # importing the compiler takes a second; if it is not imported yet, nothing is compiled
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **named)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*arguments, **named)

    # read by the compiler before it would trace `call` itself
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


def _own_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is no view, since autograd forbids to change views of a custom function in place.
    Small ones are copied: their memory may be that of a message.
    """
    if not tensor._is_view():
        return tensor
    if tensor.nbytes <= INLINE_BYTES_MAX:
        return tensor.clone()
    own = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    own.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return own


class _RemoteBackward:
    """The backward passes of one forward pass, numbered from 0. A pass that failed may have been applied by
    some experts; when it is repeated with the same gradients it keeps its number, so that these experts do
    not apply it again.
    """

    def __init__(self, backward: Backward) -> None:
        self._backward = backward
        self._lock = threading.Lock()
        self._passes = 0
        self._failed: dict[bytes, int] = {}  # digest of the gradients -> number of the pass that failed

    def backward(
        self, inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        if all(one is None for one in gradients):
            return [None] * len(inputs)
        host_inputs = to_host(inputs)
        given = [None if one is None else one.detach().to("cpu") for one in gradients]
        if not all(one is None or is_finite(one) for one in given):
            return [
                torch.full_like(tensor, float("nan")) for tensor in host_inputs if tensor.is_floating_point()
            ]
        with self._lock:
            number = self._failed.pop(_digest(given), None) if self._failed else None
            if number is None:
                number, self._passes = self._passes, self._passes + 1
        try:
            return self._backward(host_inputs, given, number)
        except BaseException:
            with self._lock:
                self._failed[_digest(given)] = number
            raise


def _digest(tensors: Sequence[torch.Tensor | None]) -> bytes:
    """Return a digest of the tensors' elements, by which a repeated pass is recognized."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        raw = None if tensor is None else flat_bytes(tensor)
        found.update(b"\0" if raw is None else b"\1" + raw.numel().to_bytes(8, "big"))
        if raw is not None and raw.numel():
            found.update(raw.numpy().data)
    return found.digest()


class _RemoteFunction(torch.autograd.Function):
    """The autograd function from inputs to remote outputs. `anchor` requires a gradient, so that experts
    learn even when no input does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        remote_backward: _RemoteBackward,
        remote_outputs: list[torch.Tensor],
        anchor: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.remote_backward = remote_backward
        # saved, so that autograd notices when inputs are overwritten: views of them are sent again
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        outputs = tuple(_own_tensor(output.to(inputs[0].device)) for output in remote_outputs)
        ctx.floating = [output.is_floating_point() for output in outputs]
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return outputs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        inputs: Sequence[torch.Tensor] = ctx.saved_tensors
        given = [one for one, is_floating in zip(gradients, ctx.floating, strict=True) if is_floating]
        found = iter(ctx.remote_backward.backward(inputs, given))
        input_gradients: list[torch.Tensor | None] = []
        for tensor, wanted in zip(inputs, ctx.needs_input_grad[3:], strict=True):
            gradient = next(found, None) if tensor.is_floating_point() else None
            input_gradients.append(gradient.to(tensor) if wanted and gradient is not None else None)
        return (None, None, None, *input_gradients)
