"""Determine how a router translates the ports of outgoing connections, from the addresses that relays see.
Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from swarm.core.ids import Address

# "none": no translation; "preserving": the port is kept, at least towards one relay; "cone": the same other
# port towards all relays; "symmetric": a different port towards each relay; "unknown": another relay is
# needed to decide
NatKind = Literal["none", "preserving", "cone", "symmetric", "unknown"]


def nat_kind(port: int, own_hosts: Collection[str], seen: Sequence[Address]) -> NatKind:
    """Return the kind of NAT in front of this machine. `port`: the local port from which it has dialed
    relays. `own_hosts`: the IP addresses of its interfaces. `seen`: for each relay, this machine's address as
    the relay observes it.
    """
    # ports observed by relays beyond the router
    ports = [one.port for one in seen if one.host not in own_hosts]
    if not ports:
        return "none" if seen else "unknown"
    if set(ports) == {port}:
        return "preserving"
    if len(set(ports)) > 1:
        return "symmetric"
    return "cone" if len(ports) > 1 else "unknown"
