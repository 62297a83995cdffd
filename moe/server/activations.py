"""Activations of forward passes that a backward pass is likely to follow."""

from __future__ import annotations

from collections import OrderedDict

import torch


class ActivationCache:
    """Activations of forward passes, by pass id, of one version of the parameters; the oldest are dropped
    first.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._version = 0
        self.size_bytes = 0
        self._graphs: OrderedDict[object, tuple[list[torch.Tensor], list[torch.Tensor], int]] = OrderedDict()

    def put(
        self, pass_id: object, version: int, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        """Keep the inputs and outputs of a pass, with their graph, if there is room."""
        if version != self._version:  # a step has overwritten the tensors of the graphs
            self.clear()
            self._version = version
        size = _graph_bytes(inputs, outputs)
        if size > self.bytes_max:
            return
        self._graphs[pass_id] = (inputs, outputs, size)
        self.size_bytes += size
        while self.size_bytes > self.bytes_max:
            self.size_bytes -= self._graphs.popitem(last=False)[1][2]

    def take(self, pass_id: object, version: int) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """Remove and return the activations of a pass; None when there are none of this version."""
        found = self._graphs.pop(pass_id, None)
        if found is None:
            return None
        self.size_bytes -= found[2]
        return found[:2] if version == self._version else None

    def clear(self) -> None:
        """Forget everything."""
        self._graphs.clear()
        self.size_bytes = 0


def _graph_bytes(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
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
