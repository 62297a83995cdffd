"""`swarm invite`: make an invite to a run. Also functions with which other commands enter an invited run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from swarm.cli import options
from swarm.cli.control import Control
from swarm.cli.identity import read_invited
from swarm.cli.paths import control_folder, default_identity, specifications_folder
from swarm.cli.render import print_result
from swarm.core.errors import SwarmError, UsageError
from swarm.core.home import user_path
from swarm.core.identity import Identity
from swarm.core.ids import Contact, PeerId
from swarm.core.wording import counted, duration
from swarm.membership.capability import ROLES, USES_MAX, Grants, Role, roles_of
from swarm.membership.invite import Entrance, Invite, RunIdentity, Terms, make_invite
from swarm.run.limits import parse_duration_s

if TYPE_CHECKING:
    from swarm.dht.logic.blobs import Handover
    from swarm.run.owned import OwnedSpecification
    from swarm.run.signed import SignedSpecification

# Uses and lifetime of the invite that `swarm start` prints, for a group of people who know each other.
_START_TERMS = Terms(roles=("train", "serve", "observe"), uses=100, lifetime_s=365 * 86400.0)
_SHORTER_S = 60.0  # an invite may be valid for this much less than requested without a notice
OWN_COMMAND_S = 3600.0  # lifetime of the capability of a command of the owner
OWN_OBSERVER_S = 365 * 86400.0  # the same for one that watches
_MEMBER_ROLES: tuple[Role, ...] = ("train", "serve", "observe")


@click.command(context_settings=options.CONTEXT)
@click.argument("run", metavar="RUN")
@click.option(
    "--for",
    "peer",
    metavar="PEERID",
    default=None,
    help="Only this peer can use it. [default: anybody who has it]",
)
@click.option(
    "--uses",
    type=options.BoundedInteger(1, USES_MAX),
    default=1,
    show_default=True,
    help="How many peers may join with it, including those that they invite.",
)
@click.option(
    "--expires",
    type=options.TIME,
    default="30d",
    show_default=True,
    help="How long it is valid, also for the peers that joined with it: 12h, 7d.",
)
@click.option(
    "--role",
    "roles",
    type=click.Choice(ROLES),
    multiple=True,
    help="A role for the peers that join. Repeatable. [default: your own among train, serve, observe]",
)
@options.peers_of_run
@options.owner_identity
@options.as_json
def invite(run: str, addresses: tuple[str, ...], identity: str | None, as_json: bool, **given: Any) -> int:
    """Make an invite to RUN: one word, `swarm1…`, that every command accepts in place of an ADDRESS.

    The run's owner can invite. So can every peer that joined by an invite with the role invite, within its
    own roles and remaining uses. Treat an invite as a password. docs/howto/invites.md says more.

    \b
    Examples:
      swarm invite bytelm
      swarm invite bytelm --uses 20 --expires 7d
      swarm invite bytelm --for 12D3KooW... --role train --role invite
      swarm change bytelm --revoke swarm1...
    """
    from swarm.run.issued_invites import IssuedInvites
    from swarm.run.membership import identity_of

    signed = _invited_run(run)
    issuer, held = _issuer(signed, identity)
    roles = given["roles"] or [one for one in _MEMBER_ROLES if not held or one in held[-1].roles]
    terms = Terms(
        roles=roles_of(roles or _MEMBER_ROLES),
        uses=given["uses"],
        lifetime_s=parse_duration_s(given["expires"]),
        peer=PeerId.parse(given["peer"]) if given["peer"] is not None else None,
    )
    made = make_invite(identity_of(signed), issuer, held, terms, now_s=time.time()).with_contacts(
        Entrance.of(run_addresses(signed.run_id, addresses)).contacts
    )
    IssuedInvites(specifications_folder(), signed.run_id).add(made, time.time())
    last = made.grants[-1]
    fields = {
        "invite": made.text(),
        "run": signed.full_name,
        "id": str(made.subject),
        "roles": list(last.roles),
        "uses": last.uses,
        "expires_s": last.expires_s,
    }
    print_result("invite", fields, made.text(), as_json=as_json)
    if last.uses < terms.uses or last.expires_s < int(time.time() + terms.lifetime_s) - _SHORTER_S:
        left = duration(last.expires_s - time.time())
        click.echo(
            f"swarm: this invite is for {counted(last.uses, 'peer')} and valid for {left}: "
            "the invite by which you joined allows no more",
            err=True,
        )
    return 0


def _invited_run(run: str) -> SignedSpecification:
    """Return the stored run with this name. Raise UsageError if it needs no invites, and SwarmError if this
    machine does not know it.
    """
    from swarm.run.specification_store import SpecificationStore

    if not SpecificationStore(specifications_folder()).all():
        raise SwarmError(
            "this machine took part in no run yet: invite on a machine that did, or join the run first"
        )
    signed = stored_run(run)
    if signed.specification.members == "open":
        raise UsageError(f"{signed.full_name} is open: anybody joins it by an address, without an invite")
    return signed


def _issuer(signed: SignedSpecification, choice: str | None) -> tuple[Identity, Grants]:
    """Return the identity that issues the invite, with its capability: the chosen one, else this user's, else
    one that entered the run by an invite with the role invite.
    """
    from swarm.run.membership import load_capability

    def held(one: Identity) -> Grants:
        return load_capability(specifications_folder(), signed.run_id, one.peer_id)

    own = user_path(choice) if choice else default_identity()
    if choice is None:
        kept = [Identity.read(own)] if own.exists() else []
        for one in itertools.chain(kept, (one for _, one in read_invited())):
            if one.peer_id == signed.owner or _may_invite(held(one)):
                return one, held(one)
        if not own.exists():
            raise UsageError(
                f"no identity on this machine may invite to {signed.full_name}: its owner may, and peers "
                "that joined by an invite with the role invite"
            )
    one = Identity.read(own)
    return one, held(one)


def _may_invite(held: Grants) -> bool:
    return bool(held) and "invite" in held[-1].roles


def starting_invite(owner: Identity, specification: OwnedSpecification) -> Invite:
    """Return the invite with which an owner's own volunteer enters its run. The command prints it for
    others.
    """
    from swarm.run.issued_invites import IssuedInvites
    from swarm.run.membership import identity_of
    from swarm.run.specification_store import SpecificationStore

    run = RunIdentity(owner.peer_id, specification.name, specification.recovery_peer)
    for known in SpecificationStore(specifications_folder()).all():
        if known.name == run.name and owner.peer_id in (known.founder, known.owner):
            run = identity_of(known)  # an existing run keeps its recovery key
    made = make_invite(run, owner, (), _START_TERMS, now_s=time.time())
    IssuedInvites(specifications_folder(), run.run_id).add(made, time.time())
    return made


def stored_run(run: str) -> SignedSpecification:
    """Return the stored run with this name. Raise SwarmError if there is none, and UsageError if it is
    ambiguous.
    """
    from swarm.run.directory import RunListing, choose
    from swarm.run.specification_store import SpecificationStore

    stored = {one.run_id: one for one in SpecificationStore(specifications_folder()).all()}
    if not stored:
        raise SwarmError(
            "this machine took part in no run yet: reach a run through its peers with --from ADDRESS"
        )
    listings = [RunListing(one.name, one.run_id) for one in stored.values()]
    return stored[choose(listings, run, by_option=False).run_id]


def run_addresses(run: str, given: Sequence[str]) -> list[str]:
    """Return the given addresses or, without any, those of volunteers on this machine. Raise UsageError if
    there are none.
    """
    running = [] if given else [one for one in Control(control_folder()).running() if one.matches(run)]
    found = list(given) or [address for one in running for address in one.addresses[:1]]
    if not found:
        raise UsageError(
            f"nothing trains {run} on this machine: pass the address of a peer of it with --from ADDRESS"
        )
    return found


def owners_entries(
    run: str,
    given: Sequence[str],
    owner: Identity,
    own: PeerId,
    handover: Handover | None = None,
    *,
    lifetime_s: float = OWN_COMMAND_S,
) -> list[str]:
    """Return the entries of a command with which an owner changes its run: addresses and, for an invited run,
    an invite of the owner for this command's own peer. `handover`: the statement that gives the run to this
    owner. `lifetime_s`: how long the invited peer may stay.
    """
    from swarm.run.membership import identity_of

    entries = run_addresses(run, given)
    try:
        signed = stored_run(run)
    except SwarmError:
        return entries
    known = identity_of(signed)
    known = replace(known, handover=handover or known.handover)
    if known.owner != owner.peer_id or signed.specification.members != "invited":
        return entries
    return [owners_invite(known, owner, lifetime_s, own).text(), *entries]


def owners_invite(run: RunIdentity, owner: Identity, lifetime_s: float, peer: PeerId | None = None) -> Invite:
    """Return an invite with which a command of the owner observes its run as a new peer. `peer`: the only
    peer that can use it; None: any.
    """
    terms = Terms(roles=("observe",), uses=1, lifetime_s=lifetime_s, peer=peer)
    return make_invite(run, owner, (), terms, now_s=time.time())


def contacts_of(entries: Sequence[str]) -> list[Contact]:
    """Return the peers that addresses and invites name. Raise UsageError when one is wrong."""
    return list(Entrance.of(list(entries)).contacts)
