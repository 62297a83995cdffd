"""The program of a packet filter decides as its networks and hosts say."""

from __future__ import annotations

import ipaddress
import random
import struct

import pytest

from swarm.runtime.listener_filter import HOSTS_MAX, NETWORKS_MAX, Instruction, program

SYN, SYN_ACK, ACK = 0x02, 0x12, 0x10
IP_HEADER = -0x100000 & 0xFFFFFFFF


def passes(instructions: list[Instruction], source: str, flags: int) -> bool:
    """Run a program on a packet, as the kernel does (Documentation/networking/filter.rst of Linux)."""
    address = ipaddress.ip_address(source)
    ip = bytes([address.version << 4]).ljust(12 if address.version == 4 else 8, b"\0") + address.packed
    tcp = bytes(13) + bytes([flags]) + bytes(6)
    accumulator, stored, at = 0, [0] * 16, 0
    for _ in range(5000):
        code, value, if_true, if_false = instructions[at]
        at += 1
        data, offset = (ip, value - IP_HEADER) if value >= IP_HEADER else (tcp, value)
        if code == 0x30:
            accumulator = data[offset]
        elif code == 0x20:
            (accumulator,) = struct.unpack_from(">I", data, offset)
        elif code == 0x60:
            accumulator = stored[value]
        elif code == 0x02:
            stored[value] = accumulator
        elif code == 0x54:
            accumulator &= value
        elif code == 0x05:
            at += value
        elif code == 0x15:
            at += if_true if accumulator == value else if_false
        else:
            assert code == 0x06
            return value != 0
    raise AssertionError("it does not end")


def a_host(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return str(ipaddress.IPv4Address(0xC6336400 + rng.getrandbits(12)))
    return str(ipaddress.IPv6Address((0x20010DB8 << 96) + (rng.getrandbits(3) << 80) + rng.getrandbits(66)))


@pytest.mark.parametrize("seed", range(20))
def test_first_packets_are_dropped_by_network_unless_their_host_is_kept(seed: int) -> None:
    rng = random.Random(seed)
    hosts = [a_host(rng) for _ in range(rng.choice([0, 1, 20, 300]))]
    networks = {
        str(ipaddress.ip_network((one, 24 if "." in one else 48), strict=False))
        for one in (a_host(rng) for _ in range(rng.choice([0, 1, 5, 100])))
    }
    named = [*sorted(networks), "12D3KooW", "2001:db8::/80"]
    found = program(named, hosts)
    assert len(found) < 2000, "each takes eight bytes of the twenty thousand that a socket has"
    kept, dropped = hosts[:HOSTS_MAX], [ipaddress.ip_network(one) for one in sorted(networks)][:NETWORKS_MAX]
    for source in [a_host(rng) for _ in range(200)] + hosts[:20]:
        address = ipaddress.ip_address(source)
        is_kept = source in kept or (
            address.version == 6
            and any(ipaddress.ip_address(one).packed[:8] == address.packed[:8] for one in kept)
        )
        expected = is_kept or not any(address in one for one in dropped)
        assert passes(found, source, SYN) == expected
        assert all(passes(found, source, flags) for flags in (SYN_ACK, ACK))
