"""How `swarm join` finds a run without an address: by the peers that this machine remembers, or on the local
network; and how volunteers let others find their run there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.cli.control import Control
from swarm.cli.identity import NEW
from swarm.cli.paths import control_folder, default_identity, invited_identities, specifications_folder
from swarm.cli.render.output import Output, Result
from swarm.core.errors import NetworkError, UsageError
from swarm.core.identity import Identity, IdentityInUse
from swarm.core.ids import RUN_NAME, Contact
from swarm.membership.invite import Invite, is_invite
from swarm.net.logic.lan import NearbyPeer, NearbyRun
from swarm.run.events import Notice

if TYPE_CHECKING:
    from swarm.node import Node
    from swarm.run.specification import SignedSpecification

_NAMES_MAX = 4  # of peers, in a line


@dataclass(frozen=True, slots=True)
class RunEntry:
    """How to enter a run: addresses and invites, and which run it is there; None: the only one. `identity`:
    the file of the one to enter with; None: as `open_entry_identity` chooses.
    """

    bootstrap: tuple[str, ...]
    run: str | None
    identity: str | None


def is_run_name(text: str) -> bool:
    """Return whether an argument is a run's name, `name@id` or id, and not an address or an invite."""
    return not is_invite(text) and RUN_NAME.fullmatch(text.partition("@")[0]) is not None


def remembered_entry(name: str, run: str | None, identity: str | None) -> RunEntry:
    """Return how to enter again a run that this machine took part in. `run` chooses among several of that
    name; `identity` is the file of the identity that was invited, for an invited run.

    Raises UsageError when no run is meant, or several, or no peer of it is remembered.
    """
    from swarm.net.joining import REMEMBERED_MAX
    from swarm.net.peerbook import reached_peers
    from swarm.run.specification_store import SpecificationStore

    store = SpecificationStore(specifications_folder())
    signed = _stored(store.all(), name, run)
    here = [one for one in Control(control_folder()).running() if one.matches(signed.run_id)]
    addresses = [address for one in here for address in one.addresses[:1]]
    for contact in reached_peers(store.peers_file(signed.run_id), REMEMBERED_MAX):
        addresses += contact.multiaddrs
    if not addresses:
        raise UsageError(
            f"this machine remembers no peer of {signed.full_name}: pass the address of one, or an invite"
        )
    if signed.specification.members == "open":
        return RunEntry(tuple(addresses), signed.full_name, identity)
    return _invited_entry(signed, addresses, identity)


def nearby_runs(output: Output, run: str | None) -> list[NearbyRun]:
    """Look for runs on the local networks for a few seconds, show them, and return them. `run`: those alone
    that this name, `name@id` or id means.
    """
    from swarm.net.lan import BROWSE_S, browse

    output.emit(Notice(text=f"looking for runs on the local network for {BROWSE_S:.0f} s"))
    found = [one for one in asyncio.run(browse()) if run in (None, one.name, one.run_id, one.full_name)]
    for number, one in enumerate(found, 1):
        output.emit(Result(name="nearby", fields=_fields(one), text=f"{number}  {_line(one)}"))
    return found


def nearby_entry(output: Output, run: str | None, identity: str | None) -> RunEntry:
    """Return how to enter a run on the local network: the only one that this peer may join, or the one that
    the user chooses. Raises NetworkError when there is none, and UsageError when it is not clear which.
    """
    found = nearby_runs(output, run)
    if not found:
        raise NetworkError(
            "no run was found on the local network: pass the address of a peer of it, or an invite. "
            "Volunteers on other networks, or started with --no-lan, are not found this way"
        )
    allowed = [one for one in found if not one.is_invited]
    chosen = (allowed or found)[0]
    if len(allowed or found) > 1:
        number = output.choose("Which one?", len(found))
        if number is None:
            raise UsageError(f"{len(found)} runs are on the local network: choose one with --run NAME@ID")
        chosen = found[number - 1]
    else:
        output.emit(Notice(text=f"joining {chosen.full_name}"))
    addresses = [address for peer in chosen.peers for address in peer.contact.multiaddrs]
    if not chosen.is_invited:
        return RunEntry(tuple(addresses), chosen.full_name, identity)
    from swarm.run.specification_store import SpecificationStore

    signed = SpecificationStore(specifications_folder()).load(chosen.run_id)
    if signed is None:
        raise UsageError(f"{chosen.full_name} needs an invite: ask its owner for one, and join with it")
    return _invited_entry(signed, addresses, identity)


def announce_nearby(node: Node, signed: SignedSpecification) -> None:
    """Announce a run on the local networks until the node closes, if others can call it there."""
    from swarm.net.lan import LanPresence

    if node.server is None:
        return
    peer = NearbyPeer(
        contact=Contact(node.peer_id),
        run_id=signed.run_id,
        run_name=signed.name,
        is_invited=signed.specification.members == "invited",
        who=node.config.name,
    )
    presence = LanPresence(peer, node.server)

    async def begin() -> None:
        node.at_close(presence.close)
        node.supervisor.spawn("announcing on the local network", presence.run, restart=True)

    node.network.run(begin(), 5.0)


def _stored(every: Iterable[SignedSpecification], name: str, run: str | None) -> SignedSpecification:
    """Return the one run on disk that a name means. Raise UsageError when there is none, or several."""
    from swarm.run.directory import RunListing

    listed = [(RunListing(one.name, one.run_id), one) for one in every]
    fitting = [signed for listing, signed in listed if listing.matches(name) and listing.matches(run)]
    if not fitting:
        raise UsageError(
            f"this machine took part in no run {name!r:.80}. Pass the address of a peer of it "
            "(/ip4/…/p2p/<PeerID>) or an invite (swarm1…), or nothing, to look on the local network"
        )
    if len(fitting) > 1:
        names = ", ".join(sorted(one.full_name for one in fitting))
        raise UsageError(
            f"{len(fitting)} runs could be meant: {names}. Join one of them by NAME@ID, as it stands here"
        )
    return fitting[0]


def _invited_entry(signed: SignedSpecification, addresses: Sequence[str], identity: str | None) -> RunEntry:
    """Return how to enter an invited run again, with the chosen identity or one that has entered it before:
    by the capability that it keeps. Raises UsageError when it keeps none.
    """
    from swarm.run.membership import identity_of, load_capability

    in_use: IdentityInUse | None = None
    kept = [default_identity(), *invited_identities()]
    for file in kept if identity is None else [Path(identity).expanduser()]:
        own = Identity.read(file) if identity != NEW and file.exists() else None
        held = load_capability(specifications_folder(), signed.run_id, own.peer_id) if own is not None else ()
        if not held or "train" not in held[-1].roles:
            continue
        try:
            Identity.load(file).close()
        except IdentityInUse as error:
            in_use = error
            continue
        invite = Invite(run=identity_of(signed), contacts=(), grants=held, key=b"")
        return RunEntry((invite.text(), *addresses), signed.full_name, str(file))
    if in_use is not None:
        raise in_use
    raise UsageError(
        f"{signed.full_name} needs an invite: join with the invite again, or with --identity FILE, the "
        "identity that has joined it before"
    )


def _fields(run: NearbyRun) -> dict[str, Any]:
    return {
        "run": run.name,
        "id": run.run_id,
        "members": "invited" if run.is_invited else "open",
        "peers": [
            {"peer_id": str(one.contact.peer_id), "who": one.who, "addresses": one.contact.multiaddrs}
            for one in run.peers
        ],
    }


def _line(run: NearbyRun) -> str:
    names = [one.who or one.contact.peer_id.short for one in run.peers]
    more = f" and {len(names) - _NAMES_MAX} more" if len(names) > _NAMES_MAX else ""
    count = f"{len(names)} peer{'s' if len(names) != 1 else ''} here"
    needs = "; needs an invite" if run.is_invited else ""
    return f"{run.full_name}: {count} ({', '.join(names[:_NAMES_MAX])}{more}){needs}"
