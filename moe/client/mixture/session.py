"""A mixture layer's passes, as they start in the trainer's thread: the network thread is entered once for the
forward pass and once for each backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from moe.client.mixture.backward import BackwardPass
from moe.client.mixture.forward import ForwardPass, MixtureOutput
from moe.client.mixture.options import MixtureOptions, PassReport
from moe.client.replicas.autograd_bridge import (
    NodeBridge,
    attach_backward,
    attach_empty,
    to_host_checked,
)


@dataclass(slots=True)
class LastPasses:
    """A layer's record of its last passes."""

    # without rows; gives the shapes and dtypes of outputs, once known, for inputs of the shape stored with it
    empty_outputs: list[torch.Tensor] = field(default_factory=list)
    sample_shape: torch.Size | None = None
    forward: PassReport | None = None
    backward: PassReport | None = None


class Session:
    """One forward pass and the backward passes that follow it."""

    def __init__(self, bridge: NodeBridge, last_passes: LastPasses, options: MixtureOptions) -> None:
        self._bridge, self._last_passes, self._options = bridge, last_passes, options

    def forward(self, scores: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> MixtureOutput:
        """Run the forward pass and block until the experts have answered. `scores` and `inputs` are as the
        layer has them, on any device.

        The outputs, [B, S, …] each, are part of the caller's autograd graph as a function of the inputs.
        """
        bridge, last_passes, options = self._bridge, self._last_passes, self._options
        bridge.node.network.check()
        host_inputs = to_host_checked(inputs, "layer")
        search_scores = [score.detach().to("cpu", torch.float32).nan_to_num() for score in scores]
        keep = torch.is_grad_enabled()
        # as many features as the inputs have, until some expert has answered for inputs of this shape
        sample_shape = host_inputs[0].shape[1:]
        known = last_passes.empty_outputs if sample_shape == last_passes.sample_shape else []
        empty = known or [host_inputs[0][:0].clone()]
        if not len(host_inputs[0]):
            return self._empty_output(inputs, empty)
        pool = bridge.node.network.pool

        async def work() -> MixtureOutput:
            return await ForwardPass(bridge.calls, pool, options, search_scores, host_inputs, keep).run(empty)

        mixture_output = bridge.run(work(), options.forward_timeout_s)
        if mixture_output.branches:
            last_passes.sample_shape = sample_shape
            last_passes.empty_outputs = [
                output.new_empty((0, *output.shape[2:])) for output in mixture_output.outputs
            ]
        last_passes.forward = mixture_output.report
        # the graph holds this object, which must not hold the graph's own outputs
        self._mixture_output = replace(mixture_output, outputs=[])
        return replace(
            mixture_output, outputs=list(attach_backward(inputs, mixture_output.outputs, self._backward))
        )

    def _empty_output(self, inputs: Sequence[torch.Tensor], empty: Sequence[torch.Tensor]) -> MixtureOutput:
        """Return the output for a batch without samples; no expert is called."""
        slots, dimensions = self._options.k_best, len(self._options.grid.dimensions)
        none = torch.zeros(0, slots, dtype=torch.bool, device="cpu")
        outputs = [one.new_empty((0, slots, *one.shape[1:])) for one in empty]
        self._last_passes.forward = PassReport(asked=(), answered=(), failed={}, short_samples=0, seconds=0.0)
        return MixtureOutput(
            coordinates_BSD=torch.zeros(0, slots, dimensions, dtype=torch.int64, device="cpu"),
            selected_BS=none,
            answered_BS=none,
            outputs=list(attach_empty(inputs, outputs)),
            branches=[],
            report=self._last_passes.forward,
        )

    def _backward(
        self, inputs: list[torch.Tensor], gradients: list[torch.Tensor | None], number: int
    ) -> Sequence[torch.Tensor | None]:
        bridge, options = self._bridge, self._options
        work = BackwardPass(
            bridge.calls, bridge.node.network.pool, options, self._mixture_output, inputs
        ).run(gradients, number)
        sums, self._last_passes.backward = bridge.run(work, options.backward_timeout_s)
        return sums
