"""`swarm.RemoteExpert`: an expert that other peers host, called like a local module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from moe.asking import Answered, Asking
from moe.calls import AS_THEY_ARE, Backwarded, GradientPass, Travel
from moe.schema import Schema, Tree, check, flatten, same_structure, unflatten
from moe.uid import ExpertUid
from swarm.errors import UsageError

if TYPE_CHECKING:
    from swarm.node import Node

__all__ = ["RemoteExpert", "Travel"]

_MARGIN_S = 1.0  # what blocks a caller's thread ends by its own deadline; this is for a loop that is busy


class RemoteExpert(torch.nn.Module):
    """The expert called `uid`, wherever it is hosted: `y = expert(x)`, with the arguments and the result that its module has.

    Gradients flow: a backward pass gives those of the inputs and makes the expert learn, wherever it is hosted. Where several servers
    host it, the least busy one is asked, another when that one fails or is slow; backward goes to the one that answered, and is applied
    there once. `travel` says in which codecs the tensors travel (as they are, by default). Made without any network traffic.

    Calls raise NotEnoughPeers (nobody hosts it), ExpertOverloaded, ExpertFailed, UsageError (arguments that do not fit its schema),
    NetworkError, DeadlineExceeded (`forward_timeout_s`, `backward_timeout_s`).
    """

    def __init__(
        self, node: Node, uid: str, *, forward_timeout_s: float = 30.0, backward_timeout_s: float = 30.0, travel: Travel | None = None
    ) -> None:
        super().__init__()
        if not (forward_timeout_s > 0 and backward_timeout_s > 0):
            raise UsageError("timeouts are above 0")
        self.node, self.uid = node, ExpertUid.parse(uid)
        self.forward_timeout_s, self.backward_timeout_s = forward_timeout_s, backward_timeout_s
        self.travel = travel or AS_THEY_ARE
        self._schema: Schema | None = None

    @property
    def schema(self) -> Schema:
        """What it takes and gives; asks a server the first time."""
        if self._schema is None:
            self._schema = self.node.network.run(self._find_schema(), self.forward_timeout_s + _MARGIN_S)
        return self._schema

    def forward(self, *arguments: Any) -> Any:
        """Its module's result for these arguments."""
        tree, tensors = flatten(arguments)
        schema = self.schema
        _check_arguments(schema, tree, tensors)
        if not torch.is_grad_enabled():
            return unflatten(schema.outputs, _onto(self._forward(tensors, keep=False).forwarded.outputs, tensors))
        # the expert learns although no input may need a gradient: the empty tensor makes autograd call backward in any case
        outputs = _RemotePass.apply(self, torch.empty(0, requires_grad=True), *tensors)  # type: ignore[no-untyped-call]
        return unflatten(schema.outputs, outputs)

    def extra_repr(self) -> str:
        return str(self.uid)

    def _forward(self, tensors: list[torch.Tensor], *, keep: bool) -> Answered:
        async def ask() -> Answered:
            return await Asking.of(self.node).forward(self.uid, tensors, timeout_s=self.forward_timeout_s, travel=self.travel, keep=keep)

        return self.node.network.run(ask(), self.forward_timeout_s + _MARGIN_S)

    def _backward(self, answered: Answered, passed: GradientPass) -> Backwarded:
        async def ask() -> Backwarded:
            return await Asking.of(self.node).backward(answered, self.uid, passed, timeout_s=self.backward_timeout_s, travel=self.travel)

        return self.node.network.run(ask(), self.backward_timeout_s + _MARGIN_S)

    async def _find_schema(self) -> Schema:
        asking = Asking.of(self.node)
        return await asking.schema(self.uid, timeout_s=self.forward_timeout_s)


class _RemotePass(torch.autograd.Function):
    """Flat tensors through a remote expert."""

    @staticmethod
    def forward(ctx: Any, expert: RemoteExpert, _: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        answered = expert._forward([tensor.detach() for tensor in inputs], keep=True)
        ctx.expert, ctx.answered = expert, answered
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        outputs = tuple(_onto(answered.forwarded.outputs, inputs))
        ctx.mark_non_differentiable(*(output for output in outputs if not output.dtype.is_floating_point))
        ctx.floating = [output.dtype.is_floating_point for output in outputs]
        return outputs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        inputs = ctx.saved_tensors
        given = [one for one, floating in zip(gradients, ctx.floating, strict=True) if floating]
        nothing = (None, None, *[None] * len(inputs))
        if all(one is None for one in given):
            return nothing
        found = iter(ctx.expert._backward(ctx.answered, GradientPass([one.detach() for one in inputs], given)).gradients)
        of_inputs = [next(found) if tensor.dtype.is_floating_point else None for tensor in inputs]
        return None, None, *(one.to(tensor.device) if one is not None else None for one, tensor in zip(of_inputs, inputs, strict=True))


def _onto(tensors: list[torch.Tensor], like: Any) -> list[torch.Tensor]:
    """On the device of the inputs."""
    return [tensor.to(like[0].device) for tensor in tensors]


def _check_arguments(schema: Schema, tree: Tree, tensors: list[torch.Tensor]) -> None:
    if not same_structure(schema.inputs, tree):
        raise UsageError(f"this expert takes other arguments: {schema}")
    check(schema.input_leaves, tensors, "input")
