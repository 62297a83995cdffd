"""Every remote call of the packages, found by importing their modules. It needs nothing but the packages."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any, TypeAlias

from swarm.net.rpc import Method, StreamMethod

PACKAGES = ("swarm", "averaging", "moe")
# the testing kit and the tasks may need extras, and define no calls
_LEFT_OUT = ("__main__", ".testing", ".run.tasks", ".frameworks")
AnyMethod: TypeAlias = "Method[Any, Any] | StreamMethod"


def methods() -> dict[str, AnyMethod]:
    """Return every remote method that some module of the packages defines, by its name."""
    found = {}
    for module in _modules():
        for value in vars(module).values():
            if isinstance(value, Method | StreamMethod):
                found[value.name] = value
    return found


def _modules() -> Iterator[ModuleType]:
    for package in PACKAGES:
        root = importlib.import_module(package)
        yield root
        for info in pkgutil.walk_packages(root.__path__, f"{package}."):
            if not any(part in info.name for part in _LEFT_OUT):
                yield importlib.import_module(info.name)
