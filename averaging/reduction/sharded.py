"""The check that refuses tensors of which this process holds only a shard, with an error that says what to
pass instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarm.core.errors import UsageError


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a DTensor: FSDP2 (`fully_shard`) and tensor parallelism make such
    parameters.

    The class is recognised by its name, because its module moved between versions of torch and importing it
    takes a second.
    """
    return any(
        kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed.")
        for kind in type(tensor).__mro__
    )


def refuse_sharded(tensors: Sequence[torch.Tensor], what: str) -> None:
    """Raise UsageError when one of `tensors` is a DTensor. `what` names the tensors in the message, as in
    "parameter".
    """
    for place, tensor in enumerate(tensors):
        if is_sharded(tensor):
            raise UsageError(
                f"{what} {place} is a DTensor, of which each process holds a shard (FSDP2's fully_shard "
                "and tensor parallelism make them);"
                " peers share whole tensors. Train with DistributedDataParallel or on one device within a "
                "peer, and pass its whole tensors"
            )
