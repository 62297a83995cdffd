"""Files that are replaced as a whole: after a crash or a power cut there is either the old or the new one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


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
