"""The folder of what swarm keeps for a user, and paths that users give."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from swarm.core.errors import UsageError


def home() -> Path:
    """Return the folder of all files: the platform's folder for user data, or `$SWARM_HOME`. It may not exist
    yet.
    """
    chosen = os.environ.get("SWARM_HOME")
    if chosen:
        return user_path(chosen)
    try:
        if sys.platform == "win32":
            return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "swarm"
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Application Support" / "swarm"
        return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "swarm"
    except RuntimeError as error:
        raise UsageError(
            "this user has no home folder: set SWARM_HOME to a folder where swarm may keep its identity"
        ) from error


def user_path(given: str | os.PathLike[str]) -> Path:
    """Return a path that a user gave, with the home folder for ~. Raise UsageError for a ~NAME that is no
    user.
    """
    try:
        return Path(given).expanduser()
    except RuntimeError:
        raise UsageError(f"{given}: there is no such home folder; give the whole path") from None
