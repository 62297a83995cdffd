"""`swarm recover`: give a run whose owner's key was lost or stolen a new owner."""

from __future__ import annotations

import click

from swarm.cli import options
from swarm.cli.admin import RunAddress, tell_members, temporary_node
from swarm.cli.control import Control
from swarm.cli.invite import stored_run
from swarm.cli.paths import control_folder, default_identity, specifications_folder
from swarm.cli.render import print_result
from swarm.core.errors import SwarmError
from swarm.core.identity import Identity
from swarm.run.entering import find_run


@click.command(context_settings=options.CONTEXT)
@click.argument("run", metavar="RUN")
@click.option(
    "--recovery-key", "recovery", metavar="FILE", required=True, help="The identity file of the recovery key."
)
@options.peers_of_run
@click.option(
    "--identity", metavar="FILE", default=None, help="The new owner's identity. [default: this user's]"
)
@options.as_json
def recover(run: str, recovery: str, addresses: tuple[str, ...], identity: str | None, as_json: bool) -> int:
    """Give a run a new owner, because the owner's key was lost or stolen.

    Members then follow only the new owner, no matter what the old key signed or will sign. The run must have
    been created with --recovery-key. The run keeps its settings, but is neither paused nor ended, and all
    bans are lifted. `swarm start RUN.toml --identity FILE` restores other settings.

    In a run for invited peers, only those of the old owner's invites stay valid by which present members
    joined. The new owner makes new ones with `swarm invite`.

    Without --from the run is reached through a volunteer of this user on this machine; if there is none, the
    change is saved here and `swarm start` publishes it.

    \b
    When the run is created, with a key on a USB stick that is kept offline:
      swarm identity --create --identity ~/usb/recovery.identity
      swarm start RUN.toml --recovery-key ~/usb/recovery.identity

    \b
    Examples:
      # the owner's key is gone, or somebody else has it
      swarm identity --create --identity ~/owner2.identity
      swarm recover bytelm --recovery-key ~/usb/recovery.identity --identity ~/owner2.identity
    """
    from swarm.dht.logic.blobs import version_text
    from swarm.run.membership import first_subjects, load_capability
    from swarm.run.recovery import make_handover, read_recovery_key
    from swarm.run.recovery import recover as sign_recovery

    key = read_recovery_key(recovery)
    owner = Identity.read(identity or default_identity())
    asked = following = 0
    if addresses or any(one.matches(run) for one in Control(control_folder()).running()):
        try:
            stored = stored_run(run)
        except SwarmError:  # the run is not stored here: an invite gives this command access
            stored = None
        handover = make_handover(stored, key, owner) if stored is not None else None
        where = RunAddress(run=run, addresses=addresses)
        with temporary_node(where, owner, handover) as (node, directory):
            known = find_run(node, directory, run)
            confirmed = node.network.run(first_subjects(node), 30.0)
            signed = sign_recovery(known, key, owner, confirmed)
            asked, following = tell_members(node, directory, signed)
        note = f"{following} of {asked} members that were asked follow it; they forward it to the others"
    else:
        from swarm.run.specification_store import SpecificationStore

        known = stored_run(run)
        held = load_capability(specifications_folder(), known.run_id, owner.peer_id)
        signed = sign_recovery(known, key, owner, {grant.subject for grant in held[:1]})
        SpecificationStore(specifications_folder()).save(signed)
        note = (
            "no member was informed, since nothing trains the run here: `swarm start` with this identity "
            "publishes it"
        )
    print_result(
        "recovered",
        {
            "run": signed.full_name,
            "owner": str(signed.owner),
            "version": signed.version,
            "members": asked,
            "following": following,
        },
        f"{signed.full_name} belongs to {signed.owner} since version {version_text(signed.version)}. {note}",
        as_json=as_json,
    )
    return 0
