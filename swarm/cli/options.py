"""Options that several commands share. This module imports click and nothing heavy."""

from __future__ import annotations

import socket
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import click

from swarm.core.device import DEVICE_NAMES, check_device_name
from swarm.core.errors import UsageError
from swarm.core.ids import Contact, PeerId
from swarm.core.presets import Preset
from swarm.run.limits import parse_duration_s, parse_size

Command = typing.TypeVar("Command", bound=Callable[..., typing.Any])

# ports of identities, below those that systems give to connections (32768 on Linux)
_PORT_FIRST, _PORTS = 24_000, 8_000
_LOOPBACK = ("127.", "::1", "localhost")
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class BoundedInteger(click.IntRange):
    """An integer within bounds. `--help` and messages call it an integer."""

    name = "integer"


class BoundedNumber(click.FloatRange):
    """A number within bounds. `--help` and messages call it a number."""

    name = "number"


class CheckedText(click.ParamType[str]):
    """A text that `check` accepts. It raises UsageError for others, and click names the option."""

    def __init__(self, name: str, check: Callable[[str], object]) -> None:
        self.name, self._check = name, check

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            self._check(value)
        except UsageError as error:
            self.fail(f"{error}.", param, ctx)
        return value


TIME = CheckedText("time", parse_duration_s)
SIZE = CheckedText("size", parse_size)


def relay_mbit(default: float) -> Callable[[Command], Command]:
    """Return the option `--relay-mbit`, in Mbit/s."""
    return click.option(
        "--relay-mbit",
        metavar="MBIT",
        type=BoundedNumber(min=0.0, max=100_000.0),
        default=default,
        show_default=True,
        help="Relay calls to peers that nobody can call directly, at most at this rate in Mbit/s; 0: none.",
    )


listen = click.option(
    "--listen",
    metavar="HOST:PORT",
    default=None,
    help="Where to listen; port 0 picks a free one; none: accept no calls.",
)
listen_behind_relays = click.option(
    "--listen",
    metavar="HOST:PORT",
    default=None,
    help="Where to listen; port 0 picks a free one; none: open no port, and be called through relays.",
)
announce = click.option(
    "--announce",
    metavar="HOST[:PORT]",
    multiple=True,
    help="Address at which others call this machine, such as a router that forwards the port. Repeatable.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON lines, one per event.")
device = click.option(
    "--device",
    type=CheckedText("device", check_device_name),  # whether it exists is checked later: that needs torch
    default="auto",
    show_default=True,
    help=f"Where to compute: {DEVICE_NAMES}; auto is CUDA if available, else the CPU.",
)
data = click.option(
    "--data",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=None,
    help="Train on the text files of this folder.",
)
owner_identity = click.option(
    "--identity", metavar="FILE", default=None, help="The owner's identity. [default: this user's]"
)
optional_identity = click.option(
    "--identity",
    metavar="FILE",
    default=None,
    help="An identity to keep; `new`: a new one that is not kept. [default: one that is kept, for each "
    "invite another]",
)
server_identity = click.option(
    "--identity",
    metavar="FILE",
    default=None,
    help="An identity to keep; `new`: a new one that is not kept. [default: this user's for GRID.toml and "
    "for a new swarm; with an invite one that is kept for it; else a new one]",
)
observer_identity = click.option(
    "--identity",
    metavar="FILE",
    default=None,
    help="An identity to keep; `new`: a new one that is not kept. The owner of the named run enters as a new "
    "peer instead, because its identity may be training. [default: with an invite one that is kept for it; "
    "else a new one]",
)


def entries(*, required: bool) -> Callable[[Command], Command]:
    """Return the argument `addresses`: addresses and invites with which a command enters a swarm, or the name
    of a run that this machine remembers (`given_entry`).
    """
    metavar = "ADDRESS|INVITE|RUN..." if required else "[ADDRESS|INVITE|RUN]..."
    return click.argument("addresses", metavar=metavar, nargs=-1, required=required)


run_name = click.option(
    "--run",
    "run",
    metavar="NAME",
    default=None,
    help="Which run, if the swarm has several: NAME, NAME@ID or ID.",
)
peers_of_run = click.option(
    "--from",
    "addresses",
    metavar="ADDRESS",
    multiple=True,
    help="The address of a peer of the run. Repeatable.",
)
libp2p_bootstrap = click.option(
    "--libp2p-bootstrap",
    metavar="MULTIADDR",
    multiple=True,
    help="A server of libp2p's DHT, for finding the run by its name. Repeatable.",
)
preset = click.option(
    "--preset",
    type=click.Choice(typing.get_args(Preset)),
    default="wan",
    show_default=True,
    help="Kind of links between the peers: one machine, a local network, or the internet. Sets timeouts.",
)
exit_with_parent = click.option(
    "--exit-with-parent", is_flag=True, hidden=True, help="Leave when standard input ends."
)


def listen_at(
    listen: str | None, announce: Sequence[str], contacts: Iterable[Contact], own: PeerId | None = None
) -> str | None:
    """Return where to listen; None: nowhere. The default is all interfaces, or loopback if all entry
    addresses are on loopback. Its port is the one that the identity `own` always gets, if that is free, so
    that addresses in invites stay true when the command is started again; any free port without an identity.
    Raise UsageError when an option is wrong.
    """
    from swarm.net.listening import given_addresses

    given_addresses(announce, port=1)
    if listen is not None and listen.lower() == "none":
        if announce:
            raise UsageError(
                "--announce gives an address for calls, and --listen none refuses calls: leave out one of "
                "them"
            )
        return None
    if listen is not None:
        return listen
    hosts = [address.host for contact in contacts for address in contact.addresses]
    host = "127.0.0.1" if hosts and all(one.startswith(_LOOPBACK) for one in hosts) else "0.0.0.0"
    return f"{host}:{_own_port(host, own) if own is not None else 0}"


def _own_port(host: str, own: PeerId) -> int:
    """Return the port of this identity; 0 if it is taken."""
    port = _PORT_FIRST + int.from_bytes(own.public_key[:4]) % _PORTS
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return 0
    return port


def parse_host_port(text: str, option: str) -> tuple[str, int]:
    """Parse `HOST:PORT`. Raise UsageError that names the option if the text is something else."""
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{option} takes HOST:PORT, like 127.0.0.1:8080, not {text!r:.80}")
    return host, int(port)
