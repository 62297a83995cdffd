"""Kinds of experts that can be served by name: built-in ones, installed ones, and those of a user's own file.

An expert class is a function that takes `ExpertSettings` and returns a module and its sample inputs (as
`swarm.Expert` takes them). A package adds one with an entry point of the group `swarm.experts`:

    [project.entry-points."swarm.experts"]
    mine = "mypackage.experts:make_mine"

A user's own class needs no package: `swarm serve --module file.py --expert-class make_mine` calls the
function of that name in the file. The code that runs is always on this machine already; none is taken from
the network.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from swarm.core.errors import SwarmError, UsageError

if TYPE_CHECKING:
    import torch

ENTRY_POINT_GROUP = "swarm.experts"
_BUILT_IN = {
    "ffn": "moe.classes.feedforward:feedforward",
    "transformer": "moe.classes.transformer:transformer",
    "causal_transformer": "moe.classes.transformer:causal_transformer",
    "nop": "moe.classes.feedforward:nop",
}
_MODULE_NAME = "swarm_user_experts"
_SIGNATURE = (
    "It is called with one argument, which has hidden_dim and sequence_length, and returns a module and the "
    "tuple of its sample inputs: def make(settings): return torch.nn.Linear(settings.hidden_dim, "
    "settings.hidden_dim), (torch.zeros(1, settings.hidden_dim),)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSettings:
    """The settings of an expert class that the command line offers."""

    hidden_dim: int = 1024
    sequence_length: int = 128  # for experts on sequences: (batch, sequence_length, hidden_dim)

    def __post_init__(self) -> None:
        if self.hidden_dim < 1 or self.sequence_length < 1:
            raise UsageError("an expert's dimensions are at least 1")


ExpertFactory: TypeAlias = "Callable[[ExpertSettings], tuple[torch.nn.Module, Sequence[Any]]]"


def available_classes() -> list[str]:
    """Return the names that `--expert-class` takes on this machine."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def expert_class(name: str, file: Path | None = None) -> ExpertFactory:
    """Return the class of this name, from the user's file if one is given. Raises UsageError when it does not
    exist or cannot be loaded.
    """
    factory = _load_from_file(name, file) if file is not None else _load_installed(name)
    if not callable(factory):
        raise UsageError(f"the expert class {name!r} is no function. {_SIGNATURE}")
    return factory  # type: ignore[no-any-return]


def make(
    name: str, factory: ExpertFactory, settings: ExpertSettings
) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Create a module of a class, and its sample inputs. Raises UsageError when the class fails, or returns
    something else.
    """
    import torch

    try:
        result = factory(settings)
    except SwarmError:
        raise
    except (Exception, SystemExit) as error:  # raised by the user's code
        raise UsageError(
            f"the expert class {name!r} failed: {type(error).__name__}: {error}. {_SIGNATURE}"
        ) from error
    if (
        not isinstance(result, tuple)
        or len(result) != 2
        or not isinstance(result[0], torch.nn.Module)
        or not isinstance(result[1], tuple | list)
    ):
        raise UsageError(
            f"the expert class {name!r} should return a module and a tuple of sample inputs, "
            f"not {result!r:.100}. {_SIGNATURE}"
        )
    return result[0], tuple(result[1])


def _load_installed(name: str) -> Any:
    if name in _BUILT_IN:
        where, _, attribute = _BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(where), attribute)
    points = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not points:
        raise UsageError(
            f"there is no expert class {name!r} on this machine "
            f"(there are {', '.join(available_classes())}): "
            "install the package that has it, or give your own file with --module"
        )
    try:
        return points[0].load()
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"the expert class {name!r} ({points[0].value}) cannot be loaded: {error}"
        ) from error


def _load_from_file(name: str, file: Path) -> Any:
    specification = importlib.util.spec_from_file_location(_MODULE_NAME, file)
    if not file.is_file() or specification is None or specification.loader is None:
        raise UsageError(f"--module {file}: there is no such Python file")
    module = importlib.util.module_from_spec(specification)
    sys.modules[_MODULE_NAME] = module  # dataclasses and pickles of the file look up their module
    try:
        specification.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(f"--module {file} fails: {type(error).__name__}: {error}") from error
    factory = getattr(module, name, None)
    if factory is None:
        raise UsageError(f"--module {file} has no function {name!r}: name one with --expert-class")
    return factory
