"""Membership of invited runs, for commands and volunteers: permission to take part, the capability on disk,
and revocations.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.core.backoff import Backoff
from swarm.core.errors import PeerError, SwarmError, UsageError
from swarm.core.files import set_aside, write_private
from swarm.core.ids import PeerId
from swarm.membership.capability import CAPABILITY_BYTES_MAX, Grants, decode, encode
from swarm.membership.invite import RunIdentity
from swarm.run.changes import CHANGE, RunFollower
from swarm.run.directory import RunDirectory
from swarm.run.estimate import read_members
from swarm.run.signed import SignedSpecification
from swarm.runtime.thread import TURN_S_MAX

if TYPE_CHECKING:
    from swarm.net.membership import RunMembership
    from swarm.node import Node

_log = logging.getLogger(__name__)

CAPABILITIES_MAX = 64  # files; above this, the oldest are deleted
_SUFFIX = ".capability"
_FIND_FIRST_S, _FIND_S_MAX = 1.0, 60.0  # between two searches for the run's specification


def identity_of(signed: SignedSpecification) -> RunIdentity:
    """Return the identity of this run, from which its id follows, with its present owner."""
    return RunIdentity(signed.founder, signed.name, signed.specification.recovery_peer, signed.handover)


def check_invited(signed: SignedSpecification, membership: RunMembership | None) -> None:
    """Raise UsageError if this process must not take part in a run: it has no invite and would answer
    everybody, or its invite is to another run.
    """
    if membership is not None and membership.run_id != signed.run_id:
        raise UsageError(
            f"this invite is to {membership.invite.name}@{membership.run_id}, not to {signed.full_name}"
        )
    if membership is None and signed.specification.members == "invited":
        raise UsageError(
            f"{signed.full_name} is for invited peers only: "
            "join with an invite (swarm1…) instead of an address"
        )


def save_capability(folder: Path, membership: RunMembership) -> None:
    """Save this peer's capability. `swarm invite` issues further invites from it; an owner needs none. Disk
    errors are logged and not raised.
    """
    if not membership.capability:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_private(_file(folder, membership.run_id, membership.own), encode(membership.capability))
        files = sorted(folder.glob(f"*{_SUFFIX}"), key=lambda file: file.stat().st_mtime_ns)
        for file in files[:-CAPABILITIES_MAX]:
            file.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("the capability for run %s cannot be saved: %s", membership.run_id, error)


def load_capability(folder: Path, run_id: str, holder: PeerId) -> Grants:
    """Return the stored capability of this peer for a run; None if there is no valid file. A damaged file is
    moved aside.
    """
    file = _file(folder, run_id, holder)
    try:
        with file.open("rb") as stream:
            if grants := decode(stream.read(CAPABILITY_BYTES_MAX + 1)):
                return grants
            raise PeerError("the file is empty")
    except FileNotFoundError:
        return ()
    except OSError as error:
        _log.error("the capability %s cannot be read: %s", file, error)
    except PeerError as error:
        set_aside(file, "capability", error)
    return ()


def excluded_peers(signed: SignedSpecification, membership: RunMembership | None) -> frozenset[PeerId]:
    """Refuse the peers and invites that this version revokes. Return the excluded peers, possibly including
    this one: banned peers and peers that have lost their capability. Runs on the network thread.
    """
    banned = signed.specification.banned_peers
    if membership is None:
        return banned
    membership.admission.follow_owner(identity_of(signed), signed.specification.confirmed_peers)
    membership.admission.revoke(signed.specification.revoked_peers)
    own = {membership.own} if membership.problem() else frozenset()
    return banned | membership.admission.removed | own


async def first_subjects(node: Node) -> frozenset[PeerId]:
    """Query the members of the run to which the node was invited. Return the peers and invites at the start
    of the members' capability chains, including this node's. Without an invite the result is empty.
    """
    membership = node.membership
    if membership is None:
        return frozenset()
    contacts = await read_members(node.dht.service, membership.run_id, node.clock)
    async with asyncio.TaskGroup() as group:
        for contact in contacts:
            group.create_task(node.dht.service.ping(contact))
    own = {grant.subject for grant in membership.capability[:1]}
    return membership.admission.first_subjects | own


def follow_run(
    node: Node,
    grid: SignedSpecification | None = None,
    on_newer: Callable[[SignedSpecification], None] = lambda newer: None,
) -> None:
    """Follow specifications on behalf of a member that does not train: that of the run to which the node was
    invited, because of revocations, and that of the grid whose experts it hosts. `on_newer` is called with
    newer versions, on the network thread.
    """
    membership = node.membership
    directory = RunDirectory(node.dht.service, clock=node.clock)

    async def follow() -> None:
        spawn = node.supervisor.spawn
        if membership is not None:
            name = f"following run {membership.run_id}"
            spawn(name, lambda: _follow_invited(node, directory, membership, on_newer), restart=True)
        if grid is not None and (membership is None or membership.run_id != grid.run_id):
            # A node accepts versions from the owner of one run only. The run of its invite has priority,
            # because of revocations.
            answers = membership is None
            name = f"following {grid.full_name}"
            spawn(name, lambda: _follow(node, directory, grid, on_newer, answers=answers), restart=True)

    node.network.run(follow(), TURN_S_MAX)


async def _follow_invited(
    node: Node,
    directory: RunDirectory,
    membership: RunMembership,
    on_newer: Callable[[SignedSpecification], None],
) -> None:
    backoff = Backoff(_FIND_FIRST_S, _FIND_S_MAX, random)
    while True:
        try:
            signed = await directory.specification(membership.run_id)
            break
        except SwarmError:  # nobody trains the run at the moment
            await asyncio.sleep(backoff.next_s())

    def apply(newer: SignedSpecification) -> None:
        excluded_peers(newer, membership)
        on_newer(newer)

    apply(signed)
    await _follow(node, directory, signed, apply, answers=True)


async def _follow(
    node: Node,
    directory: RunDirectory,
    signed: SignedSpecification,
    on_newer: Callable[[SignedSpecification], None],
    *,
    answers: bool,
) -> None:
    """Follow a specification. `answers`: also accept versions that its owner and other members send."""
    follower = RunFollower(signed, caller=node.channels, directory=directory, members=list, on_newer=on_newer)
    if answers:
        node.handlers.remove(CHANGE.name)
        node.handlers.unary(CHANGE, follower.on_change)
    await follower.run()


def _file(folder: Path, run_id: str, holder: PeerId) -> Path:
    return folder / f"{run_id}-{holder}{_SUFFIX}"
