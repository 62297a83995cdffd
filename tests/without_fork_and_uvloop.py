"""Run pytest as on a system without uvloop and some functions of `os`:

    python -m tests.without_fork_and_uvloop tests/core tests/net

Importing uvloop fails, and `os` has neither `fork` nor processor affinity. Other programs can still be
started, as on every system.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_LACKING = ("fork", "forkpty", "register_at_fork", "sched_getaffinity", "sched_setaffinity")


def hide_uvloop_and_fork() -> None:
    """Hide them from this process. Call this before any module of swarm is imported."""
    import torch  # noqa: F401  # it goes by the name of the system, and would miss `register_at_fork`

    absent: Any = None  # imports of it raise ImportError
    sys.modules["uvloop"] = absent
    for name in _LACKING:
        if hasattr(os, name):
            delattr(os, name)


if __name__ == "__main__":
    hide_uvloop_and_fork()
    import pytest

    sys.exit(pytest.main(sys.argv[1:]))
