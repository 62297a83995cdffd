"""`swarm.RemoteExpert`: an expert that other peers host, called like a local module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from moe.client.local_copies import ModuleFactory, download, download_modules
from moe.client.replicas.autograd_bridge import (
    NodeBridge,
    attach_backward,
    attach_empty,
    to_host_checked,
    uncompiled,
)
from moe.client.replicas.calling import ForwardResult
from moe.client.replicas.peers import cast_to_schema
from moe.protocol.calls import UNCOMPRESSED, GradientPass, WireCodecs, check_staleness_max
from moe.protocol.names import ExpertUid
from moe.protocol.schema import ExpertSchema, Tree, check, flatten, same_structure, unflatten
from swarm.core.errors import UsageError

if TYPE_CHECKING:
    from swarm.node import Node

__all__ = ["RemoteExpert", "WireCodecs"]


class RemoteExpert(torch.nn.Module):
    """The expert called `uid`, wherever it is hosted: `y = expert(x)`, as its module is called.

    Creating it causes no network traffic. A backward pass returns the gradients of the inputs, and makes the
    expert learn where it is hosted. If several servers host the expert, one is drawn by how quick they are,
    and another one is asked when that one fails or is slow. The backward pass goes to the server that
    answered forward, and is applied there once.

    Args:
        node: This process as a peer.
        uid: Name of the expert, such as "ffn.0.1".
        forward_timeout_s: Limit of a forward pass.
        backward_timeout_s: Limit of a backward pass.
        codecs: Codecs in which tensors are sent; None: those that the server names.
        staleness_max: Refuse a backward pass, with ExpertStale, when the expert's versions in the two passes
            are further apart than this: other callers make steps, and a server may restart. None: apply it.

    Calls raise NotEnoughPeers (nobody hosts the expert), ExpertOverloaded, ExpertFailed, UsageError
    (arguments that do not fit its schema), NetworkError, and DeadlineExceeded.
    """

    def __init__(
        self,
        node: Node,
        uid: str,
        *,
        forward_timeout_s: float = 30.0,
        backward_timeout_s: float = 30.0,
        codecs: WireCodecs | None = None,
        staleness_max: int | None = None,
    ) -> None:
        super().__init__()
        if not (forward_timeout_s > 0 and backward_timeout_s > 0):
            raise UsageError("timeouts are above 0")
        self.uid = ExpertUid.parse(uid)
        self.forward_timeout_s, self.backward_timeout_s = forward_timeout_s, backward_timeout_s
        self.codecs = codecs or UNCOMPRESSED
        self.staleness_max = check_staleness_max(staleness_max)
        self._bridge = NodeBridge(node)
        self._schema: ExpertSchema | None = None

    @property
    def schema(self) -> ExpertSchema:
        """Return the expert's schema. A server is asked for it the first time."""
        if self._schema is None:
            self._schema = self._bridge.run(self._find_schema(), self.forward_timeout_s)
        return self._schema

    @uncompiled
    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Return the module's result for these arguments: by position, or all by keyword where the expert was
        made from a dictionary of sample inputs. Under autocast floating-point arguments are cast to
        the dtypes that the expert takes.
        """
        if named and arguments:
            raise UsageError("an expert takes all arguments by position, or all by keyword")
        tree, tensors = flatten((named,) if named else arguments)
        schema = self.schema
        if any(torch.is_autocast_enabled(tensor.device.type) for tensor in tensors):
            tensors = cast_to_schema(schema.input_leaves, tensors)
        fitted = schema.at(schema.length_of(tensors))
        _check_arguments(fitted, tree, tensors)
        if not len(tensors[0]):
            empty = [
                torch.empty((0, *leaf.shape), dtype=leaf.dtype, device="cpu") for leaf in fitted.output_leaves
            ]
            return unflatten(schema.outputs, attach_empty(tensors, empty))
        result = self._bridge.run(
            self._run_forward(to_host_checked(tensors, "expert"), torch.is_grad_enabled()),
            self.forward_timeout_s,
        )
        outputs = result.forward_reply.take_outputs()

        def run_backward(
            inputs: list[torch.Tensor], gradients: list[torch.Tensor | None], number: int
        ) -> Sequence[torch.Tensor | None]:
            work = self._run_backward(
                result.for_pass(number), GradientPass(inputs, gradients, self.staleness_max)
            )
            return self._bridge.run(work, self.backward_timeout_s)

        return unflatten(schema.outputs, attach_backward(tensors, outputs, run_backward))

    def download(self) -> dict[str, torch.Tensor]:
        """Return the expert's present parameters and buffers: the `state_dict` of its module. Three replicas
        are compared where there are as many. Raises NotEnoughPeers when no server gives them.
        """
        return download(self._bridge.node, str(self.uid))[str(self.uid)].state

    def to_local(self, make_module: ModuleFactory | None = None) -> torch.nn.Module:
        """Return the expert as a module of this process. `make_module`: returns a new module like that of the
        expert with this name; None: of the class that its servers name (those of `swarm serve` do).
        """
        return download_modules(self._bridge.node, str(self.uid), make_module)[str(self.uid)]

    def extra_repr(self) -> str:
        return str(self.uid)

    async def _find_schema(self) -> ExpertSchema:
        calls = self._bridge.calls
        return await calls.schema(self.uid, deadline_s=calls.clock.monotonic_s() + self.forward_timeout_s)

    async def _run_forward(self, tensors: list[torch.Tensor], keep: bool) -> ForwardResult:
        calls = self._bridge.calls
        deadline_s = calls.clock.monotonic_s() + self.forward_timeout_s
        return await calls.forward_any(
            self.uid, tensors, keep=keep, deadline_s=deadline_s, codecs=self.codecs
        )

    async def _run_backward(self, result: ForwardResult, tensors: GradientPass) -> list[torch.Tensor | None]:
        calls = self._bridge.calls
        deadline_s = calls.clock.monotonic_s() + self.backward_timeout_s
        return (await calls.backward(result, tensors, deadline_s=deadline_s, codecs=self.codecs)).gradients


def _check_arguments(schema: ExpertSchema, tree: Tree, tensors: list[torch.Tensor]) -> None:
    if not same_structure(schema.inputs, tree):
        raise UsageError(f"this expert takes other arguments: {schema}")
    check(schema.input_leaves, tensors, "input")
