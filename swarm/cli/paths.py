"""Folders and files that the commands keep: identities with their peer books, specifications, checkpoints.

They are in the platform's folder for user data, or in `$SWARM_HOME`.
"""

from __future__ import annotations

from pathlib import Path

from swarm.core.home import home


def default_identity() -> Path:
    """Return this user's identity file. `swarm start` signs with it, so a restarted run keeps its id."""
    return home() / "identity"


def bootstrap_identity() -> Path:
    """Return the identity file of `swarm bootstrap`, so that it can run beside `swarm start`."""
    return home() / "bootstrap.identity"


def invited_identity(subject: str, number: int) -> Path:
    """Return the identity file of a peer that enters by an invite. `invite` is the PeerID or public key that
    names the invite; processes on this machine are numbered.
    """
    return home() / "invited" / f"{subject}-{number}.identity"


def invited_identities() -> list[Path]:
    """Return the identity files of all peers that entered by an invite on this machine."""
    return sorted((home() / "invited").glob("*.identity"))


def volunteer_identity(number: int) -> Path:
    """Return the identity file of a volunteer that enters by an address; each process that runs at the same
    time has another number.
    """
    return home() / "volunteers" / f"{number}.identity"


def volunteer_identities() -> list[Path]:
    """Return the identity files of all volunteers that entered by an address on this machine."""
    return sorted((home() / "volunteers").glob("*.identity"))


def specifications_folder() -> Path:
    """Return the folder of the specifications of runs in which this machine took part."""
    return home() / "runs"


def checkpoints_folder() -> Path:
    """Return the folder of checkpoints, with one subfolder per run."""
    return home() / "checkpoints"


def preferences_file() -> Path:
    """Return the preferences file of this user: what volunteers may do on this machine."""
    return home() / "preferences.toml"


def contributions_file() -> Path:
    """Return the database of the contributions of this user's volunteers."""
    return home() / "contributions.sqlite"


def control_folder() -> Path:
    """Return the folder through which `swarm pause` reaches running commands."""
    return home() / "live"


def monitor_history(run_id: str) -> Path:
    """Return the database file in which `swarm monitor` keeps the history of a run."""
    return home() / "monitor" / f"{run_id}.sqlite"
