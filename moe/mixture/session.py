"""A layer's pass from the trainer's thread: one crossing to the network thread forward, one backward, and torch's autograd in between."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from moe.mixture.backward import BackwardPass
from moe.mixture.forward import ForwardPass, Mixed
from moe.mixture.terms import PassReport, Terms
from moe.replicas.calling import ReplicaCalls
from moe.tensors import finite
from swarm.errors import UsageError

if TYPE_CHECKING:
    from swarm.node import Node

T = TypeVar("T")

CROSSING_MARGIN_S = 10.0  # passes end by their own deadlines; this is for a network thread that is busy


class Remote:
    """A layer's way to the network: its node, and what the last passes came to. Copies of a layer share it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.calls: ReplicaCalls = node.network.run(_calls_of(node), CROSSING_MARGIN_S)
        self.like: list[torch.Tensor] = []  # what outputs are like, once one was seen
        self.forward_report: PassReport | None = None
        self.backward_report: PassReport | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Remote:
        return self

    def __reduce__(self) -> Any:
        raise UsageError("a layer of remote experts belongs to its node and process: save its state_dict instead of pickling it")


async def _calls_of(node: Node) -> ReplicaCalls:
    return ReplicaCalls.of(node)


class Session:
    """One forward pass and the backward passes that follow it."""

    def __init__(self, remote: Remote, terms: Terms) -> None:
        self._remote, self._terms = remote, terms
        self._lock = threading.Lock()
        self._backwards = 0
        self.mixed: Mixed | None = None

    def forward(self, scores: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Mixed:
        """Blocks until the experts have answered. `scores` and `inputs` as the layer has them, on any device."""
        remote, terms = self._remote, self._terms
        remote.node.network.check()
        here = on_host(inputs)
        for number, tensor in enumerate(here):
            if not finite(tensor):
                raise UsageError(f"input {number} of the layer has NaN or infinity; no expert was asked")
        for_search = [score.detach().to("cpu", torch.float32).nan_to_num() for score in scores]
        keep = torch.is_grad_enabled()
        empty = remote.like or [here[0][:0]]
        pool = remote.node.network.pool

        async def work() -> Mixed:
            return await ForwardPass(remote.calls, pool, terms, for_search, here, keep).run(empty)

        mixed = remote.node.network.run(work(), terms.forward_timeout_s + CROSSING_MARGIN_S)
        if mixed.branches:
            remote.like = [output[:0, 0] for output in mixed.outputs]
        remote.forward_report = mixed.report
        self.mixed = mixed
        return mixed

    def backward(self, inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of the floating inputs, in their order, on the host. Blocks until the experts have answered."""
        assert self.mixed is not None
        remote, terms = self._remote, self._terms
        here = on_host(inputs)
        given = [None if one is None else one.detach().to("cpu") for one in gradients]
        if not all(one is None or finite(one) for one in given):
            # a loss that overflowed (GradScaler looks for just that): experts are spared, the caller sees it
            return [torch.full_like(tensor, float("nan")) for tensor in here if tensor.is_floating_point()]
        with self._lock:
            again, self._backwards = self._backwards > 0, self._backwards + 1
        work = BackwardPass(remote.calls, remote.node.network.pool, terms, self.mixed, here).run(given, again=again)
        sums, remote.backward_report = remote.node.network.run(work, terms.backward_timeout_s + CROSSING_MARGIN_S)
        return sums


class RemoteBranches(torch.autograd.Function):
    """The outputs of a session's experts, [B, S, …] each, as a function of the inputs; its backward pass calls the experts again."""

    @staticmethod
    def forward(ctx: Any, session: Session, anchor: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`anchor` wants a gradient, so that the experts learn even when no input does."""
        assert session.mixed is not None
        ctx.session = session
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        outputs = tuple(output.to(inputs[0].device) for output in session.mixed.outputs)
        ctx.floating = [output.is_floating_point() for output in outputs]
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        inputs: Sequence[torch.Tensor] = ctx.saved_tensors
        given = [one for one, is_floating in zip(gradients, ctx.floating, strict=True) if is_floating]
        found = iter([None] * len(inputs))
        if any(one is not None for one in given):
            found = iter(ctx.session.backward(inputs, given))
        back: list[torch.Tensor | None] = []
        for tensor, wanted in zip(inputs, ctx.needs_input_grad[2:], strict=True):
            gradient = next(found, None) if tensor.is_floating_point() else None
            back.append(gradient.to(tensor.device) if wanted and gradient is not None else None)
        return (None, None, *back)


def branches(session: Session, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The experts' outputs within the caller's graph."""
    anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())
    return tuple(RemoteBranches.apply(session, anchor, *inputs))  # type: ignore[no-untyped-call]


def on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Without their graph, contiguous, on the CPU."""
    return [tensor.detach().to("cpu").contiguous() for tensor in tensors]
