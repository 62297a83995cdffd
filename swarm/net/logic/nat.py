"""Determine how a router translates the ports of outgoing connections, from the addresses that relays see.
Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from swarm.core.ids import Address

# "none": nothing is translated; "preserving": the port stays as it is, at least towards one relay; "cone":
# another port, the same towards all relays; "symmetric": another port towards each; "unknown": it takes
# another relay
NatKind = Literal["none", "preserving", "cone", "symmetric", "unknown"]


def nat_kind(port: int, own_hosts: Collection[str], seen: Sequence[Address]) -> NatKind:
    """Return the kind of NAT in front of this machine. `port`: the local port from which it has dialed
    relays. `own_hosts`: the IP addresses of its interfaces. `seen`: for each relay, the address from which it
    saw this machine call.
    """
    ports = [one.port for one in seen if one.host not in own_hosts]  # by relays beyond the router
    if not ports:
        return "none" if seen else "unknown"
    if set(ports) == {port}:
        return "preserving"
    if len(set(ports)) > 1:
        return "symmetric"
    return "cone" if len(ports) > 1 else "unknown"
