"""`swarm identity`, and how the other commands open their identities."""

from __future__ import annotations

from pathlib import Path

import click

from swarm.cli import options
from swarm.cli.paths import default_identity
from swarm.cli.render import print_result
from swarm.core.errors import UsageError
from swarm.core.identity import Identity

NEW = "new"


@click.command(context_settings=options.CONTEXT)
@click.option("--identity", metavar="FILE", default=None, help="The identity file. [default: this user's]")
@click.option("--create", is_flag=True, help="Make the file if there is none.")
@options.as_json
def identity(identity: str | None, create: bool, as_json: bool) -> int:
    """Show or make an identity: the key that says who a peer is and which runs it owns.

    \b
    Examples:
      swarm identity
      swarm identity --create
      swarm identity --create --identity ~/other.identity
    """
    path = Path(identity).expanduser() if identity is not None else default_identity()
    existed = path.exists()
    if create and not existed:
        Identity.load(path, create=True).close()
    peer_id = str(Identity.read(path).peer_id)  # without the lock: a peer may be using it
    print_result(
        "identity",
        {"peer_id": peer_id, "path": str(path), "created": not existed},
        f"{peer_id}\n{'kept in' if existed else 'made and kept in'} {path}",
        as_json=as_json,
    )
    return 0


def open_identity(choice: str | None, default: Path | None) -> Identity:
    """Open the identity that an option names.

    `choice` is a file, which is created if it is missing, or `new` for an identity that is kept in memory
    only. Without a choice the `default` file is used, or a new identity if there is no default either.
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
