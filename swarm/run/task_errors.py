"""The boundary to the code of a task, which others have written: its exceptions become SwarmErrors of one
sentence with the task's name. SWARM_LOG=debug shows their tracebacks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from swarm.core.device import is_device_failure, is_out_of_memory
from swarm.core.errors import SwarmError

if TYPE_CHECKING:
    from swarm.run.task import Task

_log = logging.getLogger(__name__)
_TEXT_CHARACTERS_MAX = 500  # maximum length of an exception's text
_OPTIONAL = frozenset({"metrics", "write_sample", "export", "build_optimizer"})  # methods that may be missing


@contextlib.contextmanager
def explained(name: str, what: str) -> Iterator[None]:
    """Raise the exceptions of the task `name` within the context as SwarmErrors. `what` is the predicate of
    the sentence, such as "failed in loss".

    A SwarmError passes unchanged, because its text is for users already. Errors of a device or of memory
    pass, too: the training loop handles them.
    """
    try:
        yield
    except SwarmError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError | MemoryError) and (
            is_out_of_memory(error) or is_device_failure(error)
        ):
            raise
        _log.debug("the task %s %s", name, what, exc_info=error)
        raise SwarmError(f"the task {name!r} {what}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    """Return the text of an exception and where the task raised it, on one line."""
    text = " ".join(str(error).split())[:_TEXT_CHARACTERS_MAX]
    frames = traceback.extract_tb(error.__traceback__)
    where = (
        f" ({frames[-1].filename}, line {frames[-1].lineno})"
        if frames[1:] and frames[-1].filename != __file__
        else ""
    )
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"


def explained_of(owner: object, what: str) -> contextlib.AbstractContextManager[None]:
    """Return the context `explained` for code that a task, or its data, has caused to run. `owner`: what
    `guarded` returned; anything else is not a task's, and its exceptions pass.
    """
    return explained(owner._name, what) if isinstance(owner, _Guarded) else contextlib.nullcontext()


def guarded(name: str, task: object) -> Task:
    """Return a stand-in for a task, and for the data that it loads, whose methods raise SwarmErrors."""
    return cast("Task", _Guarded(name, task))


class _Guarded:
    """Forwards everything to a task or to its data, and converts its exceptions."""

    def __init__(self, name: str, inner: object) -> None:
        self._name, self._inner = name, inner

    def __getattr__(self, attribute: str) -> Any:
        if attribute in _OPTIONAL or attribute.startswith("__"):
            value = getattr(self._inner, attribute)  # AttributeError says that the task has none
        else:
            with explained(self._name, f"failed in {attribute}"):
                value = getattr(self._inner, attribute)
        if not callable(value):
            return value

        @functools.wraps(value)
        def call(*arguments: Any, **options: Any) -> Any:
            with explained(self._name, f"failed in {attribute}"):
                result = _checked(attribute, value(*arguments, **options))
            return _Guarded(self._name, result) if attribute == "load_data" else result

        return call


def _checked(method: str, result: Any) -> Any:
    """Return the result of a method, numbers as floats. Raise TypeError if it is not what callers need."""
    if method == "describe":
        from swarm.run.task import TaskDescription

        if not isinstance(result, TaskDescription):
            raise TypeError(f"it must return a swarm.TaskDescription, not {result!r:.60}")
    elif method == "build_model":
        import torch

        if not isinstance(result, torch.nn.Module):
            raise TypeError(f"it must return a torch.nn.Module, not {result!r:.60}")
        if not any(one.requires_grad for one in result.parameters()):
            raise TypeError("its model has no parameters to train")
    elif method == "loss":
        import torch

        if not isinstance(result, torch.Tensor) or result.numel() != 1 or not result.requires_grad:
            raise TypeError("it must return one number that depends on the model's parameters: a mean loss")
    elif method == "validation_loss":
        return float(result)
    elif method == "metrics":
        return {str(name): float(value) for name, value in result.items()}
    return result
