"""`swarm pause`, `swarm resume` and `swarm change`: act on a run while others train it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from swarm.cli import options
from swarm.cli.control import Control
from swarm.cli.identity import open_entry_identity, read_owner
from swarm.cli.invite import contacts_of, owners_entries, run_addresses
from swarm.cli.paths import control_folder, specifications_folder
from swarm.cli.render import print_result
from swarm.core.errors import NotInvited, SwarmError
from swarm.core.identity import Identity
from swarm.core.working import working
from swarm.run.entering import find_run, refusal, wait_for_answer

if TYPE_CHECKING:
    from swarm.dht.logic.blobs import Handover
    from swarm.node import Node
    from swarm.run.directory import RunDirectory
    from swarm.run.signed import SignedSpecification


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAddress:
    """A run and the peers through which it can be reached. `identity`: the file of the identity that does it;
    None: a new one, or the one that is kept for an invite among the addresses.
    """

    run: str
    addresses: tuple[str, ...]
    identity: str | None = None


@click.command(context_settings=options.CONTEXT)
@click.argument("run", metavar="[RUN]", required=False)
@click.option("--free-memory", "free", is_flag=True, help="Free the memory at once, with a file on the disk.")
@options.as_json
def pause(run: str | None, free: bool, as_json: bool) -> int:
    """Pause the volunteers of this user on this machine: all, or those of RUN (a name, an id, a PeerID or a
    process id).

    A volunteer that pauses leaves the run's rounds at once, so that no peer waits for it. It frees GPU memory
    at once and host memory after a minute.

    \b
    Examples:
      swarm pause
      swarm pause bytelm
      swarm pause --free-memory
    """
    return _set_paused(run, paused=True, free=free, as_json=as_json)


@click.command(context_settings=options.CONTEXT)
@click.argument("run", metavar="[RUN]", required=False)
@options.as_json
def resume(run: str | None, as_json: bool) -> int:
    """Let volunteers continue after `swarm pause`. They download the current state of the swarm.

    \b
    Examples:
      swarm resume
      swarm resume bytelm
    """
    return _set_paused(run, paused=False, as_json=as_json)


def _set_paused(run: str | None, *, paused: bool, free: bool = False, as_json: bool) -> int:
    control = Control(control_folder())
    found = [one for one in control.running() if one.trains and one.matches(run)]
    if not found:
        who = f"no volunteer of {run!r}" if run else "nothing"
        raise SwarmError(f"{who} trains on this machine, or it was started with another SWARM_HOME")
    for one in found:
        control.set_paused(one, paused, free=free)
        print_result(
            "pause" if paused else "resume",
            {"pid": one.pid, "run": one.full_name},
            f"{'pausing' if paused else 'resuming'}: {one.full_name}, process {one.pid}",
            as_json=as_json,
        )
    return 0


@click.command(context_settings=options.CONTEXT)
@click.argument("run", metavar="RUN")
@options.peers_of_run
@options.owner_identity
@click.option(
    "--target-batch-size",
    type=options.BoundedInteger(1),
    default=None,
    help="Samples of the whole swarm in one epoch.",
)
@click.option(
    "--pause/--resume",
    "paused",
    default=None,
    help="Pause training, or continue it; members stay and keep the state.",
)
@click.option("--end/--reopen", "ended", default=None, help="End the run for everybody, or open it again.")
@click.option(
    "--ban",
    metavar="PEERID",
    multiple=True,
    help="Make every member avoid this peer. Repeatable.",
)
@click.option("--unban", metavar="PEERID", multiple=True, help="Lift the ban of a peer. Repeatable.")
@click.option(
    "--revoke",
    metavar="PEERID",
    multiple=True,
    help="Refuse a peer or an invite (swarm1...), and all peers that joined through it. Repeatable.",
)
@click.option(
    "--message",
    metavar="TEXT",
    default=None,
    help="One line to volunteers, which joining shows; '' for none.",
)
@click.option(
    "--plan-pause",
    "pauses",
    metavar="FROM/UNTIL",
    multiple=True,
    help="Nobody trains between these local times: 2026-12-24T18:00/2026-12-26T09:00. Repeatable; replaces "
    "the plan of before; `none` empties it.",
)
@options.as_json
def change(run: str, addresses: tuple[str, ...], identity: str | None, as_json: bool, **changes: Any) -> int:
    """Change a run that you own: publishes the next version of its signed specification, which its members
    follow within seconds.

    RUN is a name, NAME@ID or an id. Without --from it is reached through a volunteer of this user on this
    machine.

    \b
    Examples:
      swarm change bytelm --target-batch-size 4096
      swarm change bytelm --pause
      swarm change bytelm --message "We finish on Friday. Thank you!"
      swarm change bytelm --ban 12D3KooW... --from /ip4/203.0.113.7/tcp/4000/tls/http/p2p/12D3KooW...
      swarm change bytelm --revoke swarm1...
    """
    from swarm.dht.logic.blobs import version_text
    from swarm.run.changes import Change, differences, read_pause, sign_change

    pauses = changes.pop("pauses")
    planned = tuple(read_pause(one) for one in pauses if one != "none") if pauses else None
    wanted = Change(**changes, pauses=planned)
    owner = read_owner(identity, "only the owner of a run changes it")
    with temporary_node(RunAddress(run=run, addresses=addresses), owner) as (node, directory):
        known = find_run(node, directory, run)
        signed = sign_change(known, wanted, owner)
        asked, following = tell_members(node, directory, signed)
    sentences = differences(known, signed)
    fields = {
        "run": signed.full_name,
        "version": signed.version,
        "changes": sentences,
        "members": asked,
        "following": following,
    }
    print_result(
        "changed",
        fields,
        f"{signed.full_name}, version {version_text(signed.version)}: {', '.join(sentences)}. "
        f"{following} of {asked} members that were asked follow it; they forward it to the others",
        as_json=as_json,
    )
    return 0


def tell_members(node: Node, directory: RunDirectory, signed: SignedSpecification) -> tuple[int, int]:
    """Publish and save a new version, and send it to members. Return the number of members asked, and of
    those that follow it.
    """
    from swarm.run.changes import send_version
    from swarm.run.estimate import read_members
    from swarm.run.grid import GridSpecification
    from swarm.run.grid_entry import read_servers

    with working("publishing the change"):
        node.network.run(directory.publish(signed), 30.0)
        node.network.run(directory.save(signed), 10.0)
    reading = (
        read_servers(node.dht.service, signed.grid)
        if isinstance(signed.specification, GridSpecification)
        else read_members(node.dht.service, signed.run_id, node.clock)
    )
    with working("telling the members"):
        contacts = node.network.run(reading, 12.0)
        versions = node.network.run(send_version(node.channels, signed, contacts), 30.0)
    return len(contacts), sum(version >= signed.version for version in versions.values())


@contextlib.contextmanager
def temporary_node(
    where: RunAddress, owner: Identity | None = None, handover: Handover | None = None
) -> Iterator[tuple[Node, RunDirectory]]:
    """Open a node and a directory of runs. `owner`: gives the node access to an invited run, together with
    the `handover` if the run is getting this new owner.
    """
    from swarm.node import Node
    from swarm.run.directory import RunDirectory
    from swarm.run.specification_store import SpecificationStore

    if owner is None:
        entries = run_addresses(where.run, where.addresses)
        own = open_entry_identity(where.identity, entries)
    else:
        own = Identity.generate()
        entries = owners_entries(where.run, where.addresses, owner, own.peer_id, handover)
    listen = options.listen_at(None, (), contacts_of(entries))
    with contextlib.closing(own), Node(bootstrap=entries, listen=listen, identity=own) as node:
        if not wait_for_answer(node):
            if owner is not None and node.not_invited:
                hint = "If this identity owns the run, pass one of its invites: --from swarm1…"
                raise NotInvited(f"{node.not_invited}. {hint}")
            raise refusal(node, entries[-1:])
        store = SpecificationStore(specifications_folder())
        yield node, RunDirectory(node.dht.service, clock=node.clock, store=store)
