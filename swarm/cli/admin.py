"""`swarm change`, `swarm pause`, `swarm resume` and `swarm export`: what is said to a run, or taken from it,
while others train.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.cli.control import Control, Running
from swarm.cli.paths import control_folder, default_identity, kept_runs, saved_states
from swarm.cli.render.output import printable
from swarm.core.errors import NetworkError, SwarmError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import Contact

_JOIN_S = 6.0


def pause(run: str | None, *, paused: bool, as_json: bool) -> int:
    """Ask volunteers of this user on this machine to pause, or to go on."""
    control = Control(control_folder())
    found = [one for one in control.running() if one.matches(run)]
    if not found:
        raise SwarmError(
            f"nothing {'of ' + run + ' ' if run else ''}trains on this machine, or not under this user's SWARM_HOME"
        )
    for one in found:
        control.set_paused(one, paused)
        word = "pausing" if paused else "going on"
        _say(
            as_json,
            {"event": "pause" if paused else "resume", "pid": one.pid, "run": one.full_name},
            f"{word}: {one.full_name}, process {one.pid}",
        )
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """How to get at a run."""

    run: str
    addresses: tuple[str, ...]
    identity: str | None = None


def change(where: Where, asked: dict[str, Any], *, as_json: bool) -> int:
    """Publish the next version of a specification and tell those who train."""
    from swarm.run.changes import Change, differences, send_version, sign_change

    wanted = Change(**asked)
    owner = Identity.read(Path(where.identity).expanduser() if where.identity else default_identity())
    with _visit(where) as (node, directory):
        known = node.network.run(directory.find(where.run), 30.0)
        signed = sign_change(known, wanted, owner)
        node.network.run(directory.publish(signed), 30.0)
        node.network.run(directory.save(signed), 10.0)
        from swarm.run.estimate import read_members

        contacts = node.network.run(read_members(node.dht.service, signed.run_id), 10.0)
        following = node.network.run(send_version(node.channels, signed, contacts), 30.0)
    now = sum(version >= signed.version for version in following.values())
    told = differences(known.specification, signed.specification)
    _say(
        as_json,
        {
            "event": "changed",
            "run": signed.full_name,
            "version": signed.version,
            "changes": told,
            "members": len(contacts),
            "following": now,
        },
        f"{signed.full_name}, version {signed.version}: {', '.join(told)}. "
        f"{now} of {len(contacts)} members that were asked follow it; the others hear of it from them",
    )
    return 0


def export(where: Where, output: Path, *, optimizer: bool, as_json: bool) -> int:
    """Write a run's model to a file, from this machine's newest checkpoint or fetched from peers."""
    from swarm.run.directory import RunListing, choose
    from swarm.run.exporting import export as write
    from swarm.run.exporting import newest_checkpoint
    from swarm.run.specification_store import SpecificationStore

    output = output.expanduser()
    if where.addresses:
        with _visit(where) as (node, directory), tempfile.TemporaryDirectory(prefix="swarm-") as folder:
            signed = node.network.run(directory.find(where.run), 30.0)
            checkpoint = _fetched(node, directory, signed, Path(folder))
            write(signed, checkpoint, output, optimizer=optimizer)
    else:
        kept = {one.run_id: one for one in SpecificationStore(kept_runs()).all()}
        if not kept:
            raise SwarmError(
                "this machine took part in no run yet: fetch the model from peers with --from ADDRESS"
            )
        chosen = choose([RunListing(one.name, one.run_id) for one in kept.values()], where.run)
        signed = kept[chosen.run_id]
        checkpoint = newest_checkpoint(saved_states() / signed.run_id, signed.full_name)
        write(signed, checkpoint, output, optimizer=optimizer)
    size = output.stat().st_size
    _say(
        as_json,
        {
            "event": "exported",
            "run": signed.full_name,
            "epoch": checkpoint.epoch,
            "path": str(output),
            "bytes": size,
        },
        f"{signed.full_name}, epoch {checkpoint.epoch}: {size / 1e6:,.1f} MB in {output}",
    )
    return 0


def _fetched(node: Any, directory: Any, signed: Any, folder: Path) -> Any:
    from swarm.run.exporting import read_checkpoint
    from swarm.run.volunteer import Volunteer, VolunteerConfig

    volunteer = Volunteer(
        node, signed, directory, VolunteerConfig(device="cpu"), lambda event: None, threading.Event()
    )
    return read_checkpoint(volunteer.fetch_state(folder / "state.safetensors"))


@contextlib.contextmanager
def _visit(where: Where) -> Iterator[tuple[Any, Any]]:
    """A node for a moment, under a name of its own, and a directory of runs."""
    from swarm.node import Node
    from swarm.run.directory import RunDirectory
    from swarm.run.specification_store import SpecificationStore

    contacts = _entries(where)
    hosts = [address.host for contact in contacts for address in contact.addresses]
    local = all(host.startswith(("127.", "::1", "localhost")) for host in hosts)
    with Node(bootstrap=contacts, listen="127.0.0.1:0" if local else "0.0.0.0:0") as node:
        if not node.wait_joined(_JOIN_S):
            why = "; ".join(node.join_failures) or "no answer in time"
            raise NetworkError(f"nobody answers: {why}. Pass the address of a live peer")
        yield (
            node,
            RunDirectory(
                node.dht.service, node.peer_id, clock=node.clock, store=SpecificationStore(kept_runs())
            ),
        )


def _entries(where: Where) -> list[Contact]:
    """The addresses that were given, else those of a volunteer on this machine."""
    if where.addresses:
        return [Contact.parse(address) for address in where.addresses]
    running: Sequence[Running] = [
        one for one in Control(control_folder()).running() if one.matches(where.run)
    ]
    found = [Contact.parse(address) for one in running for address in one.addresses[:1]]
    if not found:
        raise UsageError(
            f"nothing trains {where.run} on this machine: pass the address of a peer of it, as in `swarm join`"
        )
    return found


def _say(as_json: bool, value: dict[str, Any], text: str) -> None:
    print(json.dumps(value, ensure_ascii=False) if as_json else printable(text), flush=True)
