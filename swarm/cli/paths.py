"""Where the commands keep what must outlive them: identities, beside each its peer book, and the
specifications of runs taken part in.

That is the platform's folder for a user's data, or `$SWARM_HOME`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from swarm.core.errors import UsageError


def home() -> Path:
    """The folder; it need not exist yet."""
    chosen = os.environ.get("SWARM_HOME")
    if chosen:
        return Path(chosen).expanduser()
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


def default_identity() -> Path:
    """The owner's identity: `swarm start` signs with it, so a run keeps its id when its founder starts again."""
    return home() / "identity"


def bootstrap_identity() -> Path:
    """Of `swarm bootstrap`: a file of its own, so that it runs beside `swarm start`."""
    return home() / "bootstrap.identity"


def kept_runs() -> Path:
    """The specifications of runs that this user's machine took part in."""
    return home() / "runs"


def saved_states() -> Path:
    """Checkpoints: a folder a run."""
    return home() / "checkpoints"


def control_folder() -> Path:
    """Where commands that train say that they are there, and are asked to pause."""
    return home() / "live"


def monitor_history(run_id: str) -> Path:
    """Where `swarm monitor` keeps what it has seen of a run."""
    return home() / "monitor" / f"{run_id}.sqlite"
