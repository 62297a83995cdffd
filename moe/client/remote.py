"""`swarm.RemoteExpert`: an expert that other peers host, called like a local module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from moe.client.replicas.autograd_bridge import Remote, crossed, to_host_checked
from moe.client.replicas.calling import ForwardResult, with_new_request_id
from moe.protocol.calls import UNCOMPRESSED, GradientPass, WireCodecs
from moe.protocol.names import ExpertUid
from moe.protocol.schema import ExpertSchema, Tree, check, flatten, same_structure, unflatten
from swarm.core.errors import UsageError

if TYPE_CHECKING:
    from swarm.node import Node

__all__ = ["RemoteExpert", "WireCodecs"]


class RemoteExpert(torch.nn.Module):
    """The expert called `uid`, wherever it is hosted: `y = expert(x)`, with the arguments and the result that
    its module has.

    Gradients flow: a backward pass gives those of the inputs and makes the expert learn, wherever it is
    hosted. Where several servers host it, one is drawn by how quick they are, and another asked when that one
    fails or is slow; backward goes to the one that answered, and is applied there once. `travel` says in
    which codecs the tensors travel (as they are, by default). Made without any network traffic.

    Calls raise NotEnoughPeers (nobody hosts it), ExpertOverloaded, ExpertFailed, UsageError (arguments that
    do not fit its schema), NetworkError, DeadlineExceeded (`forward_timeout_s`, `backward_timeout_s`).
    """

    def __init__(
        self,
        node: Node,
        uid: str,
        *,
        forward_timeout_s: float = 30.0,
        backward_timeout_s: float = 30.0,
        travel: WireCodecs | None = None,
    ) -> None:
        super().__init__()
        if not (forward_timeout_s > 0 and backward_timeout_s > 0):
            raise UsageError("timeouts are above 0")
        self.uid = ExpertUid.parse(uid)
        self.forward_timeout_s, self.backward_timeout_s = forward_timeout_s, backward_timeout_s
        self.travel = travel or UNCOMPRESSED
        self._remote = Remote(node)
        self._schema: ExpertSchema | None = None

    @property
    def schema(self) -> ExpertSchema:
        """What it takes and gives; asks a server the first time."""
        if self._schema is None:
            self._schema = self._remote.run(self._find_schema(), self.forward_timeout_s)
        return self._schema

    def forward(self, *arguments: Any) -> Any:
        """Its module's result for these arguments."""
        tree, tensors = flatten(arguments)
        schema = self.schema
        _check_arguments(schema, tree, tensors)
        made = self._remote.run(
            self._ahead(to_host_checked(tensors, "expert"), torch.is_grad_enabled()), self.forward_timeout_s
        )
        outputs, made = made.forwarded.outputs, made.without_outputs()

        def back(
            inputs: list[torch.Tensor], gradients: list[torch.Tensor | None], again: bool
        ) -> Sequence[torch.Tensor | None]:
            work = self._back(with_new_request_id(made) if again else made, GradientPass(inputs, gradients))
            return self._remote.run(work, self.backward_timeout_s)

        return unflatten(schema.outputs, crossed(tensors, outputs, back))

    def extra_repr(self) -> str:
        return str(self.uid)

    async def _find_schema(self) -> ExpertSchema:
        calls = self._remote.calls
        return await calls.schema(self.uid, deadline_s=calls.clock.monotonic_s() + self.forward_timeout_s)

    async def _ahead(self, tensors: list[torch.Tensor], keep: bool) -> ForwardResult:
        calls = self._remote.calls
        deadline_s = calls.clock.monotonic_s() + self.forward_timeout_s
        return await calls.forward_of(self.uid, tensors, keep=keep, deadline_s=deadline_s, travel=self.travel)

    async def _back(self, made: ForwardResult, tensors: GradientPass) -> list[torch.Tensor | None]:
        calls = self._remote.calls
        deadline_s = calls.clock.monotonic_s() + self.backward_timeout_s
        return (await calls.backward(made, tensors, deadline_s=deadline_s, travel=self.travel)).gradients


def _check_arguments(schema: ExpertSchema, tree: Tree, tensors: list[torch.Tensor]) -> None:
    if not same_structure(schema.inputs, tree):
        raise UsageError(f"this expert takes other arguments: {schema}")
    check(schema.input_leaves, tensors, "input")
