"""The schema of a module: the inputs and outputs for its samples, and for shorter sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe.protocol.schema import ExpertSchema, Tree, flatten, unflatten
from moe.server.devices import using
from moe.server.norm_statistics import norm_layers, unchanged_statistics
from swarm.core.device import is_device_failure, is_out_of_memory
from swarm.core.errors import UsageError


def schema_of(
    module: torch.nn.Module,
    call: Callable[[Sequence[Any]], Any],
    sample_inputs: tuple[Any, ...],
    device: torch.device,
) -> ExpertSchema:
    """Return the schema of a module for samples of its arguments, by calling it. `call` takes the arguments,
    whose tensors are on `device`.

    A module that takes sequences of any length up to that of the samples says so by an attribute,
    `sequence_dimension`: the number of that dimension in its inputs, such as 1 in (batch, sequence,
    features). Such a module is called once more, with a sequence of half the length. Raises UsageError when
    the module fails, its inputs or outputs are not trees of tensors, or their shapes do not change with the
    length.
    """
    tree, tensors = flatten(sample_inputs)
    schema = _schema(call, tree, tensors, device)
    dimension = getattr(module, "sequence_dimension", None)
    if dimension is None:
        return schema
    is_number = type(dimension) is int and dimension >= 1
    length = next((one.shape[dimension] for one in tensors if is_number and one.ndim > dimension), 0)
    if not length:
        raise UsageError(
            "sequence_dimension of a module is the number of a dimension of its inputs after the batch, "
            f"not {dimension!r}"
        )
    if length == 1:
        return schema
    shorter = [
        one.narrow(dimension, 0, length // 2)
        if one.ndim > dimension and one.shape[dimension] == length
        else one
        for one in tensors
    ]
    with unchanged_statistics(norm_layers(module)):
        return schema.with_shorter(_schema(call, tree, shorter, device))


def _schema(
    call: Callable[[Sequence[Any]], Any], tree: Tree, tensors: Sequence[torch.Tensor], device: torch.device
) -> ExpertSchema:
    with using(device), torch.no_grad():
        arguments = unflatten(tree, [tensor.to(device) for tensor in tensors])
        try:
            outputs = call(arguments)
        except (Exception, SystemExit) as error:  # raised by the user's module
            if is_out_of_memory(error) or is_device_failure(error):
                raise
            given = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise UsageError(
                f"the module fails for its sample inputs, of the shapes {given}: "
                f"{type(error).__name__}: {error}"
            ) from error
    return ExpertSchema.from_samples(unflatten(tree, tensors), outputs)
