"""Changed defaults of torch, as a user's program may set them, for tests that library code does not depend on
them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

CHANGES = ("dtype bfloat16", "dtype float64", "device meta")


@contextmanager
def changed_defaults(change: str) -> Iterator[None]:
    """Apply one of CHANGES to this thread's defaults within the block, and restore the usual ones (float32,
    no device) after it.

    Caches of this project's modules (`functools.lru_cache`) are emptied before and after: a table made under
    the usual defaults would hide a missing dtype, and one made under others would reach later tests.
    """
    kind, name = change.split()
    _empty_caches()
    if kind == "dtype":
        torch.set_default_dtype(getattr(torch, name))
    else:
        torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        _empty_caches()


def _empty_caches() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith(("swarm.compression", "averaging.reduction", "averaging.allreduce")):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
