"""The kind of NAT follows from what relays see."""

from __future__ import annotations

import pytest

from swarm.core.ids import Address
from swarm.net.logic.nat import NatKind, nat_kind


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        ([], "unknown"),
        ([("192.168.1.2", 4001), ("192.168.1.2", 4001)], "none"),
        ([("8.8.8.8", 4001)], "preserving"),
        ([("8.8.8.8", 4001), ("8.8.8.8", 4001)], "preserving"),
        ([("8.8.8.8", 61234)], "unknown"),
        ([("8.8.8.8", 61234), ("8.8.8.8", 61234)], "cone"),
        ([("8.8.8.8", 61234), ("8.8.8.8", 61235)], "symmetric"),
        ([("8.8.8.8", 4001), ("8.8.8.8", 61235)], "symmetric"),
        # one relay is on this side of the router
        ([("192.168.1.2", 4001), ("8.8.8.8", 61234)], "unknown"),
    ],
)
def test_the_kind_follows_from_the_ports_that_relays_see(seen: list[tuple[str, int]], kind: NatKind) -> None:
    assert nat_kind(4001, {"192.168.1.2"}, [Address(*one) for one in seen]) == kind
