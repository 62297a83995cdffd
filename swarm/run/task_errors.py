"""The boundary to the code of a task, which others have written: its exceptions become SwarmErrors of one
sentence with the task's name. SWARM_LOG=debug shows their tracebacks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from swarm.core.device import is_device_failure, is_out_of_memory
from swarm.core.errors import SwarmError

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


def guarded(name: str, task: object, checked: Callable[[str, Any], Any]) -> Any:
    """Return a stand-in for a task, and for the data that it loads, whose methods raise SwarmErrors.
    `checked` gets the name of a method and its result, and returns the result, or raises if it is not what
    callers need.
    """
    return _Guarded(name, task, checked)


class _Guarded:
    """Forwards everything to a task or to its data, and converts its exceptions."""

    def __init__(self, name: str, inner: object, checked: Callable[[str, Any], Any]) -> None:
        self._name, self._inner, self._checked = name, inner, checked

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
                result = self._checked(attribute, value(*arguments, **options))
            return _Guarded(self._name, result, self._checked) if attribute == "load_data" else result

        return call
