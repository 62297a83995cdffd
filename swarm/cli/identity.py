"""`swarm identity`, and functions with which the other commands open their identities."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import click

from swarm.cli import options
from swarm.cli.paths import (
    default_identity,
    invited_identities,
    invited_identity,
    volunteer_identities,
    volunteer_identity,
)
from swarm.cli.render import print_result
from swarm.core.errors import UsageError
from swarm.core.files import set_aside
from swarm.core.home import user_path
from swarm.core.identity import DamagedIdentity, Identity, IdentityInUse
from swarm.core.ids import PeerId
from swarm.core.working import working
from swarm.membership.capability import Role
from swarm.membership.invite import Entrance, Invite

NEW = "new"
PASSPHRASE_CHARACTERS_MAX = 1024
PROCESSES_MAX = 16  # processes at once, for one invite or by address, whose identities are kept


@click.command(context_settings=options.CONTEXT)
@click.option("--identity", metavar="FILE", default=None, help="The identity file. [default: this user's]")
@click.option("--create", is_flag=True, help="Make the file if there is none.")
@click.option(
    "--export", "exported", metavar="COPY", default=None, help="Write a copy, encrypted with a passphrase."
)
@click.option("--import", "imported", metavar="COPY", default=None, help="Make the file from such a copy.")
@click.option(
    "--passphrase-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    default=None,
    help="Read the passphrase from the first line of a file instead of asking.",
)
@options.as_json
def identity(
    identity: str | None,
    create: bool,
    exported: str | None,
    imported: str | None,
    passphrase_file: Path | None,
    as_json: bool,
) -> int:
    """Show or make an identity: the key that says who a peer is and which runs it owns.

    Keep a copy of the identity that owns a run: without it nobody can change the run any more. Nobody,
    including you, can use a copy without its passphrase.

    \b
    Examples:
      swarm identity
      swarm identity --create
      swarm identity --create --identity ~/other.identity
      swarm identity --export ~/usb/owner.swarm
      swarm identity --import ~/usb/owner.swarm
    """
    if sum((create, exported is not None, imported is not None)) > 1:
        raise UsageError("--create, --export and --import exclude each other: choose one")
    path = user_path(identity) if identity is not None else default_identity()
    existed = os.path.exists(path)  # Path.exists raises OSError for a name that is too long
    if create and not existed:
        Identity.load(path, create=True).close()
    if imported is not None:
        if existed:
            raise UsageError(
                f"{path} exists, and no key is ever overwritten: choose another with --identity FILE"
            )
        secret = _passphrase(passphrase_file)
        with working("decrypting the copy"):
            peer_id = str(Identity.restore(imported, path, secret).peer_id)
    else:
        own = Identity.read(path)  # does not lock the file, which a running peer may use
        if exported is not None:
            secret = _passphrase(passphrase_file, new=True)
            with working("encrypting the copy"):
                own.export(exported, secret)
        peer_id = str(own.peer_id)
    print_result(
        "identity",
        {"peer_id": peer_id, "path": str(path), "created": not existed, "copy": exported},
        f"{peer_id}\n{'kept in' if existed else 'made and kept in'} {path}"
        + (f"\nan encrypted copy is in {exported}" if exported is not None else ""),
        as_json=as_json,
    )
    return 0


def _passphrase(file: Path | None, *, new: bool = False) -> str:
    """Return the passphrase from the first line of a file, or ask for it; ask twice for a new one."""
    if file is not None:
        try:
            with user_path(file).open(encoding="utf-8") as stream:
                return stream.readline(PASSPHRASE_CHARACTERS_MAX).rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise UsageError(f"cannot read a passphrase from {file}: {why}") from error
    if not sys.stdin.isatty():
        raise UsageError("there is no terminal to ask for the passphrase: pass --passphrase-file FILE")
    return str(click.prompt("Passphrase", hide_input=True, confirmation_prompt=new, err=True))


def open_identity(choice: str | None, default: Path | None) -> Identity:
    """Open the identity that an option names.

    `choice` is a file, which is created if it is missing, or `new` for an identity that is kept in memory
    only. Without a choice the `default` file is used, or a new identity if there is no default either.
    """
    if choice == NEW or (choice is None and default is None):
        return Identity.generate()
    path = user_path(choice) if choice is not None else default
    assert path is not None
    try:
        return Identity.load(path, create=True)
    except IdentityInUse as error:
        if choice is None:
            raise UsageError(f"{error}. Or pass --identity {NEW} for a new one that is not kept") from error
        raise


def read_owner(choice: str | None, need: str) -> Identity:
    """Read the identity of the owner of a run: the chosen file, or that of this user. Raise UsageError, with
    the sentence `need` in it, if this user has none.
    """
    file = user_path(choice) if choice else default_identity()
    if choice is None and not file.exists():
        raise UsageError(
            f"{need}, and this user owns none: there is no {file}. Name the owner's identity with --identity"
        )
    return Identity.read(file)


def open_entry_identity(choice: str | None, entries: Sequence[str], role: Role = "observe") -> Identity:
    """Open the identity with which a command enters a swarm through addresses and invites.

    `choice` is that of `open_identity`. Without a choice, a command with an invite uses an identity that is
    stored for this invite, so that several starts take only one use of it. A volunteer (the role train) that
    enters by an address uses a stored identity, too, so that its contributions are added up. Any other
    command uses a new identity. Raises UsageError if the invite is for another peer or lacks the role; no use
    is taken then.
    """
    invite = Entrance.of(entries).invite
    if invite is None and choice is None and role == "train":
        return _open_kept(volunteer_identity)
    if invite is None:
        return open_identity(choice, None)
    own = open_identity(choice, None) if choice is not None else _open_invited(invite)
    roles = invite.grants[-1].roles
    if own.peer_id != invite.owner and role not in (*roles, "observe"):
        own.close()
        raise UsageError(
            f"this invite is for the roles {', '.join(roles)}; this needs the role {role}: ask for an invite "
            f"that was made with --role {role}"
        )
    return own


def _open_invited(invite: Invite) -> Identity:
    """Open this user's identity if the invite is for it. Otherwise open the first identity stored for the
    invite that no other process uses.
    """
    if not invite.key:
        user = default_identity()
        if user.exists() and Identity.read(user).peer_id == invite.subject:
            return open_identity(None, user)
        raise UsageError(
            f"this invite is for peer {invite.subject}: name the file of that identity with --identity FILE"
        )
    return _open_kept(functools.partial(invited_identity, str(invite.subject)))


def _open_kept(file_of: Callable[[int], Path]) -> Identity:
    """Open the first of the numbered identities that no other process uses."""
    for number in range(1, PROCESSES_MAX + 1):
        file = file_of(number)
        try:
            return Identity.load(file)
        except IdentityInUse:
            continue
        except DamagedIdentity as error:
            set_aside(file, "identity", error)
            return Identity.load(file)
    return Identity.generate()


def read_invited() -> Iterator[tuple[Path, Identity]]:
    """Return the identities that entered by an invite on this machine, with their files. Damaged files are
    moved aside. This user's own identity is not included: runs that it owns would be lost with it, so a
    damaged file is an error there.
    """
    return _read_kept(invited_identities())


def _read_kept(files: Iterable[Path]) -> Iterator[tuple[Path, Identity]]:
    for file in files:
        try:
            yield file, Identity.read(file)
        except DamagedIdentity as error:
            set_aside(file, "identity", error)


def own_peers() -> frozenset[PeerId]:
    """Return the PeerIDs with which this user has taken part in runs, as far as their files can be read."""
    kept = [one for _, one in _read_kept([*invited_identities(), *volunteer_identities()])]
    with contextlib.suppress(UsageError):
        kept.append(Identity.read(default_identity()))
    return frozenset(one.peer_id for one in kept)
