"""A mixture layer's pass from the trainer's thread: one crossing to the network thread forward, one for each
backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from moe.client.mixture.backward import BackwardPass
from moe.client.mixture.forward import ForwardPass, MixtureOutput
from moe.client.mixture.options import MixtureOptions, PassReport
from moe.client.replicas.autograd_bridge import Remote, crossed, to_host_checked


@dataclass(slots=True)
class LastPasses:
    """What a layer remembers of its last passes."""

    like: list[torch.Tensor] = field(default_factory=list)  # what outputs are like, once one was seen
    forward: PassReport | None = None
    backward: PassReport | None = None


class Session:
    """One forward pass and the backward passes that follow it."""

    def __init__(self, remote: Remote, seen: LastPasses, terms: MixtureOptions) -> None:
        self._remote, self._seen, self._terms = remote, seen, terms

    def forward(self, scores: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> MixtureOutput:
        """Blocks until the experts have answered. `scores` and `inputs` as the layer has them, on any device.

        The outputs, [B, S, …] each, are within the caller's graph as a function of the inputs.
        """
        remote, seen, terms = self._remote, self._seen, self._terms
        remote.node.network.check()
        here = to_host_checked(inputs, "layer")
        for_search = [score.detach().to("cpu", torch.float32).nan_to_num() for score in scores]
        keep = torch.is_grad_enabled()
        empty = seen.like or [here[0][:0]]
        pool = remote.node.network.pool

        async def work() -> MixtureOutput:
            return await ForwardPass(remote.calls, pool, terms, for_search, here, keep).run(empty)

        mixed = remote.run(work(), terms.forward_timeout_s)
        if mixed.branches:
            seen.like = [output[:0, 0] for output in mixed.outputs]
        seen.forward = mixed.report
        # what the graph holds must not hold the graph's own outputs
        self._mixed = replace(mixed, outputs=[])
        return replace(mixed, outputs=list(crossed(inputs, mixed.outputs, self._backward)))

    def _backward(
        self, inputs: list[torch.Tensor], gradients: list[torch.Tensor | None], again: bool
    ) -> Sequence[torch.Tensor | None]:
        remote, terms = self._remote, self._terms
        work = BackwardPass(remote.calls, remote.node.network.pool, terms, self._mixed, inputs).run(
            gradients, again=again
        )
        sums, self._seen.backward = remote.run(work, terms.backward_timeout_s)
        return sums
