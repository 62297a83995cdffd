"""Files that are replaced as a whole: after a crash or a power cut there is either the old or the new one."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarm.core.errors import PeerError

_log = logging.getLogger(__name__)

# what reading a file raises that holds something else, or is nested too deep for JSON
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, PeerError)


def replace_durably(path: Path, write_to: Callable[[Path], object]) -> None:
    """Let `write_to` fill a temporary file beside `path`, and move it there once it is on the disk. Raises
    OSError when the disk does not take it; the old file is then unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_to(temporary)
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if hasattr(os, "O_DIRECTORY"):  # the directory entry must be on the disk, too
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_private(path: Path, raw: bytes) -> None:
    """Replace a file durably by one that only its owner may read (mode 0600). Raises OSError."""

    def write_to(temporary: Path) -> None:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
            stream.write(raw)

    replace_durably(path, write_to)


def read_json_copy(path: Path, name: str, bytes_max: int, take: Callable[[Any], None]) -> None:
    """Let `take` read the JSON document of a file that a program can do without, `name` in messages. A
    missing file is no document. A damaged one is moved aside, and one that cannot be read does not stop the
    program; both are logged as errors, which the commands show. `take` raises PeerError, or what values of
    wrong types raise, for a document that it cannot use.
    """
    try:
        with path.open("rb") as stream:
            take(json.loads(stream.read(bytes_max)))
    except FileNotFoundError:
        return
    except OSError as error:
        _log.error("the %s %s cannot be read, and this node begins a new one: %s", name, path, error)
    except _DAMAGE as error:
        set_aside(path, name, error)


def set_aside(path: Path, name: str, error: Exception) -> None:
    """Move a damaged file aside, `name` in messages, and log that as an error, which the commands show.
    `error`: what reading it raised. Where it cannot be moved, the next save replaces it.
    """
    aside = path.with_name(f"{path.name}.damaged")
    try:
        path.replace(aside)
        where = f"it was moved to {aside.name}, a new one begins"
    except OSError as why:
        where = f"it cannot be moved to {aside.name} ({why.strerror or why}), and the next save replaces it"
    _log.error(
        "the %s %s is damaged and cannot be read (%s): %s", name, path, error or type(error).__name__, where
    )
