"""`swarm doctor`: check whether this machine can volunteer, and say what to do if it cannot."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import click

import swarm
from swarm.cli import options
from swarm.cli.finding import given_entry
from swarm.cli.identity import open_entry_identity
from swarm.cli.invite import contacts_of
from swarm.cli.render import print_result
from swarm.core.errors import SwarmError
from swarm.core.ids import Contact
from swarm.core.wording import size
from swarm.core.working import working
from swarm.net.logic.nat import NatKind
from swarm.run.entering import enter

if TYPE_CHECKING:
    from swarm.node import Node
    from swarm.reach.reaching import RelayView

_VERDICT_S = 25.0  # for asking the router and for calls by peers, repeated once if the result was unclear
_POLL_S = 0.2
_RELAYS_S = 30.0  # for a reservation at a relay
_SECOND_RELAY_S = 5.0  # for a second relay, if one is not enough to determine the kind of NAT
_PACKAGES = ("torch", "grpcio", "libp2p", "protobuf")
_PEERS_SHOWN = 5
_PORT = 4000  # suggested port to forward, if the user named none
_MEASURED_MAX = 3  # peers
_NATS: dict[NatKind, str] = {
    "none": "none: relays see this machine at its own address",
    "preserving": "port-preserving: most peers behind other routers are called directly, after a first call",
    "cone": "cone (one other port towards all peers): most peers behind other routers are called directly, "
    "after a first call",
    "symmetric": "symmetric (another port towards each peer): peers behind such routers are called through "
    "relays",
    "unknown": "not known: that takes a peer that relays, or two where the first sees another port",
}

State = Literal["good", "note", "bad"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of one check. "note": this machine can volunteer, but see the text; "bad": it cannot."""

    subject: str
    state: State
    text: str


@click.command(context_settings=options.CONTEXT)
@options.entries(required=False)
@options.observer_identity
@options.listen
@options.announce
@options.as_json
def doctor(
    addresses: tuple[str, ...],
    identity: str | None,
    listen: str | None,
    announce: tuple[str, ...],
    as_json: bool,
) -> int:
    """Find out whether this machine can volunteer: software, memory and GPU, clock, how others reach it,
    relays, kind of NAT, and how fast bytes go to the peers that you name.

    ADDRESS is a peer of the swarm, RUN a run that this machine remembers; without any the network is not
    tried. Give the options that
    you would give to `swarm join`. The exit status is 1 when this machine cannot volunteer.

    \b
    Examples:
      swarm doctor
      swarm doctor /ip4/203.0.113.7/tcp/4000/p2p/12D3KooW...
      swarm doctor swarm1... --listen 0.0.0.0:4000 --json
    """
    entry = given_entry(addresses, None, identity, (), role="observe")
    if entry is not None:
        addresses, identity = entry.bootstrap, entry.identity
    where = options.listen_at(listen, announce, contacts_of(addresses))
    states: list[State] = []
    for finding in _examine(addresses, identity, where, announce):
        states.append(finding.state)
        mark = {"good": "ok  ", "note": "note", "bad": "BAD "}[finding.state]
        fields = {"subject": finding.subject, "state": finding.state, "text": finding.text}
        print_result("finding", fields, f"{mark}  {finding.subject:<8}  {finding.text}", as_json=as_json)
    can_volunteer = "bad" not in states
    text = "this machine can volunteer" if can_volunteer else "this machine cannot volunteer as it is"
    print_result("doctor", {"can_volunteer": can_volunteer}, text, as_json=as_json)
    return 0 if can_volunteer else 1


def _examine(
    addresses: tuple[str, ...], identity: str | None, listen: str | None, announce: tuple[str, ...]
) -> Iterator[Diagnosis]:
    yield Diagnosis("software", "good", _software())
    yield _machine()
    if not addresses:
        yield Diagnosis("network", "note", "not tried: name a peer of the swarm, or give an invite")
        return
    from swarm.node import Node, NodeConfig

    own = open_entry_identity(identity, addresses)
    began_s = time.monotonic()
    try:
        with Node(addresses, listen, own, config=NodeConfig(announce=announce)) as node:
            yield from _examine_network(node, addresses, listen, began_s)
    finally:
        own.close()


def _examine_network(
    node: Node, addresses: tuple[str, ...], listen: str | None, began_s: float
) -> Iterator[Diagnosis]:
    said: list[str] = []
    node.tell_reach(said.append)
    try:
        enter(node, addresses)
    except SwarmError as error:
        yield Diagnosis("network", "bad", str(error))
        return
    with working("asking peers whether they can call this machine"):
        while node.reach == "unknown" and time.monotonic() - began_s < _VERDICT_S:
            time.sleep(_POLL_S)
    with working("waiting for a relay"):
        while node.reach == "hidden" and not said and time.monotonic() - began_s < _VERDICT_S + _RELAYS_S:
            time.sleep(_POLL_S)
    yield Diagnosis("network", "good", _peers(node))
    problem = node.dht.clock_problem
    yield Diagnosis("clock", "note" if problem else "good", problem or "it agrees with its peers' clocks")
    yield _reach(node, listen, said[-1] if said else "")
    relays = node.relays()
    until_s = time.monotonic() + _SECOND_RELAY_S
    with working("finding out the kind of NAT"):
        while relays and node.nat(relays) == "unknown" and time.monotonic() < until_s:
            time.sleep(_POLL_S)
            relays = node.relays()
    yield _relays(node, relays)
    if listen is not None:
        yield Diagnosis("NAT", "good", _NATS[node.nat(relays)])
    yield _throughput(node, contacts_of(addresses))


def _software() -> str:
    versions = [f"swarm {swarm.__version__}", f"Python {platform.python_version()}"]
    versions += [f"{package} {importlib.metadata.version(package)}" for package in _PACKAGES]
    return f"{', '.join(versions)} on {platform.system()} {platform.release()}, {platform.machine()}"


def _machine() -> Diagnosis:
    import psutil

    with working("loading torch"):
        import torch

    memory = psutil.virtual_memory()
    host = f"{os.cpu_count()} cores, {size(memory.available)} of {size(memory.total)} of memory free"
    if not torch.cuda.is_available():
        return Diagnosis("machine", "good", f"{host}; no CUDA device, so that it would train on the CPU")
    devices = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        devices.append(f"cuda:{index} is {name} with {size(free)} of {size(total)} free")
    return Diagnosis("machine", "good", f"{host}; {'; '.join(devices)}")


def _peers(node: Node) -> str:
    """Return the peers that have answered this process; the book has those of earlier ones, too."""
    measured = sorted(
        (peer.round_trip_s, str(peer.peer_id))
        for peer in node.peers()
        if peer.round_trip_s is not None and peer.is_met
    )
    if not measured:
        return "a peer answered, and it is not known how long that took"
    shown = ", ".join(f"{peer} in {seconds * 1e3:.1f} ms" for seconds, peer in measured[:_PEERS_SHOWN])
    more = len(measured) - _PEERS_SHOWN
    return f"peers answer: {shown}" + (f", and {more} more" if more > 0 else "")


def _throughput(node: Node, named: Sequence[Contact]) -> Diagnosis:
    """Return the measured throughput to and from the peers that the user named."""
    shown = []
    for contact in named[:_MEASURED_MAX]:
        try:
            with working(f"measuring the speed to {contact.peer_id.short}"):
                rates = node.throughput(contact)
        except SwarmError as error:
            shown.append(f"{contact.peer_id} was not measured: {error}")
        else:
            up, down = rates.up_bytes_per_s / 1e6, rates.down_bytes_per_s / 1e6
            shown.append(f"{up:.3g} MB/s to {contact.peer_id} and {down:.3g} MB/s from it")
    are_measured = any("MB/s" in one for one in shown)
    return Diagnosis("speed", "good" if are_measured else "note", "; ".join(shown))


def _relays(node: Node, relays: Sequence[RelayView]) -> Diagnosis:
    """Return the relays that this machine knows: their round-trip time, and whether this machine has a
    reservation.
    """
    shown = []
    for one in relays[:_PEERS_SHOWN]:
        delay = f"in {one.round_trip_s * 1e3:.1f} ms" if one.round_trip_s is not None else "no answer"
        use = ", used here" if one.is_reserved else ""
        shown.append(f"{one.peer_id} at {one.address.host}:{one.address.port} ({delay}{use})")
    if shown:
        return Diagnosis("relays", "good", f"peers that relay: {', '.join(shown)}")
    missing = "none of the peers that answer is a relay"
    return Diagnosis("relays", "note" if node.reach == "hidden" else "good", missing)


def _reach(node: Node, listen: str | None, said: str) -> Diagnosis:
    """Return how others reach this machine. `said`: the node's own sentence about it."""
    if listen is None:
        return Diagnosis(
            "reach", "note", "it takes no calls, so that it reduces and serves nothing for others"
        )
    if node.reach == "direct":
        places = ", ".join(f"{one.host}:{one.port}" for one in node.contact.addresses)
        check = node.check_given()
        if check.failures:
            what = "forward that TCP port to this machine and name it in --listen, or leave --announce out"
            return Diagnosis(
                "reach", "bad", f"it announces {places}, but {'; '.join(check.failures)}: {what}"
            )
        text = said or f"it announces {places}"
        if check.untried:
            untried = " and ".join(check.untried)
            return Diagnosis("reach", "note", f"{text}, but no peer has tried {untried}")
        return Diagnosis("reach", "good", text)
    through = f"others reach it through {node.contact.through}" if node.reach == "relayed" else ""
    text = said or through or "no peer has said yet whether it can call this machine"
    return Diagnosis("reach", "note", text + _line_for_the_router(listen))


def _line_for_the_router(listen: str) -> str:
    """Return a sentence that names the port to forward in the router; empty without a private address."""
    from swarm.net.listening import machine_addresses, parse_listen
    from swarm.net.scope import Scope, scope_of

    host, port = parse_listen(listen)
    near = [one for one in machine_addresses(host, port or _PORT) if scope_of(one.host) is Scope.SITE]
    if not near:
        return ""
    listening = "" if port else f", and listen there with --listen {listen.rpartition(':')[0]}:{_PORT}"
    return (
        f". The line for the router: TCP port {near[0].port} to {near[0].host} port {near[0].port}{listening}"
    )
