"""`swarm identity`, and how the other commands open theirs."""

from __future__ import annotations

import json
from pathlib import Path

from swarm.cli.paths import default_identity
from swarm.core.errors import UsageError
from swarm.core.identity import Identity

NEW = "new"


def open_identity(choice: str | None, default: Path | None) -> Identity:
    """The identity that an option means: a file (made if missing), `new` for one in memory, or else the
    default.
    """
    if choice == NEW or (choice is None and default is None):
        return Identity.generate()
    path = Path(choice).expanduser() if choice is not None else default
    assert path is not None
    try:
        return Identity.load(path, create=True)
    except UsageError as error:
        if choice is None and "is using" in str(error):
            raise UsageError(
                f"{error}. Or pass --identity {NEW} for one that is forgotten afterwards"
            ) from error
        raise


def show_identity(choice: str | None, *, create: bool, as_json: bool) -> int:
    """Print the PeerID and where its key is kept."""
    path = Path(choice).expanduser() if choice is not None else default_identity()
    existed = path.exists()
    identity = Identity.load(path, create=create)
    peer_id = str(identity.peer_id)
    identity.close()
    if as_json:
        print(
            json.dumps({"event": "identity", "peer_id": peer_id, "path": str(path), "created": not existed})
        )
    else:
        print(f"{peer_id}\n{'kept in' if existed else 'made and kept in'} {path}")
    return 0
