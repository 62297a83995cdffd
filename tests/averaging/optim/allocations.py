"""Recorder of torch's allocations within a block, tensor by tensor, for tests of the memory that an
operation takes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """A context in which `sizes` collects the bytes of every tensor's memory that torch's operations of this
    thread allocate.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            _address(leaf) for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)
        }
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and _address(leaf) not in given:
                self.sizes.append(leaf.untyped_storage().nbytes())
        return found


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
