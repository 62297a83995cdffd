"""Refuse connections before they are made: a packet filter on a listening socket (Linux).

A TLS handshake costs milliseconds, and gRPC makes one with every caller. The kernel drops the first packet
(SYN) of a connection from a filtered network at almost no cost. The caller's system repeats that packet after
1, 2 and 4 s, so a caller connects by itself once its network is allowed again.

The program is one of classic BPF, which any process may attach to its own sockets. Established connections
inherit the program from the listening socket and keep it: each of their packets passes after three
instructions.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

NETWORKS_MAX, HOSTS_MAX = 64, 128  # limits of one filter: the kernel accepts 20 KiB of program
IPV6_HOST_BITS = 64  # a machine chooses the rest of its IPv6 address freely

_LOAD_BYTE, _LOAD_WORD, _LOAD_STORED, _STORE, _AND, _RETURN = 0x30, 0x20, 0x60, 0x02, 0x54, 0x06
_JUMP, _JUMP_IF_EQUAL = 0x05, 0x15  # a conditional jump reaches 255 instructions
_PASS, _DROP = 0xFFFFFFFF, 0
_TCP_FLAGS, _SYN, _SYN_AND_ACK = 13, 0x02, 0x12
_IP_HEADER = -0x100000 & 0xFFFFFFFF  # SKF_NET_OFF: offsets from this value on are relative to the IP header
_IPV4_SOURCE, _IPV6_SOURCE = 12, 8
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27


class Instruction(NamedTuple):
    """An instruction of classic BPF; jumps count instructions from the next one."""

    code: int
    value: int
    if_true: int = 0
    if_false: int = 0


_PASSES, _DROPS = Instruction(_RETURN, _PASS), Instruction(_RETURN, _DROP)


def program(networks: Iterable[str], hosts: Iterable[str]) -> list[Instruction]:
    """Return the program that drops first packets from `networks` (such as "198.51.100.0/24"; an IPv6 one has
    at most 64 bits), except from `hosts` (IP addresses; of IPv6 the first 64 bits count). Only the first
    `NETWORKS_MAX` and `HOSTS_MAX` are used; texts that are not networks or addresses are ignored.
    """
    kept = [one for name in hosts if (one := _host(name)) is not None][:HOSTS_MAX]
    dropped = [one for name in networks if (one := _network(name)) is not None][:NETWORKS_MAX]
    cases = [(one, _PASSES) for one in kept] + [(one, _DROPS) for one in dropped]
    ipv4, ipv6 = _cases(cases, 4), _cases(cases, 6)
    return [
        Instruction(_LOAD_BYTE, _TCP_FLAGS),
        Instruction(_AND, _SYN_AND_ACK),
        Instruction(_JUMP_IF_EQUAL, _SYN, if_true=1),
        _PASSES,
        Instruction(_LOAD_BYTE, _IP_HEADER),
        Instruction(_AND, 0xF0),  # the IP version
        Instruction(_JUMP_IF_EQUAL, 0x40, if_false=1),
        Instruction(_JUMP, len(ipv6)),
        *ipv6,
        *ipv4,
    ]


_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Case = tuple[_Network, Instruction]


def _cases(cases: Sequence[_Case], version: int) -> list[Instruction]:
    """Return the instructions that decide about packets of one IP version: the first matching network
    decides.
    """
    source, words = (_IPV4_SOURCE, 1) if version == 4 else (_IPV6_SOURCE, 2)
    found = []
    for place in range(words):
        found += [Instruction(_LOAD_WORD, _IP_HEADER + source + 4 * place), Instruction(_STORE, place)]
    for network, then in cases:
        if network.version == version:
            found += _case(network, then)
    return [*found, _PASSES]


def _case(network: _Network, then: Instruction) -> list[Instruction]:
    """Return instructions that end with `then` if the source is in a network, and otherwise continue after
    them.
    """
    masks = [mask for (mask,) in struct.iter_unpack(">I", network.netmask.packed) if mask]
    words = [word for (word,) in struct.iter_unpack(">I", network.network_address.packed)]
    found: list[Instruction] = []
    for place, mask in enumerate(masks):
        behind = 3 * (len(masks) - 1 - place) + 1  # instructions for the other words, and `then`
        found += [
            Instruction(_LOAD_STORED, place),
            Instruction(_AND, mask),
            Instruction(_JUMP_IF_EQUAL, words[place], if_false=behind),
        ]
    return [*found, then]


def _network(name: str) -> _Network | None:
    try:
        found = ipaddress.ip_network(name)
    except ValueError:  # not an IP address, such as a relay's name
        return None
    return found if found.version == 4 or found.prefixlen <= IPV6_HOST_BITS else None


def _host(name: str) -> _Network | None:
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return None
    return ipaddress.ip_network((address, 32 if address.version == 4 else IPV6_HOST_BITS), strict=False)


def attach(descriptor: int, instructions: Sequence[Instruction]) -> None:
    """Attach a program to a socket and replace the previous one; an empty program only detaches it. Raises
    OSError if the system does not support this.
    """
    if sys.platform != "linux":
        raise OSError("this system has no packet filters for sockets")
    view = socket.socket(fileno=descriptor)
    try:
        if not instructions:
            view.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            return
        packed = b"".join(struct.pack("HBBI", one.code, *one[2:], one.value) for one in instructions)
        memory = ctypes.create_string_buffer(packed, len(packed))
        where = struct.pack("HP", len(instructions), ctypes.addressof(memory))
        view.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, where)
    finally:
        view.detach()
