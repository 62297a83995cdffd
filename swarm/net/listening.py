"""The address that a node listens on, and the addresses under which others can reach it."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable, Sequence

import psutil

from swarm.core.errors import UsageError
from swarm.core.ids import Address

WILDCARDS = ("0.0.0.0", "::")  # hosts that mean every address of this machine
_ANNOUNCED_MAX = 8


def parse_listen(text: str) -> tuple[str, int]:
    """Parse `host:port`, with port 0 for any free one and IPv6 in brackets: `[::]:0`. Raises UsageError that
    says what is wrong.
    """
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"listen={text!r} is not host:port, like 0.0.0.0:4000, 127.0.0.1:0 or [::]:4000")
    return host, int(port)


def given_addresses(texts: Sequence[str], port: int) -> tuple[Address, ...]:
    """Return the addresses that a user gives for a server on `port`: `host`, `host:port` or a multiaddr each.
    Raises UsageError when one is wrong.
    """
    return tuple(dict.fromkeys(_parse_announced(text, port) for text in texts))[:_ANNOUNCED_MAX]


def machine_addresses(host: str, port: int) -> tuple[Address, ...]:
    """Return the addresses of a server on `host:port` of this machine. A wildcard stands for every address of
    it: public ones first, then those of private networks, loopback last.
    """
    if host not in WILDCARDS:
        return (Address(host, port),)
    return tuple(
        Address(str(one), port) for one in best_addresses(_interface_hosts(), ipv4_only=host == "0.0.0.0")
    )


def best_addresses(
    hosts: Iterable[str], *, ipv4_only: bool
) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the addresses worth announcing, best first, at most eight; the IPv4 loopback address is always
    among them, for peers on the same machine.
    """
    parsed = {ipaddress.ip_address(host.partition("%")[0]) for host in hosts}
    useful = [
        one
        for one in parsed
        if not (one.is_link_local or one.is_multicast or one.is_unspecified)
        and not (ipv4_only and one.version == 6)
    ]
    outside = sorted(
        (one for one in useful if not one.is_loopback),
        key=lambda one: (not one.is_global, one.version, int(one)),
    )
    loopback = sorted((one for one in useful if one.is_loopback), key=lambda one: (one.version, int(one)))[:1]
    return outside[: _ANNOUNCED_MAX - len(loopback)] + loopback


def why_no_listening(host: str, port: int) -> str:
    """Return the reason why no server can listen there, with a remedy."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as one:
            one.bind(where)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"cannot listen on {address}: another program has this port. Port 0 picks a free one"
        return f"cannot listen on {address}: {error.strerror or error}. Is it an address of this machine?"
    return f"cannot listen on {address}: is the port taken, or not an address of this machine?"


def _interface_hosts() -> list[str]:
    families = (socket.AF_INET, socket.AF_INET6)
    return [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in families
    ]


def _parse_announced(text: str, port: int) -> Address:
    if text.startswith("/"):
        return Address.parse(text.partition("/p2p/")[0])
    try:
        return Address(str(ipaddress.ip_address(text)), port)  # a bare IPv6 address has colons too
    except ValueError:
        pass
    if ":" not in text:
        return Address(text, port)
    try:
        host, port = parse_listen(text)
    except UsageError:
        raise UsageError(f"{text!r:.80} is not an address to announce: give HOST or HOST:PORT") from None
    return Address(host, port)
