"""Find a run for `swarm join` without an address: through the peers that this machine remembers, or on the
local network. Also announce the runs of volunteers there.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.cli.control import Control
from swarm.cli.identity import NEW, read_invited
from swarm.cli.invite import OWN_OBSERVER_S, owners_invite, starting_invite
from swarm.cli.paths import control_folder, default_identity, specifications_folder
from swarm.cli.render.output import Output, Result
from swarm.core.errors import NetworkError, UsageError
from swarm.core.home import user_path
from swarm.core.identity import Identity, IdentityInUse, MissingIdentity
from swarm.core.ids import RUN_NAME, Contact
from swarm.core.wording import counted
from swarm.membership.capability import Role
from swarm.membership.invite import Invite, is_invite
from swarm.net.logic.lan import NearbyPeer, NearbyRun
from swarm.run.events import Event, Notice

if TYPE_CHECKING:
    from swarm.node import Node
    from swarm.run.signed import SignedSpecification

_ADDRESSES_MAX = 2  # addresses used of each peer found in a DHT
_NAMES_MAX = 4  # names of peers in one line


@dataclass(frozen=True, slots=True)
class RunEntry:
    """Addresses and invites with which to enter a run, and the run's name there (None: the only run).
    `identity`: the identity file to use; None: `open_entry_identity` chooses.
    """

    bootstrap: tuple[str, ...]
    run: str | None
    identity: str | None


def is_run_name(text: str) -> bool:
    """Return whether an argument is a run's name, `name@id` or id, and not an address or an invite."""
    return not is_invite(text) and RUN_NAME.fullmatch(text.partition("@")[0]) is not None


def given_entry(
    given: Sequence[str],
    run: str | None,
    identity: str | None,
    servers: Sequence[Contact],
    *,
    role: Role,
) -> RunEntry | None:
    """Return how to enter the run that the user gave: by addresses, an invite, or the name of a run. None if
    the user gave nothing.

    `run` chooses among several runs of a name. `identity` is the file of the invited identity, for an invited
    run. `servers` are servers of libp2p's DHT. `role`: what the command does there; all peers may observe.
    Raises UsageError if the run is ambiguous, and NetworkError if no server answers.
    """
    by_name = given[0] if len(given) == 1 and is_run_name(given[0]) else None
    found = _found_by_name(by_name or run, given, servers) if servers else []
    if by_name is not None:
        return remembered_entry(by_name, run, identity, found, role=role)
    if not given and servers and run is not None:
        return remembered_entry(run, None, identity, found, role=role)
    return RunEntry((*given, *found), run, identity) if given else None


def remembered_entry(
    name: str, run: str | None, identity: str | None, found: Sequence[str] = (), *, role: Role
) -> RunEntry:
    """Return how to enter a run by its name: through remembered peers, if this machine took part in it, and
    through the found addresses. For an invited run an identity with the `role` is chosen. The other
    parameters are those of `given_entry`.

    Raises UsageError if no run matches, several match, or no peer of the run is known.
    """
    from swarm.net.joining import REMEMBERED_MAX
    from swarm.net.peerbook import reached_peers
    from swarm.run.specification_store import SpecificationStore

    store = SpecificationStore(specifications_folder())
    signed = _stored(store.all(), name, run)
    if signed is None and found:
        return RunEntry(tuple(found), name, identity)
    if signed is None and run is not None and (other := _stored(store.all(), name, None)) is not None:
        raise UsageError(
            f"--run {run!r:.80} is another run than {other.full_name}: give one of the two names"
        )
    if signed is None:
        raise UsageError(
            f"this machine took part in no run {name!r:.80}, and knows no peer of it. Pass the address of "
            "one (/ip4/…/p2p/<PeerID>) or an invite (swarm1…). On the local network, `swarm join` without "
            "arguments looks for runs"
        )
    here = [one for one in Control(control_folder()).running() if one.matches(signed.run_id)]
    addresses = [address for one in here for address in one.addresses[:1]]
    for contact in reached_peers(store.peers_file(signed.run_id), REMEMBERED_MAX):
        addresses += contact.multiaddrs
    addresses += found
    if not addresses:
        raise UsageError(
            f"this machine remembers no peer of {signed.full_name}: pass the address of one, or an invite"
        )
    if signed.specification.members == "open":
        return RunEntry(tuple(addresses), signed.full_name, identity)
    return _invited_entry(signed, addresses, identity, role)


def remembered_addresses() -> list[str]:
    """Return addresses of peers that this machine has met in open runs: its own volunteers, then the peers of
    each run in turn, those seen last first.
    """
    from swarm.net.joining import REMEMBERED_MAX
    from swarm.net.peerbook import reached_peers
    from swarm.run.specification_store import SpecificationStore

    store = SpecificationStore(specifications_folder())
    ids = [one.run_id for one in store.all() if one.specification.members == "open"]
    here = [one for one in Control(control_folder()).running() if one.run_id in ids]
    met = [reached_peers(store.peers_file(run_id), REMEMBERED_MAX) for run_id in ids]
    turns = [contact for turn in itertools.zip_longest(*met) for contact in turn if contact is not None]
    found = [address for one in here for address in one.addresses[:1]]
    found += [address for contact in turns for address in contact.multiaddrs]
    return list(dict.fromkeys(found))[:REMEMBERED_MAX]


def nearby_runs(output: Output, run: str | None, search: str = "") -> list[NearbyRun]:
    """Look for runs on the local networks for a few seconds, show them, and return them. `run`: only runs
    with this name, `name@id` or id; `search`: only those with this text in their line.
    """
    from swarm.net.lan import BROWSE_S, browse

    output.emit(Notice(text=f"looking for runs on the local network for {BROWSE_S:.0f} s"))
    found = [one for one in asyncio.run(browse()) if run in (None, one.name, one.run_id, one.full_name)]
    found = [one for one in found if search.casefold() in _line(one).casefold()]
    for number, one in enumerate(found, 1):
        output.emit(Result(name="nearby", fields=_fields(one), text=f"{number}  {_line(one)}"))
    return found


def nearby_entry(output: Output, run: str | None, identity: str | None) -> RunEntry:
    """Return how to enter a run on the local network: the only one that this peer may join, or the one that
    the user chooses. Raises NetworkError if there is none, and UsageError if the choice is ambiguous.
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
    return _invited_entry(signed, addresses, identity, "train")


def announce_nearby(node: Node, signed: SignedSpecification) -> None:
    """Announce a run on the local networks until the node closes, if other peers can call this node there."""
    from swarm.net.lan import LanPresence
    from swarm.runtime.thread import TURN_S_MAX

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

    node.network.run(begin(), TURN_S_MAX)


def announce_by_name(
    node: Node, signed: SignedSpecification, servers: Sequence[Contact], emit: Callable[[Event], None]
) -> None:
    """Let others find a run by its name and id in libp2p's DHT until the node closes."""
    from swarm.runtime.thread import TURN_S_MAX

    async def renew() -> None:
        await node.rendezvous.run(
            [signed.name, signed.run_id], servers, lambda sentence: emit(Notice(text=sentence))
        )

    async def begin() -> None:
        node.supervisor.spawn(f"provider of {signed.full_name}", renew, restart=True)

    node.network.run(begin(), TURN_S_MAX)


def _found_by_name(name: str | None, given: Sequence[str], servers: Sequence[Contact]) -> list[str]:
    """Return addresses of a run's peers from libp2p's DHT, found by the run's name or by the name in an
    invite.
    """
    from swarm.reach.rendezvous import find_peers

    invites = [one for one in given if is_invite(one)]
    if name is None and invites:
        name = Invite.parse(invites[0]).run_id
    if name is None:
        raise UsageError("--libp2p-bootstrap finds a run by its name: pass the name, as in `swarm join NAME`")
    peers = asyncio.run(find_peers(name.rpartition("@")[2], servers))
    return [text for peer in peers for text in peer.multiaddrs[:_ADDRESSES_MAX]]


def _stored(every: Iterable[SignedSpecification], name: str, run: str | None) -> SignedSpecification | None:
    """Return the stored run with this name, if there is one. Raise UsageError if there are several."""
    from swarm.run.directory import RunListing

    listed = [(RunListing(one.name, one.run_id), one) for one in every]
    fitting = [signed for listing, signed in listed if listing.matches(name) and listing.matches(run)]
    if len(fitting) > 1:
        names = ", ".join(sorted(one.full_name for one in fitting))
        raise UsageError(
            f"{len(fitting)} runs match: {names}. Join one of them by its NAME@ID from this list"
        )
    return fitting[0] if fitting else None


def _invited_entry(
    signed: SignedSpecification, addresses: Sequence[str], identity: str | None, role: Role
) -> RunEntry:
    """Return how to enter an invited run again, with the stored capability of the chosen identity or of one
    that has entered the run before. An owner needs none. One who only observes enters as a new peer, whether
    its identity was chosen or is this user's, because that identity may be training. Raises UsageError if
    there is no such capability, or the identity with it is in use.
    """
    from swarm.run.membership import identity_of, load_capability

    in_use: IdentityInUse | None = None
    user = default_identity() if identity is None else user_path(identity)
    kept: list[tuple[Path, Identity]] = []
    with contextlib.suppress(MissingIdentity):
        kept = [(user, Identity.read(user))] if identity != NEW else []
    run = identity_of(signed)
    for file, own in itertools.chain(kept, read_invited() if identity is None else ()):
        held = load_capability(specifications_folder(), signed.run_id, own.peer_id)
        if own.peer_id == signed.owner:
            if role == "observe":
                invite = owners_invite(run, own, OWN_OBSERVER_S)
                return RunEntry((invite.text(), *addresses), signed.full_name, NEW)
            invite = starting_invite(own, signed.specification)  # shown to others, too
        elif held and role in (*held[-1].roles, "observe"):
            invite = Invite(run=run, contacts=(), grants=held, key=b"")
        else:
            continue
        try:
            Identity.load(file).close()
        except IdentityInUse as error:
            in_use = error
            continue
        return RunEntry((invite.text(), *addresses), signed.full_name, str(file))
    if in_use is not None and identity is not None:
        raise in_use
    if in_use is not None:
        raise UsageError(
            f"the identity with which this user joined {signed.full_name} is in use by another process, "
            "such as its volunteer: pass an invite (swarm1…) instead of the name, so that this command is "
            "another peer, or stop that process"
        )
    raise UsageError(
        f"{signed.full_name} needs an invite, and no identity of this user has joined it: pass the invite "
        "(swarm1…) instead of the name"
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
    count = f"{counted(len(names), 'peer')} here"
    needs = "; needs an invite" if run.is_invited else ""
    return f"{run.full_name}: {count} ({', '.join(names[:_NAMES_MAX])}{more}){needs}"
