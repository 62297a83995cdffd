"""A stand-in for a tensor on MPS on machines without a Metal device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_COPIES_AND_VIEWS = frozenset(
    {
        "to",
        "copy_",
        "clone",
        "detach",
        "view",
        "reshape",
        "__getitem__",
        "numel",
        "dim",
        "size",
        "stride",
        "is_contiguous",
        "__len__",
    }
    | {"__get__", "element_size", "data_ptr", "untyped_storage", "storage_offset"}
)


class Metal(torch.Tensor):
    """Host memory that reports to be on MPS. It can be copied and viewed; computing with it raises
    AssertionError.
    """

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("mps")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__
        assert name in _COPIES_AND_VIEWS, f"the device was asked to compute {name}"
        with torch._C.DisableTorchFunctionSubclass():
            if name == "to" and isinstance(args[1], torch.device):
                moved = args[0].as_subclass(torch.Tensor)
                return args[0] if args[1].type == "mps" else moved.clone()
            found = func(*args, **(kwargs or {}))
        if name == "copy_":
            return args[0]
        return found.as_subclass(Metal) if type(found) is torch.Tensor else found


def on_metal(values: torch.Tensor) -> torch.Tensor:
    """Return a copy of `values` that reports to be on MPS."""
    return values.clone().as_subclass(Metal)
